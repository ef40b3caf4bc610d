"""Untrusted datasets, whose files must be in their folder, and datasets of the hub."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from pyarrow.parquet import write_table

from isobit.config.data import HubData
from isobit.data.hugging_face import dataset_folder, read_hugging_face
from isobit.data.sources import load_rows
from isobit.util.errors import DataError

ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one file, beside another that is none of its own; no name is looked up."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "secret.jsonl").write_text(json.dumps({"prompt": "secret", "answer": ""}))
    return folder


def rows(folder: Path) -> list[dict[str, object]]:
    return list(read_hugging_face(folder, "train", None))


@pytest.mark.parametrize(
    "place",
    [
        "hf://datasets/someone/else/train.jsonl",
        "https://example.org/train.jsonl",
        "zip://x.jsonl::https://example.org/x.zip",
        "{outside}/secret.jsonl",
        "../secret.jsonl",
        "~/secret.jsonl",
    ],
)
@pytest.mark.parametrize("form", ["data_files: {}", "data_files: [{{split: train, path: [{}]}}]"])
@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
def test_a_readme_that_names_other_places_is_refused(
    folder: Path, place: str, form: str, card: str
) -> None:
    place = place.replace("{outside}", str(folder.parent))
    lines = f"configs:\n- config_name: default\n  {form.format(json.dumps(place))}\n"
    text = f"---\n{lines}---\n# About\n" if card == "README.md" else lines
    (folder / card).write_text(text)
    with pytest.raises(DataError, match=r"names .*, which is outside of the folder"):
        rows(folder)


def test_a_readme_that_names_its_own_files_is_followed(folder: Path) -> None:
    (folder / "b.jsonl").write_text(json.dumps(ROW | {"prompt": "2+2="}))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: b.*\n---\n"
    )
    assert [row["prompt"] for row in rows(folder)] == ["2+2="]
    (folder / "README.md").write_text("---\n[\n---\n")
    with pytest.raises(DataError, match="its YAML cannot be read"):
        rows(folder)


def test_a_link_that_leads_outside_is_refused(folder: Path) -> None:
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(folder.parent / "secret.jsonl")
    with pytest.raises(DataError, match="outside of the folder"):
        rows(folder)


def test_a_folder_called_like_a_reader_is_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(folder.parent / "json")
    monkeypatch.chdir(folder.parent)
    assert rows(Path("json")) == [ROW]


def test_a_saved_dataset_that_names_other_places_is_refused(folder: Path) -> None:
    saved, other = folder.parent / "saved", folder.parent / "other"
    from datasets import Dataset

    Dataset.from_list([ROW]).save_to_disk(str(saved))
    Dataset.from_list([ROW | {"prompt": "secret"}]).save_to_disk(str(other))
    assert rows(saved) == [ROW]
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other/data-00000-of-00001.arrow"}]
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="outside of the folder"):
        rows(saved)
    splits = folder.parent / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(DataError, match="outside of the folder"):
        rows(splits)


def test_images_are_refused_by_column(folder: Path) -> None:
    from datasets import Dataset, Features, Image, Value

    features = Features({"prompt": Value("string"), "picture": Image(decode=True)})
    picture = {"path": "https://example.org/x.png", "bytes": None}
    made = Dataset.from_dict({"prompt": ["a"], "picture": [picture]}, features=features)
    write_table(made.data.table, str(folder / "train.parquet"))
    (folder / "train.jsonl").unlink()
    with pytest.raises(DataError, match="the column 'picture' holds Image"):
        rows(folder)


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
        ({"dataset": "org/name@v9"}, error_of(RevisionNotFoundError), "but no revision v9"),
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
