"""What every stage does before and after its own work: settings, inputs, versions, exit codes.

Exit codes: 0 done; 1 refused, the last line on stderr is the reason; 130 and 143 interrupted by SIGINT and SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_cache.blocks import lock_files, scratch_folders
from dspark_cache.errors import DsparkCacheError, SettingsError, Terminated
from dspark_cache.files import building_lock
from dspark_cache.inputs import Fingerprints, Input, locate_inputs
from dspark_cache.publish import eval_folder
from dspark_cache.schema import STAGE_VERSIONS
from dspark_cache.settings import Settings, load_settings
from dspark_cache.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PARAMS_PATH = Path("params.yaml")
VERSIONS_PATH = Path("stages/versions.yaml")
TOKENS_PATH = Path("tokens")
LEDGER_PATH = Path("features.json")
CACHE_PATH = Path("cache")
REPORT_PATH = Path("reports/verify.json")
PAGE_PATH = Path("reports/verify.html")
PLOTS_PATH = Path("reports/plots")
_AGAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage works with.

    Attributes:
        settings: The checked params.
        root: Root of the repository, the working directory of every stage.
        scratch: Folder for captured blocks and remembered digests.
        data: The conversations.
        target: The target.
    """

    settings: Settings
    root: Path
    scratch: Path
    data: Input
    target: Input

    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints remembered in scratch."""
        return Fingerprints(self.scratch / "fingerprints.json")


def writer_locks(root: Path, scratch: Path) -> list[Path]:
    """Return every lock that a stage may hold: of its output in `root`, and of each capture in `scratch`."""
    outputs = (TOKENS_PATH, LEDGER_PATH, CACHE_PATH, eval_folder(CACHE_PATH), PLOTS_PATH, PAGE_PATH, REPORT_PATH)
    return [building_lock(root / path) for path in outputs] + [
        path for folder, _ in scratch_folders(scratch) for path in lock_files(folder)
    ]


def open_stage(name: str, root: Path = Path()) -> StageContext:
    """Read and check everything a stage is told, before any work.

    Raises:
        SettingsError: Faults in params.yaml or stages/versions.yaml.
        InputError: Inputs that DVC would not see change.
    """
    settings = load_settings(root / PARAMS_PATH, os.environ)
    _check_version(name, root / VERSIONS_PATH)
    data, target = locate_inputs(settings, root)
    scratch = scratch_root(root) / settings.runtime.scratch_dir
    return StageContext(settings=settings, root=root, scratch=scratch, data=data, target=target)


def scratch_root(root: Path) -> Path:
    """Return the folder from which `runtime.scratch_dir` is taken: the DVC repository that `root` is in.

    The variable that DVC sets comes first: `dvc exp run` works in a copy of the repository, and scratch stays with the
    one the user started from.
    """
    if named := os.environ.get("DVC_ROOT"):
        return Path(named)
    return next((folder for folder in (root, *root.resolve().parents) if (folder / ".dvc").is_dir()), root)


def _check_version(name: str, path: Path) -> None:
    try:
        versions = read_yaml(path)
    except FileNotFoundError as error:
        raise SettingsError(f"no such file: {path}; run from the root of the repository") from error
    found = versions.get(name) if isinstance(versions, dict) else None
    if found != STAGE_VERSIONS[name]:
        raise SettingsError(
            f"{path}: {name} is {found!r}, the installed library gives outputs of version {STAGE_VERSIONS[name]}: "
            f"write {name}: {STAGE_VERSIONS[name]} there and run dvc repro"
        )


class _Signals:
    """Turns SIGINT and SIGTERM into exceptions and remembers the last, lest somebody swallows the exception.

    Python itself swallows what is raised while it calls a `__del__` or a callback of a weak reference: then the signal
    is sent once more, unless another one has come.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._raised = 0
        sys.unraisablehook = self._swallowed
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as a shell has it for what it runs in the background
                signal.signal(number, self._raise)

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        self.last = number
        self._raised += 1
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def _swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
            sys.__unraisablehook__(unraisable)
            return
        again = threading.Timer(_AGAIN_SECONDS, self._send_again, (self._raised,))
        again.daemon = True
        again.start()

    def _send_again(self, raised: int) -> None:
        if self.last is not None and self._raised == raised:
            os.kill(os.getpid(), self.last)


def run_stage(main: Callable[[], object]) -> int:
    """Run a stage's main function and return the exit code of its process."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    logging.captureWarnings(True)
    for noisy in ("transformers", "datasets", "huggingface_hub", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    signals = _Signals()
    try:
        main()
    except DsparkCacheError as error:
        return _say(f"error: {error}", 1)
    except OSError as error:
        return _say(f"error: {error}: nothing was put in place, make room or mend the disk and run again", 1)
    except KeyboardInterrupt:
        signals.last = signal.SIGINT
    except Terminated:
        signals.last = signal.SIGTERM
    if signals.last is None:
        return 0
    word = "interrupted" if signals.last == signal.SIGINT else "terminated"
    return _say(f"{word}; finished work is kept, run again to go on", 128 + signals.last)


def _say(text: str, code: int) -> int:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    return code
