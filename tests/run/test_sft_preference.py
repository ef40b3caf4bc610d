"""Runs that make a reward model from pairs: what they leave behind, that they repeat and learn, and
what is refused.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from isobit.commands.dry_run import plan_training
from isobit.config.load import build
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.recipes import SftConfig
from isobit.data.examples import conversation_ids
from isobit.data.sources import Row
from isobit.memory.retry import within_memory
from isobit.models.frozen import load_reward_model
from isobit.run.resolved import resolve
from isobit.run.sft import prepare_sft, read_sft, sft
from isobit.starter.tasks import guess, problems, question, worked_out
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError, DataError, IsobitError, ModelError
from tests.tiny import json_lines as lines
from tests.tiny import with_sections

MakeConfig = Callable[..., SftConfig]
FP32 = PrecisionConfig(preset="fp32")


def write_pairs(path: Path, held_out: bool, count: int) -> Path:
    """Worked-out sums are preferred to guesses."""
    random = Random(count)
    rows = (
        {"prompt": question(p), "chosen": worked_out(p), "rejected": guess(p, random)}
        for p in problems(held_out)[:count]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_config(tiny_folder: Path, tmp_path: Path) -> MakeConfig:
    """Two steps of 4 pairs with a tiny random model; sections replace keys of these."""

    def make(**sections: Any) -> SftConfig:
        train, held_out = (
            {"type": "jsonl", "path": write_pairs(tmp_path / f"{count}.jsonl", held_out, count)}
            for held_out, count in ((False, 12), (True, 5))
        )
        config: dict[str, Any] = {
            "objective": "preference",
            "model": str(tiny_folder),
            "output": tmp_path / "run",
            "data": {"train": train, "eval": {"held_out": held_out}},
            "training": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
        }
        return build(SftConfig, with_sections(config, sections), "test")

    return make


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_a_language_model_becomes_a_reward_model_that_ranks_held_out_pairs(
    preset: Preset, make_config: MakeConfig
) -> None:
    config = make_config(precision={"preset": preset}, training={"steps": 6})
    summary = sft(config)
    assert summary.loss_before is not None and summary.loss_after is not None
    assert summary.loss_after < summary.loss_before / 2
    assert summary.accuracy_after == 1.0


def test_the_directory_holds_what_the_run_did(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(evaluation={"every": 1}, checkpoint={"keep_best": "eval/held_out/loss"})
    summary = sft(config)
    root = config.output
    written = json.loads((root / "summary.json").read_text())
    assert (written["loss_after"], written["accuracy_after"]) == (
        summary.loss_after,
        summary.accuracy_after,
    )
    figures = lines(root / "metrics.jsonl")
    assert [line["step"] for line in figures] == [0, 1, 1, 2, 2]
    measured = {"eval/held_out/loss", "eval/held_out/accuracy", "eval/held_out/margin"}
    assert measured <= figures[0].keys()
    names = {"loss", "accuracy", "margin", "score_mean", "score_min", "score_max", "grad_norm"}
    assert names <= figures[1].keys()
    assert not {"entropy", "response_tokens"} & figures[1].keys()
    run = prepare_sft(resolve(make_config(output="nowhere")))
    pairs = [pair for _ in range(2) for pair in run.next_examples()]
    assert summary.tokens_trained == sum(pair.tokens for pair in pairs)
    printed = capsys.readouterr().out
    assert "12 pairs, each seen 0.67 times; held out: 5 in held_out" in printed
    assert "nats a pair on 5 pairs" in printed
    assert "% of pairs, margin " in printed
    assert "  accuracy " in printed, "of each step"


def test_the_result_is_read_by_transformers_and_scores_the_same(make_config: MakeConfig) -> None:
    summary = sft(make_config(training={"steps": 4}))
    ours = load_reward_model(summary.model, FP32)
    assert ours.policy.config.pad_token_id == 0, "the tokenizer's"
    model = AutoModelForSequenceClassification.from_pretrained(
        summary.model, dtype=torch.float32, local_files_only=True
    )
    answers = [
        (Row(question(p), {}, ""), answer)
        for p in problems(held_out=True)[:3]
        for answer in (worked_out(p), "7")
    ]
    ids = conversation_ids(answers, ours.tokenizer)
    scores = ours.score(ids, 4096)
    with torch.no_grad():
        theirs = [float(model(torch.tensor([one])).logits) for one in ids]
    assert scores == pytest.approx(theirs, abs=1e-4)
    assert min(scores[0::2]) > max(scores[1::2])


def test_a_reward_model_learns_on_with_its_own_head(make_config: MakeConfig) -> None:
    first = sft(make_config())
    second = make_config(model=str(first.model), output=first.directory.with_name("second"))
    made = load_reward_model(first.model, FP32).policy.weights("training")
    head = prepare_sft(resolve(second)).model.policy.masters["score.weight"]
    assert torch.equal(head, made.plain["score.weight"])
    assert sft(second).loss_before == pytest.approx(first.loss_after, rel=0.02)


def test_a_run_repeats_its_bits_and_the_seed_draws_the_head(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    runs = [
        sft(make_config(output=tmp_path / name, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    weights = [(run.model / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] != weights[2]
    assert runs[0].loss_before == runs[1].loss_before != runs[2].loss_before


def test_a_reward_model_is_made_from_scratch(make_config: MakeConfig) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 1, "num_heads": 4}
    summary = sft(make_config(model="starter", from_scratch=shape))
    made = load_reward_model(summary.model, FP32).policy.config
    assert (made.score_head, made.pad_token_id, made.num_layers) == (True, 0, 1)


def test_a_pair_is_never_cut(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare_sft(resolve(make_config(training={"tokens_per_microbatch": 1})))
    seen: list[Sequence[int]] = []

    def spy(trainer: Trainer, lengths: Sequence[int], *rest: Any) -> Any:
        seen.append(lengths)
        return within_memory(trainer, lengths, *rest)

    monkeypatch.setattr("isobit.run.sft.within_memory", spy)
    pairs = run.next_examples()
    assert run.learn(pairs).tokens == 2 * len(pairs)
    assert seen == [[pair.tokens for pair in pairs]], "no smaller micro-batch than a pair is tried"


def test_the_plan_says_pairs_and_counts_no_lm_head(make_config: MakeConfig) -> None:
    config = make_config()
    shown = "\n".join(plan_training(config, read_sft).describe(None))
    parameters = sum(m.numel() for m in prepare_sft(resolve(config)).model.policy.parameters())
    assert f"{parameters:,} parameters" in shown
    assert "steps: 2 of 4 pairs; pairs of at most" in shown


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        (
            {"reward": {"function": "isobit.starter.tasks:correct_answer", "in_process": True}},
            ConfigError,
            'objective is "preference": a reward model gives no completions',
        ),
        (
            {"data": {"train": {"type": "jsonl", "path": "x.jsonl", "messages": "talk"}}},
            ConfigError,
            "data.train.messages is set, but objective",
        ),
        (
            {"data": {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}},
            DataError,
            "no column 'chosen'",
        ),
        ({"checkpoint": {"keep_best": "eval/held_out/x"}}, ConfigError, "eval/held_out/margin"),
        ({"model": "nowhere"}, ModelError, "nowhere is not a folder"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    make_config: MakeConfig, sections: dict[str, Any], error: type[IsobitError], message: str
) -> None:
    config = make_config(**sections)
    with pytest.raises(error, match=message):
        sft(config)
    assert not config.output.exists()


def test_a_reward_model_does_not_learn_completions(make_config: MakeConfig) -> None:
    made = sft(make_config()).model
    with pytest.raises(ModelError, match=r"is a reward model.*objective = \"preference\""):
        prepare_sft(resolve(make_config(model=str(made), objective="supervised", output="nowhere")))
