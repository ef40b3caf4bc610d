"""Every number of a recipe, and of a command line, has a least and a largest value."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from isobit.cli.options import FOLDER, SEED, THREADS, Command, count_of_threads, positive
from isobit.config import recipes
from isobit.config.base import Strict
from isobit.config.load import LARGEST_FILE, MAX_NESTING, load_config, read_toml
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.rules import check_run
from isobit.util.errors import ConfigError

ROOTS = (
    RunConfig,
    SftConfig,
    *(one for one in vars(recipes).values() if isinstance(one, type) and issubclass(one, Strict)),
)


def tables(models: tuple[type[BaseModel], ...]) -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()
    waiting = list(models)
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            waiting += [
                one
                for field in model.model_fields.values()
                for one in leaves(field.annotation)
                if isinstance(one, type) and issubclass(one, BaseModel)
            ]
    return found


def leaves(annotation: Any) -> Iterator[Any]:
    below = get_args(annotation)
    if not below:
        yield annotation
    for one in below:
        yield from leaves(one)


def test_every_number_has_both_bounds() -> None:
    checked = 0
    for model in tables(ROOTS):
        for name, field in model.model_fields.items():
            if {int, float} & {one for one in leaves(field.annotation) if isinstance(one, type)}:
                key = f"{model.__name__}.{name}"
                inside = [one for one in leaves(field.annotation) if isinstance(one, FieldInfo)]
                bounds = [*field.metadata, *(bound for one in inside for bound in one.metadata)]
                assert any(isinstance(bound, Ge | Gt) for bound in bounds), key
                assert any(isinstance(bound, Le | Lt) for bound in bounds), key
                checked += 1
    assert checked > 150


def refusal(path: Any, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(load_config(path, words))
    return str(caught.value)


@pytest.fixture
def recipe(tmp_path: Any) -> Any:
    path = tmp_path / "r.toml"
    path.write_text('output = "run"\n[data.train]\ntype = "jsonl"\npath = "x.jsonl"\n')
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("--training.steps", "100000000"),
        ("--training.steps", str(10**22)),
        ("--threads", "100000"),
        ("--seed", str(2**64)),
        ("--seed", "-1"),
        ("--data.train.limit", str(10**30)),
        ("--rollout.kv_pages", str(10**10)),
        ("--rollout.max_sequences", str(10**12)),
        ("--training.learning_rate", "1e300"),
        ("--training.prompts_per_step", "1000000"),  # times samples_per_prompt
        ("--seed", "1" * 5000),
        ("--reward.options", "[" * 5000 + "]" * 5000),
        ("--reward.options.deep", "[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1)),
        ("--" + "a." * 5000 + "b", "1"),
    ],
)
def test_a_number_or_a_nesting_beyond_all_runs_is_refused_in_a_line(
    recipe: Any, words: tuple[str, str]
) -> None:
    message = refusal(recipe, *words)
    assert words[0].removeprefix("--")[:20] in message and len(message) < 400


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--training.steps", '"20"'), "should be a whole number, but it is '20'"),
        (("--training.steps", "true"), "should be a whole number, but it is True"),
        (("--training.learning_rate", '"1e-4"'), "should be a number, but it is '1e-4'"),
        (("--data.shuffle", "1"), "should be true or false, but it is 1"),
        (("--data.shuffle", "yes"), "should be true or false, but it is 'yes'"),
        (("--reward.function", "5"), "should be text, but it is 5"),
    ],
)
def test_a_value_of_another_type_is_refused(
    recipe: Any, words: tuple[str, str], expected: str
) -> None:
    assert refusal(recipe, *words).endswith(f"{words[0].removeprefix('--')}: {expected}")


def test_a_whole_number_may_be_written_as_a_float(recipe: Any) -> None:
    assert load_config(recipe, ["--training.steps", "1e3"]).training.steps == 1000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "more than 32 deep"),
        ("a = " + "[" * 33 + "]" * 33, "more than 32 deep"),
        ("a" + ".a" * 2000 + " = 1", "more than 32 deep"),
        ("a = " + "1" * 5000, "a number of too many digits"),
        ("#" * (LARGEST_FILE + 1), "more than 1,048,576 bytes"),
    ],
)
def test_a_file_beyond_all_recipes_is_refused_by_name(
    tmp_path: Any, content: str, expected: str
) -> None:
    path = tmp_path / "r.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_toml(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("option", "text"),
    [("--seed", str(2**64)), ("--seed", "-1"), ("--threads", "100000"), ("--threads", "1" * 5000)],
)
def test_a_command_line_has_bounds_too(
    capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        Command("x", "", [FOLDER, SEED, THREADS]).read(["folder", option, text])
    shown = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in shown and "is not a whole number from" in shown
    assert len(shown) < 200


def test_a_count_is_a_whole_number() -> None:
    assert (positive("10"), count_of_threads("1024")) == (10, 1024)
