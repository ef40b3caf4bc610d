import json
from shlex import split

import pytest

from isobit.cli.main import main
from isobit.util.disk_space import LineFile
from isobit.util.errors import StorageError
from tests.forked import ran

ONE = ["starter", "--prompt", "1"]
SMALL = split("--max-new-tokens 4 --rollout.max_sequences 2 --precision fp32 --threads 1")


def test_a_prompt_is_completed_with_the_starter_model(capsys):
    assert main(["rollout", "starter", "--prompt", "3+8+2+9=", "--samples", "2", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[prompt/0, sample 0: ")
    assert any(line.startswith("[prompt/0, sample 1: ") for line in lines)


def test_two_processes_that_share_the_model_write_what_one_writes(tmp_path):
    words = ["--prompt", "3+8+2+9=", "--samples", "2", *SMALL, "--precision", "fp8"]
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    assert main(["rollout", "starter", *words, "--out", str(alone)]) == 0
    tp = ["--cluster.rollout_tp", "2"]
    words = ["rollout", "starter", *words, *tp, "--out", str(shared)]
    done = ran("isobit.cli.main:main", tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert shared.read_bytes() == alone.read_bytes()
    assert done.stdout.splitlines() == [f"2 completions in {shared}"]
    assert "2 processes" in done.stderr


def test_a_file_of_prompts_gives_json_lines(tmp_path, capsys):
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    data.write_text('{"prompt": "1+2+3+4=", "answer": "10"}\n{"prompt": "5+5+5+5="}\n')
    words = ["--data", str(data), "--out", str(out), "--temperature", "0", *SMALL]
    assert main(["rollout", "starter", *words]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["1+2+3+4=", "5+5+5+5="]
    assert records[0]["columns"] == {"answer": "10"}
    assert all(len(record["token_ids"]) == len(record["log_probs"]) > 0 for record in records)
    assert f"2 completions in {out}" in capsys.readouterr().out

    before = out.read_bytes()
    assert main(["rollout", "starter", "--prompt", "1", "--out", str(out), *SMALL]) == 2
    assert "which exists" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*ONE, "--precision", "fp9"], "precision.preset: should be 'fp32'"),
        (
            [*ONE, "--temperature", "-1"],
            "rollout.temperature: should be greater than or equal to 0",
        ),
        ([*ONE, "--rollout.topk", "1"], "unknown key; did you mean rollout.top_k?"),
        ([*ONE, "--out", "no/such/folder/x.jsonl"], "there is no directory 'no/such/folder'"),
        (["no-such-folder", "--prompt", "1"], "no-such-folder"),
        (["starter", "--data", "no-such.jsonl"], "no-such.jsonl"),
    ],
)
def test_what_cannot_be_used_is_named_and_exits_2(words, expected, capsys):
    assert main(["rollout", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["starter"], [*ONE, "--data", "x"], [*ONE, "--samples", "0"]],
)
def test_a_wrong_command_line_exits_2_with_the_usage(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["rollout", *words])
    assert "usage: isobit rollout" in capsys.readouterr().err


def test_completions_are_written_as_they_come_and_a_full_disk_keeps_them(
    tmp_path, capsys, monkeypatch
):
    """Half of a surrogate pair in a column is an escape; an error after two lines keeps those."""
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = ['{"prompt": "1+2+3+4=", "note": "\\ud800"}', '{"prompt": "5+5="}', '{"prompt": "1+1="}']
    data.write_text("\n".join(rows) + "\n")
    words = ["rollout", "starter", "--data", str(data), "--out", str(out), *SMALL]
    seen, write = [], LineFile.write

    def watched(self, line):
        seen.append(out.read_bytes())
        if len(seen) == 3:
            raise StorageError("no space")
        write(self, line)

    monkeypatch.setattr(LineFile, "write", watched)
    assert main(words) == 2
    lines = out.read_bytes().splitlines(keepends=True)
    assert seen == [b"", lines[0], lines[0] + lines[1]]
    assert [json.loads(line)["prompt"] for line in lines] == ["1+2+3+4=", "5+5="]
    assert b'"\\ud800"' in lines[0] and json.loads(lines[0])["columns"] == {"note": "\ud800"}
    said = capsys.readouterr().err
    assert f"the completions of the first prompts are in {out}" in said and "no space" in said


def test_a_file_that_cannot_be_made_is_refused_before_anything_is_generated(
    tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out.jsonl"

    def refuse(self, *arguments, **words):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(out), "open", refuse)
    assert main(["rollout", "no-such-model", "--prompt", "1", "--out", str(out), *SMALL]) == 2
    assert "out.jsonl could not be written" in capsys.readouterr().err
    assert not out.exists()
