"""Datasets of strangers: what they name lies in their folder, or nothing of it is read."""

import json
import socket
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, Value
from pyarrow.parquet import write_table

from isobit.data.hugging_face import read_hugging_face
from isobit.errors import DataError

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
    features = Features({"prompt": Value("string"), "picture": Image(decode=True)})
    picture = {"path": "https://example.org/x.png", "bytes": None}
    made = Dataset.from_dict({"prompt": ["a"], "picture": [picture]}, features=features)
    write_table(made.data.table, str(folder / "train.parquet"))
    (folder / "train.jsonl").unlink()
    with pytest.raises(DataError, match="the column 'picture' holds Image"):
        rows(folder)
