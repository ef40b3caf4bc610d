"""Rows from every kind of source, and the errors of wrong ones."""

import bz2
import csv
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from datasets import Dataset, DatasetDict, interleave_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from isobit.config.data import (
    CsvData,
    HfData,
    JsonlData,
    MixtureData,
    ParquetData,
    ReasoningGymData,
    RowsData,
)
from isobit.data.readers import read_jsonl
from isobit.data.sources import give_rows, load_rows
from isobit.records.messages import written_messages
from isobit.util.errors import DataError
from tests.suites import examples

ROWS = [
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": "2+2=", "answer": "4"},
    {"prompt": "3+3=", "answer": "6"},
]


def write_jsonl(path: Path, lines: list[bytes]) -> JsonlData:
    path.write_bytes(b"\n".join(lines))
    return JsonlData(path=path)


def lines(rows: list[dict[str, Any]]) -> list[bytes]:
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
        (b'{"prompt": "a",}', "line 2, column 16: not JSON .a comma before '}'"),
        (b'{"prompt": "a"},', "line 2, column 16: not JSON .a comma behind the object"),
        (b"{'prompt': 'a'}", "line 2, column 2: not JSON .single quotes"),
        (b'{"prompt": "a"} // b', "line 2, column 17: not JSON .a comment"),
        (b'{"prompts": "a", "n": 1}', "line 2: no column 'prompt'; .* did you mean 'prompts'"),
        (b'{"messages": []}', "columns are 'messages'; .* data.train.messages = .messages."),
        (b'{"conversations": []}', "'conversations'; .* data.train.messages = .conversations."),
        (b'{"question": "a"}', "'question'; name it in the key `prompt` of the data, as data.tr"),
        (b'{"text": "a", "id": 1}', "'text', 'id'; name it in the key `prompt` of the data"),
        (b"{}", "the columns are none; name it in the key `prompt`"),
        (b'{"Prompt": "a"}', "did you mean 'Prompt'. Name it in the key `prompt` of the data"),
        (b'{"prompt": null}', "line 2, column 'prompt': expected text .* found NoneType"),
        (b'{"prompt": [{"role": "user"}]}', "column 'prompt', message 1: the message says nothing"),
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
    with pytest.raises(DataError, match="is a device, not a file"):
        load_rows(JsonlData(path=Path("/dev/zero")))


ARRAY = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf\r\n  "])
def test_a_file_that_is_one_array_is_read(tmp_path: Path, indent: int | None, begin: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(begin + json.dumps(ARRAY, indent=indent).encode())
    rows = load_rows(JsonlData(path=path))
    assert [(row.prompt, row.columns["answer"]) for row in rows] == [("1+1=", "2"), ("2+2=", "4")]
    assert rows[1].place.endswith("rows.json, element 2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"prompt": "a"}, 5]', "rows.json, element 2: expected a JSON object, found int"),
        (b'[{"prompt": "a"},\n]', "line 2, column 1: not JSON .a comma before ']'"),
        (b'[{"prompt": "a"}\n', "line 2, column 1: not JSON"),
        (b'["a"]\n{"prompt": "a"}', "expected one JSON array, or one object a line"),
        ('[{"prompt": "a"}]'.encode("utf-16"), "is UTF-16; save the file as UTF-8"),
        (b"[]", "has no rows"),
    ],
)
def test_an_array_that_is_wrong_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_rows(JsonlData(path=path))


def test_reading_takes_time_that_grows_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of all keys for each took minutes; a file of blank lines came to no end."""
    keys = ", ".join(f'"k{one}": 1' for one in range(50_001))
    source = write_jsonl(tmp_path / "keys.jsonl", [f'{{{keys}, "k50000": 1}}'.encode()])
    with pytest.raises(DataError, match="the key 'k50000' is there twice"):
        load_rows(source)
    monkeypatch.setattr("isobit.data.readers.MOST_BLANK", 1000)
    for path, kind in ((tmp_path / "a.jsonl", JsonlData), (tmp_path / "a.csv", CsvData)):
        path.write_bytes(gzip.compress(b"prompt\n" * (kind is CsvData) + b"\n" * 2000))
        with pytest.raises(DataError, match="only blank lines for 1,000 lines"):
            load_rows(kind(path=path))


@pytest.mark.parametrize("name", ["/etc/passwd", "../tasks.py", "a/../../x.jsonl"])
def test_the_packages_files_are_not_the_way_to_others(name: str) -> None:
    for kind in (JsonlData, CsvData):
        with pytest.raises(DataError, match=r"names a file of the package: .*held_out\.jsonl"):
            load_rows(kind(path=Path(f"starter:{name}")))


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
    "content",
    [
        b"prompt\tanswer\n1,5\t2\n",
        b"prompt;answer\r\n1,5;2\r\n",
        b'\xef\xbb\xbf"prompt"\t"answer"\n"1,5"\t2\n',
        b'prompt,answer\n"1,5",2\n',
    ],
)
def test_columns_of_a_table_are_parted_as_its_first_line_is(tmp_path: Path, content: bytes) -> None:
    ((prompt, columns, _),) = csv_rows(tmp_path, content)
    assert (prompt, columns) == ("1,5", {"answer": "2"})


def test_a_field_of_csv_may_be_as_long_as_a_line_of_jsonl(tmp_path: Path) -> None:
    ((_, columns, _),) = csv_rows(tmp_path, b"prompt,tests\na," + b"x" * 200_000 + b"\n")
    assert columns == {"tests": "x" * 200_000}


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
        ("prompt\ta\n".encode("utf-16"), "not UTF-8"),
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


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}],
    "reasoning_content": "Add them.",
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}
TALK = [{"role": "user", "content": "1+1=", "name": None}, CALL, RESULT]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_messages_keep_every_field_that_is_not_null(tmp_path: Path) -> None:
    (row,) = load_rows(write_jsonl(tmp_path / "a.jsonl", lines([{"prompt": TALK}])))
    asked, call, result = row.prompt
    assert asked == {"role": "user", "content": "1+1="}
    assert call == {name: value for name, value in CALL.items() if value is not None}
    assert result == RESULT


def test_nulls_of_arrow_are_missing_keys(tmp_path: Path) -> None:
    """Each struct of a column has the keys of all structs."""
    talk = [{"role": "user", "content": "1+1="}, CALL, RESULT]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": talk, "tools": [TOOL]}]), path)
    (row,) = load_rows(ParquetData(path=path))
    assert row.prompt[0] == {"role": "user", "content": "1+1="}
    assert not isinstance(row.prompt, str)
    assert row.prompt[1]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert row.tools == (TOOL,)


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_a_conversation_that_is_written_down_is_a_conversation(
    tmp_path: Path, write: Callable[[Any], str]
) -> None:
    """A CSV file can hold nothing else; pandas writes what Python prints."""
    talk = [{"role": "system", "content": 'Say "it\'s"\n'}, {"role": "user", "content": "1+1="}]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], [write(talk)], ["[1, 2] has how many?"]])
    first, second = load_rows(CsvData(path=path))
    assert list(first.prompt) == talk
    assert second.prompt == "[1, 2] has how many?"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '[{"role": 1, "content": "x"}]',
        '[{"role": "user", "content',
        "[1]",
    ],
)
def test_other_text_stays_text(text: str) -> None:
    assert written_messages(text) == text


def test_an_array_of_messages_is_a_list(tmp_path: Path) -> None:
    rows = [{"prompt": np.array([{"role": "user", "content": "1+1="}])}]
    given = give_rows(rows, "data.train")
    (row,) = load_rows(RowsData(count=1, sha256=given.sha256))
    assert row.prompt == ({"role": "user", "content": "1+1="},)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_are_schemas_or_their_text(tmp_path: Path, tools: Any) -> None:
    rows = lines([{"prompt": "1+1=", "tools": tools}, {"prompt": "2", "tools": None}])
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [row.tools for row in load_rows(source)] == [(TOOL,), None]
    other = source.model_copy(update={"tools": ""})
    assert [row.tools for row in load_rows(other)] == [None, None]
    missing = source.model_copy(update={"tools": "tool"})
    with pytest.raises(DataError, match=r"no column 'tool'.* did you mean 'tools'"):
        load_rows(missing)


@pytest.mark.parametrize("tools", ["add", ["add"], 1, {"name": "add"}])
def test_a_column_that_holds_no_tools_is_refused(tmp_path: Path, tools: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", lines([{"prompt": "1+1=", "tools": tools}]))
    with pytest.raises(DataError, match=r"line 1.*expected tools .* set `tools` of this data set"):
        load_rows(source)


def test_variables_of_a_row(tmp_path: Path) -> None:
    values = [{"enable_thinking": False}, '{"enable_thinking": false}', None, "no"]
    rows = lines([{"prompt": "1", "chat_template_kwargs": value} for value in values])
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    found = load_rows(source.model_copy(update={"limit": 3}))
    assert [row.variables for row in found] == [values[0], values[0], {}]
    with pytest.raises(DataError, match="line 4, column 'chat_template_kwargs': expected a table"):
        load_rows(source)


def test_messages_of_sharegpt_are_messages(tmp_path: Path) -> None:
    talk = [{"from": "system", "value": "Add."}, {"from": "human", "value": "1+1="}]
    (row,) = load_rows(write_jsonl(tmp_path / "a.jsonl", lines([{"prompt": talk}])))
    assert row.prompt == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
    )
    unknown = [{"from": "function_call", "value": "{}"}]
    with pytest.raises(DataError, match="expected text or a list of messages with 'role'"):
        load_rows(write_jsonl(tmp_path / "b.jsonl", lines([{"prompt": unknown}])))


def test_arrays_in_messages_and_tools_are_lists_at_any_depth() -> None:
    """pandas reads each list of a Parquet file as an array."""
    talk = np.array([{**CALL, "tool_calls": np.array(CALL["tool_calls"])}, RESULT])
    given = give_rows([{"prompt": talk, "tools": np.array([TOOL])}], "data.train")
    (row,) = load_rows(RowsData(count=1, sha256=given.sha256))
    assert not isinstance(row.prompt, str)
    assert (row.prompt[0]["tool_calls"], row.tools) == (CALL["tool_calls"], (TOOL,))


@pytest.mark.parametrize("tools", [None, [], "", "null", "[]"])
def test_no_tools_are_no_tools(tmp_path: Path, tools: Any) -> None:
    """Llama's template writes another system message for an empty list."""
    source = write_jsonl(tmp_path / "a.jsonl", lines([{"prompt": "1+1=", "tools": tools}]))
    assert load_rows(source)[0].tools is None


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["end", "middle"])
@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_zeros_behind_compressed_rows_come_to_an_end(
    tmp_path: Path, place: str, compress: Callable[[bytes], bytes]
) -> None:
    """Python's decompressors skip them, which takes days for a hole of a terabyte."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(compress(b'{"prompt": "a"}\n') + bytes(4096))
    if compress is gzip.compress:  # Python's lzma takes no padding at all
        assert len(list(read_jsonl(path))) == 1
    os.truncate(path, 1 << 40)
    if place == "middle":
        with path.open("ab") as file:
            file.write(compress(b'{"prompt": "b"}\n'))
    with pytest.raises(DataError, match=r"damaged compressed file \(more than 1,048,576 zeros"):
        list(read_jsonl(path))


COMPRESSIONS = {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_compressed_files_are_recognised_by_their_bytes(
    name: str, suffix: str, tmp_path: Path
) -> None:
    """Whatever the file is called; a reader that went by the name would read one as the other."""
    content = COMPRESSIONS[name](b"\n".join(lines(ROWS)))
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(content)
    assert [row.columns["answer"] for row in load_rows(JsonlData(path=path))] == ["2", "4", "6"]
    table = tmp_path / f"rows.csv{suffix}"
    table.write_bytes(COMPRESSIONS[name](b"\xef\xbb\xbfprompt,answer\r\n1+1=,2\r\n"))
    (row,) = load_rows(CsvData(path=table))
    assert (row.prompt, row.columns) == ("1+1=", {"answer": "2"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"prompt": "a"}\n' * 999)[:-20], "is a damaged compressed file"),
        (b"\x1f\x8b" + b"\0" * 30, "is a damaged compressed file"),
        (lzma.compress(b'{"prompt": "a"}\n')[:-9], "is a damaged compressed file"),
        (b"BZh9" + b"\0" * 30, "is a damaged compressed file .Invalid data"),
        (b"\x28\xb5\x2f\xfd" + b"\0" * 30, "is compressed with Zstandard; decompress it"),
    ],
    ids=["cut gz", "no gz", "cut xz", "no bz2", "zst"],
)
def test_damaged_and_other_compressions_are_named(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_rows(JsonlData(path=path))


def test_a_damaged_csv_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"prompt\n" + b"a\n" * 99999)[:-20])
    with pytest.raises(DataError, match="is a damaged compressed file"):
        load_rows(CsvData(path=path))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("part-*.jsonl", ["a", "b", "c"]),
        (["part-2.jsonl", "part-1.jsonl"], ["b", "a"]),
        (["part-3.jsonl", "part-[12].jsonl"], ["c", "a", "b"]),
        ("**/*.jsonl", ["d", "e", "a", "b", "c"]),
        ("odd[1].jsonl", ["e"]),  # a name, though it reads as a pattern
    ],
)
def test_lists_and_patterns_of_files(
    paths: Any, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    names = ["part-1", "part-2", "part-3", "below/d", "odd[1]"]
    for name, prompt in zip(names, "abcde", strict=True):
        write_jsonl(tmp_path / f"{name}.jsonl", lines([{"prompt": prompt}]))
        Dataset.from_list([{"prompt": prompt}]).to_parquet(tmp_path / f"{name}.parquet")
        (tmp_path / f"{name}.csv").write_text(f"prompt\n{prompt}\n")

    def renamed(suffix: str) -> Any:
        if isinstance(paths, str):
            return paths.replace("jsonl", suffix)
        return [one.replace("jsonl", suffix) for one in paths]

    for source in (
        JsonlData(path=paths),
        ParquetData(path=renamed("parquet")),
        CsvData(path=renamed("csv")),
    ):
        assert [row.prompt for row in load_rows(source)] == expected
        limited = source.model_copy(update={"limit": 1})
        assert [row.prompt for row in load_rows(limited)] == expected[:1]


def test_patterns_without_files_and_files_named_twice_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", lines(ROWS))
    with pytest.raises(DataError, match=r"no file matches .*b\*\.jsonl; correct the pattern"):
        load_rows(JsonlData(path=tmp_path / "b*.jsonl"))
    with pytest.raises(DataError, match=r"a list on the command line is written '\[\"a\.jsonl"):
        load_rows(JsonlData(path=Path("[a.jsonl,b.jsonl]")))
    with pytest.raises(DataError, match=r"a\.jsonl is named twice; name it once"):
        load_rows(JsonlData(path=(tmp_path / "*.jsonl", tmp_path / "a.jsonl")))


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=4, max_size=4),
    stop=st.sampled_from(["first_exhausted", "all_exhausted"]),
    seed=st.integers(0, 2**32),
)
def test_a_mixture_is_what_interleave_datasets_makes(
    sizes: list[int], weights: list[float], stop: Any, seed: int
) -> None:
    tables = [[{"prompt": f"{i}-{n}"} for n in range(size)] for i, size in enumerate(sizes)]
    held = [give_rows(table, "data") for table in tables]
    names = [f"source {i}" for i in range(len(sizes))]
    shares = weights[: len(sizes)]
    source = MixtureData(
        sources={
            name: RowsData(count=len(one.rows), sha256=one.sha256)
            for name, one in zip(names, held, strict=True)
        },
        weights=dict(zip(names, shares, strict=True)),
        stop=stop,
        seed=seed,
    )
    expected = interleave_datasets(
        [Dataset.from_list(table) for table in tables],
        probabilities=[share / sum(shares) for share in shares],
        seed=seed,
        stopping_strategy=stop,
    )
    found = [row.prompt for row in load_rows(source)]
    assert found == list(expected["prompt"])
    seen = [len({x for x in found if str(x).startswith(f"{i}-")}) for i in range(len(sizes))]
    ended = [count == size for count, size in zip(seen, sizes, strict=True)]
    assert all(ended) if stop == "all_exhausted" else any(ended)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_an_empty_source_of_a_mixture_is_refused(place: int, stop: Any, tmp_path: Path) -> None:
    """As huggingface/datasets#8626: rows of another source must not be taken for its own."""
    names = ["a", "b"]
    names.insert(place, "empty")
    sources: dict[str, Any] = {
        name: write_jsonl(tmp_path / name, [] if name == "empty" else lines(ROWS)) for name in names
    }
    with pytest.raises(DataError, match="empty has no rows; a run needs at least one prompt"):
        load_rows(MixtureData(sources=sources, stop=stop))


def test_a_mixture_says_how_much_it_took_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (write_jsonl(tmp_path / name, lines(ROWS)) for name in ("a", "b"))
    source = MixtureData(sources={"a": a, "b": b}, weights={"a": 1e6}, stop="first_exhausted")
    assert [row.columns["answer"] for row in load_rows(source)] == ["2", "4", "6"]
    assert "mixture of 3 rows: 3 of a, 0 of b (first_exhausted)" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"has a weight of 'c', which is none of .* \(a, b\)"):
        MixtureData(sources={"a": a, "b": b}, weights={"c": 1})
