"""The digest of the kernels is read from the user's cache, and is the same as if it were not."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import isobit
from isobit.store import kernels_digest
from isobit.store.kernels_digest import definitions_sha256, kernels_sha256

DIGEST = "0123456789abcdef" * 4
SOURCES = {"isobit.kernels.a": b"x = 1\n", "isobit.kernels.b": b"y = 2\n"}


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "isobit" / "kernels"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that sources are parsed."""
    times: list[int] = []

    def parse(sources: dict[str, str]) -> str:
        times.append(len(sources))
        return DIGEST

    monkeypatch.setattr(kernels_digest, "definitions_sha256", parse)
    monkeypatch.setattr(kernels_digest, "_sources", lambda: SOURCES)
    return times


def asked() -> str:
    """The digest as a process gets it that has not asked before."""
    return kernels_sha256.__wrapped__()


def test_the_digest_is_that_of_the_source(entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the formats alone, which are soon parsed."""
    package = Path(str(isobit.__file__)).parent
    sources = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_bytes()
        for folder in ("kernels", "precision")
        for path in (package / folder).rglob("*.py")
    }
    assert kernels_digest._sources() == sources
    few = {name: source for name, source in sources.items() if ".precision" in name}
    monkeypatch.setattr(kernels_digest, "_sources", lambda: few)
    digest = definitions_sha256({name: source.decode() for name, source in few.items()})
    assert [asked(), asked()] == [digest, digest]
    assert len(list(entries.iterdir())) == 1


def test_the_same_bytes_are_parsed_once(
    entries: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [asked() for _ in range(3)] == [DIGEST] * 3
    assert parsed == [2]
    for others in (
        {**SOURCES, "isobit.kernels.b": b"y = 3\n"},
        {"isobit.kernels.a": b"x = 1\ny = 2\n"},
        {"isobit.kernels.a": SOURCES["isobit.kernels.a"], "isobit.kernels.c": b"y = 2\n"},
    ):
        monkeypatch.setattr(kernels_digest, "_sources", lambda others=others: others)
        asked()
        asked()
    assert parsed == [2, 2, 1, 2]
    assert len(list(entries.iterdir())) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.write_bytes(b""),
        lambda entry: entry.write_bytes(entry.read_bytes()[:70]),
        lambda entry: entry.write_bytes(b"f" + entry.read_bytes()[1:]),
        lambda entry: entry.write_bytes(b"\xff" * 130),
        lambda entry: entry.write_bytes(entry.read_bytes() * 2),
        lambda entry: (entry.unlink(), os.mkfifo(entry)),
    ],
    ids=["empty", "cut", "another digit", "no text", "too long", "a pipe"],
)
def test_a_damaged_entry_is_made_again(
    entries: Path, parsed: list[int], damage: Callable[[Path], object]
) -> None:
    asked()
    (entry,) = entries.iterdir()
    whole = entry.read_bytes()
    damage(entry)
    assert asked() == DIGEST
    assert parsed == [2, 2]
    assert entry.is_file() and entry.read_bytes() == whole


@pytest.mark.parametrize("cache", ["/proc/isobit", "file", "folder"])
def test_a_cache_that_cannot_be_used_costs_nothing_but_time(
    cache: str, parsed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "isobit" / "kernels" / kernels_digest._key(SOURCES) / "x").mkdir(
        parents=True
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    assert [asked(), asked()] == [DIGEST] * 2
    assert parsed == [2, 2]
    assert list(tmp_path.rglob(".*")) == []


def test_a_user_without_a_home_has_no_cache(
    parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "a/relative/path")
    monkeypatch.setattr(kernels_digest.Path, "home", no_home)
    assert [asked(), asked()] == [DIGEST] * 2


def test_many_may_write_at_once(entries: Path, parsed: list[int]) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: asked(), range(64))) == {DIGEST}
    (entry,) = entries.iterdir()
    assert entry.read_bytes() == kernels_digest._line(entry.name, DIGEST)
