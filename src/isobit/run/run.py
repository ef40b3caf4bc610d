"""A run: a training with all of its parts, whatever it learns from.

On a device with a memory of its own the memory is planned before anything is in it.  The plan says
how many pages the KV cache gets: this is the only place where what the engine reads differs from
what the recipe says.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self

import torch

from isobit.config.recipes import Recipe, SftConfig
from isobit.data.sampler import PromptSampler
from isobit.data.spool import Mapped
from isobit.environments.pool import Environments
from isobit.kernels.backend import support
from isobit.memory.device import DevicePlan
from isobit.memory.sharing import DeviceSharing, MemorySharing, allocate_in_pages
from isobit.observe.console import Console, describe_policy, silent
from isobit.parallel.gradient_sum import Slots
from isobit.parallel.world import ALONE, World, run_on_all
from isobit.precision.flow import describe_flow
from isobit.rewards.grading import Graders, ModelScores
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.requests import Handle
from isobit.run.acting import Generate
from isobit.run.agreement import check_machines
from isobit.run.crests import notice_crests
from isobit.run.engines import make_engine, sharing_world
from isobit.run.evaluation import Evaluation, Evaluator, OnProgress
from isobit.run.frozen_models import load_teacher, teacher_table
from isobit.run.grading import RecordedGrading
from isobit.run.interruption import Interruption
from isobit.run.plan import Config, Data, Plan, check_requests, plan_device_memory
from isobit.run.reward_models import ModelRewards
from isobit.store.keeper import check_hook
from isobit.store.reward_record import AnswerRecord, RewardRecord
from isobit.store.schedule_record import ScheduleRecord
from isobit.store.training_run import Extra
from isobit.store.waiting_writer import WaitingWriter
from isobit.training.trainer import Trainer
from isobit.util.clock import Clock


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is there before a run is built, and outlives it."""

    console: Console
    interruption: Interruption
    graders: Graders | None
    """The processes that grade; None without a reward."""
    rewards: RewardRecord
    """Rewards of an interrupted run, which come before those of the graders."""
    answers: AnswerRecord
    """What an environment said in an interrupted run, which comes before what it says."""
    schedule: ScheduleRecord
    """What each step of an interrupted run learnt from, which comes before another schedule."""
    writer: WaitingWriter | None = None
    """Writes the records; None where they are sent to others."""
    environments: Environments[Handle] | None = None
    """The processes of an environment, where this rank samples with one."""

    def grading(self, models: ModelScores, world: World) -> RecordedGrading:
        """Grading by the record, the graders and reward models."""
        return RecordedGrading(
            self.rewards, self.graders, models, self.interruption, world, self.writer
        )

    @classmethod
    def none(cls, world: World) -> Self:
        """Nothing: for a run that is looked at and does no step, or that others command."""
        rewards, answers = RewardRecord(lambda _: None), AnswerRecord(lambda _: None)
        schedule = ScheduleRecord(lambda _: None)
        return cls(silent(), Interruption(world), None, rewards, answers, schedule)


class Run(ABC, Generic[Config, Data]):
    """A training with all of its parts, on each rank of ``world``."""

    saves_model_when_interrupted = False
    """Whether a signal to stop leaves the model folder too, beside a checkpoint."""

    def __init__(
        self,
        plan: Plan[Config, Data],
        world: World = ALONE,
        around: Surroundings | None = None,
        learns: bool = True,
        keeps: bool = False,
    ) -> None:
        """Load the policy and build the engine and the trainer around it, on each rank of a world.
        A run that never ``learns`` keeps no masters; one that ``keeps`` weights has rollouters that
        come back.  Writes nothing.

        Raises an ``IsobitError`` for weights that cannot be used, for a plan that does not fit the
        device, and for prompts that the engine or the model's context cannot take.
        """
        config, rollout = plan.config, plan.config.rollout
        around = around or Surroundings.none(world)
        sharing = sharing_world(world, config.cluster.rollout_tp)
        run_on_all(world, lambda: None if world.rank else check_hook(config.checkpoint.on_save))
        self.config, self.data, self.world = config, plan.data, world
        self.console, self.interruption = around.console, around.interruption
        self.clock = Clock(world.pulse.beat)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = world.own_device(plan.choose_device())
        slots = Slots.of(plan.training.slots, world)
        device_plan = self._planned_memory(plan, device, learns, slots, sharing, keeps)
        if device_plan is not None:
            rollout = rollout.model_copy(update={"kv_pages": device_plan.pages})
        self.model = plan.source.load(
            config.precision, config.seed, device, world, learns, slots, sharing
        )
        self._engine: RolloutEngine | None = None
        if plan.generates:
            self._engine = make_engine(
                self.model, rollout, config, world, sharing, plan.drawn, self.interruption.check
            )
        policy, folder = self.model.policy, self.model.folder
        self.teacher = load_teacher(config, policy, folder) if learns else None
        divergence = None if self.teacher is None else self.teacher.divergence
        self.trainer = Trainer(
            policy, plan.training, plan.updates, config.seed,
            head_rate=plan.head_rate, teacher=divergence,
        )  # fmt: skip
        self.turns: MemorySharing = MemorySharing()
        if device_plan is not None:
            self.turns = DeviceSharing(device_plan, self._engine, self.trainer)
        self.reward_models = ModelRewards(
            config.reward, plan.reward_models, device, config.data.date
        )
        self.grading = around.grading(self.reward_models.scores(self._release_engine), world)
        self.evaluator: Evaluator | None = None
        if self._engine is not None:
            check_requests(plan.requests, self._engine.check, self.model.context)
            self.evaluator = Evaluator(self._engine, plan.evaluation, world, self.generation(plan))
        per_step = config.training.prompts_per_step
        self.sampler = PromptSampler(plan.data.prompts, per_step, config.seed, config.data.shuffle)
        self.inputs: Mapping[str, str] = plan.inputs
        self.extras = self._frozen_extras()
        """What else a checkpoint holds, by the name of its file."""

    def _frozen_extras(self) -> dict[str, Extra]:
        """The models beside the policy, whose digests a checkpoint holds."""
        extras: dict[str, Extra] = {}
        if self.teacher is not None:
            extras["teacher"] = self.teacher
        if len(self.reward_models):
            extras["reward_models"] = self.reward_models
        return extras

    def _planned_memory(
        self,
        plan: Plan[Config, Data],
        device: torch.device,
        learns: bool,
        slots: Slots,
        sharing: World,
        keeps: bool = False,
    ) -> DevicePlan | None:
        """The plan of the device's own memory, which is taken in pages from here on; None where it
        has none.
        """
        if not support(device.type).has_own_memory:
            return None
        world = self.world
        here = world.all_gather(world.host).count(world.host)
        device_plan = plan_device_memory(
            plan, device, world.size, here, learns, slots.hosts, sharing=sharing, keeps=keeps
        )
        allocate_in_pages(device)
        return device_plan

    def _release_engine(self) -> None:
        self.turns.release_engine()

    # What each kind of training says of itself.

    @abstractmethod
    def evaluate(self, progress: OnProgress, grading: RecordedGrading) -> Evaluation[Any]:
        """Every evaluation set under the current policy."""

    def describe_sampling(self) -> list[str]:
        """Lines on what is sampled, and with which tools."""
        return []

    def describe_engine(self) -> list[str]:
        """Lines on the engine, where it is another one than ours."""
        return []

    def generation(self, plan: Plan[Config, Data]) -> Generate | None:
        """What completes the problems of an evaluation; None for the engine alone."""
        return None

    def check_machines(self) -> None:
        """Refuse ranks whose machines would compute other bits."""
        check_machines(self.world, self.model.policy.device)

    def prove(self) -> None:
        """What is tried once, between the first evaluation and the first step.  It may publish the
        weights, and ends with those that it began with.  All ranks together.
        """

    def data_figures(self) -> dict[str, Any]:
        """Numbers about the data that it learns from and is measured on, for the manifest."""
        return self.data.figures()

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes that its engine has, for the manifest; None where nothing is generated."""
        if self._engine is None:
            return None
        return self._engine.figures()

    @property
    def engine(self) -> RolloutEngine:
        """The engine, which samples by the policy."""
        assert self._engine is not None, "nothing is generated"
        return self._engine

    def describe(self) -> list[str]:
        """The first lines: the model, the data, the flow, the plan of the memory."""
        config, policy = self.config, self.model.policy
        is_drawn = isinstance(config, SftConfig) and config.from_scratch is not None
        return [
            describe_policy("from scratch" if is_drawn else config.model, policy),
            self.data.describe(config.training),
            *self.describe_sampling(),
            *self.data.notes,
            *self.describe_teacher(),
            *(f"  {line}" for line in describe_flow(policy.flow)),
            *self.describe_engine(),
            *self.turns.describe(),
        ]

    def describe_teacher(self) -> list[str]:
        """A line on who is learnt from; none without a teacher."""
        table = teacher_table(self.config)
        if table is None:
            return []
        name, kl = table.model or self.config.model, f"{table.kl} KL over the vocabulary"
        if table.kl == "sampled":
            kl = "reverse KL by the sampled tokens"
        elif table.top_k:
            kl = f"{table.kl} KL over its {table.top_k} likeliest tokens and the rest"
        return [f"teacher: {name}, {table.precision}; {kl}"]

    def describe_crests(self) -> list[str]:
        """A line on what INT8 finds hard in the first prompts, on the rank that prints."""
        if self.world.rank > 0:
            return []
        return notice_crests(
            self.model.policy, Mapped(self.data.prompts, lambda prompt: prompt.token_ids)
        )

    # Evaluation.

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows the step."""
        return evaluation_is_due(self.config, step)

    def evaluate_now(self) -> Evaluation[Any]:
        """Every evaluation set under the current policy.  Raises Interrupted where a signal to stop
        has come.
        """
        with self.clock("evaluation"), self.console.generating("evaluation") as progress:
            figures = self.evaluate(self.interruption.watched(progress), self.grading)
        run_on_all(self.world, self.interruption.check)
        return figures


def evaluation_is_due(config: Recipe, step: int) -> bool:
    """Whether a run evaluates then: before the first step, after every ``evaluation.every`` steps,
    and after the last.
    """
    every = config.evaluation.every
    return step in (0, config.training.steps) or (every > 0 and step % every == 0)
