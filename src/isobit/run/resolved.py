"""A recipe with what it names, resolved once at a run's start and handed on.

    resolve     the model's folder, config and tokenizer, and the folders of reward models
    as_begun    the date that chat templates write, and the flows that the recipe does not name; of
                a resumed run those that it had
    settled     what model and data decide where the recipe leaves it open

All of it is there before anything compares or records the recipe.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from isobit.config.base import MAX_STEPS
from isobit.config.data import ChatConfig
from isobit.config.load import build
from isobit.config.precision import PrecisionConfig, recorded_precision
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.reward import RewardConfig, RewardPart, ScoringPreset
from isobit.config.rollout import SpecialTokens
from isobit.config.tables import ON_MISMATCH
from isobit.data.chat_template import reads_clock
from isobit.models.config import ModelConfig
from isobit.parallel.world import ALONE, World, broadcast
from isobit.run.model_source import ModelSource, describe_source
from isobit.run.plan import AnyPlan
from isobit.run.reward_models import reward_model_folders
from isobit.store.checkpoint import MANIFEST, folders_by_step
from isobit.store.directory import RunDirectory
from isobit.store.manifest import recorded_targets
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain

Chat = TypeVar("Chat", bound=ChatConfig)
AnyRecipe = TypeVar("AnyRecipe", bound=RunConfig | SftConfig)
AnyReward = TypeVar("AnyReward", RewardConfig, RewardPart)


@dataclass(frozen=True, slots=True)
class ResolvedRecipe(Generic[AnyRecipe]):
    """A recipe, and what it names."""

    config: AnyRecipe
    source: ModelSource
    """The model that the training starts from."""
    reward_models: Mapping[str, Path]
    """Folders by the name of the part of the reward (``reward_model_folders``)."""
    with_weights: bool = True
    """Whether weights of models of the hub are fetched."""
    data: Any = None
    """The ``RlData`` or ``SftData``, where they had to be read to settle the recipe."""

    @property
    def shape(self) -> ModelConfig:
        """The model that is trained, without a value head."""
        return self.source.described.config


def resolve(config: AnyRecipe, weights: bool = True) -> ResolvedRecipe[AnyRecipe]:
    """Find and read what a recipe names; without ``weights`` those of models of the hub are not
    fetched.  Raises as ``describe_source`` and ``ModelSource.with_lora`` do.
    """
    if isinstance(config, SftConfig):
        source = describe_source(config.model, config.from_scratch, config.objective, weights)
    else:
        source = describe_source(config.model, weights=weights)
    folders = reward_model_folders(config.reward, weights)
    return ResolvedRecipe(config, source.with_lora(config.lora), folders, weights)


def as_begun(
    recipe: ResolvedRecipe[AnyRecipe], resume: bool, world: World = ALONE
) -> ResolvedRecipe[AnyRecipe]:
    """The recipe with the date of its run, when that began, and if it is resumed with its flow,
    those of its reward models and what it shows of special tokens, where the recipe names none.
    """
    config = recipe.config
    if resume:
        for with_its in (with_flow_of_run, with_scoring_of_run, with_text_of_run):
            config = with_its(config, world)
    folder = recipe.source.described.folder
    known = partial(_saved_date, RunDirectory(config.output)) if resume else lambda: None
    folders = recipe.reward_models.values()
    config = with_date_of(config, folder, folders, world, known)
    source = with_targets_of_run(recipe.source, config, world) if resume else recipe.source
    return replace(recipe, config=config, source=source)


def with_targets_of_run(
    source: ModelSource, config: RunConfig | SftConfig, world: World = ALONE
) -> ModelSource:
    """The model with the adapters that the run in its directory has."""

    def recorded() -> Sequence[str] | None:
        directory = RunDirectory(config.output)
        if not folders_by_step(directory.checkpoints):
            return None  # it begins anew
        with suppress(OSError, ValueError, RecursionError):
            return recorded_targets(json.loads(read_plain(directory.manifest)))
        return None

    if config.lora is None:
        return source
    model = replace(source.described.config, lora=None)
    plain = replace(source, described=replace(source.described, config=model))
    return plain.with_lora(config.lora, broadcast(world, recorded))


def with_date_of(
    config: AnyRecipe,
    model: Path,
    reward_models: Iterable[Path],
    world: World = ALONE,
    known: Callable[[], datetime | None] = lambda: None,
) -> AnyRecipe:
    """A recipe with one date for the templates of the folders of its model and its reward models,
    as ``with_date`` chooses it.
    """
    folders = [*([model] if config.data.chat else []), *reward_models]
    data = with_date(config.data, folders, world, known)
    return config if data is config.data else config.model_copy(update={"data": data})


def with_date(
    chat: Chat,
    folders: Sequence[Path],
    world: World = ALONE,
    known: Callable[[], datetime | None] = lambda: None,
) -> Chat:
    """Settings of chat templates with a date, the same on all ranks: where none is set and a
    template of the model ``folders`` reads the clock, the date that is ``known``, or the time now.
    """

    def date() -> str | None:
        reads = any(map(reads_clock, folders))
        return (known() or now()).isoformat() if reads else None

    if chat.date is not None or (text := broadcast(world, date)) is None:
        return chat
    return chat.model_copy(update={"date": datetime.fromisoformat(text)})


def now() -> datetime:
    return datetime.now().replace(microsecond=0)


_FORMERLY_OTHERS = ("preset", "dgrad", "wgrad")
"""Keys of ``precision`` that had other defaults in earlier versions."""


def with_flow_of_run(config: AnyRecipe, world: World = ALONE) -> AnyRecipe:
    """A recipe that leaves its flow, or the backward of it, as the run in its directory has it,
    where it names none: earlier versions had other defaults.
    """
    saved = broadcast(world, lambda: _saved(RunDirectory(config.output), "precision"))
    if not isinstance(saved, Mapping) or "preset" not in saved:
        return config
    ran, given = recorded_precision(saved), config.precision
    if "preset" in given.model_fields_set and given.preset != ran["preset"]:
        return config
    named = given.model_dump(exclude_unset=True)
    table = {key: ran[key] for key in _FORMERLY_OTHERS if key not in named} | named
    precision = build(PrecisionConfig, table, f"the precision of the run in {config.output}")
    return config.model_copy(update={"precision": precision})


def with_scoring_of_run(config: AnyRecipe, world: World = ALONE) -> AnyRecipe:
    """A recipe whose reward models score in the flows that the run in its directory has, where it
    names none: those of earlier versions scored in ``fp8`` by default.
    """
    saved = broadcast(world, lambda: _saved(RunDirectory(config.output), "reward"))
    if config.reward is None or not isinstance(saved, Mapping):
        return config
    of_parts = saved.get("parts")
    parts = {
        name: _scored_as(part, of_parts.get(name) if isinstance(of_parts, Mapping) else None)
        for name, part in config.reward.parts.items()
    }
    reward = _scored_as(config.reward, saved).model_copy(update={"parts": parts})
    return config.model_copy(update={"reward": reward})


def with_text_of_run(config: AnyRecipe, world: World = ALONE) -> AnyRecipe:
    """A recipe that shows special tokens as the run in its directory does, where it names nothing:
    those of earlier versions hid them by default.
    """
    saved = broadcast(
        world, lambda: _saved(RunDirectory(config.output), "rollout", "special_tokens")
    )
    rollout = config.rollout
    if saved not in get_args(SpecialTokens) or "special_tokens" in rollout.model_fields_set:
        return config
    rollout = rollout.model_copy(update={"special_tokens": saved})
    return config.model_copy(update={"rollout": rollout})


def _scored_as(reward: AnyReward, saved: Any) -> AnyReward:
    if not isinstance(saved, Mapping) or "model_precision" in reward.model_fields_set:
        return reward
    if (preset := saved.get("model_precision")) not in get_args(ScoringPreset):
        return reward
    return reward.model_copy(update={"model_precision": preset})


def with_check_of_run(
    config: RunConfig,
    resume: bool,
    world: World = ALONE,
    say: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """A recipe that does at a mismatch what its run did so far, where it is resumed and the recipe
    leaves that open: runs of earlier versions warned by default, and go on so.
    """
    if not resume or config.check.on_mismatch != "auto":
        return config
    saved = broadcast(world, lambda: _saved(RunDirectory(config.output), "check", "on_mismatch"))
    if saved not in ON_MISMATCH:
        return config
    say(f'check.on_mismatch is "{saved}", as the run has recorded; set it to have another')
    check = config.check.model_copy(update={"on_mismatch": saved})
    return config.model_copy(update={"check": check})


def _saved_date(directory: RunDirectory) -> datetime | None:
    saved = _saved(directory, "data", "date")
    with suppress(ValueError, TypeError):
        return datetime.fromisoformat(saved)
    return None


def _saved(directory: RunDirectory, *keys: str) -> Any:
    """A setting in the run's manifest, or where that is lost, in its newest checkpoint's; None
    where neither has it.
    """
    checkpoints = folders_by_step(directory.checkpoints)
    newest_first = [checkpoints[step] / MANIFEST for step in sorted(checkpoints, reverse=True)]
    for path in (directory.manifest, *newest_first):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            value = json.loads(read_plain(path))["config"]
            for key in keys:
                value = value[key]
            return value
    return None


def settled(
    recipe: ResolvedRecipe[AnyRecipe],
    read: Callable[[ResolvedRecipe[AnyRecipe]], AnyPlan],
    say: Callable[[str], None] = lambda _: None,
) -> ResolvedRecipe[AnyRecipe]:
    """The recipe with what model and data decide where it leaves that open:
    ``rollout.max_new_tokens``, which is at most half of a small context, and ``training.steps``,
    where ``data.epochs`` is set.  For the latter ``read``, which plans the training, reads the
    data, which the result then has.

    Raises ConfigError where ``training.steps`` is set as well, to another number, and what
    ``read`` raises.
    """
    recipe = _with_room(recipe, say)
    config = recipe.config
    epochs, training = config.data.epochs, config.training
    if epochs is None:
        return recipe
    data = read(recipe).data
    rows, per_step = len(data.prompts), training.prompts_per_step
    steps = math.ceil(epochs * rows / per_step)
    if "steps" in training.model_fields_set and training.steps != steps:
        raise ConfigError(
            f"data.epochs is {epochs:g}, which is {steps} steps of {per_step} of the {rows} "
            f"training prompts, but training.steps is {training.steps}; leave one of them out"
        )
    if steps > MAX_STEPS:
        raise ConfigError(
            f"data.epochs is {epochs:g}, which is {steps:,} steps; a run has at most "
            f"{MAX_STEPS:,}: lower it, or raise training.prompts_per_step"
        )
    training = training.model_copy(update={"steps": steps})
    say(f"data.epochs = {epochs:g} of {rows} prompts: {steps} steps of {per_step}")
    return replace(recipe, config=config.model_copy(update={"training": training}), data=data)


def _with_room(
    recipe: ResolvedRecipe[AnyRecipe], say: Callable[[str], None]
) -> ResolvedRecipe[AnyRecipe]:
    """The recipe with completions that leave room for prompts, where it does not limit them."""
    config, half = recipe.config, recipe.shape.max_positions // 2
    rollout = config.rollout
    if config.reward is None or "max_new_tokens" in rollout.model_fields_set:
        return recipe
    if half >= rollout.max_new_tokens:
        return recipe
    say(
        f"completions have at most {half} tokens, half of the model's context; another "
        "limit is rollout.max_new_tokens"
    )
    rollout = rollout.model_copy(update={"max_new_tokens": half})
    return replace(recipe, config=config.model_copy(update={"rollout": rollout}))
