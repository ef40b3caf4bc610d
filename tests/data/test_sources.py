"""Rows from every kind of source, and the errors of wrong ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from isobit.config.data import CsvData, HfData, JsonlData, ParquetData, ReasoningGymData, RowsData
from isobit.data.sources import give_rows, load_rows
from isobit.util.errors import DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": "2+2=", "answer": "4"},
    {"prompt": "3+3=", "answer": "6"},
]


def write_jsonl(path: Path, lines: list[bytes]) -> JsonlData:
    path.write_bytes(b"\n".join(lines))
    return JsonlData(path=path)


def lines(rows: list[dict[str, str]]) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def test_jsonl_rows_keep_order_columns_and_lines(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "rows.jsonl", [b"\xef\xbb\xbf" + lines(ROWS)[0], b"", *lines(ROWS)[1:], b""]
    )
    rows = load_rows(source)
    assert [row.prompt for row in rows] == ["1+1=", "2+2=", "3+3="]
    assert [row.columns for row in rows] == [{"answer": "2"}, {"answer": "4"}, {"answer": "6"}]
    assert rows[1].place.endswith("rows.jsonl, line 3")


def test_limit_cuts_before_a_damaged_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*lines(ROWS), b"{"])
    assert len(load_rows(source.model_copy(update={"limit": 2}))) == 2


def test_messages_are_a_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    source = write_jsonl(tmp_path / "rows.jsonl", [json.dumps({"prompt": messages}).encode()])
    assert load_rows(source)[0].prompt == tuple(messages)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "line 2, column 15: not JSON"),
        (b'{"prompt": "\xff"}', "line 2: byte 13 of the line is not UTF-8"),
        (b'["prompt"]', "line 2: expected a JSON object, found list"),
        (b'{"prompts": "a", "n": 1}', "line 2: no column 'prompt'; .* did you mean 'prompts'"),
        (b'{"prompt": null}', "line 2, column 'prompt': expected text .* found NoneType"),
        (b'{"prompt": [{"role": "user"}]}', "line 2, column 'prompt': expected text or a list"),
        (b'{"prompt": []}', "line 2, column 'prompt': expected text or a list of messages"),
        (b"[" * 100_000, "line 2: nested too deeply"),
        (b'{"prompt": "a", "prompt": "b"}', "line 2: the key 'prompt' is there twice"),
        (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "line 2: a number has too many digits"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*lines(ROWS[:1]), line])
    with pytest.raises(DataError, match=message):
        load_rows(source)


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*lines(ROWS[:1]), b"x" * 200])
    monkeypatch.setattr("isobit.data.readers.LONGEST_LINE", 100)
    with pytest.raises(DataError, match="line 2: longer than 100 bytes"):
        load_rows(source)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"line 1: longer than 67,108,864 bytes"):
        load_rows(JsonlData(path=Path("/dev/zero")))


def test_the_starters_problems_go_by_name() -> None:
    rows = load_rows(JsonlData(path=Path("starter:held_out.jsonl"), limit=2))
    assert [(row.prompt, row.columns) for row in rows] == [
        ("2+3+2+1=", {"answer": "8"}),
        ("7+0+8+5=", {"answer": "20"}),
    ]
    with pytest.raises(DataError, match=r"cannot read .*none\.jsonl"):
        load_rows(JsonlData(path=Path("starter:none.jsonl")))


def test_an_empty_or_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"empty.jsonl has no rows"):
        load_rows(write_jsonl(tmp_path / "empty.jsonl", [b"", b"  "]))
    with pytest.raises(DataError, match=r"cannot read .*none.jsonl: No such file"):
        load_rows(JsonlData(path=tmp_path / "none.jsonl"))


def test_saved_dataset_and_saved_splits(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "single"))
    DatasetDict(
        {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[2:])}
    ).save_to_disk(str(tmp_path / "splits"))
    single = load_rows(HfData(path=tmp_path / "single"))
    assert [row.prompt for row in single] == ["1+1=", "2+2=", "3+3="]
    (row,) = load_rows(HfData(path=tmp_path / "splits", split="test"))
    assert (row.prompt, row.columns) == ("3+3=", {"answer": "6"})
    with pytest.raises(DataError, match="no split 'validation'; the splits are 'train', 'test'"):
        load_rows(HfData(path=tmp_path / "splits", split="validation"))


@pytest.mark.parametrize("suffix", ["parquet", "json", "csv"])
def test_folder_of_files(tmp_path: Path, suffix: str) -> None:
    for split, rows in {"train": ROWS, "test": ROWS[:1]}.items():
        path = str(tmp_path / f"{split}.{suffix}")
        dataset = Dataset.from_list(rows)
        getattr(dataset, f"to_{suffix}")(path)
    (tmp_path / "README.txt").write_text("about")
    assert [row.prompt for row in load_rows(HfData(path=tmp_path, limit=2))] == ["1+1=", "2+2="]
    assert len(load_rows(HfData(path=tmp_path, split="test"))) == 1
    with pytest.raises(DataError, match="row 0: no column 'question'"):
        load_rows(HfData(path=tmp_path, prompt="question"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(b"\n".join(lines(ROWS)))
    assert len(load_rows(HfData(path=tmp_path))) == 3
    path.write_bytes(b"\n".join(lines(ROWS[:2])))
    assert len(load_rows(HfData(path=tmp_path))) == 2


def test_a_folder_without_a_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no dataset"):
        load_rows(HfData(path=tmp_path))
    with pytest.raises(DataError, match="is not a folder"):
        load_rows(HfData(path=tmp_path / "none"))
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(HfData(path=tmp_path))


def test_a_task_gives_the_same_rows_for_the_same_seed() -> None:
    source = ReasoningGymData(task="chain_sum", size=5, seed=7, options={"max_terms": 3})
    rows = load_rows(source)
    assert rows == load_rows(source)
    assert [row.prompt for row in rows] != [
        row.prompt for row in load_rows(source.model_copy(update={"seed": 8}))
    ]
    assert all(row.prompt == row.columns["question"] for row in rows)
    identity = {"task": "chain_sum", "seed": 7, "size": 5, "options": {"max_terms": 3}}
    assert rows[0].columns["reasoning_gym"] == identity


def test_a_system_message_goes_before_the_question() -> None:
    (row,) = load_rows(ReasoningGymData(task="chain_sum", size=1, system="Think."))
    assert row.prompt == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": row.columns["question"]},
    )


def test_a_wrong_task_or_option_is_named() -> None:
    with pytest.raises(DataError, match="no task 'chain_sun'; did you mean 'chain_sum'"):
        load_rows(ReasoningGymData(task="chain_sun"))
    with pytest.raises(DataError, match=r"no option 'terms'; its options are .*max_terms"):
        load_rows(ReasoningGymData(task="chain_sum", options={"terms": 3}))
    with pytest.raises(DataError, match=r"refuses the options .*min_terms must be positive"):
        load_rows(ReasoningGymData(task="chain_sum", options={"min_terms": -1}))


def mix(*parts: dict[str, Any]) -> ReasoningGymData:
    return ReasoningGymData(task="composite", size=30, seed=3, options={"datasets": list(parts)})


def test_a_mix_of_tasks_draws_from_each() -> None:
    source = mix({"name": "chain_sum", "weight": 1, "config": {"max_terms": 3}}, {"name": "gcd"})
    rows = load_rows(source)
    assert {row.columns["metadata"]["source_dataset"] for row in rows} == {"chain_sum", "gcd"}
    assert [row.prompt for row in rows] == [row.prompt for row in load_rows(source)]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": "chain_sun"}, "no task 'chain_sun'; did you mean 'chain_sum'"),
        ({"name": "chain_sum", "config": {"max_term": 3}}, "has no option 'max_term'"),
        ({"name": "chain_sum", "wait": 2}, "expected a table with name, weight and config"),
        ({"name": "chain_sum", "weight": 0}, "refuses the options .*Weight must be positive"),
        (
            {"name": "composite", "config": {"datasets": [{"name": "countdown"}]}},
            "task 'composite' refuses the options",
        ),
    ],
)
def test_a_part_of_a_mix_that_cannot_be_used_is_named(part: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(mix(part))


SYSTEM = {"role": "system", "content": "Add."}
USER = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize("prompt", ["1+1=", [USER]])
def test_a_system_message_of_the_source_stands_before_each_prompt(
    tmp_path: Path, prompt: Any
) -> None:
    row = json.dumps({"prompt": prompt}).encode()
    source = write_jsonl(tmp_path / "rows.jsonl", [row]).model_copy(update={"system": "Add."})
    assert load_rows(source)[0].prompt == (SYSTEM, USER)


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    row = json.dumps({"prompt": [SYSTEM, USER]}).encode()
    source = write_jsonl(tmp_path / "rows.jsonl", [row]).model_copy(update={"system": "Add."})
    with pytest.raises(DataError, match=r"line 1: the prompt begins with a system message, and"):
        load_rows(source)


def test_parts_of_text_are_one_text_and_other_parts_are_refused(tmp_path: Path) -> None:
    def source(*parts: dict[str, Any]) -> JsonlData:
        message = {"role": "user", "content": parts}
        row = json.dumps({"prompt": [message]}).encode()
        return write_jsonl(tmp_path / "rows.jsonl", [row])

    text = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    assert load_rows(source(*text))[0].prompt == (USER,)
    with pytest.raises(DataError, match="a part of type 'image'; only parts of text"):
        load_rows(source(*text, {"type": "image", "image": "x.png"}))


ROWS_GIVEN = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": np.int64(4)}]


def test_rows_are_found_while_they_are_held() -> None:
    held = give_rows(iter(ROWS_GIVEN), "data.train")
    source = RowsData(count=2, sha256=held.sha256)
    assert [row.prompt for row in load_rows(source)] == ["1+1=", "2+2="]
    assert load_rows(source)[1].place == "the rows given, row 1"
    again = give_rows(ROWS_GIVEN, "data.train")
    assert again is held
    del held, again
    with pytest.raises(DataError, match=r"2 rows that were given from Python.*resume=True"):
        load_rows(source)


def test_the_digest_is_of_order_and_values() -> None:
    def digest(*rows: Any) -> str:
        return give_rows(rows, "data").sha256

    assert digest(*ROWS_GIVEN) != digest(*reversed(ROWS_GIVEN))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": {"x", "y", "z"}}) == digest({"a": {"z", "x", "y"}})
    large = np.zeros(5000)
    other = large.copy()
    other[2500] = 1
    assert digest({"a": large}) != digest({"a": other}), "str() would leave the middle out"


@pytest.mark.parametrize("rows", [["1+1="], [("prompt", "1+1=")], [{1: "1+1="}]])
def test_what_are_no_rows(rows: list[Any]) -> None:
    with pytest.raises(DataError, match=r"data\.train: row 0 is .*expected a list of mappings"):
        give_rows(rows, "data.train")


def csv_rows(tmp_path: Path, content: bytes, **keys: object) -> list[tuple[object, dict, str]]:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    source = CsvData.model_validate({"path": path, **keys})
    return [(row.prompt, dict(row.columns), row.place) for row in load_rows(source)]


def test_csv_values_are_text_as_it_stands(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfquestion,answer\n"a, ""b""\nc",007\n\xc3\xa9,\n'
    rows = csv_rows(tmp_path, content, prompt="question")
    path = tmp_path / "rows.csv"
    assert rows == [
        ('a, "b"\nc', {"answer": "007"}, f"{path}, line 3"),
        ("é", {"answer": ""}, f"{path}, line 4"),
    ]
    assert len(csv_rows(tmp_path, content + b"1,2,3\n", prompt="question", limit=2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\na,b,c\n", "line 2: not one value for each of the 2 columns"),
        (b"prompt,answer\na\n", "line 2: not one value for each of the 2 columns"),
        (b"prompt,prompt\na,b\n", "line 1: expected a name for each column, and each once"),
        (b"prompt,\na,b\n", "line 1: expected a name for each column, and each once"),
        (b'prompt\n"a\n', "not CSV: unexpected end of data"),
        (b"prompt\n\xff\n", "not UTF-8"),
        (b"", "has no rows"),
        (b"promt\na\n", "line 2: no column 'prompt'; .* did you mean 'promt'"),
    ],
)
def test_csv_that_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        csv_rows(tmp_path, content)


def test_parquet_rows_are_python_values(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": messages, "answer": i, "info": {"x": [i]}} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = load_rows(ParquetData(path=tmp_path / "rows.parquet", limit=2))
    assert [row.prompt for row in found] == [tuple(messages)] * 2
    assert [row.columns for row in found] == [{"answer": i, "info": {"x": [i]}} for i in (0, 1)]
    assert found[1].place.endswith("rows.parquet, row 1")


def test_parquet_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    for content in (b"", b"PAR1 not really PAR1", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.parquet"):
            load_rows(ParquetData(path=path))
