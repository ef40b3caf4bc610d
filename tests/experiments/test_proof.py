"""The problems of the proof are right and its splits disjoint, differences are paired by seed and
problem, planted outliers leave the function alone, and gradients are those of one forward.
"""

import json
import random
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
import torch

from experiments.proof import decide, figures, gradients, ladder, rows, runs, suite
from experiments.proof.suite import EVERY, FIRST, plant, product_worked_out, rows_of
from isobit import load_config
from isobit.config.algorithm import GrpoConfig
from isobit.config.recipes import RunConfig, SftConfig
from isobit.starter import starter_folder
from isobit.store.directory import write_json
from tests.experiments.made_up_rows import made_up_row
from tests.tiny import json_lines

TINY = {
    "model": "starter",
    "device": "cpu",
    "training.steps": "1",
    "training.prompts_per_step": "2",
    "training.samples_per_prompt": "2",
    "training.without_signal": "take",  # the starter earns nothing here
    "algorithm.overlong_buffer": "2",
    "algorithm.max_refills": "0",
    "rollout.max_new_tokens": "8",
    "rollout.kv_memory_gib": "0.01",
    "evaluation.max_new_tokens": "4",
    "checkpoint.keep_last": "0",
}


def test_a_product_is_worked_out_rightly() -> None:
    draw = random.Random(0)
    for first, second in [
        (999999, 99999),
        (100000, 10000),
        *((draw.randrange(10**5, 10**6), draw.randrange(10**4, 10**5)) for _ in range(20)),
    ]:
        partial, sums = product_worked_out(first, second).split("Sum by columns:\n")
        parts = [int(line[2:]) for line in partial.splitlines() if line.startswith("= ")]
        assert sum(parts) == first * second
        for line in (*partial.splitlines(), *sums.splitlines()):
            if ": write " in line:
                terms, total = line.partition(":")[0].split("=")
                assert sum(_product(term) for term in terms.split("+")) == int(total)
                assert line.endswith(f"write {int(total) % 10}, carry {int(total) // 10}")
        written = [line.split("write ")[1][0] for line in sums.splitlines()[:-1]]
        assert int("".join(reversed(written))) == first * second
        assert sums.splitlines()[-1] == f"#### {first * second}"


def _product(term: str) -> int:
    first, _, second = term.partition("*")
    return int(first) * int(second or 1)


def test_products_of_one_split_are_in_no_other() -> None:
    splits = [{row["prompt"] for row in rows_of("multiply", split, 500)} for split in suite.SIZES]
    assert all(len(split) == 500 for split in splits)
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])


def test_solutions_earn_the_reward_and_repeat() -> None:
    for task in suite.TASKS:
        rows = rows_of(task, "held_out", 20)
        assert rows == rows_of(task, "held_out", 20)
        assert all(row["completion"].endswith(f"#### {row['answer']}") for row in rows)


def test_differences_are_paired_by_seed_and_problem() -> None:
    def row(arm: str, seed: int, after: list[float]) -> rows.Row:
        evaluations = [{"rewards": [0.0] * len(after)}, {"rewards": after}]
        return {"task": "gsm", "arm": arm, "seed": seed, "evaluations": evaluations}

    base = [row("bf16", 0, [1, 0, 1, 0]), row("bf16", 1, [1, 1, 0, 0])]
    ours = [row("fp8", 1, [1, 1, 0, 1]), row("fp8", 0, [1, 0, 1, 1]), row("fp8", 2, [1, 1, 1, 1])]
    difference = figures.paired(ours, base)
    assert difference is not None
    assert difference.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]  # seed 2 has no pair
    low, high = figures.interval(difference.repeat(1, 50))
    assert 0.19 < low < 0.25 < high < 0.31
    assert figures.interval(torch.zeros(3, 10)) == (0.0, 0.0)


def test_a_run_of_the_ladder_answers_in_the_other_flow_as_its_task_says() -> None:
    """All arms of a size share its start and its held-out problems, also answered back."""
    made = suite.wanted(["ladder-1.1b"], suite.ALL_ARMS, [0])
    arms = ["bf16", "fp8", "fp8-linear", "int8", "fp8-rollout-tis", "fp8-int8-attention"]
    arms += ["int8-backward"]
    assert [run.arm for run in made] == arms
    for run in made:
        assert run.start == "start-1.1b" and run.problems == "multiply"
        config = load_config(runs.recipe_of(run.problems), runs.words_of(run.settings))
        assert config.evaluation.every == 0 and config.training.steps == 150
        words = runs.answers_command(run, Path("DIR"), {})
        assert runs.by_key(words[6:])["data.eval.held_out.limit"] == "1000"
        assert runs.by_key(words[6:])["precision"] == ("fp8" if run.arm == "bf16" else "bf16")
        assert "corrections" not in runs.by_key(words[6:])


def test_every_arm_of_a_lag_is_a_recipe() -> None:
    made = suite.wanted(list(suite.LAGS), suite.ALL_ARMS, [0])
    assert len({run.name for run in made}) == 2 * (1 + 2 * 3)
    for run in made:
        assert run.problems == "gsm" and run.start == "start"
        config = load_config(runs.recipe_of(run.problems), runs.words_of(run.settings))
        assert run.task == f"lag-{config.training.learning_rate:.0e}".replace("e-0", "e-")
        assert config.precision == RunConfig.model_fields["precision"].default
        ratio, _, lag = run.arm.rpartition("-")
        assert config.asynchrony.lag == (0 if run.arm == "int8-backward" else int(lag))
        assert isinstance(config.algorithm, GrpoConfig)
        assert config.algorithm.clip == ("none" if ratio == "exact" else "ratio")
        assert [one.type for one in config.corrections] == (["tis"] if ratio == "tis" else [])


def test_a_finished_run_of_the_ladder_leaves_no_checkpoint(tmp_path: Path) -> None:
    """After its answers: without them it is gone on with, from its last checkpoint."""
    run = suite.run_named("ladder-27m:fp8:0")
    row = made_up_row(run.task, run.arm, run.seed, steps=25, problems=20)
    rows.write_row(runs.row_path(run, tmp_path), row)
    checkpoint = tmp_path / "runs" / run.name / "checkpoints" / "150"
    checkpoint.mkdir(parents=True)
    assert not runs.is_made(run, tmp_path)
    other = {"precision": {"preset": "bf16"}, "sets": {"held_out": {"accuracy": 0.5}}}
    write_json(runs.answers_path(run, tmp_path), other)
    runs.keep_answers(run, tmp_path)
    assert runs.is_made(run, tmp_path) and not checkpoint.parent.exists()
    assert rows.read_row(runs.row_path(run, tmp_path)) == {**row, "other_flow": other}


def test_the_function_stays(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=2 * EVERY,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    plant(tmp_path / "model", tmp_path / "other", 17)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    seen = list[torch.Tensor]()
    for one in (model, other):
        norm = one.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, given, output: seen.append(output))
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens).logits, other(tokens).logits)
    factors = torch.ones(2 * EVERY)
    factors[FIRST::EVERY] = 2.0**17
    assert torch.equal(seen[1], seen[0] * factors)


RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SMALL = (
    *("--output", "nowhere", "--device", "cpu", "--rollout.max_new_tokens", "8"),
    *("--training.prompts_per_step", "4", "--training.samples_per_prompt", "4"),
)


@pytest.mark.exhaustive
def test_wgrad_in_bf16_is_nearer_to_the_exact_gradient() -> None:
    config, random = load_config(RECIPE, SMALL), Random(0)
    found = gradients.measure(starter_folder(), config, lambda *_: float(random.random() < 0.5))
    assert 0.99 < found["own"]["cosine"] < found["wgrad_bf16"]["cosine"] < 1
    assert found["own"]["smallest"] < found["own"]["cosine"]
    assert found["tokens"] > 40 and found["norm"] > 0


def a_start(output: Path) -> SftConfig:
    """Four updates of the starter, which solves half of its sums."""
    sums = {"type": "jsonl", "path": "recipes/fine_tune_held_out.jsonl", "limit": 20}
    return SftConfig.model_validate(
        {
            "model": "starter",
            "output": str(output),
            "device": "cpu",
            "threads": 1,
            "data": {
                "train": {"type": "jsonl", "path": "recipes/fine_tune.jsonl"},
                "eval": {"multiply": sums},
            },
            "reward": {"function": "isobit.starter.tasks:correct_answer", "in_process": True},
            "rollout": {"max_new_tokens": 32},
            "training": {"steps": 4, "prompts_per_step": 2, "learning_rate": 1e-4},
            "evaluation": {"every": 2},
            "checkpoint": {"every": 1},
        }
    )


def test_a_start_of_the_ladder_ends_when_it_solves_enough(tmp_path: Path) -> None:
    """Here before any update, and it is not begun again."""
    assert ladder.train_start(a_start(tmp_path)) == 0
    told = json.loads((tmp_path / "start.json").read_text())
    assert told["updates"] == 0 and told["eval/multiply/accuracy"] >= ladder.ENOUGH
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert told["sha256"] == sha256(weights).hexdigest()
    (tmp_path / "run.json").unlink()
    assert ladder.train_start(a_start(tmp_path)) == 0


@pytest.mark.exhaustive
def test_a_start_that_never_solves_enough_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "ENOUGH", 1.1)
    monkeypatch.setattr(ladder, "FIRST", 3)
    assert ladder.train_start(a_start(tmp_path)) == 1
    assert not (tmp_path / "start.json").exists()
    lines = json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/multiply/accuracy" in line] == [0, 4]


def test_arms_are_decided_by_the_last_rewards_of_pairs() -> None:
    def row(arm: str, seed: int, late: float) -> rows.Row:
        rewards = [9.0] * 75 + [late] * 75
        answers = [{"rewards": [0.0]}, {"rewards": [late, 0.0]}]
        steps = {"reward/mean": rewards}
        return {"task": "gsm", "arm": arm, "seed": seed, "steps": steps, "evaluations": answers}

    found = [row("bf16", seed, 0.5) for seed in range(4)]
    found += [row("int8", seed, 0.5 + d) for seed, d in ((0, 0.01), (1, 0.02), (2, 0.03), (9, 0.4))]
    lines = list(decide.markdown(found))[2:]
    # Student's interval of 1, 2 and 3: 2 -+ 4.303 / sqrt(3); seed 9 has no pair
    # and (1.96 / 1)^2 pairs leave the interval above +1
    assert lines == ["| `gsm` | `int8` - `bf16` | 3 | +2.0 [-0.5, +4.5] | 4 | +1.0 [-0.2, +2.2] |"]
    assert str(decide.Difference((1.0,))) == "+1.0"
    assert decide.Difference((0.1, 0.2, 0.3)).would_decide is None, "it is within one point"
    assert decide.Difference((2.1, 2.2, 2.3)).would_decide is None, "it is not"
