"""`dspark-cache init`: the pipeline put into a repository that exists, or into a new one, beside what is there.

First a plan is made, which writes nothing and lists everything that is in the way; then it is shown, or applied.
Lines are only added to files that people wrote, and a file of theirs is never replaced.
"""

from __future__ import annotations

import difflib
import io
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dspark_cache.doctor import advise_links, open_repo
from dspark_cache.errors import SettingsError
from dspark_cache.files import TEMPORARY_PREFIX, FileLock, building_lock, make_folder, put_bytes, remove_temporaries
from dspark_cache.settings import DataSettings, TargetSettings, check_settings
from dspark_cache.yaml_text import merge_yaml, parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DVC_FILES = (".dvc/.gitignore", ".dvc/config")
"""What a clone of a DVC repository has of `.dvc`."""
SCRIPTS = tuple(f"stages/{name}.py" for name in ("__init__", "tokenize", "capture", "shards", "verify"))
YAML_FILES = ("stages/versions.yaml", "params.yaml", "dvc.yaml")
IGNORE_FILES = (".gitignore", ".dvcignore")
README = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The part of the sample that a folder holds which DVC watches; a README there keeps the folder in git.

    Attributes:
        folder: The folder.
        param: The param that names data or target.
        value: Its value for the sample.
        names: Its files; without the first one it is not there.
    """

    folder: str
    param: str
    value: str
    names: tuple[str, ...]

    def is_named_by(self, params: Mapping[str, Any]) -> bool:
        """Say whether params.yaml names what the sample has."""
        section, _, key = self.param.partition(".")
        values = params.get(section)
        return isinstance(values, dict) and values.get(key) == self.value


SAMPLES = (
    Sample(folder="inputs/data", param="data.path", value=DataSettings().path, names=("conversations.jsonl",)),
    Sample(
        folder="inputs/target",
        param="target.model",
        value=TargetSettings().model,
        names=(
            "config.json",
            "chat_template.jinja",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    ),
)
TEMPLATE_FILES = (
    *(f"{sample.folder}/{name}" for sample in SAMPLES for name in (README, *sample.names)),
    *SCRIPTS,
    *IGNORE_FILES,
    *DVC_FILES,
    *YAML_FILES,
)
"""In the order in which they are put in place: stages appear, with dvc.yaml, once all they need is there."""

_SHOWN_BYTES = 1 << 14
"""A larger file that is made is shown by name and size."""
_TOOLS_HEADING = "# environment and tools"
"""In our .gitignore; but for `_NEEDED_TOOLS` what follows is for developers of the library."""
_NEEDED_TOOLS = ("/.venv", "__pycache__/")
_RESOLVED = ("params.yaml", "dvc.yaml")
_IGNORES_HEADING = "# dspark-cache"
_WAY_OUT = "or put the pipeline into a folder of its own: dspark-cache init FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One file that is made or added to.

    Attributes:
        name: Path in the folder of the pipeline.
        old: What it holds; None: it does not exist.
        new: What it will hold.
    """

    name: str
    old: bytes | None
    new: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InitPlan:
    """What `init` does to a folder; nothing where the pipeline is there already.

    Attributes:
        root: Folder of the pipeline.
        commands: Commands that are run in it first.
        changes: Files, in the order in which they are put in place.
        kept: Names of what is there, differs from what is shipped, and stays.
        advice: What the user may do beside it, a line each.
    """

    root: Path
    commands: tuple[tuple[str, ...], ...]
    changes: tuple[FileChange, ...]
    kept: tuple[str, ...]
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what is done, without the contents."""
        return {
            "folder": str(self.root),
            "commands": [" ".join(command) for command in self.commands],
            "made": [change.name for change in self.changes if change.old is None],
            "added_to": [change.name for change in self.changes if change.old is not None],
            "kept": list(self.kept),
            "advice": list(self.advice),
        }

    def diff(self) -> str:
        """Return the commands, and a unified diff of all changes; large new files by name and size."""
        return "".join([*(f"$ {' '.join(command)}\n" for command in self.commands), *map(_diff, self.changes)])

    def apply(self) -> None:
        """Run the commands and put the files in place, each at once; a later plan goes on where a killed one was.

        Raises:
            LockedError: Another process does the same.
            SettingsError: A command fails, or a file is no longer what it was when the plan was made.
        """
        make_folder(self.root)
        for command in self.commands:
            done = subprocess.run(command, cwd=self.root, check=False, capture_output=True, text=True)
            if done.returncode:
                raise SettingsError(f"{' '.join(command)} in {self.root} failed: {done.stderr.strip()}")
        if not self.changes:
            return
        with FileLock(building_lock(self.root / "dvc.yaml")):
            moved = [change.name for change in self.changes if _read(self.root / change.name) != change.old]
            if moved:
                raise SettingsError(f"{', '.join(moved)} changed while this was planned: run dspark-cache init again")
            for path in (self.root / name for name in TEMPLATE_FILES):
                if path.parent.exists():
                    remove_temporaries(path.parent, f"{path.name}-")
            for change in self.changes:
                path = (self.root / change.name).resolve()  # a link stays one
                make_folder(path.parent)
                put_bytes(path, change.new)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _diff(change: FileChange) -> str:
    is_large = change.old is None and len(change.new) > _SHOWN_BYTES
    if is_large or b"\0" in change.new:
        return f"new file {change.name}, {len(change.new)} bytes\n"
    old, new = (_lines(content or b"") for content in (change.old, change.new))
    origin = "/dev/null" if change.old is None else f"a/{change.name}"
    lines = difflib.unified_diff(old, new, origin, f"b/{change.name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(content: bytes) -> list[str]:
    return list(io.StringIO(content.decode(errors="replace"), newline="\n"))


def template_folder() -> Path:
    """Return where the shipped files lie: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "template"
    return inside if inside.is_dir() else package.parent


def plan_init(root: Path, *, sample: bool = True) -> InitPlan:
    """Plan to put the pipeline into a folder: of a DVC repository, of a git repository, or of none.

    Args:
        root: The folder; it need not exist.
        sample: Whether with the sample conversations and the tiny target, where there are no others.

    Raises:
        SettingsError: Listing everything that is in the way.
    """
    draft = _Draft(root=root.resolve(), template=template_folder())
    draft.plan(sample=sample)
    faults = list(dict.fromkeys(draft.faults))
    if faults:
        listed = "\n  ".join(fault.replace("\n", "\n  ") for fault in faults)
        raise SettingsError(
            f"{len(faults)} thing(s) are in the way in {draft.root}, nothing was written:\n  {listed}\n"
            f"change them, {_WAY_OUT}"
        )
    order = {name: place for place, name in enumerate(TEMPLATE_FILES)}
    return InitPlan(
        root=draft.root,
        commands=tuple(draft.commands),
        changes=tuple(sorted(draft.changes, key=lambda change: order[change.name])),
        kept=tuple(draft.kept),
        advice=tuple(draft.advice),
    )


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A plan while it is made; each step reads the folder and adds to the lists."""

    root: Path
    template: Path
    commands: list[tuple[str, ...]] = field(default_factory=list)
    changes: list[FileChange] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def plan(self, *, sample: bool) -> None:
        blocked = list(_blocked(self.root, TEMPLATE_FILES))
        self.faults += blocked
        if blocked:  # nothing else can be read
            return
        git, dvc = _roots(self.root)
        owners = self._owners(dvc)
        if dvc is None or dvc == self.root:
            self._plan_dvc(git, dvc)
        params = self._plan_params(dvc)
        self._plan_versions()
        self._plan_stages(owners)
        self._plan_scripts()
        for part in SAMPLES:
            is_named = part.is_named_by(params)
            self._plan_inputs(part, owners, with_sample=sample and is_named)
            if is_named:
                self._advise_input(part)
        self._plan_ignores()
        self._advise(git, dvc)
        if not self.faults:
            self._check_resolves()

    def shipped(self, name: str) -> bytes:
        return (self.template / name).read_bytes()

    def change(self, name: str, new: bytes) -> None:
        old = _read(self.root / name)
        if old != new:
            self.changes.append(FileChange(name=name, old=old, new=new))

    def _owners(self, dvc: Path | None) -> dict[Path, str]:
        """Return each output of the DVC repository with the stage or file that says so."""
        if dvc is None:
            return {}
        from dvc.exceptions import DvcException

        try:
            with open_repo(dvc) as repo:
                return {Path(out.fs_path): _address(out.stage) for out in repo.index.outs}
        except (DvcException, TypeError) as error:  # TypeError: a param of a kind that it does not know
            self.faults.append(f"DVC cannot read its files in {dvc}: {error}: dvc status shows where")
            return {}

    def _plan_dvc(self, git: Path | None, dvc: Path | None) -> None:
        if git is None and dvc is None:
            if shutil.which("git") is None:
                self.faults.append("git is not found: install it")
            self.commands.append(("git", "init", "--quiet"))
        for name in DVC_FILES:
            if not (self.root / name).exists():
                self.change(name, self.shipped(name))

    def _plan_params(self, dvc: Path | None) -> dict[str, Any]:
        """Plan params.yaml and return what it will hold."""
        shipped = self.shipped("params.yaml").decode()
        if dvc is not None and dvc != self.root:
            scratch = _quoted(f"{self.root.relative_to(dvc).as_posix()}/.work")
            shipped = shipped.replace("scratch_dir: .work ", f"scratch_dir: {scratch} ")
        params = self._merge("params.yaml", shipped)
        try:
            check_settings(params, name="params.yaml")
        except SettingsError as error:
            self.faults.append(str(error))
        return params

    def _merge(self, name: str, shipped: str) -> dict[Any, Any]:
        """Plan to add to a YAML file what it lacks, and return what it will hold."""
        try:
            merged = merge_yaml((_read(self.root / name) or b"").decode(), shipped, name)
            self.change(name, merged.encode())
            return parse_yaml(merged, name)
        except (SettingsError, UnicodeDecodeError) as error:
            self.faults.append(str(error) if isinstance(error, SettingsError) else f"{name} is not UTF-8: {error}")
            return {}

    def _plan_stages(self, owners: Mapping[Path, str]) -> None:
        text = self.shipped("dvc.yaml").decode()
        shipped, found = parse_yaml(text, "dvc.yaml"), self._merge("dvc.yaml", text)
        if not found:  # a fault by now
            return
        for key, value in shipped.items():
            if type(found[key]) is not type(value):
                expected = "a list" if isinstance(value, list) else "keys and values"
                self.faults.append(f"dvc.yaml: {key}: expected {expected}, found {found[key]!r:.60}")
            elif isinstance(value, dict) and key != "stages":
                self.kept += _others(f"dvc.yaml: {key}.", found[key], value)
        before = parse_yaml((_read(self.root / "dvc.yaml") or b"").decode(), "dvc.yaml").get("stages")
        for stage, content in shipped["stages"].items():
            there = before.get(stage) if isinstance(before, dict) else None
            if there is None:
                self.faults += _taken(self.root, stage, outputs(content), owners)
            elif not (isinstance(there, dict) and f"-m stages.{stage}" in str(there.get("cmd"))):
                self.faults.append(f"dvc.yaml: stage {stage} is another: expected cmd {content['cmd']!r}: rename yours")
            elif there != content:
                self.kept.append(f"dvc.yaml: stages.{stage}")

    def _check_resolves(self) -> None:
        """Find what DVC refuses of params.yaml and dvc.yaml together, as a name in `vars` that both have then."""
        changed = {change.name: change for change in self.changes if change.name in _RESOLVED}
        if not any(change.old is not None for change in changed.values()):
            return
        before = {name: change.old for name, change in changed.items()}
        fault = _unresolved(self.root, {name: change.new for name, change in changed.items()})
        if fault and not _unresolved(self.root, before):
            self.faults.append(f"DVC could not read dvc.yaml and params.yaml any more: {fault}: rename yours")

    def _plan_versions(self) -> None:
        text = self.shipped("stages/versions.yaml").decode()
        found = self._merge("stages/versions.yaml", text)
        self.kept += _others("stages/versions.yaml: ", found, parse_yaml(text, ""))

    def _plan_scripts(self) -> None:
        for name in SCRIPTS:
            old, new = _read(self.root / name), self.shipped(name)
            if old is None:
                self.change(name, new)
            elif old != new and (name.endswith("__init__.py") or b"dspark_cache" in old):
                self.kept.append(name)
            elif old != new:
                self.faults.append(f"{name} is not of this pipeline: it does not import dspark_cache: rename yours")

    def _plan_inputs(self, sample: Sample, owners: Mapping[Path, str], *, with_sample: bool) -> None:
        if any(_overlap(self.root / sample.folder, path) for path in owners) or self._is_theirs(sample):
            self.kept.append(sample.folder)
            return
        for name in (README, *sample.names) if with_sample else (README,):
            self.change(f"{sample.folder}/{name}", self.shipped(f"{sample.folder}/{name}"))

    def _is_theirs(self, sample: Sample) -> bool:
        """Say whether a folder holds anything but our files, or what a killed run left of them."""
        path = self.root / sample.folder
        there = [entry.name for entry in path.iterdir()] if path.exists() else []
        return any(
            name not in (README, *sample.names) or _read(path / name) != self.shipped(f"{sample.folder}/{name}")
            for name in there
            if not name.startswith(TEMPORARY_PREFIX)
        )

    def _advise_input(self, sample: Sample) -> None:
        """Say what `dvc repro` would miss."""
        path = f"{sample.folder}/{sample.names[0]}"
        if not (self.root / path).exists() and path not in {change.name for change in self.changes}:
            self.advice.append(f"put yours into {sample.folder}, or set {sample.param}  # there is no {path}")

    def _plan_ignores(self) -> None:
        for name in IGNORE_FILES:
            old = _read(self.root / name) or b""
            there = {line.strip() for line in old.decode(errors="replace").splitlines()}
            missing = [line for line in ignored(self.shipped(name).decode()) if line not in there]
            if missing:
                start = old if old.endswith(b"\n") or not old else old + b"\n"
                self.change(name, start + "\n".join([_IGNORES_HEADING, *missing, ""]).encode())

    def _advise(self, git: Path | None, dvc: Path | None) -> None:
        if dvc is not None:
            self.advice += [f"{item.remedy}  # {item.found}" for item in advise_links(dvc) if item.remedy]
        made = {change.name for change in self.changes}
        hidden = [name for name in TEMPLATE_FILES if name in made or (self.root / name).exists()]
        hidden = _hidden_by_git(git, self.root, hidden)
        if hidden:
            self.advice.append(f"git add --force {shlex.join(hidden)}  # git ignores them: a clone would lack them")


def _unresolved(root: Path, contents: Mapping[str, bytes | None]) -> str:
    """Return why DVC cannot resolve the dvc.yaml of a folder in which files had other contents; None: no such file."""
    from dvc.dvcfile import load_file
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    with TemporaryDirectory() as name:
        place = Path(name)
        for entry in root.iterdir() if root.exists() else ():
            if entry.name not in (".dvc", ".git", *contents):
                (place / entry.name).symlink_to(entry)
        for file, content in contents.items():
            if content is not None:
                (place / file).write_bytes(content)
        (place / ".dvc").mkdir()
        (place / ".dvc" / "config").write_text("[core]\n    no_scm = true\n")
        try:
            with Repo(name) as repo:
                if (place / "dvc.yaml").exists():
                    list(load_file(repo, str(place / "dvc.yaml")).stages.values())
        except (DvcException, TypeError) as error:  # TypeError: a param of a kind that it does not know
            return str(error).replace(f"{name}/", "")
    return ""


def _blocked(root: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Find what is no folder where a folder must be, and no file where a file must be."""
    folders = {folder for name in names for folder in (root / name).parents}
    for folder in sorted(folders):
        is_link = folder.is_symlink()
        if is_link or (folder.exists() and not folder.is_dir()):
            yield f"{folder} is {'a link' if is_link else 'a file'}: expected a folder"
    for name in names:
        if (root / name).is_dir():
            yield f"{root / name} is a folder: expected a file"


def _roots(root: Path) -> tuple[Path | None, Path | None]:
    """Return the git repository and the DVC repository that a folder is in; one outside of the first is none."""
    git = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    dvc = next((folder for folder in (root, *root.parents) if (folder / ".dvc").is_dir()), None)
    return git, None if git and dvc and not dvc.is_relative_to(git) else dvc


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w./-]+", text) else "'" + text.replace("'", "''") + "'"


def outputs(stage: Mapping[str, Any]) -> list[str]:
    """Return the paths of all outputs of a stage of dvc.yaml."""
    items = [item for kind in ("outs", "metrics", "plots") for item in stage.get(kind, [])]
    return [next(iter(item)) if isinstance(item, dict) else item for item in items]


def _others(prefix: str, found: Mapping[str, Any], shipped: Mapping[str, Any]) -> list[str]:
    """Name the entries that have another value than what is shipped."""
    return [f"{prefix}{name}" for name, value in shipped.items() if found and found[name] != value]


def _taken(root: Path, stage: str, names: list[str], owners: Mapping[Path, str]) -> Iterator[str]:
    """Find outputs of a new stage that another stage has, or where something lies that DVC would remove."""
    for name in names:
        found = [owner for path, owner in owners.items() if _overlap(root / name, path)]
        if found:
            yield f"{name}, an output of the stage {stage}, is one of {found[0]} already: rename that"
        elif (root / name).exists():
            yield f"{name} is there, and is to be an output of the stage {stage}: move it away"
        elif (root / name).parent.exists() and not (root / name).parent.is_dir():
            yield f"{(root / name).parent} is a file: expected a folder, for an output of the stage {stage}"


def _address(stage: Any) -> str:
    """Return where a stage of DVC is written, from the root of its repository."""
    name = getattr(stage, "name", None)
    return f"{stage.path_in_repo}:{name}" if name else str(stage.path_in_repo)


def _overlap(first: Path, second: Path) -> bool:
    return first.is_relative_to(second) or second.is_relative_to(first)


def ignored(text: str) -> list[str]:
    """Return the patterns of a shipped .gitignore or .dvcignore that every repository of the pipeline needs."""
    outputs_part, _, tools = text.partition(_TOOLS_HEADING)
    lines = [line for line in outputs_part.splitlines() if line and not line.startswith("#")]
    return lines + [line for line in tools.splitlines() if line in _NEEDED_TOOLS]


def _hidden_by_git(git: Path | None, root: Path, names: list[str]) -> list[str]:
    """Return those of `names` in `root` that the user's rules keep out of git."""
    if git is None or shutil.which("git") is None:
        return []
    paths = {str(root / name): name for name in names}
    done = subprocess.run(["git", "check-ignore", *paths], cwd=git, check=False, capture_output=True, text=True)
    return [paths[line] for line in done.stdout.splitlines() if line in paths]
