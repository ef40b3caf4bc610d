"""The parts that every training has, built in one place: the policy on its device, the engine, the
trainer, and who of the two has the memory when.

Memory that a device has for itself is planned before anything is in it.  The plan says how many
pages the KV cache gets: this is the only place where what the engine reads differs from what the
recipe says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isobit.data.sampler import PromptSampler
from isobit.kernels.backend import support
from isobit.memory.turns import DeviceTurns, NoTurns, Turns, allocate_in_pages
from isobit.models.loaded import LoadedModel
from isobit.parallel.slots import Slots
from isobit.parallel.world import ALONE, World
from isobit.rewards.grading import ModelScores
from isobit.rollout.native.engine import NativeEngine
from isobit.run.outline import Outline
from isobit.run.plan import plan_device_memory
from isobit.run.reward_models import ModelRewards
from isobit.store.training_run import Extra
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Parts:
    """Policy, engine and trainer, ready to start."""

    model: LoadedModel
    engine: NativeEngine | None
    """None where nothing is ever generated."""
    trainer: Trainer
    turns: Turns
    reward_models: ModelRewards


def build_parts(outline: Outline, world: World = ALONE, learns: bool = True) -> Parts:
    """Load the policy and build around it what the outline asks for, on each rank of a world.  One
    that never learns keeps no masters.

    Raises an ``IsobitError`` for weights that cannot be used, and for a plan that does not fit the
    device.
    """
    config, rollout = outline.config, outline.config.rollout
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = world.own_device(outline.choose_device())
    slots, plan = Slots.of(outline.training.slots, world), None
    if support(device.type).has_own_memory:
        here = world.messages(world.host).count(world.host)
        plan = plan_device_memory(outline, device, world.size, here, learns, slots.hosts)
        allocate_in_pages(device)
        rollout = rollout.model_copy(update={"kv_pages": plan.pages})
    model = outline.source.load(config.precision, config.seed, device, world, learns, slots)
    engine = None
    if outline.generates:
        engine = NativeEngine(model.policy, rollout, model.tokenizer, config.seed)
    trainer = Trainer(
        model.policy,
        outline.training,
        outline.updates,
        config.seed,
        head_rate=outline.head_rate,
    )
    turns = NoTurns() if plan is None else DeviceTurns(plan, engine, trainer)
    return Parts(model, engine, trainer, turns, ModelRewards(config.reward, device))


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A training whose parts are built; each kind adds what it learns from.  As the store knows it
    (``isobit.store.training_run``).
    """

    parts: Parts
    sampler: PromptSampler
    """The order of what is learnt from."""
    inputs: Mapping[str, str]
    """Digests of what is read beside the recipe (``isobit.run.inputs``)."""

    @property
    def model(self) -> LoadedModel:
        """The policy that learns, with its folder and tokenizer."""
        return self.parts.model

    @property
    def trainer(self) -> Trainer:
        """The optimiser, its counters and its budget."""
        return self.parts.trainer

    @property
    def turns(self) -> Turns:
        """Who has the device's memory when."""
        return self.parts.turns

    @property
    def extras(self) -> Mapping[str, Extra]:
        """What else has a state."""
        return self.reward_extras()

    def reward_extras(self) -> dict[str, Extra]:
        """The reward models, where there are any."""
        models = self.parts.reward_models
        return {"reward_models": models} if len(models) else {}

    @property
    def model_scores(self) -> ModelScores:
        """What scores the rewards that are models, once the engine has made room."""
        return self.parts.reward_models.scores(self.turns.release_engine)

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes that its engine has, whatever the recipe asked for; None without an engine."""
        if self.parts.engine is None:
            return None
        limits = self.parts.engine.limits
        return {"kv_pages": limits.num_pages, "page_tokens": limits.page_tokens}
