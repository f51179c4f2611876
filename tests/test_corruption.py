"""Damage everywhere in a published cache: each is refused, by the name of the file, and nothing else ever comes out.

The inputs tried are printed, file by file and region by region: `pytest -rP tests/test_corruption.py`. What one fault
is told in words is in test_reader, test_ragged and test_verify; here it is the places that count, all of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache import CachedDSparkDataset, read_target_weight_modules
from dspark_cache.cache_files import CacheFolder
from dspark_cache.errors import DsparkCacheError
from dspark_cache.verify import verify_cache
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Tally

LAYOUTS = ("padded", "ragged")
MANIFEST, PROVENANCE, WEIGHTS = "manifest.json", "provenance.json", "target_weights.safetensors"
SHARDS = 3
ROW_BYTES = 64 * 3 * 2
"""Bytes of a token's states: two layers and the last one, 64 bf16 numbers each."""
PARAMS: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 40, "min_loss_tokens": 2},
    "target": {"layer_ids": [1, 3]},
    "verify": {"level": "supervision", "recompute_samples": 0},
    "cache": {"shard_size": 2, "shard_bytes": 80 * ROW_BYTES},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Layout and "one" or "other" to a cache of six samples, published and verified by the pipeline.

    The "other" holds the same samples in another order, so that its shards have the same shapes in the padded layout.
    """
    repository = make_repository(tmp_path_factory.mktemp("corruption") / "repository", num_rows=6, **PARAMS)
    caches = {}
    for name, order in (("one", {}), ("other", {"shuffle": True, "shuffle_seed": 43})):
        repository.set_params(data=order)
        for layout in LAYOUTS:
            repository.set_params(cache={"layout": layout})
            repository.run()
            caches[layout, name] = repository.root / f"{layout}-{name}"
            (repository.root / "cache").rename(caches[layout, name])
            assert len(list(caches[layout, name].glob("shard-*"))) == SHARDS
    return caches


@pytest.fixture
def cache(made: dict[tuple[str, str], Path], layout: str, tmp_path: Path) -> Iterator[Path]:
    """A copy of a cache whose files are links: files are replaced in it, never written through."""
    before = Repository(made[layout, "one"]).digests("")
    yield linked(made[layout, "one"], tmp_path / "cache")
    assert Repository(made[layout, "one"]).digests("") == before


def linked(cache: Path, folder: Path) -> Path:
    return shutil.copytree(cache, folder, copy_function=os.link)


def replace(path: Path, content: bytes) -> None:
    """Put another file in the place of a linked one."""
    path.unlink()
    path.write_bytes(content)


# What is done to files


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file: where, what was done, and its content now."""

    region: str
    what: str
    content: bytes


def regions(name: str, content: bytes) -> dict[str, range]:
    """Return the parts of a file: header length, header and each tensor, read by this test's own means."""
    if name.endswith(".json"):
        return {"text": range(len(content))}
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    places = {
        key: range(start + entry["data_offsets"][0], start + entry["data_offsets"][1]) for key, entry in entries.items()
    }
    found = {"length": range(8), "header": range(8, start), **places}
    assert sum(map(len, found.values())) == len(content)
    return found


def with_byte(content: bytes, position: int, value: int) -> bytes:
    return content[:position] + bytes([value]) + content[position + 1 :]


def damages(name: str, content: bytes, region: str) -> Iterator[Damage]:
    """Yield every kind of damage in one region of a file; nothing where the file has no such region."""
    if region == "file":
        yield Damage(region, "empty", b"")
        yield Damage(region, "a byte appended", content + b"\0")
        yield Damage(region, "appended to itself", content * 2)
        return
    place = regions(name, content).get(region)
    if place is None:
        return
    for position, bit in product((place[0], place[len(place) // 2], place[-1]), (0, 7)):
        flipped = with_byte(content, position, content[position] ^ 1 << bit)
        yield Damage(region, f"bit {bit} of byte {position} flipped", flipped)
    for position, value in product((place[0], place[-1]), (0x00, 0x20, 0xFF)):
        if content[position] != value:
            yield Damage(region, f"byte {position} set to {value}", with_byte(content, position, value))
    for size in sorted({place.start, place[len(place) // 2], place.stop} - {0, len(content)}):
        yield Damage(region, f"truncated to {size} bytes", content[:size])
    hole = bytes(len(place))
    if content[place.start : place.stop] != hole:
        yield Damage(region, "zeroed", content[: place.start] + hole + content[place.stop :])


def flips(content: bytes, stride: int) -> Iterator[Damage]:
    """Yield every `stride`-th single-bit flip of a text."""
    for number in range(0, 8 * len(content), stride):
        position, bit = divmod(number, 8)
        flipped = with_byte(content, position, content[position] ^ 1 << bit)
        yield Damage("text", f"bit {bit} of byte {position} flipped", flipped)


# What becomes of it


def refusals(cache: Path) -> dict[str, list[str]]:
    """Open and verify a cache and load its weights; return what each says against it.

    Any error but the library's own goes through.
    """
    found: dict[str, list[str]] = {"open": [], "weights": [], "verify": []}
    for way, use in (("open", CachedDSparkDataset), ("weights", read_target_weight_modules)):
        try:
            use(cache)
        except DsparkCacheError as error:
            found[way] = [str(error)]
    try:
        found["verify"] = list(map(str, verify_cache(CacheFolder(cache), "supervision").findings))
    except DsparkCacheError as error:
        found["verify"] = [str(error)]
    return found


def says_the_same(path: Path, before: bytes) -> bool:
    """Say whether provenance differs in spaces only, of which its digest is not one (see test_provenance)."""
    return json.dumps(json.loads(path.read_bytes())) == json.dumps(json.loads(before))


@dataclass
class Results:
    """What was tried and what came of it."""

    provenance: bytes
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    at_open: int = 0
    harmless: int = 0
    losses: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def add(self, cache: Path, name: str, damage: Damage) -> None:
        """Damage one file of a linked cache and look at what becomes of it."""
        self.tried[name, damage.region] += 1
        place = f"{name}, {damage.region}: {damage.what}"
        replace(cache / name, damage.content)
        try:
            found = refusals(cache)
        except Exception as error:
            self.crashes.append(f"{place}: {error!r}")
            return
        self.at_open += bool(found["open"])
        if not found["verify"] and name == PROVENANCE and says_the_same(cache / name, self.provenance):
            self.harmless += 1
        elif not found["verify"]:
            self.losses.append(place)
        elif not any(name in line for lines in found.values() for line in lines):
            self.unnamed.append(f"{place}: {found['verify'][0]}")

    def report(self, title: str, tally: Tally) -> None:
        """Print the counts and fail on anything that crashed or was accepted."""
        total = self.tried.total()
        lines = [
            f"{title}: inputs tried {total}, losses {len(self.losses)}, crashes {len(self.crashes)}; refused at open "
            f"{self.at_open}, by another file's name {len(self.unnamed)}; the same with other spaces {self.harmless}",
            *(f"    {count:6} {name}, {region}" for (name, region), count in self.tried.items()),
        ]
        print("\n".join(lines))  # noqa: T201 - for people, by -rP
        for name, number in {"damages": total, "losses": len(self.losses)}.items():
            tally(name, number)
        assert total
        assert self.crashes == []
        assert self.losses == []
        assert self.unnamed == []


# Tests

TENSORS = {
    "padded": ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"),
    "ragged": ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states", "sample_offsets"),
}
REGIONS = {
    layout: ("file", "text", "length", "header", *tensors, "embed_tokens.weight", "lm_head.weight")
    for layout, tensors in TENSORS.items()
}
PLACES = [(layout, region) for layout, names in REGIONS.items() for region in names]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_cache_is_accepted_so_that_the_rest_is_about_the_damage(cache: Path, layout: str) -> None:
    assert refusals(cache) == {"open": [], "weights": [], "verify": []}
    found = {region for path in cache.iterdir() for region in regions(path.name, path.read_bytes())}
    assert {"file", *found} == set(REGIONS[layout])


@pytest.mark.parametrize(("layout", "region"), PLACES)
def test_damage_in_a_region_of_any_file_is_refused_by_name(cache: Path, layout: str, region: str, tally: Tally) -> None:
    results = Results((cache / PROVENANCE).read_bytes())
    files = 0
    for path in sorted(cache.iterdir()):
        content = path.read_bytes()
        found = list(damages(path.name, content, region))
        for damage in found:
            assert damage.content != content
            results.add(cache, path.name, damage)
        if found:
            files += 1
            replace(path, content)
    if region in ("length", "header", "sample_offsets"):
        assert results.at_open == sum(count for (name, _), count in results.tried.items() if name != WEIGHTS)
    per_file = 3 if region == "file" else 12
    assert results.tried.total() >= per_file * files > 0
    results.report(f"{layout}, {region}", tally)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "stride"),
    [
        (MANIFEST, 29),
        (PROVENANCE, 213),
        pytest.param(MANIFEST, 1, marks=pytest.mark.slow),
        pytest.param(PROVENANCE, 1, marks=pytest.mark.slow),
    ],
)
def test_a_bit_flipped_anywhere_in_a_text_is_refused_by_name(
    cache: Path, layout: str, name: str, stride: int, tally: Tally
) -> None:
    """The strides are odd, so that every bit of a byte has its turn."""
    content = (cache / name).read_bytes()
    results = Results((cache / PROVENANCE).read_bytes())
    for damage in flips(content, stride):
        results.add(cache, name, damage)
    assert results.tried == {(name, "text"): -(-8 * len(content) // stride)}
    results.report(f"every {stride}. bit of {name}, {layout}", tally)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("key", "value"), [("seq_length", 20), ("target_vocab_size", 1025)])
def test_a_changed_manifest_is_named_and_not_only_the_files_that_no_longer_fit_it(
    cache: Path, layout: str, key: str, value: int
) -> None:
    manifest = json.loads((cache / MANIFEST).read_text())
    changed = (cache / MANIFEST).read_text().replace(f'"{key}": {manifest[key]}', f'"{key}": {value}')
    replace(cache / MANIFEST, changed.encode())
    findings = verify_cache(CacheFolder(cache), "supervision").findings
    assert findings
    assert MANIFEST in {finding.file for finding in findings}, layout


def exchange(cache: Path, *names: tuple[str, str]) -> None:
    """Give each file of a pair the name of the other."""
    for one, other in names:
        (cache / one).rename(cache / "aside")
        (cache / other).rename(cache / one)
        (cache / "aside").rename(cache / other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_two_shards_exchanged_are_found_by_both_names(cache: Path, layout: str, tally: Tally) -> None:
    """Both files of a ragged shard, or one of them."""
    kinds: dict[str, list[tuple[str, ...]]] = {
        "padded": [("shard",)],
        "ragged": [("shard", "samples"), ("shard",), ("samples",)],
    }
    tried = 0
    for kind, (one, other) in product(kinds[layout], combinations(range(SHARDS), 2)):
        names = [(f"{part}-{one:06d}.safetensors", f"{part}-{other:06d}.safetensors") for part in kind]
        exchange(cache, *names)
        found = " ".join(refusals(cache)["verify"])
        assert all(name in found for pair in names for name in pair), found
        exchange(cache, *names)
        tried += 1
    assert refusals(cache)["verify"] == []
    assert tried == {"padded": 3, "ragged": 9}[layout]
    tally("damages", tried)
    tally("losses", 0)


def test_a_shard_of_another_cache_is_found_by_its_bytes(made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Of the same samples in another order, and of the same shape, so that nothing else can tell."""
    for number in range(SHARDS):
        name = f"shard-{number:06d}.safetensors"
        cache = linked(made["padded", "one"], tmp_path / f"cache-{number}")
        replace(cache / name, (made["padded", "other"] / name).read_bytes())
        found = refusals(cache)
        assert found["open"] == []
        assert [line[: len(f"[bytes] {name}: ")] for line in found["verify"]][:1] == [f"[bytes] {name}: "]
        assert all(name in line for line in found["verify"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [MANIFEST, PROVENANCE])
def test_a_text_of_another_cache_is_found(
    made: dict[tuple[str, str], Path], cache: Path, layout: str, name: str
) -> None:
    replace(cache / name, (made[layout, "other"] / name).read_bytes())
    assert refusals(cache)["verify"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_of_the_other_layout_s_files_is_refused(
    made: dict[tuple[str, str], Path], tmp_path: Path, layout: str
) -> None:
    """The manifest, or all but the manifest."""
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    cache = linked(made[other, "one"], tmp_path / "cache")
    replace(cache / MANIFEST, (made[layout, "one"] / MANIFEST).read_bytes())
    found = refusals(cache)
    assert found["open"]
    assert found["verify"]
