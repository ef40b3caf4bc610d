"""The public interface: lazy, typed as it is loaded, and strict about what it is given."""

import ast
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import isobit
from isobit.api import _configured
from isobit.config.recipes import RunConfig, SftConfig
from isobit.util.errors import ConfigError

DATA = {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 8}}
SMALL = {
    "rollout": {"max_new_tokens": 4},
    "training": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
}
REWARD = {"function": "isobit.starter.tasks:correct_answer"}


def names_for_type_checkers() -> set[tuple[str, str]]:
    """(module, name) of every import under ``if TYPE_CHECKING``."""
    tree = ast.parse(Path(str(isobit.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    return {(str(node.module), alias.name) for node in imports for alias in node.names}


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    assert names_for_type_checkers() == {
        (module, name) for name, module in isobit._modules().items()
    }
    for _, name in names_for_type_checkers():
        assert getattr(isobit, name) is not None
        assert name in dir(isobit)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'isobit' has no attribute 'trian'"):
        getattr(isobit, "trian")  # noqa: B009 (a type checker would refuse the plain form)


def test_importing_and_listing_load_no_torch() -> None:
    code = (
        "import sys, isobit; dir(isobit); isobit.IsobitError; "
        "print(sorted({'torch', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_mapping_a_configuration_and_changes_make_the_same_run(tmp_path: Path) -> None:
    recipe = {"output": tmp_path / "a", "data": DATA, "reward": REWARD, **SMALL}
    first = isobit.train(recipe)
    changed = isobit.train(
        RunConfig.model_validate({**recipe, "seed": 1}), output=tmp_path / "b", seed=0
    )
    changes: dict[str, Any] = {**SMALL, "reward.function": REWARD["function"], "training.steps": 1}
    dotted = isobit.train({"data": DATA}, output=tmp_path / "c", **changes)
    weights = {
        (summary.model / "model.safetensors").read_bytes() for summary in (first, changed, dotted)
    }
    assert len(weights) == 1


def test_a_wrong_key_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        isobit.IsobitError,
        match=(
            r"the recipe with its changes: training.stepz: unknown key; did you mean "
            r"training.steps"
        ),
    ):
        isobit.train({"data": DATA}, output=tmp_path / "run", training={"stepz": 3})
    assert not (tmp_path / "run").exists()


def test_generation_takes_a_folder_and_settings() -> None:
    groups = isobit.generate(
        "starter",
        ["1+1+1+1=", "2+2+2+2="],
        samples=2,
        precision="bf16",
        rollout={"max_new_tokens": 3},
    )
    assert [len(group.completions) for group in groups] == [2, 2]
    with pytest.raises(isobit.IsobitError, match=r"rollout\.max_tokens: unknown key"):
        isobit.generate("starter", ["1="], rollout={"max_tokens": 3})


def test_a_function_starts_no_processes(tmp_path):
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
    with pytest.raises(ConfigError, match="start this script with torchrun"):
        isobit.train(recipe, output=str(tmp_path / "run"), cluster={"processes": 2})
    assert not (tmp_path / "run").exists()


def test_a_script_of_several_processes_has_no_rollouters(tmp_path, monkeypatch):
    monkeypatch.setattr("isobit.api.is_launched", lambda: True)
    monkeypatch.setattr("isobit.api.watched", lambda: nullcontext(SimpleNamespace(size=2)))
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
    parts: dict[str, Any] = {"cluster": {"rollouters": 1}, "async": {"lag": 1}}
    with pytest.raises(ConfigError, match=r"in a script all 2 processes train; .* with torchrun"):
        isobit.train(recipe, output=str(tmp_path / "run"), **parts)


ROWS = [{"prompt": f"{a}+{b}+1+2=", "answer": str(a + b + 3)} for a in (1, 2, 3) for b in (1, 2)]


def test_a_run_of_rows_and_functions_is_resumed_with_the_same_alone(tmp_path: Path) -> None:
    bonus = 0.5

    def run(factor: float, rows: list[dict[str, str]] = ROWS[:4], **changes: Any) -> Any:
        return isobit.train(
            output=tmp_path / "a",
            data={"train": rows, "eval": {"held_out": {"rows": ROWS[4:], "limit": 1}}},
            reward=[
                lambda prompt, completion: factor + bonus,
                "isobit.starter.tasks:correct_answer",
            ],
            **{**SMALL, **changes},
        )

    summary = run(1.0)
    assert summary.problems == 1
    assert summary.accuracy_after in (1.5, 2.5)
    more = {"training": {**SMALL["training"], "steps": 2}, "resume": True}
    with pytest.raises(ConfigError, match=r"reward\.parts\.lambda\.function: 'python:lambda@"):
        run(2.0, **more)
    with pytest.raises(ConfigError, match=r"data\.train\.sha256"):
        run(1.0, ROWS[1:5], **more)
    with pytest.raises(isobit.IsobitError, match=r"given from Python.*isobit\.train\("):
        isobit.train(RunConfig.model_validate(recorded(tmp_path / "a")), resume=True)
    assert run(1.0, **more).steps == 2


def recorded(directory: Path) -> dict[str, Any]:
    """The configuration of a run, as `isobit train RUN --resume` reads it."""
    return json.loads((directory / "run.json").read_text())["config"]


def test_a_reward_takes_the_place_of_the_recipes_and_rows_of_its_data(tmp_path: Path) -> None:
    recipe = {
        "output": tmp_path / "a",
        "data": {"train": {"type": "reasoning_gym", "task": "chain_sum", "size": 9}},
        "reward": {"function": "math_verify", "options": {"x": 1}, "deadline_s": 3.0},
        **SMALL,
    }
    with _configured(RunConfig, recipe, {"reward": len, "data": iter(ROWS)}) as config:
        assert config.reward.options == {} and config.reward.deadline_s == 3.0
        assert config.reward.function.startswith("python:len@")
        assert config.data.train.type == "rows" and config.data.train.count == len(ROWS)
    with _configured(RunConfig, recipe, {"reward": {"options": {"y": 2}}}) as config:
        assert config.reward.options == {"x": 1, "y": 2}, "a table changes keys, as ever"


@pytest.mark.parametrize(
    ("schema", "data", "expected"),
    [
        (RunConfig, {"prompt": "question"}, {"prompt": "question"}),
        (RunConfig, {"limit": 2, "epochs": 3}, {"limit": 2}),
        (RunConfig, {"system": "Add.", "chat": False}, {"system": "Add."}),
        (RunConfig, {"tools": "", "eval": {"held_out": ROWS[:1]}}, {"tools": ""}),
        (SftConfig, {"completion": "answer"}, {"completion": "answer"}),
        (SftConfig, {"messages": "talk", "max_tokens": 9}, {"messages": "talk"}),
    ],
)
def test_a_table_of_rows_is_that_of_training(
    schema: type[RunConfig] | type[SftConfig],
    data: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    changes = {"output": tmp_path / "a", "data": {"rows": ROWS, **data}}
    with _configured(schema, {}, changes) as config:
        train = config.data.train.model_dump(exclude_unset=True)
        assert {key: train[key] for key in expected} == expected
        assert train["count"] == len(ROWS)
        others = config.data.model_dump(exclude_unset=True)
        assert {*others} == {"train", *data} - {*expected}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": [lambda: 0, lambda: 1]}, "two rewards are called 'lambda'; name them"),
        ({"reward": [3]}, "reward is int 3; expected a function"),
        ({"data": ["1+1="]}, "data: row 0 is str '1\\+1='; expected a list of mappings"),
        ({"data": []}, "the list of rows has no rows"),
        ({"reward": len}, "'python:len@.* takes .*by position alone"),
    ],
)
def test_what_is_no_reward_and_no_data(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(isobit.IsobitError, match=message):
        isobit.train(**{"output": tmp_path / "a", "data": ROWS, **SMALL, **changes})
    assert not (tmp_path / "a").exists()


class Shop:
    """An environment as a notebook has it."""

    def buy(self, price: int) -> str:
        """Buy.

        Args:
            price: What it costs.
        """
        return str(price)


def goes(number: int) -> int:
    """A tool.

    Args:
        number: A number.
    """
    return number


def of_shops(environments: list[Any], **columns: Any) -> list[float]:
    return [1.0 for _ in environments]


@pytest.mark.parametrize(
    ("changes", "name", "reward"),
    [
        ({"environment": Shop}, f"{__name__}:Shop", "math_verify"),
        ({"environment": {"class": Shop, "max_turns": 3}}, f"{__name__}:Shop", "math_verify"),
        ({"environment": [goes], "reward": "exact_match"}, "python:tools@", "exact_match"),
        ({"tools": [goes], "environment": {"max_turns": 3}}, "python:tools@", "math_verify"),
        ({"environment": Shop, "reward": of_shops}, "python:Shop@", "environment"),
        ({"environment": {"class": Shop}, "reward": [of_shops]}, "python:Shop@", "environment"),
        ({"environment.class": Shop}, f"{__name__}:Shop", "math_verify"),
    ],
)
def test_environments_and_tools_may_be_objects_of_python(
    changes: dict[str, Any], name: str, reward: str
) -> None:
    recipe = {"model": "starter", "output": "runs/x", "data": DATA}
    given = {"reward": "math_verify", **changes}
    configured = [_configured(RunConfig, recipe, given)]
    if "environment.class" not in changes:  # which is a form of changes alone
        configured.append(_configured(RunConfig, {**recipe, **given}, {}))
    for config in configured:
        with config as made:
            assert made.environment is not None
            assert made.environment.place.startswith(name)
            assert made.reward.function == reward


def test_a_reward_of_environments_stands_beside_others() -> None:
    def of_text(completions: list[str], **columns: Any) -> list[float]:
        return [0.0 for _ in completions]

    recipe = {"model": "starter", "output": "runs/x", "data": DATA}
    both = {"environment": Shop, "reward": [of_shops, of_text]}
    with _configured(RunConfig, recipe, both) as made:
        assert [*made.reward.parts] == ["environment", "of_text"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward_funcs": [of_shops]}, r"reward_funcs is a name of TRL's; here it is reward=\[f"),
        ({"environment_factory": Shop}, "here it is environment=CLASS"),
        (
            {"reward_funcs": [of_shops], "train_dataset": [], "eval_dataset": []},
            r"(?s)reward=\[f.*train_dataset .* data=ROWS.*eval_dataset .* data=\{",
        ),
        ({"reward_func": len, "environment_factory": Shop}, r"reward=f\n.*environment=CLASS"),
        ({"train_dataset": []}, "here it is data=ROWS"),
        ({"reward": of_shops}, "'of_shops' takes the objects of episodes: give their class beside"),
        ({"environment": {"class": Shop()}}, "expected a class whose public methods are the tools"),
        ({"environment": Shop, "tools": [goes]}, "tools and environment are given"),
    ],
)
def test_objects_that_have_no_place_are_answered_with_theirs(
    changes: dict[str, Any], told: str
) -> None:
    recipe = {"model": "starter", "output": "runs/x", "data": DATA}
    with pytest.raises(ConfigError, match=told), _configured(RunConfig, recipe, changes):
        pass


def test_one_text_is_one_prompt_and_arguments_are_flat() -> None:
    (one,) = isobit.generate("starter", "3+8+2+9=", max_new_tokens=8)
    (same,) = isobit.generate(
        "starter", ["3+8+2+9="], rollout={"max_new_tokens": 8, "temperature": 0}
    )
    assert one.prompt.text == "3+8+2+9=" and one.completions[0].text == same.completions[0].text
    (two,) = isobit.generate("starter", "3+8+2+9=", samples=2, max_new_tokens=4, top_p=0.9)
    assert len({completion.text for completion in two.completions}) == 2, "drawn, not greedy"
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        isobit.generate("starter", "3+8+2+9=", temperature=-1)


def test_a_name_stands_where_a_preset_may() -> None:
    assert isobit.load_model("starter", "fp8", trainable=False).policy.flow.exact
    with pytest.raises(ConfigError, match=r"precision is 'fp9'; expected .* 'fp8-linear', 'fp8'"):
        isobit.load_model("starter", "fp9")


def test_rows_are_evaluated_with_a_function_and_nothing_else() -> None:
    def always(prompt: Any, completion: Any) -> float:
        return 1.0

    found = isobit.evaluate(
        "starter", data={"eval": {"sums": ROWS}}, reward=always, rollout={"max_new_tokens": 2}
    )
    assert found["sums"].accuracy == 1.0
