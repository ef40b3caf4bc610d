"""Every shipped recipe runs for a step, with overrides that keep it small; the table names them
all.
"""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from isobit.cli.main import main
from isobit.config.load import load_config, load_recipe
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import SftConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.run.resolved import resolve
from isobit.run.rl_run import prepare_rl
from isobit.util.errors import ModelError
from tools.starter.build import save_tokenizer, write_text
from tools.starter.tokenizer import build_tokenizer

Figures = dict[str, float]

RECIPES = Path(__file__).parents[2] / "recipes"
CLAIMS: dict[str, Callable[[Figures, Figures], bool]] = {
    "dapo": lambda first, _: first["reward/level_groups"] == 0 < first["rollout/refills"],
    "kl": lambda first, last: first["kl/k1"] == first["kl/k3"] == 0 < last["kl/k3"],
    "off_policy": lambda first, _: first["correction/rejected"] < 1 != first["correction/mean"],
    "own_objective": lambda first, _: first["ratio/max"] > 1 and "clip_fraction/low" not in first,
    "ppo": lambda _, last: last["value/loss"] > 0 and "value/explained_variance" in last,
    "replay": lambda first, last: first["replay/samples"] == 0 < last["staleness/mean"],
}
"""What a recipe for one capability shows in its first or its last step."""
TRAIN = ("checkpoint", "lora", "quickstart", "reasoning_gym", "tens", "tools", "your_data", *CLAIMS)
SFT = ("distil", "fine_tune", "hybrid", "moe", "reward_model", "starter", "tools_sft")
SMALL = {"training.steps": 1, "training.prompts_per_step": 2, "threads": 1}
FEW_ROWS = {"data__train__limit": 200}
"""Of thousands, all of which a run would tokenise."""
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    """A tiny Hugging Face folder with the starter's tokenizer and a chat template."""
    config = ModelConfig(
        "llama", 128, 128, 128, 2, 4, 2, 32, 1024, 1e-6, 10000.0, tied_embeddings=False
    )
    folder = tmp_path / "checkpoint"
    save_policy(random_policy(config, PrecisionConfig(preset="fp32"), seed=0), folder)
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(config.max_positions)
    tokenizer.chat_template = CHAT
    save_tokenizer(tokenizer, folder)
    return folder


def run(command: str, name: str, output: Path, **changes: object) -> dict[str, object]:
    """The summary of a recipe run with overrides; ``__`` in a keyword stands for a dot."""
    settings = {
        **SMALL,
        **{key.replace("__", "."): value for key, value in changes.items()},
        "output": output,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert main([command, str(RECIPES / f"{name}.toml"), *words]) == 0
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


def test_every_recipe_is_listed_here_and_in_the_table() -> None:
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    assert names == sorted((*TRAIN, *SFT))
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    for name in names:
        assert (
            f"| [{name}.toml]({name}.toml) | `isobit {'sft' if name in SFT else 'train'}` |"
            in table
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(("precision", "is_exact"), [("fp8", True), ("fp8-rollout", False)])
def test_the_loop_on_the_public_interface_trains(
    precision: str,
    is_exact: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--steps", "2", "--prompts", "3", "--samples", "8")
    monkeypatch.setattr(sys, "argv", ["rl_loop.py", "--precision", precision, *sizes])
    runpy.run_path(str(RECIPES / "rl_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    counts = re.findall(r"(\d+) of (\d+) log-probabilities differ", printed)
    assert len(counts) == 2
    for differing, compared in counts:
        assert int(compared) > 50 and (int(differing) == 0) == is_exact
    assert len(re.findall(r"% of 100 held-out sums are right", printed)) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["quickstart", "your_data"])
def test_recipes_of_the_starter_model_train(name: str, tmp_path: Path) -> None:
    summary = run(
        "train",
        name,
        tmp_path / "run",
        training__samples_per_prompt=2,
        data__eval__held_out__limit=4,
        **FEW_ROWS,
    )
    assert summary["tokens_differing"] == 0 != summary["tokens_compared"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CLAIMS)
def test_recipes_of_one_capability_show_it(name: str, tmp_path: Path) -> None:
    small = {"training__prompts_per_step": 4, "training__samples_per_prompt": 4}
    changes = {**small, "training__steps": 2, "data__eval__held_out__limit": 4}
    if name != "dapo":  # whose first batch of all rows has a group without a signal
        changes |= FEW_ROWS
    summary = run("train", name, tmp_path / "run", **changes)
    assert (summary["tokens_differing"] == 0) == (name != "off_policy")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = (line for text in lines if "loss" in (line := json.loads(text)))
    assert CLAIMS[name](first, last)


@pytest.mark.exhaustive
def test_adapters_are_what_the_recipe_for_them_trains(tmp_path: Path) -> None:
    changes = {"training__prompts_per_step": 8, "training__samples_per_prompt": 8, **FEW_ROWS}
    summary = run("train", "lora", tmp_path / "run", data__eval__held_out__limit=4, **changes)
    assert summary["tokens_differing"] == 0 != summary["tokens_compared"]
    (written,) = (tmp_path / "run" / "model").glob("*.safetensors")
    adapters = load_file(written)
    assert all("lora_" in name and values.any() for name, values in adapters.items())


@pytest.mark.exhaustive
def test_the_mix_of_tasks_trains_and_evaluates_each(tmp_path: Path) -> None:
    tasks = ("chain_sum", "spell_backward", "letter_counting", "gcd")
    few = {f"data__eval__{task}__size": 2 for task in tasks}
    changes = {
        "training__samples_per_prompt": 2,
        "training__prompts_per_step": 8,
        "training__without_signal": "take",  # the starter earns nothing here
        "rollout__max_new_tokens": 8,
        **few,
    }
    summary = run("train", "reasoning_gym", tmp_path / "run", data__train__size=40, **changes)
    evaluations = summary["evaluations"]
    assert isinstance(evaluations, dict)
    assert tuple(evaluations) == tasks
    assert summary["tokens_differing"] == 0 != summary["tokens_compared"]


@pytest.mark.exhaustive
def test_the_evaluation_of_the_mix_keeps_its_own_problems(tmp_path: Path) -> None:
    """Entries are drawn from seed + index: seeds closer than the sizes would give the same problems
    to both.
    """
    config = load_config(
        RECIPES / "reasoning_gym.toml",
        ["--output", str(tmp_path / "run"), "--data.train.size", "200"],
    )
    assert prepare_rl(resolve(config)).data_figures()["dropped_prompts"] < 20, (
        "small numbers and short words repeat, whole sets do not"
    )


@pytest.mark.exhaustive
def test_a_checkpoint_on_disk_trains_through_its_chat_template(
    chat_folder: Path, tmp_path: Path
) -> None:
    small = {
        "data__train__size": 4,
        "data__eval__chain_sum__size": 2,
        "training__without_signal": "take",  # of random weights
        "rollout__max_new_tokens": 4,
        "rollout__max_sequences": 4,
    }
    summary = run(
        "train",
        "checkpoint",
        tmp_path / "run",
        model=chat_folder,
        training__samples_per_prompt=2,
        **small,
    )
    assert summary["tokens_differing"] == 0 != summary["tokens_compared"]
    lines = (tmp_path / "run" / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(
        json.loads(line)["prompt"].startswith("<system>Give the number alone") for line in lines
    )


def test_the_recipe_for_a_checkpoint_asks_for_a_folder(tmp_path: Path) -> None:
    config = load_config(RECIPES / "checkpoint.toml", ["--output", str(tmp_path / "run")])
    with pytest.raises(
        ModelError, match=r"Qwen/Qwen3-0.6B is no folder here, and as a model of the hub"
    ):
        prepare_rl(resolve(config))


def test_the_quickstart_measures_what_it_promises() -> None:
    config = load_config(RECIPES / "quickstart.toml", [])
    run = prepare_rl(resolve(config.model_copy(update={"output": Path("nowhere/quickstart")})))
    assert run.data_figures()["evaluation_problems"]["held_out"] >= 200
    assert run.evaluator is not None
    assert run.evaluator.requests["held_out"][0].sampling.temperature == 0
    assert run.data_figures()["dropped_prompts"] == 0, (
        "held-out problems are disjoint from those trained on"
    )
    assert config.precision.preset == "int8"


@pytest.mark.exhaustive
def test_fine_tuning_on_worked_examples_lowers_the_loss(tmp_path: Path) -> None:
    small = {
        **FEW_ROWS,
        "training__steps": 4,
        "training__prompts_per_step": 8,
        "data__eval__held_out__limit": 16,
    }
    summary = run("sft", "fine_tune", tmp_path / "run", training__learning_rate=1e-4, **small)
    before, after = summary["loss_before"], summary["loss_after"]
    assert isinstance(before, float) and isinstance(after, float)
    assert after < before
    assert summary["accuracy_after"] is not None


@pytest.mark.exhaustive
def test_products_are_learnt_from_transcripts_and_then_with_a_calculator(tmp_path: Path) -> None:
    made = runpy.run_path(str(RECIPES / "tools.py"))
    made["SIZES"].update(transcripts=30, train=8, held_out=4)
    made["write"](tmp_path)
    path = tmp_path / "transcripts.jsonl"
    run("sft", "tools_sft", tmp_path / "start", data__train__path=path)
    summary = run(
        "train",
        "tools",
        tmp_path / "run",
        model=tmp_path / "start" / "model",
        data__train__path=tmp_path / "train.jsonl",
        data__eval__held_out__path=tmp_path / "held_out.jsonl",
        training__samples_per_prompt=2,
        training__without_signal="take",  # a step teaches no product
        rollout__max_new_tokens=8,
    )
    assert summary["tokens_differing"] == 0 != summary["tokens_compared"]
    assert (tmp_path / "run" / "environment.jsonl").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("recipe", "layers"), [("moe", 2), ("hybrid", 4)])
def test_a_decoder_learns_from_random_weights(recipe: str, layers: int, tmp_path: Path) -> None:
    small = {"training__prompts_per_step": 16, "data__eval__held_out__limit": 8}
    small |= {"from_scratch__num_layers": layers, "training__learning_rate": 1e-2, **FEW_ROWS}
    summary = run("sft", recipe, tmp_path / "run", training__steps=3, **small)
    before, after = summary["loss_before"], summary["loss_after"]
    assert isinstance(before, float) and isinstance(after, float)
    assert after < before


@pytest.mark.exhaustive
def test_a_reward_model_learns_from_the_shipped_pairs_and_scores_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**FEW_ROWS, "training__prompts_per_step": 16, "data__eval__held_out__limit": 16}
    summary = run("sft", "reward_model", tmp_path / "run", training__steps=4, **small)
    before, after = summary["loss_before"], summary["loss_after"]
    assert isinstance(before, float) and isinstance(after, float)
    assert after < before
    folder, data = tmp_path / "run" / "model", "recipes/preferences_held_out.jsonl"
    words = ["eval", "--reward-model", str(folder), "--data", data, "--problems", "16", "--json"]
    capsys.readouterr()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == summary["accuracy_after"]


@pytest.mark.exhaustive  # and with its card: tools/test_starter_build.py
def test_the_starter_model_is_made_by_its_recipe(tmp_path: Path) -> None:
    write_text(tmp_path / "text", batches=1)
    small = {
        "data__train__path": tmp_path / "text" / "text.jsonl",
        "data__eval__held_out__limit": 4,
        "rollout__max_new_tokens": 4,
    }
    small["data__eval__held_out__path"] = tmp_path / "text" / "held_out_text.jsonl"
    summary = run("sft", "starter", tmp_path / "run", model=tmp_path / "text", **small)
    assert summary["preset"] == "bf16"
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()


def test_the_starter_recipe_has_the_shape_and_the_sizes_of_its_text() -> None:
    config = load_recipe(SftConfig, RECIPES / "starter.toml")
    assert config.from_scratch is not None
    assert config.from_scratch.max_positions == 512
    assert (config.training.steps, config.training.prompts_per_step, config.data.shuffle) == (
        1000,
        96,
        False,
    )
