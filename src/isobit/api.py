"""The commands as functions: what ``isobit train``, ``sft``, ``eval``, ``flows``, ``rollout`` and
``verify`` do, for Python.

A recipe is a TOML file, its tables as a mapping, or a configuration; keyword arguments change keys
of it, tables as mappings.  Rewards may be functions and data lists of rows, which no file can hold:

    reward=f                        reward.function = the name of f
                                    (``isobit.rewards.python_rewards``)
    reward=[f, g]                   reward.parts, each by its function's name, added up
    reward={"function": f, ..}      that key alone
    data=rows                       data.train = the digest of the rows (``isobit.data.sources``)
    data={"train": rows,
          "eval": {"held_out": rows}}
    data={"train": {"rows": rows, "prompt": "question"}}
    environment=Shop                environment.class = the name of the class, whose public methods
                                    are the tools (``isobit.environments.python_environments``)
    environment={"class": Shop, "max_turns": 4}
    environment=[f, g]              functions as tools; also tools=[f, g], as TRL has it

What is left are settings as a recipe has them, that can be written down, compared and resumed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from isobit.commands import flows as flow_measures
from isobit.commands.evaluate import evaluate_folder
from isobit.commands.rollout import rollout_folder
from isobit.config.base import Strict
from isobit.config.commands import GenerationConfig, VerifyConfig
from isobit.config.data import DataConfig, SftDataConfig
from isobit.config.load import Override, apply_overrides, build, nested_overrides, read_toml
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.reward import DEFAULT_FUNCTION
from isobit.config.rollout import RolloutConfig
from isobit.data.sources import give_rows
from isobit.environments.python_environments import (
    give_environment,
    is_environment,
    takes_environments,
)
from isobit.kernels.backend import use_back_end
from isobit.launch.own_rank import watched
from isobit.models.folder import model_folder
from isobit.observe.evaluation import EvalResult
from isobit.observe.flow_choice import Comparison
from isobit.parallel.launched import is_launched
from isobit.parallel.world import World
from isobit.proof import verify as verification
from isobit.proof.verify import VerifyOptions, VerifyResult
from isobit.records.text import Group
from isobit.rewards.python_rewards import give_reward
from isobit.run import loop as rl_loop
from isobit.run import sft as sft_loop
from isobit.run.log import RlSummary
from isobit.run.sft_log import SftSummary
from isobit.util.errors import ConfigError

Schema = TypeVar("Schema", bound=Strict)
_SAMPLING = RolloutConfig.model_fields.keys()


Recipe: TypeAlias = str | Path | Mapping[str, Any]


def train(
    recipe: Recipe | RunConfig = MappingProxyType({}),
    *,
    resume: bool = False,
    allow_change: Sequence[str] = (),
    **changes: Any,
) -> RlSummary:
    """Train a policy with reinforcement learning: ``train("recipes/quickstart.toml",
    output="runs/x", training={"steps": 5})``, or from Python alone: ``train(model="starter",
    output="runs/x", data=[{"prompt": "1+2=", "answer": "3"}, ..], reward=f)``.

    ``reward`` may be a function of any form of ``isobit.rewards.signatures``, or a list of them
    that are added up; ``data`` may be rows, of which the column ``prompt`` is the prompt.  The
    functions run in processes of their own, each with a copy.

    With ``resume`` the run in the output directory goes on from its newest checkpoint, where there
    is one; ``allow_change`` names keys and inputs that may be other than they were. Raises an
    ``IsobitError``, before anything is written, for what cannot be used; see
    ``isobit.run.loop.train``.  A script that torchrun or srun has started several times joins
    the others.
    """
    with (
        _configured(RunConfig, recipe, changes) as config,
        _world_of(config, "train") as world,
    ):
        return rl_loop.train(config, resume=resume, world=world, allowed=allow_change)


def sft(
    recipe: Recipe | SftConfig = MappingProxyType({}),
    *,
    resume: bool = False,
    allow_change: Sequence[str] = (),
    **changes: Any,
) -> SftSummary:
    """Fine-tune a model on prompts and completions; takes rows and rewards, resumes and raises as
    ``train`` does.
    """
    with (
        _configured(SftConfig, recipe, changes) as config,
        _world_of(config, "sft") as world,
    ):
        return sft_loop.sft(config, resume=resume, world=world, allowed=allow_change)


def evaluate(
    model: str | Path, recipe: Recipe | RunConfig = MappingProxyType({}), **changes: Any
) -> dict[str, EvalResult]:
    """Measure a model folder on the evaluation sets of a recipe, with its reward; the figures by
    name of the set: ``evaluate("starter", data={"eval": {"sums": rows}}, reward=f)``.  Writes
    nothing.
    """
    changes = {"output": "nowhere", **changes}
    with _configured(RunConfig, recipe, changes, fill=_training_data) as config:
        return evaluate_folder(model_folder(model), config)


def compare_flows(
    model: str | Path,
    recipe: Recipe | RunConfig = MappingProxyType({}),
    flows: Sequence[PrecisionConfig | str | Mapping[str, Any]] = (),
    *,
    answers: str | None = None,
    **changes: Any,
) -> Comparison:
    """Answer the evaluation prompts of a recipe in ``bf16`` and in each of the flows, by default
    those of ``isobit flows``: ``compare_flows("starter", data={"eval": {"s": rows}}, reward=f)``.
    ``isobit.observe.flow_choice`` has the table and the recommendation.  Raises what
    ``isobit.commands.flows.compare_flows`` raises; writes nothing.
    """
    changes = {"output": "nowhere", **changes}
    with _configured(RunConfig, recipe, changes, fill=_training_data) as config:
        return flow_measures.compare_flows(model, config, flows, answers=answers)


def generate(
    model: str | Path,
    prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    samples: int = 1,
    seed: int = 0,
    chat: bool = True,
    **settings: Any,
) -> list[Group]:
    """Complete a prompt, or each of several, ``samples`` times: ``generate("starter", "3+8+2+9=",
    precision="int8", max_new_tokens=24)``.  A prompt is text or a list of chat messages.

    ``settings`` are the keys device and back_end, keys of the tables precision and rollout, and
    those of rollout by themselves.  One sample is greedy and several are drawn at temperature 1,
    unless they say otherwise.  Raises what ``isobit.commands.rollout.rollout_folder`` raises.
    """
    flat = {f"rollout.{key}": settings.pop(key) for key in _SAMPLING & settings.keys()}
    with _configured(GenerationConfig, {}, settings | flat) as config:
        asked = [prompts] if isinstance(prompts, str) else prompts
        return rollout_folder(model_folder(model), asked, config, samples, seed, chat)


def verify(
    model: str | Path, options: VerifyOptions | None = None, **settings: Any
) -> VerifyResult:
    """Compare sampled and trained log-probabilities of a model folder, bit for bit:
    ``verify("starter", precision="int8")``.

    ``settings`` are the keys device and back_end and those of the table precision.  Raises what
    ``isobit.proof.verify.verify`` raises.
    """
    with _configured(VerifyConfig, {}, settings) as config:
        use_back_end(config.back_end)
        precision, device = config.precision, config.device
        return verification.verify(model_folder(model), precision, options, device=device)


@contextmanager
def _world_of(config: RunConfig | SftConfig, command: str) -> Iterator[World]:
    """Those that were started together.  Raises ConfigError where the recipe asks for processes
    that nobody has started: a function cannot start the script that calls it.
    """
    if config.cluster.is_launched and not is_launched():
        raise ConfigError(
            f"cluster.processes is {config.cluster.processes}, with the launcher "
            f"{config.cluster.launcher!r}, but a function starts no processes; run the command "
            f"`isobit {command}`, start this script with torchrun, or leave the key out"
        )
    with watched() as world:
        if config.cluster.rollouters and world.size > 1:
            raise ConfigError(
                f"cluster.rollouters is {config.cluster.rollouters}, and in a script all "
                f"{world.size} processes train; start the command `isobit {command}` with torchrun "
                f"(-m isobit.cli.main {command}), or leave the key out: all sample and train in "
                "turn then"
            )
        yield world


@contextmanager
def _configured(
    schema: type[Schema],
    recipe: Recipe | Strict,
    changes: Mapping[str, Any],
    fill: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[Schema]:
    """A recipe with its changes, checked as ``isobit.config.load.build`` does, after ``fill`` has
    filled in what a command does without; functions and rows in it are found while this is open.
    """
    held: list[Any] = []
    match recipe:
        case Strict():
            values, source = recipe.model_dump(exclude_unset=True), "the configuration"
        case Mapping():
            values, source = plain_tables(recipe, held), "the recipe"
        case _:
            values, source = read_toml(Path(recipe)), str(recipe)
    values = apply_overrides(values, plain_overrides(changes, held))
    if fill is not None:
        fill(values)
    yield build(schema, values, f"{source} with its changes" if changes else source)


def _training_data(values: dict[str, Any]) -> None:
    """An evaluation reads none; the schema wants some."""
    data = values.get("data")
    if isinstance(data, dict) and "train" not in data and data.get("eval"):
        data["train"] = next(iter(data["eval"].values()))


Held: TypeAlias = list[Any]
"""What is found by its name for as long as this is held."""


class _Whole:
    """A table that replaces what a recipe has in its place, key by key or not."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table


def plain_overrides(changes: Mapping[str, Any], held: Held) -> list[Override]:
    """Changes of a recipe as overrides, without functions and rows.

    Raises ConfigError for several rewards of one name, DataError for what are no rows.
    """
    nested = nested_overrides(_plain(_renamed(changes, held), (), held))
    return [(parts, _opened(value)) for parts, value in nested]


def plain_tables(recipe: Mapping[str, Any], held: Held) -> dict[str, Any]:
    """A recipe's tables, likewise."""
    return _opened(_plain(_renamed(recipe, held), (), held))


_IN_PYTHON = {
    "reward_funcs": "reward=[f, ..]",
    "reward_func": "reward=f",
    "environment_factory": "environment=CLASS",
    "train_dataset": "data=ROWS",
    "eval_dataset": 'data={"train": ROWS, "eval": {"held_out": ROWS}}',
}
"""What TRL's trainer is given as objects, and what has its place here."""


def _renamed(table: Mapping[str, Any], held: Held) -> Mapping[str, Any]:
    """A table with TRL's ``tools`` as the environment, and the environment with those rewards that
    take its objects, and rows as those of training.  Raises ConfigError for TRL's other names.
    """
    theirs = [
        f"{name} is a name of TRL's; here it is {own}"
        for name, own in _IN_PYTHON.items()
        if name in table and not isinstance(table[name], str)
    ]
    if theirs:
        raise ConfigError(*theirs)
    data = table.get("data")
    if isinstance(data, Mapping) and "rows" in data and "train" not in data:
        table = {**table, "data": _for_training(data)}
    if is_environment(tools := table.get("tools")):
        if "environment" in table and not _is_table_without_class(table["environment"]):
            raise ConfigError(
                "tools and environment are given; make the tools methods of the class"
            )
        others = {name: value for name, value in table.items() if name != "tools"}
        table = {**others, "environment": {**table.get("environment", {}), "class": tools}}
    reward = table.get("reward")
    rewards: list[Any] = [*reward] if isinstance(reward, list | tuple) else [reward]
    if not (of_objects := [reward for reward in rewards if takes_environments(reward)]):
        return table
    environment = table.get("environment")
    given = environment if isinstance(environment, Mapping) else {"class": environment}
    if not is_environment(given.get("class")):
        raise ConfigError(
            f"the reward {getattr(of_objects[0], '__name__', '')!r} takes the objects of episodes: "
            "give their class beside it, as environment=CLASS; or make it the class's method "
            'get_reward(self), and reward="environment"'
        )
    held.append(give_environment(given["class"], of_objects))
    others = [reward for reward in rewards if reward not in of_objects]
    return {
        **table,
        "environment": {**given, "class": held[-1].name},
        "reward": ["environment", *others] if others else "environment",
    }


def _for_training(data: Mapping[str, Any]) -> dict[str, Any]:
    """The table ``data`` of one that gives rows, which are those of training."""
    known = {*DataConfig.model_fields, *SftDataConfig.model_fields}
    train = {key: value for key, value in data.items() if key not in known}
    return {key: value for key, value in data.items() if key in known} | {"train": train}


def _is_table_without_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "class" not in value


def _plain(table: Mapping[str, Any], path: tuple[str, ...], held: Held) -> dict[str, Any]:
    return {
        key: _plain_value(value, (*path, *str(key).split(".")), held)
        for key, value in table.items()
    }


def _plain_value(value: Any, path: tuple[str, ...], held: Held) -> Any:
    match path:
        case ("reward",) if callable(value) or isinstance(value, str | list | tuple):
            return _reward_table(value, held)
        case ("reward", "parts", _) if callable(value):
            return {"function": _named(value, held)}
        case ("reward", "function") | ("reward", "parts", _, "function") if callable(value):
            return _named(value, held)
        case ("environment",) if is_environment(value):
            return {"class": _environment_named(value, held)}
        case ("environment", "class") if not isinstance(value, str | None):
            return _environment_named(value, held)
        case ("data",) if _are_rows(value):
            return {"train": _rows_table({"rows": value}, "data", held)}
        case (
            ("data", "train")
            | ("data", "eval", _)
            | ("data", "train", "sources", _)
            | ("data", "eval", _, "sources", _)
        ):
            if _are_rows(value):
                return _rows_table({"rows": value}, ".".join(path), held)
            if isinstance(value, Mapping) and "rows" in value:
                return _rows_table(value, ".".join(path), held)
    return _plain(value, path, held) if isinstance(value, Mapping) else value


def _reward_table(value: Any, held: Held) -> dict[str, Any]:
    """The table ``reward`` with another grader and its other keys."""
    alone = not isinstance(value, list | tuple)
    return {
        "function": _named(value, held) if alone else DEFAULT_FUNCTION,
        "parts": _Whole({} if alone else _parts(value, held)),
        "options": _Whole({}),
        "model": None,
        "weight": 1.0,
    }


def _parts(functions: Iterable[Any], held: Held) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for function in functions:
        name = (
            function.rpartition(":")[2]
            if isinstance(function, str)
            else getattr(function, "__name__", "")
        )
        label = "".join(sign for sign in name if sign.isalnum() or sign in "_-") or "reward"
        if label in parts:
            raise ConfigError(
                f"two rewards are called {label!r}; name them: reward={{'parts': {{'one': "
                "{'function': f}, 'two': {'function': g}}}"
            )
        parts[label] = {"function": _named(function, held)}
    return parts


def _named(function: Any, held: Held) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ConfigError(
            f"reward is {type(function).__name__} {function!r:.60}; expected a function, the name "
            "of one, or a list of them"
        )
    held.append(give_reward(function))
    return held[-1].name


def _environment_named(value: Any, held: Held) -> str:
    held.append(give_environment(value))
    return held[-1].name


def _are_rows(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Path | Mapping)


def _rows_table(table: Mapping[str, Any], key: str, held: Held) -> _Whole:
    given = give_rows(table["rows"], key)
    held.append(given)
    others = {name: value for name, value in table.items() if name not in ("rows", "type")}
    return _Whole({"type": "rows", "count": len(given.rows), "sha256": given.sha256, **others})


def _opened(value: Any) -> Any:
    if isinstance(value, _Whole):
        return _opened(value.table)
    if isinstance(value, Mapping):
        return {key: _opened(part) for key, part in value.items()}
    return value
