"""What surrounds the starter's recipe: repeatable text before, figures and card after."""

import json
from pathlib import Path

import pytest

from isobit.config.data import JsonlData
from isobit.config.load import load_recipe
from isobit.config.recipes import SftConfig
from isobit.data.sources import load_rows
from isobit.data.tokenizer import load_tokenizer
from isobit.run.sft import sft
from isobit.starter import starter_folder
from isobit.starter.tasks import final_answer, is_held_out, is_worked_out
from tools.starter import build

RECIPE = Path(__file__).parents[2] / "recipes" / "starter.toml"


def test_the_text_repeats_and_leaves_held_out_problems_out() -> None:
    rows = list(build.pretraining_text(batches=5, seed=1))
    assert rows == list(build.pretraining_text(batches=5, seed=1))
    assert len(rows) == 5 * build.BATCH
    for start in range(0, len(rows), build.BATCH):
        assert len({row["prompt"] for row in rows[start : start + build.BATCH]}) == build.BATCH, (
            "a batch holds no problem twice"
        )
    for row in rows:
        one, two, three, four = row["prompt"].rstrip("=").split("+")
        assert not is_held_out((int(one), int(two), int(three), int(four)))
        assert (
            not is_worked_out(row["completion"]) or final_answer(row["completion"]) == row["answer"]
        )


@pytest.mark.exhaustive
def test_the_folder_of_the_text_has_the_shipped_tokenizer_and_problems(tmp_path: Path) -> None:
    build.main(["text", str(tmp_path)])
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "train.jsonl",
        "held_out.jsonl",
    ):
        assert (tmp_path / name).read_bytes() == (starter_folder() / name).read_bytes()
    assert len(load_tokenizer(tmp_path)) == 99
    assert len(load_rows(JsonlData(path=tmp_path / "text.jsonl"))) == build.BATCHES * build.BATCH
    held_out = [row.prompt for row in load_rows(JsonlData(path=tmp_path / "held_out_text.jsonl"))]
    assert held_out == [
        row.prompt for row in load_rows(JsonlData(path=tmp_path / "held_out.jsonl"))
    ]


def test_the_card_tells_of_the_run_that_made_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.write_text(tmp_path / "text", batches=1)
    changes = {
        "model": tmp_path / "text",
        "output": tmp_path / "run",
        "data.train.path": tmp_path / "text" / "text.jsonl",
        "data.eval.held_out.path": tmp_path / "text" / "held_out_text.jsonl",
        "data.eval.held_out.limit": 2,
        "rollout.max_new_tokens": 4,
        "training.steps": 1,
        "training.prompts_per_step": 8,
        "threads": 1,
    }
    sft(
        load_recipe(
            SftConfig,
            RECIPE,
            [word for key, value in changes.items() for word in (f"--{key}", str(value))],
        )
    )
    held_out = (
        (starter_folder() / "held_out.jsonl")
        .read_text(encoding="utf-8")
        .splitlines(keepends=True)[:3]
    )
    (tmp_path / "held_out.jsonl").write_text("".join(held_out))
    monkeypatch.setattr(build, "PROBLEMS", tmp_path / "held_out.jsonl")
    build.main(["card", str(tmp_path / "run")])
    assert "3 held-out problems" in capsys.readouterr().out
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "1 updates of 8 answers in the\n`bf16` flow" in card
    assert "A Qwen3 decoder of 870,016 parameters" in card
    assert "{" not in card
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
