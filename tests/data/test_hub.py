"""Datasets of the hub, without a network: what is cached, what would be fetched, and what is
refused.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from isobit.config.data import HubData
from isobit.data.hub import dataset_folder
from isobit.data.sources import load_rows
from isobit.errors import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ["README.md", "evil.py", "main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl"]


class Hub:
    """The two functions of the hub's library that are used, with a cache that is a folder."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot, self.requests = snapshot, []
        self.error: Exception | None = None

    def info(self, name: str, revision: str | None = None) -> Any:
        self.requests.append(f"list {name} {revision}")
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in FILES]
        )

    def download(
        self, name: str, local_files_only: bool = False, allow_patterns: Any = None, **_: Any
    ) -> str:
        if local_files_only:
            if not self.snapshot.is_dir():
                raise ValueError("not cached")
            return str(self.snapshot)
        self.requests.append(f"fetch {name}: {allow_patterns}")
        for file in allow_patterns:
            self.put(file)
        return str(self.snapshot)

    def put(self, file: str) -> None:
        path = self.snapshot / file
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = self.snapshot.parents[1] / "blobs" / file.replace("/", "-")
        blob.parent.mkdir(exist_ok=True)
        blob.write_text(json.dumps({"prompt": file, "answer": "2"}) + "\n")
        path.unlink(missing_ok=True)
        path.symlink_to(blob)  # as the hub's library lays a snapshot out


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "datasets--org--name" / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", made.info)
    return made


def source(**keys: Any) -> HubData:
    return HubData.model_validate({"dataset": "org/name", "subset": "main", **keys})


def test_rows_of_a_subset_are_fetched_once_and_nothing_else(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = load_rows(source(split="test"))
    assert (row.prompt, row.place) == ("main/test.jsonl", "org/name [test], row 0")
    assert hub.requests == [
        "list org/name None",
        "fetch org/name: ['main/train.jsonl', 'main/test.jsonl']",
    ]
    assert "fetching the dataset org/name" in capsys.readouterr().err
    load_rows(source(split="train"))
    assert len(hub.requests) == 2, "what is cached is not asked for again"


def test_an_interrupted_fetch_is_finished_and_offline_never_asks(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("main/train.jsonl")
    dataset_folder(source())
    assert len(hub.requests) == 2, "the list of the files was not there"
    (hub.snapshot / "main/test.jsonl").unlink()
    dataset_folder(source())
    assert len(hub.requests) == 4
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    dataset_folder(source())
    with pytest.raises(DataError, match=r"no subset 'socratic'; its folders with rows are main"):
        dataset_folder(source(subset="socratic"))
    assert len(hub.requests) == 4


def test_offline_and_not_cached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"not in the hub's cache .*HF_HUB_OFFLINE forbids"):
        dataset_folder(source())
    assert hub.requests == []


def error_of(kind: type[Exception]) -> Exception:
    """As the library makes it, but without a response of its HTTP client."""
    error = kind.__new__(kind)
    Exception.__init__(error, "404")
    return error


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"subset": None}, None, r"rows in 2 folders: main, socratic; name one .* as `subset`"),
        ({"subset": "mian"}, None, r"no subset 'mian'; its folders with rows are main, socratic"),
        ({}, error_of(RepositoryNotFoundError), "the hub has no dataset org/name, or none that"),
        (
            {"dataset": "org/name@v9"},
            error_of(RevisionNotFoundError),
            "org/name, but no revision v9",
        ),
        ({}, OSError("no route\nto host"), "OSError: no route; check the network"),
    ],
)
def test_what_the_hub_does_not_give(
    hub: Hub, keys: dict[str, Any], error: Exception | None, message: str
) -> None:
    hub.error = error
    with pytest.raises(DataError, match=message):
        dataset_folder(source(**keys))


@pytest.mark.parametrize("name", ["name", "../x/y", "org/name@", "/org/name", "org/.."])
def test_what_is_no_name_of_a_dataset(name: str) -> None:
    with pytest.raises(ValueError, match="dataset"):
        HubData(dataset=name)
    with pytest.raises(ValueError, match="subset"):
        HubData(dataset="org/name", subset="../x")
