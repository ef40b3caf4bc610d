"""One step of reinforcement learning: graded groups in, new weights out.

    advantages      and every other column that the loss reads
                    (``isobit.training.advantage_estimator``)
    parts           the groups cut into ``updates_per_batch`` parts, so that the samples of one
                    prompt stay together; replayed samples are shared out among them
    updates         ``epochs`` times over the parts, one update each; a part without a signal is
                    left out, unless ``training.without_signal`` asks for it
                    (``isobit.training.step``); one that runs out of memory is packed and done
                    again (``isobit.memory.retry``); the clip of the last may be
                    calibrated just before it (``isobit.training.calibration``)
    keep            what was learnt from, for later steps, where there is a replay buffer

Only the first update of a batch is on-policy: with more than one, every later part is learnt from
with weights that have moved since it was sampled, which is what the ratio and its clip are for.
For the same reason recorded and trained log-probabilities are compared before any weight has
changed, and not for what is replayed: over the first part that is learnt from where they are
exact, over the whole batch where they are recomputed.  Whoever asks for it is told before the first
update (``Findings``), and can still prevent it.  A batch that was sampled by older weights is
compared when it is sampled instead (``isobit.run.pending``).

Whether an update has anything to learn from.

With A[i] the advantage of response token i and c[i] the weight of its corrections, the gradient of
the family's losses (``isobit.algorithms.policy_gradient``) is exactly 0 where

    c[i] * A[i] = 0     for every token, and
    the loss has no other term: no KL, no entropy bonus, no value head

That is so where all rewards of each prompt are equal, or where nothing is left to learn from
(``AdvantageEstimator.reasons_without_signal``).  AdamW would move the weights all the same, by the
momentum of earlier updates: by the rewards of other prompts, seen long ago.  A router's own
losses (``isobit.training.comparison``) say nothing of rewards and are no signal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import TypeVar

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.ppo import explained_variance
from isobit.algorithms.sample_size import effective_sample_size
from isobit.config.algorithm import StepConfig
from isobit.config.training import TrainingConfig
from isobit.memory.retry import within_memory
from isobit.records.batch import PackedBatch
from isobit.records.metrics import Metrics, over_updates
from isobit.records.packing import micro_batches, pack, responses
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.training.advantage_estimator import (
    AdvantageEstimator,
    has_advantage,
    sequences_learnt_from,
    teacher_metrics,
)
from isobit.training.calibration import Calibration
from isobit.training.comparison import ComparedTokens, Comparison, UpdateMetrics
from isobit.training.repeat import FORWARD, Repeat
from isobit.training.replay_buffer import ReplayBuffer
from isobit.training.token_count import check_learnt
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError


def has_signal(sequences: Sequence[TokenSequence], algorithm: Algorithm) -> bool:
    """Whether an update on these sequences can have a gradient; never where there are none.

    A user's algorithm without ``has_other_terms`` is assumed to have other loss terms.
    """
    if not sequences:
        return False
    return getattr(algorithm, "has_other_terms", True) or any(map(has_advantage, sequences))


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Findings:
    """What the forwards of a step have found before its first update."""

    comparison: Comparison = field(default_factory=Comparison)
    mismatch: Metrics = field(default_factory=dict)
    """The train-inference mismatch of the tokens compared; empty where none were."""
    repeat: Repeat | None = None
    """The result of computing a micro-batch twice, where that was due."""


Inspect = Callable[[Findings], None]
"""Called before a step's first update with what was found; where it raises, no weight changes."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did, over all its updates."""

    metrics: Metrics  # of the updates taken, and of the step; all but those of the comparison
    updates: tuple[UpdateMetrics, ...]
    comparison: Comparison
    mismatch: Metrics  # of the tokens compared; empty where none were
    samples: int  # fresh ones that were trained on
    excluded_samples: int  # without a valid reward, alone in their group, masked, or empty
    tokens: int  # of prompts and responses that were put through the updates
    has_signal: bool  # whether any update had
    repeat: Repeat | None = None  # of a micro-batch, where that was due
    tokens_learnt: int = 0  # response tokens of the batch's samples, of updates that were taken
    reasons_without_signal: Mapping[str, int] = field(default_factory=dict)
    """Completions by a name of ``REASONS_WITHOUT_SIGNAL``; empty where an update had a signal."""

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """The reason of each skipped update."""
        return tuple(update.skipped for update in self.updates if update.skipped is not None)


@dataclass(frozen=True, slots=True)
class Learner:
    """Learns from the graded completions of each step."""

    estimator: AdvantageEstimator
    replay: ReplayBuffer | None = None
    calibration: Calibration | None = None
    repeat_every: int = 0
    """Steps between two in which a micro-batch is computed twice; 0: never."""

    @property
    def trainer(self) -> Trainer:
        """The trainer; its configuration says into how many updates a step is cut."""
        return self.estimator.trainer

    def learn(self, groups: Sequence[Group], step: int) -> StepMetrics:
        """``with_advantages``, then ``update``."""
        return self.update(groups, self.with_advantages(groups), step)

    def with_advantages(self, groups: Sequence[Group]) -> list[Group]:
        """``AdvantageEstimator.estimate`` of graded groups, and of what is replayed with them, each
        replayed completion as a group of its own.  Raises ConfigError if there are fewer groups
        than parts.
        """
        _check_parts(len(groups), self.trainer.config)
        if self.replay is None:
            return self.estimator.estimate(groups, [])
        fresh = sum(len(group.completions) for group in groups)
        return self.estimator.estimate(groups, self.replay.draw(fresh, self.trainer.policy.version))

    def update(
        self,
        groups: Sequence[Group],
        estimated: Sequence[Group],
        step: int,
        inspect: Inspect = lambda found: None,
    ) -> StepMetrics:
        """Learn from what ``with_advantages`` made of the graded groups of step number ``step``,
        counted from 1.

        A part that has nothing to learn from (``has_signal``) makes no update, or with
        ``training.without_signal`` = "take" one by AdamW's momentum.  Raises what ``check_learnt``,
        ``inspect``, ``Trainer.update`` and ``within_memory`` raise.
        """
        version = self.trainer.policy.version
        fresh, replayed = estimated[: len(groups)], sequences_learnt_from(estimated[len(groups) :])
        parts = self._parts(fresh, replayed)
        check_learnt(fresh, parts)
        compared = self._recomputed(parts)
        if self.estimator.recomputes:
            inspect(Findings(compared.comparison(), compared.mismatch()))
        signals = [has_signal(part, self.estimator.algorithm) for part in parts]
        taken = [
            bool(part) and (signal or self.trainer.config.without_signal == "take")
            for part, signal in zip(parts, signals, strict=True)
        ]
        learnt = sequences_learnt_from(fresh)
        updates, repeat = self._update(parts, taken, step, inspect)
        if self.replay is not None:
            self.replay.keep(fresh, self.trainer.policy.version)
        if not self.estimator.recomputes and updates:
            comparison, mismatch = updates[0].comparison, updates[0].mismatch
        else:
            comparison, mismatch = compared.comparison(), compared.mismatch()
        reasons = {} if any(signals) else self.estimator.reasons_without_signal(groups, fresh)
        return StepMetrics(
            metrics={
                **_update_metrics(updates),
                **_correction_metrics(parts),
                **teacher_metrics([one for part in parts for one in part]),
                **self._clip_metrics(),
                **_repeat_metrics(repeat),
                **{f"no_signal/{name}": count for name, count in reasons.items()},
                **self._level_metrics(groups),
                "updates/without_signal": self.trainer.config.epochs * signals.count(False),
                "replay/samples": len(replayed),
                "staleness/mean": _staleness(parts, version),
            },
            updates=tuple(updates),
            comparison=comparison,
            mismatch=mismatch,
            samples=len(learnt),
            excluded_samples=sum(len(group.completions) for group in groups) - len(learnt),
            tokens_learnt=_tokens_of(learnt, compress(parts, taken)),
            tokens=self.trainer.config.epochs
            * sum(one.length for part in compress(parts, taken) for one in part),
            reasons_without_signal=reasons,
            has_signal=any(signals),
            repeat=repeat,
        )

    def _level_metrics(self, groups: Sequence[Group]) -> Metrics:
        """How many groups have equal rewards."""
        level = sum(map(self.estimator.is_zero_variance, self.estimator.counted(groups)))
        return {"reward/level_groups": level, "reward/level_share": level / len(groups)}

    def _clip_metrics(self) -> Metrics:
        """The clip of the last update, where it is calibrated."""
        if self.calibration is None or self.calibration.bounds is None:
            return {}
        bounds = self.calibration.bounds
        return {"clip/low": bounds.clip_low, "clip/high": bounds.clip_high}

    def _parts(
        self, fresh: Sequence[Group], replayed: Sequence[TokenSequence]
    ) -> list[list[TokenSequence]]:
        """The sequences of each part; none where nothing of it is learnt from."""
        count = self.trainer.config.updates_per_batch
        ours, theirs = cut_by_prompt(len(fresh), count), cut_by_prompt(len(replayed), count)
        return [
            [
                *sequences_learnt_from(fresh[part.start : part.stop]),
                *replayed[again.start : again.stop],
            ]
            for part, again in zip(ours, theirs, strict=True)
        ]

    def _recomputed(self, parts: Sequence[Sequence[TokenSequence]]) -> ComparedTokens:
        """Recorded beside recomputed log-probabilities of what was drawn in this step."""
        compared = ComparedTokens.none()
        if self.estimator.recomputes:
            for one in (sequence for part in parts for sequence in part if sequence.fresh):
                compared.add_sequence(one)
        return compared

    def _update(
        self,
        parts: Sequence[Sequence[TokenSequence]],
        taken: Sequence[bool],
        step: int,
        inspect: Inspect,
    ) -> tuple[list[UpdateMetrics], Repeat | None]:
        """All updates of the step: on the parts that are taken; and what came of repeating a
        micro-batch of the first, where that is due.
        """
        trainer = self.trainer
        updates = list[UpdateMetrics]()
        repeat = None
        epochs, last = trainer.config.epochs, list(compress(parts, taken))[-1:]
        calibration = self.calibration if last else None
        begun = None if calibration is None else calibration.begin(step, last[0])
        for sequences, is_taken in list(zip(parts, taken, strict=True)) * epochs:
            if not is_taken:
                trainer.pass_over()
                continue
            is_last = len(updates) == epochs * sum(taken) - 1
            if calibration is not None and begun is not None and is_last:
                calibration.finish(begun)
            algorithm = self.estimator.algorithm if calibration is None else calibration.algorithm
            compare = not self.estimator.recomputes and not updates
            if self.repeat_every and step % self.repeat_every == 0 and not updates:
                repeat = _repeat(trainer, sequences, algorithm, step // self.repeat_every)
                inspect(Findings(repeat=repeat))
            updates.append(_update(trainer, sequences, algorithm, compare, inspect))
        return updates, repeat


def train_on_groups(
    trainer: Trainer, groups: Sequence[Group], algorithm: Algorithm, exact: bool
) -> StepMetrics:
    """Learn from the graded completions of one step, with nothing around the algorithm: no
    reference model, no corrections, no replay, no calibration.

    ``exact``: whether the recorded log-probabilities are those of the trainer's own function, as
    ``isobit.models.function.is_one_function`` says of an engine and a trainer.  Raises as
    ``Learner.learn`` does.
    """
    estimator = AdvantageEstimator(trainer, algorithm, StepConfig(), exact, max_new_tokens=0)
    return Learner(estimator).learn(groups, step=1)


def cut_by_prompt(num_groups: int, num_parts: int) -> list[range]:
    """Indices of the groups of each part: consecutive, and the sizes differ by at most one."""
    bounds = [part * num_groups // num_parts for part in range(num_parts + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _check_parts(num_groups: int, config: TrainingConfig) -> None:
    if config.updates_per_batch > num_groups:
        raise ConfigError(
            f"training.updates_per_batch is {config.updates_per_batch}, but a step has "
            f"{num_groups} prompts; a part needs at least one: "
            "lower it, or raise training.prompts_per_step"
        )


def _update(
    trainer: Trainer,
    sequences: Sequence[TokenSequence],
    algorithm: Algorithm,
    compare: bool,
    inspect: Inspect,
) -> UpdateMetrics:
    """One update."""

    def found(comparison: Comparison, mismatch: Metrics) -> None:
        inspect(Findings(comparison, mismatch))

    return _packed(
        trainer, sequences, lambda batches: trainer.update(batches, algorithm, compare, found)
    )


def _repeat(
    trainer: Trainer, sequences: Sequence[TokenSequence], algorithm: Algorithm, pick: int
) -> Repeat:
    """One of the update's micro-batches, another one each time, twice."""
    return _packed(trainer, sequences, lambda batches: trainer.repeat(batches, algorithm, pick))


def _packed(
    trainer: Trainer,
    sequences: Sequence[TokenSequence],
    compute: Callable[[Sequence[PackedBatch]], Result],
) -> Result:
    """What the trainer computes of the sequences in micro-batches, of smaller ones where it runs
    out of memory.
    """
    shared = trainer.config.shared_prefix
    return within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        lambda tokens: compute(pack(sequences, tokens, shared)),
        cut=lambda tokens: micro_batches(sequences, tokens, shared),
    )


def _tokens_of(learnt: Sequence[TokenSequence], parts: Iterable[Sequence[TokenSequence]]) -> int:
    """The response tokens of the sequences that are in the parts, where replayed ones are, too."""
    own = {id(one) for one in learnt}
    return sum(one.response_length for part in parts for one in part if id(one) in own)


def _staleness(parts: Sequence[Sequence[TokenSequence]], version: int) -> float:
    """How many updates the weights that drew a response token are behind; the mean."""
    flat = [sequence for part in parts for sequence in part]
    if not flat:
        return 0.0
    drawn = responses(flat, [sequence.weights_versions for sequence in flat])
    return float((version - drawn).double().mean()) if drawn.numel() else 0.0


def _update_metrics(updates: Sequence[UpdateMetrics]) -> Metrics:
    """Those of the updates taken, reduced, and how many were taken."""
    metrics = over_updates(update.metrics for update in updates if update.skipped is None)
    if "return_square" in metrics and (explained := explained_variance(metrics)) is not None:
        metrics["value/explained_variance"] = explained
    skipped = sum(update.skipped is not None for update in updates)
    return {**metrics, "updates/taken": len(updates) - skipped, "updates/skipped": skipped}


def _repeat_metrics(repeat: Repeat | None) -> Metrics:
    """How many gradients of the micro-batch that was computed twice had other bits."""
    if repeat is None:
        return {}
    return {
        "check/gradients_repeated": repeat.gradients,
        "check/gradients_differing": len(set(repeat.differing) - {FORWARD}),
        "check/forwards_differing": int(FORWARD in repeat.differing),
    }


def _correction_metrics(parts: Sequence[Sequence[TokenSequence]]) -> Metrics:
    """Effective sample size and the share of zeros of the weights, over all response tokens."""
    pairs = [
        (sequence, sequence.importance)
        for part in parts
        for sequence in part
        if sequence.importance is not None
    ]
    if not pairs:
        return {}
    weights = responses(*zip(*pairs, strict=True))
    return {
        "correction/mean": float(weights.double().mean()),
        "correction/effective_sample_size": effective_sample_size(weights),
        "correction/rejected": float((weights == 0).double().mean()),
    }
