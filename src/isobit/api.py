"""The commands as functions: what ``isobit train``, ``sft``, ``eval``, ``rollout`` and ``verify``
do, for Python.

A recipe is a TOML file, its tables as a mapping, or a configuration; keyword arguments change keys
of it, tables as mappings.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from isobit.config.base import Strict
from isobit.config.commands import GenerationConfig, VerifyConfig
from isobit.config.load import build
from isobit.config.overrides import apply_overrides, nested_overrides
from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig
from isobit.config.toml import read_toml
from isobit.errors import ConfigError
from isobit.models.loaded import model_folder
from isobit.observe.eval_result import EvalResult
from isobit.parallel.launched import is_launched
from isobit.parallel.processes import joined
from isobit.parallel.world import World
from isobit.proof import verify as verification
from isobit.proof.verify import VerifyOptions, VerifyResult
from isobit.records.text import Group
from isobit.run.evaluate import evaluate_folder
from isobit.run.rl import loop as rl_loop
from isobit.run.rl.summary import RlSummary
from isobit.run.rollout import rollout_folder
from isobit.run.sft import loop as sft_loop
from isobit.run.sft.summary import SftSummary

Schema = TypeVar("Schema", bound=Strict)


def train(
    recipe: str | Path | Mapping[str, Any] | RunConfig, *, resume: bool = False, **changes: Any
) -> RlSummary:
    """Train a policy with reinforcement learning: ``train("recipes/quickstart.toml",
    output="runs/x", training={"steps": 5})``.

    With ``resume`` the run in the output directory goes on from its newest checkpoint, where there
    is one. Raises an ``IsobitError``, before anything is written, for what cannot be used; see
    ``isobit.run.rl.loop.train``.  A script that torchrun or srun has started several times joins
    the others.
    """
    with _world_of(config := _configuration(RunConfig, recipe, changes), "train") as world:
        return rl_loop.train(config, resume=resume, world=world)


def sft(
    recipe: str | Path | Mapping[str, Any] | SftConfig, *, resume: bool = False, **changes: Any
) -> SftSummary:
    """Fine-tune a model on prompts and completions; resumes and raises as ``train`` does."""
    with _world_of(config := _configuration(SftConfig, recipe, changes), "sft") as world:
        return sft_loop.sft(config, resume=resume, world=world)


def evaluate(
    model: str | Path, recipe: str | Path | Mapping[str, Any] | RunConfig, **changes: Any
) -> dict[str, EvalResult]:
    """Measure a model folder on the evaluation sets of a recipe, with its reward; the figures by
    name of the set.  Writes nothing.
    """
    return evaluate_folder(
        model_folder(model), _configuration(RunConfig, recipe, {"output": "nowhere", **changes})
    )


def generate(
    model: str | Path,
    prompts: Sequence[str],
    *,
    samples: int = 1,
    seed: int = 0,
    chat: bool = True,
    **settings: Any,
) -> list[Group]:
    """Complete each prompt ``samples`` times: ``generate("starter", ["3+8+2+9="], precision="fp8",
    rollout={"max_new_tokens": 24})``.

    ``settings`` are the key device and keys of the tables precision and rollout.  Raises what
    ``isobit.run.rollout.rollout_folder`` raises.
    """
    config = _configuration(GenerationConfig, {}, settings)
    return rollout_folder(model_folder(model), prompts, config, samples, seed, chat)


def verify(
    model: str | Path, options: VerifyOptions | None = None, **settings: Any
) -> VerifyResult:
    """Compare sampled and trained log-probabilities of a model folder, bit for bit:
    ``verify("starter", precision="fp8")``.

    ``settings`` are the key device and keys of the table precision.  Raises what
    ``isobit.proof.verify.verify`` raises.
    """
    config = _configuration(VerifyConfig, {}, settings)
    return verification.verify(model_folder(model), config.precision, options, device=config.device)


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
    with joined() as world:
        yield world


def _configuration(
    schema: type[Schema],
    recipe: str | Path | Mapping[str, Any] | Schema,
    changes: Mapping[str, Any],
) -> Schema:
    """A recipe with its changes, checked as ``isobit.config.load.build`` does."""
    match recipe:
        case Strict():
            values, source = recipe.model_dump(exclude_unset=True), "the configuration"
        case Mapping():
            values, source = recipe, "the recipe"
        case _:
            values, source = read_toml(Path(recipe)), str(recipe)
    return build(
        schema,
        apply_overrides(values, nested_overrides(changes)),
        f"{source} with its changes" if changes else source,
    )
