"""``isobit eval --reward-model``: scores of rows and of pairs, printed and written as they come."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit.cli.main import main
from isobit.config.precision import PrecisionConfig
from isobit.models.folder import read_reward_masters, reward_config
from isobit.models.policy import Policy
from isobit.models.reward_model import RewardModel, load_reward_model
from isobit.models.saving import save_policy
from isobit.run import score
from isobit.starter import starter_folder
from tools.starter.tokenizer import PAD_ID

FP32 = PrecisionConfig(preset="fp32")
SMALL = ["--precision", "fp32", "--threads", "1"]
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
    words = ["eval", "--reward-model", folder, "--data", data, *SMALL]
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
    words = ["eval", f"--reward-model={folder}", "--data", data, *SMALL, "--problems", "4"]
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
    words = ["--data.prompt", "question", "--data.completion", "answer"]
    assert main(["eval", "--reward-model", folder, "--data", data, *SMALL, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == expected(folder, "1+1=2")


def test_lines_are_written_as_they_come(folder, tmp_path, monkeypatch, capsys):
    """And kept where a later row ends the command."""
    monkeypatch.setattr(score, "ROWS_AT_ONCE", 2)
    exact, calls = RewardModel.score, iter(range(9))

    def failing(self: RewardModel, *arguments: Any) -> list[float]:
        scores = exact(self, *arguments)
        return [float("nan"), *scores[1:]] if next(calls) == 1 else scores

    monkeypatch.setattr(RewardModel, "score", failing)
    data, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "scores.jsonl"
    words = ["eval", "--reward-model", folder, "--data", data, "--out", str(out), *SMALL]
    assert main(words) == 2
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
    assert main(["eval", "--reward-model", folder, "--data", data, *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_a_language_model_is_refused_and_so_is_a_reward_model_as_a_policy(folder, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", ROWS)
    assert main(["eval", "--reward-model", str(starter_folder()), "--data", data, *SMALL]) == 2
    assert "is a language model" in capsys.readouterr().err
    reward = ["--reward", "isobit.starter.tasks:correct_answer"]
    assert main(["eval", folder, "--data", data, *reward, *SMALL]) == 2
    assert "is a reward model" in capsys.readouterr().err
