"""What reinforcement learning adds to a run: its plan, and its parts.

Everything is made and checked before the run's directory exists, and the cheap refusals come first:
a rule of the recipe is reported before any file is read, and a prompt that is too long before any
weight.  Nothing is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from isobit.algorithms.objective import Algorithm, Distilled
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import PpoConfig
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_run
from isobit.data.spool import Mapped
from isobit.data.stop_tokens import describe_end_of_turn
from isobit.memory.cache_size import batched_tokens
from isobit.models.adapter_delivery import filled
from isobit.models.config import ModelConfig
from isobit.models.function import is_one_function
from isobit.models.kv_calibration import calibrate_kv_scales
from isobit.models.tensor_parallel import check_cut
from isobit.observe.evaluation import EvalResult
from isobit.observe.metrics import check_packages, check_services
from isobit.parallel.world import ALONE, World
from isobit.proof.redraw import redraw_some
from isobit.records.packing import pack
from isobit.records.schedule import Schedule
from isobit.records.text import Completion, Group, SamplingParams
from isobit.records.wire import completions_of
from isobit.rollout.carried_episodes import CarriedEpisodes
from isobit.rollout.engine_stats import EngineStats, Progress
from isobit.rollout.episodes import Episodes
from isobit.rollout.requests import Request
from isobit.rollout.shared import generate_shared
from isobit.run.acting import Generate
from isobit.run.data import RlData, evaluation_requests, load_prompts
from isobit.run.evaluation import Evaluation, OnProgress
from isobit.run.free_batches import FreeBatches
from isobit.run.frozen_models import (
    checkpoint_bytes,
    describe_reference,
    describe_teacher,
    load_reference,
)
from isobit.run.grading import RecordedGrading
from isobit.run.log import RlLog
from isobit.run.pending import Pending, pending_bytes
from isobit.run.plan import Plan
from isobit.run.recorded_inputs import RecordedInputs
from isobit.run.resolved import ResolvedRecipe
from isobit.run.reward_models import plan_reward_models
from isobit.run.rollouters import Rollouters, ask_for, evaluation_of, receive_for
from isobit.run.run import Run, Surroundings
from isobit.store.resume import Start
from isobit.store.reward_record import AnswerRecord, RewardRecord
from isobit.store.schedule_record import ScheduleRecord
from isobit.training.advantage_estimator import AdvantageEstimator
from isobit.training.calibration import build_calibration, describe_shadow
from isobit.training.checks import check_noise
from isobit.training.replay_buffer import ReplayBuffer
from isobit.training.step import Learner
from isobit.util.errors import ConfigError, MismatchError
from isobit.util.terminal import counted

AnyEpisodes = TypeVar("AnyEpisodes", bound=Episodes)
VALUE_HEAD_RATE = 10.0
"""Default learning rate of a value head, as a multiple of the policy's: the head starts at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPlan(Plan[RunConfig, RlData]):
    """The plan of a run of reinforcement learning."""

    algorithm: Algorithm
    sampling: SamplingParams
    rollouts: Sequence[Request]
    """One sample of each training prompt: what the engine is asked for."""

    @property
    def requests(self) -> Sequence[Sequence[Request]]:
        """All of an evaluation, or prompts to learn from."""
        return [one for asked in self.evaluation.values() for one in asked], self.rollouts


class RlRun(Run[RunConfig, RlData]):
    """A run of reinforcement learning (``isobit.run.loop``)."""

    def __init__(
        self,
        plan: RlPlan,
        world: World = ALONE,
        rollouters: Rollouters | None = None,
        around: Surroundings | None = None,
        learns: bool = True,
    ) -> None:
        """``rollouters`` sample for a run whose processes only train; a run that never ``learns``
        belongs to one of them.
        """
        around = around or Surroundings.none(world)
        keeps = rollouters is not None and rollouters.can_replace
        super().__init__(plan, world, around, learns, keeps)
        config, policy = self.config, self.model.policy
        self.algorithm = plan.algorithm
        self.sampling = plan.sampling
        self.rollouters = rollouters
        self._environments = around.environments
        self.recorded = RecordedInputs(self.grading, around.answers, around.schedule, around.writer)
        """What the run is given from outside."""
        self._episodes = self._with_answers(around.answers)
        if rollouters is not None:
            self.engine.release()  # it is asked for nothing
        self.reference = load_reference(config, policy, self.model.folder) if learns else None
        schedule = schedule_of(config)
        self.pending = Pending(schedule, plan.data.train, not plan.algorithm.needs_greedy)
        is_free = config.asynchrony.max_staleness is not None
        self.free_batches = self._free_batches(schedule, around, learns) if is_free else None
        """Draws the groups of a recorded schedule; None where it is written beforehand."""
        self.replay: ReplayBuffer | None = None
        if config.replay.fraction > 0:
            self.replay = ReplayBuffer(config.replay, config.seed)
        self.calibration = build_calibration(config, plan.algorithm, self.trainer)
        self._redrawn = 0
        """The version of the weights whose samples were last drawn again."""
        self.exact = is_one_function(self.engine.function, self.trainer.function)
        """Whether what the engine records and what the trainer computes are one function."""
        self.learner = self._make_learner()
        extras = {
            "reference": self.reference,
            "replay": self.replay,
            "calibration": self.calibration,
            "pending": self.pending if schedule.ahead and not is_free else None,
            "open_groups": self.free_batches if schedule.ahead else None,
        }
        self.extras |= {name: extra for name, extra in extras.items() if extra is not None}

    def _make_learner(self) -> Learner:
        """The learner of all steps, from what the run has by now."""
        config, teacher = self.config, self.teacher
        estimator = AdvantageEstimator(
            trainer=self.trainer,
            algorithm=self.algorithm,
            config=config.algorithm,
            exact=self.exact,
            max_new_tokens=config.rollout.max_new_tokens,
            old_log_probs=config.training.old_log_probs,
            corrections=config.corrections,
            reference=None if self.reference is None else self.reference.frozen,
            teacher=teacher.frozen if teacher and teacher.divergence is None else None,
            teaching=config.teacher,
        )
        return Learner(estimator, self.replay, self.calibration, config.check.repeat_every)

    def _free_batches(self, schedule: Schedule, around: Surroundings, learns: bool) -> FreeBatches:
        data, samples = self.data, self.config.training.samples_per_prompt
        like = Request(data.prompts[0], 0, samples, self.sampling)
        return FreeBatches(
            schedule,
            self.world,
            self.engine,
            self.sampler,
            like,
            data.train,
            self.recorded,
            learns,
            self.config.environment is not None,
            self._with_answers(around.answers, CarriedEpisodes),
        )

    def _with_answers(
        self, answers: AnswerRecord, kind: type[AnyEpisodes] = Episodes
    ) -> AnyEpisodes | None:
        """Episodes with what tools say from ``answers`` where it still has some, else from the
        environment; None where this rank samples with none.
        """
        if self._environments is None:
            return None
        assert self.config.environment is not None
        assert self.data.tools is not None
        return kind(
            self.config.environment,
            self.data.tools,
            self._environments,
            answers,
            self.model.tokenizer,
            self.model.context,
            self.engine,
        )

    def take_records(
        self, rewards: RewardRecord, answers: AnswerRecord, schedule: ScheduleRecord
    ) -> None:
        """Give what these records still have before anything new, from now on."""
        self.grading = replace(self.grading, record=rewards)
        self.recorded = replace(
            self.recorded, grading=self.grading, answers=answers, schedule=schedule
        )
        self._episodes = self._with_answers(answers)
        if self.free_batches is not None:
            self.free_batches.take_records(self.recorded)

    def describe_sampling(self) -> list[str]:
        shape = self.model.policy.config
        text = describe_text(self.config, shape, self.model.tokenizer, self.sampling)
        return text if self.data.tools is None else [*text, self.data.tools.describe()]

    def describe_engine(self) -> list[str]:
        if self.config.rollout.engine == "http":
            names = ", ".join(self.config.rollout.servers)
            return [f"servers sample, by the trainer's own function: {names}"]
        if self.config.rollout.is_exact:
            return []
        names = ", ".join(one.type for one in self.config.corrections) or "none"
        where = f" at {', '.join(servers)}" if (servers := self.config.rollout.servers) else ""
        return [
            f"{self.engine.function.back_end} samples{where}, with weights and kernels of its own: "
            "its log-probabilities are not the trainer's; old log-probabilities are recomputed, "
            f"corrections: {names}"
        ]

    def notes(self) -> list[str]:
        """Lines of the engines of all ranks since the last call.  All ranks together."""
        return [note for notes in self.world.all_gather(self.engine.notes()) for note in notes]

    def next_requests(self, count: int) -> list[Request]:
        """The next ``count`` prompts, as the engine takes them."""
        samples = self.config.training.samples_per_prompt
        return [
            Request(prompt, visit, samples, self.sampling)
            for prompt, visit in self.sampler.next(count)
        ]

    def calibrate_if_due(self) -> None:
        """Set the scales of Q, K and V a tensor by the prompts of the next step, where these are to
        set them for the weights as they are now; all ranks together, while nothing is sampled.
        Another engine than ours makes its own.
        """
        policy, scales = self.model.policy, self.model.policy.kv_scales
        if scales is None or not scales.is_due or self.config.rollout.engine != "native":
            return
        with self.clock("calibration"), self.console.busy("calibrating"):
            next_prompts = self.sampler.state()
            prompts = [prompt.token_ids for prompt, _ in self.sampler.next()]
            self.sampler.restore(next_prompts)
            tokens = batched_tokens(self.config.rollout, policy.backend.sizes)
            calibrate_kv_scales(policy, prompts, tokens)

    def generate(
        self,
        requests: Sequence[Request],
        progress: Callable[[Progress], None] | None = None,
        complete: Callable[[int, list[Completion]], None] | None = None,
    ) -> tuple[list[list[Completion]], list[int], EngineStats]:
        """What ``generate_shared`` gives, with an environment by episodes."""
        scales = self.model.policy.kv_scales
        if scales is None:
            return self._generate(requests, progress, complete)
        scales.forget_sampled()
        completions, ranks, stats = self._generate(requests, progress, complete)
        stats.kv_ratio = max(self.world.all_gather(scales.largest_ratio()))
        return completions, ranks, stats

    def _generate(
        self,
        requests: Sequence[Request],
        progress: Callable[[Progress], None] | None,
        complete: Callable[[int, list[Completion]], None] | None,
    ) -> tuple[list[list[Completion]], list[int], EngineStats]:
        if self._episodes is None:
            return generate_shared(self.world, self.engine, requests, progress, complete)
        version = self.model.policy.version
        result = self._episodes.generate(self.world, version, requests, progress, complete)
        self.recorded.write_answers()
        return result

    def check_noise(
        self, requests: Sequence[Request], completions: Sequence[list[Completion]]
    ) -> None:
        """Draw a few of the samples that servers have drawn again, in the first rollout by each
        version of the weights.  Raises MismatchError where the run is to stop at others.
        """
        policy = self.model.policy
        if self.config.rollout.engine != "http" or not self.exact:
            return
        if self._redrawn == policy.version:
            return
        self._redrawn = policy.version
        with self.turns.training(self.clock):
            problem = redraw_some(policy, requests, completions, self.config.seed)
        self.console.notes(check_noise(self.config.check, problem))

    def check_noise_of(self, version: int, groups: Sequence[Group]) -> None:
        """``check_noise`` of the groups that weights of one version, the present ones, have drawn
        from the first token to the last.
        """
        drawn = [
            group
            for group in groups
            if all(set(one.weights_versions) <= {version} for one in group.completions)
        ]
        if drawn:
            requests = [
                Request(group.prompt, group.visit, len(group.completions), self.sampling)
                for group in drawn
            ]
            self.check_noise(requests, [group.completions for group in drawn])

    def generation(self, plan: Plan[RunConfig, RlData]) -> Generate | None:
        return None if plan.data.tools is None else self.generate

    def check_machines(self) -> None:
        super().check_machines()
        if self.rollouters is not None:
            self.rollouters.check_machines(self.model.policy.device, self.inputs)

    def prove(self) -> None:
        """Fill each B of LoRA with small numbers, before the first step, sample some tokens, and
        compare their log-probabilities with the trainer's.  At the start B is zeros, and the first
        step's own comparison would not see an adapter that one side does not read.  Scales a tensor
        are those of the few prompts, with and without.  All ranks together.  Raises MismatchError.
        """
        policy, scales = self.model.policy, self.model.policy.kv_scales
        if policy.config.lora is None or not self.exact:
            return
        begun = None if scales is None else scales.state()
        if scales is not None:
            prompts = [one.prompt.token_ids for one in self._few_requests()]
            tokens = batched_tokens(self.config.rollout, policy.backend.sizes)
            calibrate_kv_scales(policy, prompts, tokens)
        probed = None if scales is None else scales.state()
        base = self._sampled_and_scored()
        with filled(policy):
            if scales is not None and probed is not None:
                scales.restore(probed)  # a publication may have set others
            sampled, scored = self._sampled_and_scored()
        if scales is not None and begun is not None:
            scales.restore(begun)
            scales.forget_sampled()
        same = torch.equal(sampled, scored)
        if same and not (sampled.shape == base[0].shape and torch.equal(sampled, base[0])):
            return
        what = "are those without them" if same else "are not the trainer's"
        raise MismatchError(
            f"before the first step, with adapters that are not zero, log-probabilities {what}: "
            "the engine or the trainer does not read them; `isobit verify` on the run's adapters "
            "with --bisect names the operation"
        )

    def sample_few(self) -> list[Completion]:
        """The beginnings of answers to the next prompts, which stay the next ones."""
        completions, _, _ = generate_shared(self.world, self.engine, self._few_requests())
        return [completion for of_prompt in completions for completion in of_prompt]

    def _few_requests(self) -> list[Request]:
        next_prompts = self.sampler.state()
        prompts = self.sampler.next(min(2, self.config.training.prompts_per_step))
        self.sampler.restore(next_prompts)
        sampling = replace(self.sampling, max_new_tokens=min(4, self.sampling.max_new_tokens))
        return [Request(prompt, visit, 1, sampling) for prompt, visit in prompts]

    def _sampled_and_scored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of a few tokens as an engine records them, and the trainer's."""
        if self.rollouters is None:
            completions = self.sample_few()
        else:
            ask_for("few", self.rollouters, self)
            completions = completions_of(receive_for(self.rollouters, self)["samples"])
        [batch] = pack([completion.sequence for completion in completions], 1 << 30)
        with self.turns.training(self.clock):
            return batch.recorded_log_probs, self.trainer.scorer.score(batch).log_probs

    def evaluate(self, progress: OnProgress, grading: RecordedGrading) -> Evaluation[EvalResult]:
        """Every evaluation set under the current policy."""
        assert self.evaluator is not None, "reinforcement learning always generates"
        self.calibrate_if_due()  # before the first step
        if self.rollouters is None:
            return self.evaluator.run(progress, grading)
        ask_for("evaluation", self.rollouters, self)
        return evaluation_of(receive_for(self.rollouters, self), self.evaluator)

    def open_log(self, start: Start) -> RlLog:
        """The log, which makes the run's directory, or takes an old one back to where the run
        stands.
        """
        return RlLog(
            self,
            start,
            self.console,
            self.clock,
            sampling=self.sampling,
            exact=self.exact,
            turns=self.turns,
            replay=self.replay,
            samples_here=self.rollouters is None,
        )


def prepare_rl(
    recipe: ResolvedRecipe[RunConfig],
    world: World = ALONE,
    rollouters: Rollouters | None = None,
    around: Surroundings | None = None,
    learns: bool = True,
) -> RlRun:
    """Load and check a run, on each rank of a world.  Raises an ``IsobitError`` that names what
    cannot be used; writes nothing.
    """
    check_services(recipe.config.tracking.services())
    return RlRun(read_rl(recipe), world, rollouters, around, learns)


def read_rl(recipe: ResolvedRecipe[RunConfig]) -> RlPlan:
    """Read everything but the weights, and but for data that the recipe has already.  Raises an
    ``IsobitError`` for what cannot be used.
    """
    config, weights = recipe.config, recipe.with_weights
    check_packages(config.tracking.services())
    check_run(config)
    algorithm = build_algorithm(config.algorithm, config.rollout.max_new_tokens)
    if algorithm.needs_greedy and config.asynchrony.max_staleness is not None:
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}, whose greedy samples belong to one "
            "batch, and async.max_staleness is set; leave it out, or set async.lag"
        )
    if config.teacher is not None and config.teacher.kl != "sampled":
        algorithm = Distilled(algorithm, config.teacher.coefficient)
    source = recipe.source.with_value_head() if algorithm.needs_values else recipe.source
    model = source.described
    check_cut(model.config, config.cluster.rollout_tp)
    sampling = model.sampling(config.rollout)
    data: RlData = recipe.data or load_prompts(config, model)
    evaluation = evaluation_requests(data.sets, config.evaluation, config.rollout, model)
    rollouts = Mapped(data.prompts, lambda prompt: Request(prompt, 0, 1, sampling))
    longest = max(request.max_length(model.config.max_positions) for request in rollouts)
    training = config.training
    updates = training.updates_per_batch * training.epochs
    described = describe_text(config, model.config, model.tokenizer, sampling)
    reference = describe_reference(config, model, longest, weights)
    teacher = describe_teacher(config, model, longest, weights)
    rewards = plan_reward_models(config.reward, recipe.reward_models)
    extra = extra_bytes(config, model.config)
    head_rate = _head_rate(config)
    shadow = describe_shadow(config, model.config)
    frozen = [reference, shadow, *teacher, *rewards]
    return RlPlan(
        config=config,
        source=source,
        data=data,
        training=training,
        updates=training.steps * updates,
        longest=longest,
        learning=(
            data.describe(training),
            *data.notes,
            f"steps: {training.steps} of "
            f"{training.prompts_per_step * training.samples_per_prompt:,} samples, "
            f"{counted(updates, 'updates')} each; sequences of at most {longest} tokens",
            *described,
        ),
        evaluation=evaluation,
        reward_models=recipe.reward_models,
        frozen=tuple(one for one in frozen if one is not None),
        extra_bytes=extra,
        head_rate=head_rate,
        algorithm=algorithm,
        sampling=sampling,
        rollouts=rollouts,
    )


def describe_text(
    config: RunConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
) -> list[str]:
    """Lines on the rows of lm_head that are drawn, on what rewards see of special tokens, and on an
    end of turn that ends no completion.
    """
    drawn, rows = model.num_drawn, model.vocab_size
    seen, shown = ("with", "show") if sampling.special_tokens else ("without", "hide")
    left_out = (
        f"vocabulary: {drawn:,} tokens of the tokenizer; {rows - drawn:,} further rows of lm_head "
        "are never drawn"
    )
    return [
        *([left_out] if drawn < rows else []),
        f'rewards read completions {seen} special tokens (rollout.special_tokens = "{shown}")',
        *([_STOPS] if sampling.stop_strings else []),
        *describe_end_of_turn(tokenizer, config.data.chat, sampling.stop_token_ids),
    ]


_STOPS = (
    "rewards: completion.text ends before the one of rollout.stop_strings that ended it, which is "
    "completion.stop_string; marks that it closes count for graders, and functions in TRL's and "
    "verl's form are given both"
)


def schedule_of(config: RunConfig) -> Schedule:
    """The schedule of ``lag`` or ``max_staleness``, of which one has to be left out."""
    ahead = config.asynchrony.lag or config.asynchrony.max_staleness or 0
    return Schedule(ahead, config.training.prompts_per_step, config.training.steps)


def extra_bytes(config: RunConfig, model: ModelConfig) -> int:
    """The most that a checkpoint holds beside policy and optimiser."""
    replay = config.replay.max_mib * (1 << 20) if config.replay.fraction > 0 else 0
    schedule = schedule_of(config)
    waiting = schedule.ahead * schedule.per_step * config.training.samples_per_prompt
    tokens = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return checkpoint_bytes(config, model) + int(replay) + pending_bytes(waiting, tokens)


def _head_rate(config: RunConfig) -> float:
    """The learning rate of a value head over that of the policy."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PpoConfig) or algorithm.value_learning_rate is None:
        return VALUE_HEAD_RATE
    return algorithm.value_learning_rate / config.training.learning_rate
