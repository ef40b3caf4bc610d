"""``isobit eval --reward-model``: scores of rows and of pairs, printed and written as they come."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from shlex import split
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from isobit.cli.main import main
from isobit.commands import score
from isobit.config.commands import ScoringConfig
from isobit.config.data import JsonlExamples
from isobit.config.precision import PrecisionConfig
from isobit.models.folder import read_reward_masters, reward_config
from isobit.models.frozen import RewardModel, load_reward_model
from isobit.models.policy import Policy
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from tests.forked import command
from tools.starter.tokenizer import PAD_ID

HELD_OUT = ["--data", "starter:held_out.jsonl"]
REWARD = ["--reward", "isobit.starter.tasks:correct_answer"]
SMALL = split(
    "--problems 3 --max-new-tokens 12 --rollout.max_sequences 6 --precision fp32 --threads 1"
)


def test_the_starter_on_its_held_out_problems(capsys):
    assert main(["eval", "starter", "--data", "starter:held_out.jsonl", *REWARD, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fp32: held_out accuracy ")
    assert " on 3 problems" in shown


def test_a_precision_may_be_a_recipes_table(capsys):
    words = ["--data", "starter:held_out.jsonl", *REWARD, *SMALL]
    table = '{preset = "fp8", modules_bf16 = ["down_proj"]}'
    assert main(["eval", "starter", *words, "--precision", table]) == 0
    assert capsys.readouterr().out.startswith(f"{table}: held_out accuracy ")
    table = '{preset = "fp8", modules_bf16 = ["gone_proj"]}'
    assert main(["eval", "starter", *words, "--precision", table]) == 2
    assert "'gone_proj', which the model does not have" in capsys.readouterr().err


@pytest.mark.exhaustive  # two processes sample in test_rollout.py
def test_two_processes_that_share_the_model_find_what_one_finds(tmp_path, capsys):
    words = [*HELD_OUT, *REWARD, *SMALL, "--max-new-tokens", "3", "--json"]
    assert main(["eval", "starter", *words]) == 0
    alone = json.loads(capsys.readouterr().out)
    out, errors = tmp_path / "out", tmp_path / "errors"
    process = command(["eval", "starter", *words, "--cluster.rollout_tp", "2"], out, errors)
    process.join()
    assert process.exitcode == 0, errors.read_text()
    assert json.loads(out.read_text()) == alone


@pytest.mark.exhaustive
def test_what_graders_count_and_which_references_are_unusable_is_printed(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    answers = ["so\\n#### 9999", None, "8888"]
    rows = [{"prompt": f"1+2+3+{i}=", "answer": one} for i, one in enumerate(answers)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrapped = tmp_path / "wrapped.py"
    wrapped.write_text(
        "from dataclasses import replace\n"
        "from isobit.rewards.graders.math import score\n"
        "def f(prompt, completion):\n"
        "    return score(prompt, replace(completion, text='The answer is 5.'))\n"
    )
    words = ["eval", "starter", "--data", str(data), *SMALL]
    assert main([*words, "--reward", f"{wrapped}:f", "--reward.in_process", "true"]) == 0
    shown = capsys.readouterr().out
    assert (
        ", 1 reward failed; graders met: 2 math_verify: no marked answer, 1 failed: Miss" in shown
    )
    assert main([*words, "--reward", "math_verify"]) == 0
    told = "references of sums for math_verify: 1 missing of 3 (33.3%)"
    assert told in " ".join(capsys.readouterr().err.split())
    data.write_text(json.dumps({"prompt": "1+2=", "answer": None}) + "\n")
    assert main([*words, "--reward", "math_verify"]) == 2
    assert "can use none of the 1 references of sums" in capsys.readouterr().err


def test_several_samples_as_json(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "1+2+3+{i}=", "answer": "{6 + i}"}}\n' for i in range(5)))
    words = ["--data", str(data), *REWARD, *SMALL, *split("--samples 2 --temperature 1 --json")]
    assert main(["eval", "starter", *words]) == 0
    result = json.loads(capsys.readouterr().out)["sums"]
    assert result["accuracy"] == result["mean_reward"]
    assert (result["problems"], result["samples"]) == (3, 2)
    assert set(result["pass_at"]) == {"1", "2"}


def test_standard_output_has_the_json_alone_whatever_a_reward_prints(tmp_path, capfd):
    """The mean of this reward is no share, and so no accuracy."""
    reward = tmp_path / "loud.py"
    reward.write_text(
        "import sys\n"
        "print('loaded')\n"
        "def f(prompt, completion):\n"
        "    print('graded')\n"
        "    sys.stdout.flush()\n"
        "    return 1.5\n"
    )
    words = ["--data", "starter:held_out.jsonl", "--reward", f"{reward}:f", *SMALL, "--json"]
    for in_process in ("false", "true"):
        assert main(["eval", "starter", *words, "--reward.in_process", in_process]) == 0
        found = json.loads(capfd.readouterr().out)["held_out"]
        assert (found["mean_reward"], found["accuracy"], found["problems"]) == (1.5, None, 3)


def test_what_is_too_long_is_left_out_and_said(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    data.write_text(
        f'{{"prompt": "1+2+3+4=", "answer": "10"}}\n{{"prompt": "{"1+" * 40}1=", "answer": "41"}}\n'
    )
    words = ["--data.max_prompt_tokens", "30", "--data.too_long", "drop", *REWARD, *SMALL]
    assert main(["eval", "starter", "--data", str(data), *words]) == 0
    shown = capsys.readouterr()
    assert " on 1 problem," in shown.out
    assert "isobit: sums: 1 too long: dropped" in shown.err


@pytest.mark.exhaustive
def test_a_task_of_reasoning_gym_is_scored_by_itself(capsys):
    words = ["--data", "task:chain_sum", "--reward.in_process", "true", *SMALL, "--json"]
    assert main(["eval", "starter", *words]) == 0
    assert json.loads(capsys.readouterr().out)["chain_sum"]["problems"] == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data", "task:chain_summ"], "chain_sum"),
        (["--data", "none.jsonl", *REWARD], "none.jsonl"),
        ([*HELD_OUT, "--reward", "no_module:f"], "no_module"),
        ([*HELD_OUT, *REWARD, "--samples", "4"], "evaluation.samples is 4"),
        ([*HELD_OUT, *REWARD, "--samples", "0"], "evaluation.samples: should be greater than 0"),
        ([*HELD_OUT, *REWARD, "--cluster.processes", "2"], "cluster.processes is 2, but"),
    ],
)
def test_what_cannot_be_used_is_named_and_exits_2(words, expected, capsys):
    assert main(["eval", "starter", *words, *SMALL]) == 2
    assert expected in capsys.readouterr().err


FP32 = PrecisionConfig(preset="fp32")
SMALL_EVAL_REWARD_MODEL = ["--precision", "fp32", "--threads", "1"]
ROWS = [{"prompt": f"1+2+3+{i}=", "completion": str(6 + i)} for i in range(5)]
PAIRS = [{"prompt": f"1+2+3+{i}=", "chosen": str(6 + i), "rejected": "3,9,7"} for i in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reward")
    config = replace(reward_config(starter_folder(), PAD_ID), max_positions=64)
    policy = Policy(config, FP32, read_reward_masters(starter_folder(), config, seed=0))
    save_policy(policy, folder, tokenizer_from=starter_folder())
    return str(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def expected(folder: str, text: str) -> float:
    model = load_reward_model(Path(folder), FP32)
    return model.score([[*model.tokenizer(text)["input_ids"], 2]], 64)[0]


def test_the_scores_of_rows(folder, tmp_path, capsys):
    data, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "scores.jsonl"
    words = ["eval", "--reward-model", folder, "--data", data, *SMALL_EVAL_REWARD_MODEL]
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[2] == {"row": 2, "score": expected(folder, "1+2+3+2=8")}
    mean = sum(line["score"] for line in lines) / 5
    assert shown.startswith(f"fp32: mean score {mean:.4f}, from ")
    assert "on 5 rows" in shown
    assert main([*words, "--out", str(out)]) == 2
    assert "which exists" in capsys.readouterr().err


def test_the_agreement_with_pairs(folder, tmp_path, capsys):
    data, out = write(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "scores.jsonl"
    words = ["--data", data, *SMALL_EVAL_REWARD_MODEL, "--problems", "4"]
    words = ["eval", f"--reward-model={folder}", *words]
    assert main([*words, "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[1] == {
        "row": 1,
        "chosen": expected(folder, "1+2+3+1=7"),
        "rejected": expected(folder, "1+2+3+1=3,9,7"),
    }
    assert result["rows"] == len(lines) == 4
    assert result["accuracy"] == sum(a["chosen"] > a["rejected"] for a in lines) / 4
    assert result["margin"] == pytest.approx(sum(a["chosen"] - a["rejected"] for a in lines) / 4)
    assert result["lowest"] == min(a[key] for a in lines for key in ("chosen", "rejected"))
    assert main(words) == 0
    assert f"{100 * result['accuracy']:.1f}% ranked right" in capsys.readouterr().out


def test_columns_have_other_names(folder, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", [{"question": "1+1=", "answer": "2"}])
    words = split("--data.prompt question --data.completion answer --json")
    words = ["--data", data, *SMALL_EVAL_REWARD_MODEL, *words]
    assert main(["eval", "--reward-model", folder, *words]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == expected(folder, "1+1=2")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "csv.gz", "jsonl.gz"])
def test_a_file_of_any_kind_is_scored(suffix, folder, tmp_path, capsys):
    path, rows = tmp_path / f"rows.{suffix}", [{"prompt": "1+1=", "completion": "2"}]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        text = json.dumps(rows[0]) if suffix == "jsonl.gz" else "prompt,completion\n1+1=,2\n"
        plain = text.replace(",", "\t") if suffix == "tsv" else text
        path.write_bytes(gzip.compress(plain.encode()) if suffix[-3:] == ".gz" else plain.encode())
    words = ["--data", str(path), *SMALL_EVAL_REWARD_MODEL, "--json"]
    assert main(["eval", "--reward-model", folder, *words]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == expected(folder, "1+1=2")


def test_the_help_of_a_reward_model_names_its_default_precision(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "--reward-model", "x", "--help"])
    preset = ScoringConfig(data=JsonlExamples(path=Path("x"))).precision.preset
    assert f"{preset} (default)" in capsys.readouterr().out


def test_lines_are_written_as_they_come(folder, tmp_path, monkeypatch, capsys):
    """And kept where a later row ends the command."""
    monkeypatch.setattr(score, "ROWS_AT_ONCE", 2)
    exact, calls = RewardModel.score, iter(range(9))

    def failing(self: RewardModel, *arguments: Any) -> list[float]:
        scores = exact(self, *arguments)
        return [float("nan"), *scores[1:]] if next(calls) == 1 else scores

    monkeypatch.setattr(RewardModel, "score", failing)
    data, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "scores.jsonl"
    words = ["--data", data, "--out", str(out), *SMALL_EVAL_REWARD_MODEL]
    assert main(["eval", "--reward-model", folder, *words]) == 2
    assert "line 3: the reward model's score is nan" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 2


REFUSED = [
    ([{"prompt": "1=", "text": "1"}], "no column 'completion'"),
    ([{"prompt": "1=", "chosen": "1"}], "data.chosen and data.rejected"),
    ([PAIRS[0], ROWS[0]], "line 2: no column 'chosen'"),
    ([{"prompt": "1=", "completion": "1" * 70}], "74 tokens, more than the reward model's"),
]


@pytest.mark.parametrize(("rows", "message"), REFUSED)
def test_an_unusable_row_is_named_and_exits_2(folder, rows, message, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", rows)
    assert main(["eval", "--reward-model", folder, "--data", data, *SMALL_EVAL_REWARD_MODEL]) == 2
    assert message in capsys.readouterr().err


def test_a_language_model_is_refused_and_so_is_a_reward_model_as_a_policy(folder, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", ROWS)
    words = ["--data", data, *SMALL_EVAL_REWARD_MODEL]
    assert main(["eval", "--reward-model", str(starter_folder()), *words]) == 2
    assert "is a language model" in capsys.readouterr().err
    assert main(["eval", folder, *REWARD, *words]) == 2
    assert "is a reward model" in capsys.readouterr().err
