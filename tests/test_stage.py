"""What every stage does around its own work: exit codes, the reason as the last line, versions, where scratch is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_cache.errors import InputError, SettingsError
from dspark_cache.schema import STAGE_VERSIONS
from dspark_cache.stage import StageContext, open_stage
from tests.repository import ROOT, STAGES, Repository, make_repository, read_yaml

# Exit codes, of real processes: one program imports torch, which is most of their time, and forks

BODIES = {
    "done": "print('worked')",
    "refused": "raise SettingsError('cache.dtype: expected bf16, found fp8')",
    "refused in lines": "raise InputError('the inputs have faults:\\n  first\\n  second')",
    "full disk": "raise OSError(28, 'No space left on device')",
    "a bug": "raise KeyError('hidden')",
    "SIGINT": "wait_for_the_signal()",
    "SIGTERM": "wait_for_the_signal()",
    "swallowed": (
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    wait_for_the_signal()\nexcept BaseException:\n    pass"
    ),
    "interrupted by itself": "raise KeyboardInterrupt",
    "ignored": "os.kill(os.getpid(), signal.SIGINT); print('worked')",
    "chatter": (
        "warnings.warn('odd'); logging.getLogger('dspark_cache.x').info('said'); "
        "logging.getLogger('transformers.x').warning('noise')"
    ),
}
PROGRAM = """
import json, logging, os, signal, sys, warnings
from dspark_cache.errors import InputError, SettingsError
from dspark_cache.stage import run_stage

ready, when_ready = os.pipe()

def wait_for_the_signal():
    os.write(when_ready, b"x")
    while True:  # a signal between a check and a blocking call would wait for ever
        pass

codes = {}
for name, body in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT), number)
        if name == "ignored":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(run_stage(lambda: exec(body)))
    if name.startswith("SIG"):
        os.read(ready, 1)
        os.kill(child, signal.Signals[name])
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str], str]]:
    """Run each body as a stage; return its exit code, the lines of its stderr, and its stdout."""
    folder = tmp_path_factory.mktemp("ended")
    command = [sys.executable, "-c", PROGRAM, json.dumps(BODIES)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return {
        name: (code, (folder / f"{name}.err").read_text().splitlines(), (folder / f"{name}.out").read_text())
        for name, code in json.loads(done.stdout).items()
    }


def test_an_interrupt_that_somebody_swallowed_is_no_success(ended: dict[str, tuple[int, list[str], str]]) -> None:
    assert ended["swallowed"][:2] == (143, ["terminated; finished work is kept, run again to go on"])


SWALLOWED = """
import os, signal, sys, threading
from dspark_cache.stage import run_stage

class Dying:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass  # where the signal is handled

def main():
    Dying()
    threading.Event().wait(60)
    sys.exit("went on")

sys.exit(run_stage(main))
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_an_interrupt_that_python_swallowed_comes_again(number: signal.Signals, word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, str(int(number))], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (128 + number, f"{word}; finished work is kept, run again to go on\n")


def test_an_interrupt_without_a_signal_is_no_success_either(ended: dict[str, tuple[int, list[str], str]]) -> None:
    assert ended["interrupted by itself"][:2] == (130, ["interrupted; finished work is kept, run again to go on"])


def test_a_stage_in_the_background_ignores_what_its_shell_lets_it_ignore(
    ended: dict[str, tuple[int, list[str], str]],
) -> None:
    assert ended["ignored"] == (0, [], "worked\n")


def test_a_stage_that_is_done_exits_with_0_in_silence(ended: dict[str, tuple[int, list[str], str]]) -> None:
    assert ended["done"] == (0, [], "worked\n")


@pytest.mark.parametrize(
    ("name", "code", "last"),
    [
        ("refused", 1, "error: cache.dtype: expected bf16, found fp8"),
        ("refused in lines", 1, "  second"),
        (
            "full disk",
            1,
            "error: [Errno 28] No space left on device: nothing was put in place, make room or mend the disk and run "
            "again",
        ),
        ("a bug", 1, "KeyError: 'hidden'"),
        ("SIGINT", 130, "interrupted; finished work is kept, run again to go on"),
        ("SIGTERM", 143, "terminated; finished work is kept, run again to go on"),
    ],
)
def test_exit_codes_and_the_reason(
    ended: dict[str, tuple[int, list[str], str]], name: str, code: int, last: str
) -> None:
    assert ended[name][0] == code
    assert ended[name][1][-1] == last


@pytest.mark.parametrize("name", ["refused", "full disk", "SIGINT", "SIGTERM"])
def test_a_refusal_on_purpose_comes_without_a_traceback(
    ended: dict[str, tuple[int, list[str], str]], name: str
) -> None:
    assert len(ended[name][1]) == 1


def test_logs_and_warnings_go_to_stderr_and_those_of_noisy_libraries_nowhere(
    ended: dict[str, tuple[int, list[str], str]],
) -> None:
    code, lines, out = ended["chatter"]
    assert (code, out) == (0, "")
    assert "INFO: said" in lines
    assert any(line.startswith("WARNING: ") and "UserWarning: odd" in line for line in lines)
    assert not any("noise" in line for line in lines)


# Opening


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(tmp_path / "repository", num_rows=1)


@pytest.fixture(autouse=True)
def _without_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DVC_ROOT", raising=False)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_opens_with_its_settings_and_inputs(repository: Repository, name: str) -> None:
    repository.set_params(data={"seq_length": 64})
    stage = open_stage(name, repository.root)
    assert isinstance(stage, StageContext)
    assert stage.settings.data.seq_length == 64
    assert stage.root == repository.root
    assert stage.scratch == repository.root / ".work"
    assert (stage.data.text, stage.data.kind) == ("inputs/data/conversations.jsonl", "watched")
    assert (stage.target.text, stage.target.kind) == ("inputs/target", "watched")


def test_scratch_is_that_of_the_repository_dvc_was_started_in(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "main"))
    stage = open_stage("capture", repository.root)
    assert stage.scratch == tmp_path / "main" / ".work"
    assert stage.root == repository.root
    repository.set_params(runtime={"scratch_dir": str(tmp_path / "disk")})
    assert open_stage("capture", repository.root).scratch == tmp_path / "disk"


def test_runtime_keys_come_from_the_environment(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_RUNTIME__NUM_WORKERS", "7")
    assert open_stage("tokenize", repository.root).settings.runtime.num_workers == 7


def test_scratch_of_a_pipeline_in_a_folder_of_its_own_is_taken_from_the_dvc_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where DVC did not start the stage, as below torchrun."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    repository = make_repository(tmp_path / "main/drafts", num_rows=1, runtime={"scratch_dir": "drafts/.work"})
    (repository.root / ".dvc").rename(tmp_path / "main/.dvc")
    assert open_stage("capture", repository.root).scratch == tmp_path / "main/drafts/.work"


def test_fingerprints_are_remembered_in_scratch(repository: Repository) -> None:
    stage = open_stage("tokenize", repository.root)
    stage.fingerprints().of(repository.root / "inputs/target")
    assert (stage.scratch / "fingerprints.json").is_file()


@pytest.mark.parametrize("name", STAGES)
def test_a_version_that_is_not_the_library_s_is_refused_with_what_to_write(repository: Repository, name: str) -> None:
    path = repository.root / "stages/versions.yaml"
    current = STAGE_VERSIONS[name]
    text = path.read_text()
    path.write_text(text.replace(f"{name}: {current}", f"{name}: {current + 1}"))
    with pytest.raises(SettingsError) as error:
        open_stage(name, repository.root)
    assert str(error.value) == (
        f"{path}: {name} is {current + 1}, the installed library gives outputs of version {current}: write "
        f"{name}: {current} there and run dvc repro"
    )
    for other in set(STAGES) - {name}:
        open_stage(other, repository.root)
    path.write_text(text.replace(f"{name}: {current}\n", ""))
    with pytest.raises(SettingsError, match=f"{name} is None, the installed library"):
        open_stage(name, repository.root)


@pytest.mark.parametrize("content", ["", "- 1\n", "5\n"])
def test_versions_that_are_no_mapping_are_refused(repository: Repository, content: str) -> None:
    (repository.root / "stages/versions.yaml").write_text(content)
    with pytest.raises(SettingsError, match="shards is None, the installed library gives outputs of version"):
        open_stage("shards", repository.root)


def test_missing_versions_are_refused(repository: Repository) -> None:
    path = repository.root / "stages/versions.yaml"
    path.unlink()
    with pytest.raises(SettingsError) as error:
        open_stage("shards", repository.root)
    assert str(error.value) == (f"no such file: {path}; run from the root of the repository")


def test_malformed_versions_are_refused(repository: Repository) -> None:
    (repository.root / "stages/versions.yaml").write_text("capture: [")
    with pytest.raises(SettingsError, match=r"versions\.yaml"):
        open_stage("capture", repository.root)


def test_faulty_params_and_inputs_are_refused_before_any_work(repository: Repository) -> None:
    repository.set_params(target={"model": "inputs/targt"})
    with pytest.raises(InputError, match=r"the inputs have faults:\n  target.model: no such file: "):
        open_stage("tokenize", repository.root)
    repository.set_params(cache={"shard_size": 0})
    with pytest.raises(SettingsError, match="has 1 fault"):
        open_stage("tokenize", repository.root)
    assert not (repository.root / ".work").exists()


def test_the_shipped_versions_are_the_library_s() -> None:
    assert read_yaml(ROOT / "stages/versions.yaml") == STAGE_VERSIONS
    assert set(STAGE_VERSIONS) == set(STAGES)
    for name in STAGES:
        assert Path(ROOT, "stages", f"{name}.py").is_file()
