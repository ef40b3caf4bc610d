"""What a step makes of its completions before it learns from them: sequences with every column
that a loss reads.

    old          log-probabilities of the policy that sampled: the recorded ones where those are the
                 trainer's own function; elsewhere the trainer's forward, since the recorded ones
                 are another function's.  ``training.old_log_probs`` can ask for either
    values       by the policy's value head, where the algorithm has one: the same forward
    reference    log-probabilities of the reference model, over the same batches; while its bytes
                 are the policy's, the policy's own stand in
    teacher      log-probabilities of a teacher of the sampled tokens
    penalties    the KL coefficient times the divergence, where it is taken from the reward
    advantages   the algorithm's ``credit``, over all groups of the step at once, for each turn
                 where ``algorithm.credit`` asks for it; returns with them where there are values
                 With a teacher of the sampled tokens each one loses ``teacher.coefficient`` times
                 log p(old) - log p(teacher), whose mean is the reverse KL (Lu, "On-Policy
                 Distillation", thinkingmachines.ai, 2025); with ``teacher.only`` all else is 0
    importance   the corrections' weights, from old and recorded log-probabilities

A completion that the length limit cut is learnt from, has a part in the advantages of others alone,
or neither (``algorithm.truncated``).  One that is replayed is a group of its own, and keeps the
advantage that it had among others; only where a value head is the baseline is that estimated again.

What a forward says of a sequence does not depend on how it is packed, so for a forward without
learning sequences are packed anew, by length.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import fmean

import numpy as np
import torch

from isobit.algorithms.advantages import (
    columns_of,
    is_zero_variance,
    overlong_punishment,
    turn_credit,
)
from isobit.algorithms.corrections import correction_weights
from isobit.algorithms.objective import Algorithm, Columns
from isobit.algorithms.policy_gradient import token_kl
from isobit.config.algorithm import StepConfig
from isobit.config.corrections import Correction
from isobit.config.teacher import RunTeacher
from isobit.config.training import OldLogProbs
from isobit.memory.retry import measured_within_memory, within_memory
from isobit.models.frozen import FrozenPolicy
from isobit.models.scorer import Scorer
from isobit.parallel.world import ALONE, World, map_on_all
from isobit.records.batch import TokenScores
from isobit.records.packing import lay_end_to_end, micro_batches, responses
from isobit.records.rounding import are_level
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group
from isobit.training.budget import Cut
from isobit.training.trainer import Trainer


def score_sequences(
    scorer: Scorer,
    sequences: Sequence[TokenSequence],
    tokens_per_microbatch: int,
    world: World = ALONE,
    shared_prefix: bool = False,
) -> list[TokenScores]:
    """The scores of each of the sequences, none of them empty, without entropies; each micro-batch
    by one rank. ``shared_prefix`` changes no bit.
    """
    bins = micro_batches(sequences, tokens_per_microbatch, shared_prefix)

    def columns(members: Sequence[int]) -> list[Sequence[torch.Tensor] | None]:
        batch = lay_end_to_end([sequences[index] for index in members], shared_prefix)
        counts = torch.bincount(batch.sequence, minlength=len(members)).tolist()
        scores = scorer.score(batch)
        found = (scores.log_probs, scores.values, scores.routings)
        return [None if column is None else column.split(counts) for column in found]

    by_index: dict[int, TokenScores] = {}
    for members, found in zip(bins, map_on_all(world, bins, columns), strict=True):
        for member, index in enumerate(members):
            log_probs, values, routings = (of and of[member] for of in found)
            by_index[index] = TokenScores(
                log_probs, torch.empty(0, dtype=torch.float32), values, routings
            )
    return [by_index[index] for index in range(len(sequences))]


def scores_by_policy(trainer: Trainer, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
    """Scores of sequences by the policy as it is now.  What runs out of memory lowers the budget of
    the update that comes next.
    """
    return within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        lambda tokens: score_sequences(
            trainer.scorer,
            sequences,
            tokens,
            trainer.policy.world,
            trainer.config.shared_prefix,
        ),
        cut=_cut(trainer, sequences),
    )


def scores_by_frozen(
    trainer: Trainer,
    model: Callable[[], FrozenPolicy],
    sequences: Sequence[TokenSequence],
    phase: str,
) -> list[TokenScores]:
    """Scores of sequences by another model, beside the trainer; ``phase`` names it where the memory
    does not suffice.
    ``model`` is called again for each attempt, so that one which is made for it goes with it.
    """
    return measured_within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        trainer.budget.at(trainer.updates),
        lambda tokens: score_sequences(
            Scorer(model()), sequences, tokens, trainer.policy.world, trainer.config.shared_prefix
        ),
        phase,
        cut=_cut(trainer, sequences),
    )


def _cut(trainer: Trainer, sequences: Sequence[TokenSequence]) -> Cut:
    """How ``score_sequences`` cuts them."""
    return lambda tokens: micro_batches(sequences, tokens, trainer.config.shared_prefix)


def has_advantage(sequence: TokenSequence) -> bool:
    """Whether the advantage of a token, times the weight of its corrections, is not 0."""
    advantages, weights = sequence.advantages, sequence.importance
    return bool((advantages if weights is None else advantages * weights).any())


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """Adds to the completions of each step what the loss reads, under one configuration."""

    trainer: Trainer
    algorithm: Algorithm
    config: StepConfig
    exact: bool
    """Whether recorded log-probabilities are those of the trainer's own function."""
    max_new_tokens: int
    """The length limit, which ``algorithm.overlong_buffer`` is counted from."""
    old_log_probs: OldLogProbs = "auto"
    corrections: Sequence[Correction] = ()
    reference: FrozenPolicy | None = None
    teacher: FrozenPolicy | None = None
    """The teacher, where it scores the sampled tokens."""
    teaching: RunTeacher | None = None

    @property
    def recomputes(self) -> bool:
        """Whether old log-probabilities are the trainer's, taken before it learns."""
        if self.old_log_probs == "auto":
            return not self.exact
        return self.old_log_probs == "recomputed"

    def estimate(self, groups: Sequence[Group], replayed: Sequence[Group]) -> list[Group]:
        """Graded groups, and behind them what is replayed, with every column that the loss reads
        and the mean advantage of each completion; None for one that is not learnt from.
        """
        scored = self.score([*self.rewarded(groups), *replayed])
        credit = self.credit(scored[: len(groups)], scored[len(groups) :])
        learnt = [self.learnt(*pair) for pair in zip(scored, credit, strict=True)]
        is_learnt = [[advantage is not None for advantage in group.advantages] for group in learnt]
        return _changed(learnt, is_learnt, self.corrected)

    def rewarded(self, groups: Sequence[Group]) -> list[Group]:
        """Graded groups with the punishment of long completions in their rewards, where there is
        one; what the length limit cut is without a reward where that excludes it.
        """
        return [
            replace(
                group,
                rewards=[
                    None if reward is None else reward + self._punishment(completion.length)
                    for completion, reward in zip(group.completions, group.rewards, strict=True)
                ],
                baseline=None
                if group.baseline is None
                else group.baseline + self._punishment(group.baseline_length),
            )
            for group in self.counted(groups)
        ]

    def counted(self, groups: Sequence[Group]) -> list[Group]:
        """Graded groups in which what the length limit cut has no reward, where that excludes it,
        nor an episode whose environment failed to give one to a turn.
        """
        excludes = self.config.truncated == "exclude"
        return [
            replace(
                group,
                rewards=[
                    None if (excludes and one.is_cut) or _lacks_turn_reward(one) else reward
                    for one, reward in zip(group.completions, group.rewards, strict=True)
                ],
            )
            for group in groups
        ]

    def is_zero_variance(self, group: Group) -> bool:
        """Whether a group of ``counted`` has rewards without variance."""
        return is_zero_variance(
            group, self.config.turn_gamma if self.config.credit == "turn" else None
        )

    def has_advantages(self, groups: Sequence[Group]) -> list[bool]:
        """Whether the rewards of each graded group give any completion that is learnt from an
        advantage, by the algorithm's ``credit`` and before penalties for length or KL.

        Where the algorithm needs values, which a forward gives, whether two valid rewards differ.
        """
        counted = self.counted(groups)
        if self.algorithm.needs_values:
            return [not self.is_zero_variance(group) for group in counted]
        credit = self._credit(counted)
        return [
            any(
                columns is not None and self._is_learnt(completion) and _is_nonzero(columns)
                for completion, columns in zip(group.completions, of_group, strict=True)
            )
            for group, of_group in zip(counted, credit, strict=True)
        ]

    def reasons_without_signal(
        self, groups: Sequence[Group], estimated: Sequence[Group]
    ) -> Counter[str]:
        """The number of completions without an advantage by the reason, a name of
        ``REASONS_WITHOUT_SIGNAL``, of graded groups and what ``estimate`` made of them.
        """
        reasons = (
            self._reason(before, after, index)
            for before, after in zip(groups, estimated, strict=True)
            for index in range(len(before.completions))
        )
        return Counter(reason for reason in reasons if reason is not None)

    def _reason(self, graded: Group, estimated: Group, index: int) -> str | None:
        completion = estimated.completions[index]
        if graded.rewards[index] is None or _lacks_turn_reward(completion):
            return "failed"
        if completion.is_cut and self.config.truncated != "keep":
            return {"exclude": "excluded", "mask": "masked"}[self.config.truncated]
        if not completion.length:
            return "empty"
        if estimated.advantages[index] is None:
            return self._why_left_out(graded, estimated)
        if has_advantage(completion.sequence):
            return None
        if completion.sequence.advantages.any():
            return "rejected"
        return self._why_no_advantage(estimated)

    def _why_left_out(self, graded: Group, estimated: Group) -> str:
        if self.algorithm.needs_greedy and graded.baseline is None:
            return "no_baseline"
        valid = sum(reward is not None for reward in estimated.rewards)
        return "alone" if valid < 2 else "left_out"

    def _why_no_advantage(self, estimated: Group) -> str:
        turns = (one.sequence.turn_rewards for one in estimated.completions)
        is_zero = are_level([0.0, *(one for one in estimated.rewards if one)]) and not any(
            one is not None and one.any() for one in turns
        )
        if self.algorithm.needs_greedy:
            return "zero" if is_zero else "as_greedy"
        if not self.is_zero_variance(estimated):
            return "no_advantage"
        parts = estimated.reward_parts.values()
        if any(not are_level(one for one in part if one is not None) for part in parts):
            return "cancelled"
        return "zero" if is_zero else "level"

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the columns that a forward gives; completions without a reward or a
        response as they were.
        """
        wanted = [
            [
                reward is not None and completion.length > 0
                for completion, reward in zip(group.completions, group.rewards, strict=True)
            ]
            for group in groups
        ]
        return _changed(groups, wanted, self._scored)

    def credit(
        self, fresh: Sequence[Group], replayed: Sequence[Group]
    ) -> list[list[Columns | None]]:
        """The columns that each scored completion is learnt from with, of the replayed ones
        last.
        """
        if self.teaching is not None and self.teaching.only:
            nothing: Columns = {"advantages": 0.0}
            rewards = (group.rewards for group in (*fresh, *replayed))
            return [[None if one is None else nothing for one in of_one] for of_one in rewards]
        if self.algorithm.needs_values:
            return self.algorithm.credit([*fresh, *replayed])
        kept = columns_of([group.advantages for group in replayed])
        return [*self._credit(fresh), *kept]

    def _credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        if self.config.credit == "episode":
            return self.algorithm.credit(groups)
        return turn_credit(groups, self.algorithm.credit, self.config.turn_gamma)

    def learnt(self, group: Group, credit: Sequence[Columns | None]) -> Group:
        """The scored group with the columns and the mean advantage of what is learnt from; None for
        completions that are not.
        """
        completions, advantages = list(group.completions), list[float | None]()
        for index, (completion, columns) in enumerate(zip(completions, credit, strict=True)):
            if columns is None or not self._is_learnt(completion):
                advantages.append(None)
                continue
            with_kl = self._less_teacher_kl(completion.sequence, columns["advantages"])
            sequence = completion.sequence.with_columns(**{**columns, "advantages": with_kl})
            completions[index] = replace(completion, sequence=sequence)
            advantages.append(with_kl if isinstance(with_kl, (int, float)) else fmean(with_kl))
        return replace(group, completions=completions, advantages=advantages)

    def _less_teacher_kl(
        self, sequence: TokenSequence, advantages: float | Sequence[float]
    ) -> float | Sequence[float]:
        """The advantages with what the teacher says of each response token."""
        if self.teaching is None or sequence.teacher_log_probs is None:
            return advantages
        apart = _apart(sequence) * self.teaching.coefficient
        return (np.asarray(advantages, np.float64) - apart).tolist()

    def corrected(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """The sequences of a step with the weights of the corrections, if there are any."""
        if not self.corrections or not sequences:
            return list(sequences)
        lengths = torch.tensor([sequence.response_length for sequence in sequences])
        old = responses(sequences, [sequence.ratio_log_probs for sequence in sequences])
        recorded = responses(sequences, [sequence.log_probs for sequence in sequences])
        owner = torch.arange(len(sequences)).repeat_interleave(lengths)
        weights = correction_weights(self.corrections, old - recorded, owner)
        columns = weights.split(lengths.tolist())
        return [
            replace(sequence, importance=sequence.spread(column.numpy()))
            for sequence, column in zip(sequences, columns, strict=True)
        ]

    def _is_learnt(self, completion: Completion) -> bool:
        """Whether a completion with an advantage is learnt from."""
        masked = completion.is_cut and self.config.truncated == "mask"
        return completion.length > 0 and not masked

    def _punishment(self, length: int) -> float:
        """What a completion of so many tokens loses, 0 or below."""
        if self.config.overlong_buffer is None:
            return 0.0
        return overlong_punishment(
            length,
            self.max_new_tokens,
            self.config.overlong_buffer,
            self.config.overlong_penalty,
        )

    def _scored(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        scored = list(sequences)
        if not scored:
            return scored
        if self.recomputes or self.algorithm.needs_values:
            scored = [
                self._with_policy_scores(sequence, scores)
                for sequence, scores in zip(
                    scored, scores_by_policy(self.trainer, scored), strict=True
                )
            ]
        if self.teacher is not None:
            scored = self._with_teacher(self.teacher, scored)
        if self.reference is None:
            return scored
        return self._with_reference(self.reference, scored)

    def _with_teacher(
        self, teacher: FrozenPolicy, sequences: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        with self.trainer.timing("teacher"):
            scores = scores_by_frozen(
                self.trainer, lambda: teacher, sequences, "the teacher's forward"
            )
        return [
            sequence.with_columns(teacher_log_probs=one.log_probs.numpy())
            for sequence, one in zip(sequences, scores, strict=True)
        ]

    def _with_policy_scores(self, sequence: TokenSequence, scores: TokenScores) -> TokenSequence:
        found = with_old_columns(sequence, scores) if self.recomputes else sequence
        return found.with_columns(values=_array(scores.values))

    def _with_reference(
        self, reference: FrozenPolicy, sequences: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        """The policy's own are known for tokens that it has just drawn in an exact flow, and for
        all where they were recomputed.
        """
        own_are_known = all(
            sequence.old_log_probs is not None or (self.exact and sequence.fresh)
            for sequence in sequences
        )
        if own_are_known and reference.is_equal_to(self.trainer.policy):
            columns = [sequence.ratio_log_probs for sequence in sequences]
        else:
            phase = "the reference model's forward"
            with self.trainer.timing("reference"), reference.on_device():
                scores = scores_by_frozen(self.trainer, lambda: reference, sequences, phase)
            pairs = zip(sequences, scores, strict=True)
            columns = [sequence.spread(one.log_probs.numpy()) for sequence, one in pairs]
        found = [
            replace(sequence, reference_log_probs=column)
            for sequence, column in zip(sequences, columns, strict=True)
        ]
        return found if self.config.kl_in == "loss" else list(map(self._with_penalties, found))

    def _with_penalties(self, sequence: TokenSequence) -> TokenSequence:
        """The coefficient times the divergence at each response token."""
        assert sequence.reference_log_probs is not None
        log_probs = responses([sequence], [sequence.ratio_log_probs])
        reference = responses([sequence], [sequence.reference_log_probs])
        kl = token_kl(self.config.kl_estimator, log_probs, reference)
        return sequence.with_columns(kl_penalties=(self.config.kl_coefficient * kl).numpy())


def teacher_metrics(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """The mean of log p(old) - log p(teacher) over response tokens; empty without a teacher of
    sampled tokens.
    """
    apart = [_apart(one) for one in sequences if one.teacher_log_probs is not None]
    return {"teacher/kl": float(np.concatenate(apart).mean())} if apart else {}


def _apart(sequence: TokenSequence) -> np.ndarray:
    """float64, of each response token."""
    assert sequence.teacher_log_probs is not None
    policy, teacher = (
        sequence.of_response(column).astype(np.float64)
        for column in (sequence.ratio_log_probs, sequence.teacher_log_probs)
    )
    return policy - teacher


def with_old_columns(sequence: TokenSequence, scores: TokenScores) -> TokenSequence:
    """The sequence with its scores as old log-probabilities and routings."""
    return sequence.with_columns(
        old_log_probs=_array(scores.log_probs), old_routings=_array(scores.routings)
    )


def sequences_learnt_from(estimated: Sequence[Group]) -> list[TokenSequence]:
    """The sequences that have an advantage, in their order."""
    return [
        completion.sequence
        for group in estimated
        for completion, advantage in zip(group.completions, group.advantages, strict=True)
        if advantage is not None
    ]


def _changed(
    groups: Sequence[Group],
    wanted: Sequence[Sequence[bool]],
    change: Callable[[Sequence[TokenSequence]], list[TokenSequence]],
) -> list[Group]:
    """The groups with what ``change`` makes of the wanted sequences, all at once and in their
    order.
    """
    flat = [
        completion.sequence
        for group, chosen in zip(groups, wanted, strict=True)
        for completion in compress(group.completions, chosen)
    ]
    made = iter(change(flat))
    return [
        replace(
            group,
            completions=[
                replace(completion, sequence=next(made)) if is_chosen else completion
                for completion, is_chosen in zip(group.completions, chosen, strict=True)
            ],
        )
        for group, chosen in zip(groups, wanted, strict=True)
    ]


def _lacks_turn_reward(completion: Completion) -> bool:
    return None in (completion.sequence.rewards_of_turns or ())


def _is_nonzero(columns: Columns) -> bool:
    given = columns["advantages"]
    return bool(given) if isinstance(given, (int, float)) else any(given)


def _array(entries: torch.Tensor | None) -> np.ndarray | None:
    return None if entries is None else entries.numpy()
