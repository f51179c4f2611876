"""Stage 4: cache, tokens and ledger in, `reports/` out; fails on any finding, after the reports."""

from __future__ import annotations

import sys

from dspark_cache.errors import VerificationError
from dspark_cache.stage import PAGE_PATH, open_stage, run_stage
from dspark_cache.verify_run import put_reports, release_blocks, verify_stage


def main() -> None:
    """Verify `cache/`, write the reports, raise on findings, and remove blocks that are not to be kept."""
    stage = open_stage("verify")
    parts = verify_stage(stage)
    put_reports(stage, parts)
    for name, part in parts.items():
        report = part.report
        if report.findings:
            listed = "\n  ".join(str(finding) for finding in report.findings[:20])
            raise VerificationError(f"the {name} cache has {report.count} finding(s), see {PAGE_PATH}:\n  {listed}")
    release_blocks(stage)


if __name__ == "__main__":
    sys.exit(run_stage(main))
