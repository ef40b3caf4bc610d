"""Every shipped recipe can be started; those that name no model of the user's run."""

from pathlib import Path

import pytest

from isobit.config.load import load_config
from isobit.errors import CheckpointError
from isobit.run.loop import train
from isobit.run.setup import prepare

RECIPES = Path(__file__).parents[2] / "recipes"
HERE = ("quickstart", "reasoning_gym", "your_data")


def test_every_recipe_is_listed_here() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.toml")) == sorted((*HERE, "checkpoint"))


@pytest.mark.parametrize("name", HERE)
def test_recipes_of_the_starter_model_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    small = {"output": tmp_path / "run", "training.steps": 1, "training.prompts_per_step": 2, "training.samples_per_prompt": 2}
    overrides = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    config = load_config(RECIPES / f"{name}.toml", overrides)
    few = {
        key: source.model_copy(update={"size" if source.type == "reasoning_gym" else "limit": 4})
        for key, source in config.data.eval.items()
    }
    summary = train(config.model_copy(update={"data": config.data.model_copy(update={"eval": few})}))
    assert summary.tokens_differing == 0 < summary.tokens_compared


def test_the_recipe_for_a_checkpoint_asks_for_a_folder(tmp_path: Path) -> None:
    config = load_config(RECIPES / "checkpoint.toml", ["--output", str(tmp_path / "run")])
    with pytest.raises(CheckpointError, match=r"models/Qwen3-0.6B is not a folder"):
        prepare(config)


def test_the_quickstart_measures_what_it_promises() -> None:
    config = load_config(RECIPES / "quickstart.toml", [])
    run = prepare(config.model_copy(update={"output": Path("nowhere/quickstart")}))
    assert len(run.evaluator.sets["held_out"]) >= 200
    assert run.evaluator.sampling.temperature == 0
    assert run.dropped_prompts == 0, "held-out problems are disjoint from those trained on"
    assert config.precision.preset == "fp8"
