"""The plan of a training, before its weights are read: everything that a run is built from
(``isobit.run.run``), and what it asks of the model and of the machine.

Each kind of training makes its own plan, and from there on all is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.rollout import RunRolloutConfig
from isobit.config.rules import check_sharing
from isobit.config.training import TrainingConfig
from isobit.kernels.backend import backend_of, use_back_end
from isobit.memory.activations import FrozenModel
from isobit.memory.cards import Card, support_for
from isobit.memory.device import MOMENTS, DevicePlan, DevicePlanner
from isobit.memory.host import KEPT
from isobit.models.decoder import checkpoint_shapes, decoder_shape
from isobit.models.folder import DescribedModel, choose_device
from isobit.models.saving import quantised_sites, whole_blocks
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.rollout.requests import Request
from isobit.run.data import RlData, SftData
from isobit.run.digests import digests
from isobit.run.model_source import ModelSource
from isobit.store.compatible import ALL_TOKENS
from isobit.training.optimiser import advise_smaller_moments
from isobit.util.errors import ConfigError, DataError
from isobit.util.machine import read_memory
from isobit.util.terminal import gib

Config = TypeVar("Config", RunConfig, SftConfig)
Data = TypeVar("Data", RlData, SftData)
AnyPlan: TypeAlias = "Plan[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Config, Data]):
    """A training before any weight is read: what it is made from, and what it asks of the model and
    of the machine.
    """

    config: Config
    source: ModelSource
    data: Data
    training: TrainingConfig
    """The ``training`` table as the trainer and the memory plan read it."""
    updates: int
    """Updates of the whole run: the length of the learning rate's schedule."""
    longest: int
    """Tokens of the longest sequence that training can meet."""
    learning: Sequence[str]
    """Lines on the data and the steps."""
    evaluation: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each evaluation set; empty where nothing is generated."""
    reward_models: Mapping[str, Path]
    """The folders of the parts of the reward that are models, by name."""
    frozen: tuple[FrozenModel, ...] = ()
    """Models that only score: a reference model, reward models."""
    extra_bytes: int = 0
    """Bytes of a checkpoint beside policy and optimiser, at most."""
    head_rate: float = 1.0
    """How many times as fast as the rest a value head learns."""

    @property
    def model(self) -> DescribedModel:
        """The model that the training starts from, without its weights."""
        return self.source.described

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is read beside the recipe (``isobit.run.digests``); reads the files."""
        content, model = self.data.digests(), self.model
        read = digests(self.config, model.folder, self.source.from_scratch, content)
        size = model.config.tokenizer_size
        return read | {"model.tokens": ALL_TOKENS if size is None else f"the first {size}"}

    @property
    def requests(self) -> Sequence[Sequence[Request]]:
        """All that its engine may be asked for, in sets of which no two are asked for together."""
        return ([one for asked in self.evaluation.values() for one in asked],)

    @property
    def drawn(self) -> int:
        """No sequence that its engine may be asked for has more tokens."""
        asked = (one for requests in self.evaluation.values() for one in requests)
        context = self.model.config.max_positions
        return max([self.longest, *(one.max_length(context) for one in asked)])

    @property
    def replayed(self) -> int:
        """Completions of earlier steps that a step learns from beside its own, at most."""
        if not isinstance(self.config, RunConfig):
            return 0
        fresh = self.training.prompts_per_step * self.training.samples_per_prompt
        return self.config.replay.beside(fresh)

    @property
    def generates(self) -> bool:
        """Whether there is an engine: completions are wanted where a reward grades them."""
        return self.config.reward is not None

    @property
    def samples_here(self) -> bool:
        """Whether that engine has a cache and forwards of its own, beside the trainer."""
        rollout = self.config.rollout
        return self.generates and not (isinstance(rollout, RunRolloutConfig) and rollout.servers)

    def choose_device(self) -> torch.device:
        """The device that it computes on.  Raises ConfigError where there is none such."""
        use_back_end(self.config.back_end)
        return choose_device(self.config.device, self.model.config, self.config.precision)


def check_requests(
    requests: Sequence[Sequence[Request]], check: Callable[[Sequence[Request]], None], context: int
) -> None:
    """Refuse prompts that the engine, by its ``check``, or the model's context cannot take."""
    for asked_together in requests:
        check(asked_together)
        check_context(asked_together, context)


def check_context(requests: Sequence[Request], context: int) -> None:
    """Refuse prompts whose longest answer would not fit the model's context: the context, not the
    limit asked for, would cut it.

    Raises DataError naming the first such prompt and the numbers.
    """
    for request in requests:
        tokens, new = len(request.prompt.token_ids), request.sampling.max_new_tokens
        if tokens + new > context:
            raise DataError(
                f"prompt {request.prompt.id} has {tokens} tokens; with max_new_tokens = {new} that "
                f"is {tokens + new}, more than the model's context of {context}: lower "
                f"max_new_tokens to {context - tokens} or shorten the prompt"
            )


def plan_device_memory(
    plan: AnyPlan,
    device: torch.device,
    processes: int = 1,
    here: int = 1,
    learns: bool = True,
    hosts: int = 1,
    card: Card | None = None,
    sharing: World = ALONE,
    keeps: bool = False,
) -> DevicePlan:
    """The plan of the memory that a device has for itself, of each of so many processes that train
    together; ``here`` are on this machine.  One that never ``learns`` only samples; ``hosts``
    compute slots side by side.  With a ``card`` nothing of this machine is asked.  The ranks
    ``sharing`` an engine, which all call it, plan with the least memory of theirs, since they have
    as many pages.  With ``keeps`` they are trainers that keep weights for rollouters.

    Raises ConfigError where the plan does not fit, and where the main memory does not hold what is
    to go there.
    """
    config = plan.config
    training = plan.training
    shape = plan.model.config
    flow = build_flow(config.precision, decoder_shape(shape))
    memory = read_memory() if card is None else None
    rollout = config.rollout if plan.samples_here else None
    sizes = support_for(device.type, card).sizes
    total = card.total if card else min(sharing.all_gather(available_memory(device)))
    frozen = plan.frozen if learns else tuple(one for one in plan.frozen if one.grades)
    planner = DevicePlanner(
        shape,
        flow,
        sizes,
        total,
        frozen,
        processes,
        learns,
        hosts,
        _copied_bytes(plan, flow),
        config.cluster.rollout_tp,
        _can_share(config),
        plan.drawn,
        plan.replayed if learns else 0,
        keeps,
    )
    device_plan = planner.plan(rollout, training, plan.longest)
    holders = {KEPT: min(here, processes)}  # rollouters have none
    host = {name: holders.get(name, here) * size for name, size in device_plan.host.items()}
    if memory is not None and sum(host.values()) > memory.available:
        raise ConfigError(_too_much_offloaded(plan, host, memory.available))
    return device_plan


def _can_share(config: RunConfig | SftConfig) -> bool:
    """Whether processes may share engines (``config.rules``)."""
    cluster = config.cluster.model_copy(update={"rollout_tp": 2})
    try:
        check_sharing(config.model_copy(update={"cluster": cluster}))
    except ConfigError:
        return False
    return True


def _copied_bytes(plan: AnyPlan, flow: PrecisionFlow) -> int:
    """What an engine that does not read the published weights has of its own: matrices of whole
    blocks in E4M3, and all else in BF16.
    """
    rollout, shape = plan.config.rollout, plan.model.config
    if not isinstance(rollout, RunRolloutConfig) or rollout.is_exact or rollout.servers:
        return 0
    whole = whole_blocks(shape, quantised_sites(shape, flow).keys())
    sizes = {name: prod(size) for name, size in checkpoint_shapes(shape).items()}
    return sum(size if name in whole else 2 * size for name, size in sizes.items())


def _too_much_offloaded(plan: AnyPlan, host: Mapping[str, int], available: int) -> str:
    """What would go to main memory, by the keys that send it there."""
    keys = {model.name: f"{model.table}.offload" for model in plan.frozen}
    keys |= {MOMENTS: "training.offload_moments", KEPT: "cluster.rollouters"}
    what = {KEPT: " of weights for rollouters that come back"}
    parts = [
        f"{keys[name]} puts {gib(size)}{what.get(name, '')} into main memory"
        for name, size in host.items()
    ]
    smaller = advise_smaller_moments(plan.training.moments) if MOMENTS in host else ""
    return (
        f"{' and '.join(parts)}, and {gib(available)} are free: leave "
        f"{'it' if len(parts) == 1 else 'one'} out{f', or {smaller}' if smaller else ''}"
    )


def available_memory(device: torch.device) -> int:
    """Bytes of a device's own memory that this process has or could have now."""
    memory = backend_of(device).memory
    assert memory is not None, "the device has a memory of its own"
    return memory.available()
