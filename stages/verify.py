"""Stage 4: cache, tokens and ledger in, `reports/verify.json` out; fails on any finding, after the report."""

from __future__ import annotations

import sys

from dspark_cache.errors import VerificationError
from dspark_cache.files import put_output
from dspark_cache.stage import REPORT_PATH, open_stage, run_stage
from dspark_cache.verify_run import release_blocks, reports_json, verify_stage


def main() -> None:
    """Verify `cache/`, write the report, raise on findings, and remove blocks that are not to be kept."""
    stage = open_stage("verify")
    reports = verify_stage(stage)
    put_output(stage.root / REPORT_PATH, reports_json(reports))
    for part, report in reports.items():
        if report.findings:
            listed = "\n  ".join(str(finding) for finding in report.findings[:20])
            raise VerificationError(
                f"the {part} cache has {len(report.findings)} finding(s), see {REPORT_PATH}:\n  {listed}"
            )
    release_blocks(stage)


if __name__ == "__main__":
    sys.exit(run_stage(main))
