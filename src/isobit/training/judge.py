"""What a step makes of its completions before it learns from them: sequences with every column
that a loss reads.

    old          log-probabilities of the policy that sampled: the recorded ones where those are the
                 trainer's own function; elsewhere the trainer's forward, since the recorded ones
                 are another function's.  ``training.old_log_probs`` can ask for either
    values       by the policy's value head, where the algorithm has one: the same forward
    reference    log-probabilities of the reference model, over the same batches; while its bytes
                 are the policy's, the policy's own stand in
    advantages   the algorithm's ``credit``, over all groups of the step at once
    importance   the corrections' weights, from old and recorded log-probabilities

A completion that the length limit cut is learnt from, judged but not learnt from, or neither
(``algorithm.truncated``).  One that is replayed keeps the advantage that it had, since the rest of
its group is gone; only where a value head is the baseline is it judged again.

Columns of sequences from a forward without learning: log-probabilities and values, by the
policy or by a reference model.

What a forward says of a sequence does not depend on how it is packed, so sequences are packed
anew, by length, and the columns go back to where they belong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from isobit.algorithms.advantages import overlong_punishment
from isobit.algorithms.corrections import correction_weights
from isobit.algorithms.objective import Algorithm, Credit, Judged, JudgedGroup
from isobit.algorithms.policy_gradient import token_kl
from isobit.config.algorithm import Correction, StepConfig
from isobit.config.tables import OldLogProbs
from isobit.models.frozen import FrozenPolicy
from isobit.models.scorer import Scorer
from isobit.parallel.world import ALONE, World, map_on_all
from isobit.records.batch import Sample, first_fit_decreasing, lay_end_to_end, responses
from isobit.records.sequence import Digests, Numbers, TokenSequence
from isobit.records.text import Group
from isobit.training.out_of_memory import measured_within_memory, within_memory
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class SequenceScores:
    """Of one sequence of L tokens: columns with an entry for each, 0 outside the response."""

    log_probs: Numbers
    values: Numbers | None
    """None for a model without a value head."""
    routings: Digests | None = None
    """Digests of the experts; None for a model without any."""


def score_sequences(
    scorer: Scorer,
    sequences: Sequence[TokenSequence],
    tokens_per_microbatch: int,
    world: World = ALONE,
) -> list[SequenceScores]:
    """The scores of sequences, none of them empty, in their order; each micro-batch by one rank."""
    lengths = [sequence.length for sequence in sequences]
    bins = first_fit_decreasing(lengths, tokens_per_microbatch)

    def columns(members: Sequence[int]) -> list[Sequence[torch.Tensor] | None]:
        batch = lay_end_to_end([sequences[index] for index in members])
        counts = torch.bincount(batch.sequence, minlength=len(members)).tolist()
        scores = scorer.score(batch)
        found = (scores.log_probs, scores.values, scores.routings)
        return [None if column is None else column.split(counts) for column in found]

    made: dict[int, SequenceScores] = {}
    for members, found in zip(bins, map_on_all(world, bins, columns), strict=True):
        for place, index in enumerate(members):
            log_probs, values, routings = (of and of[place].numpy() for of in found)
            sequence = sequences[index]
            made[index] = SequenceScores(
                sequence.spread(log_probs),
                None if values is None else sequence.spread(values),
                None if routings is None else sequence.with_columns(routings=routings).routings,
            )
    return [made[index] for index in range(len(sequences))]


def scores_by_policy(trainer: Trainer, sequences: Sequence[TokenSequence]) -> list[SequenceScores]:
    """By the policy as it is now.  What runs out of memory lowers the budget of the update that
    comes next.
    """
    return within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        lambda tokens: score_sequences(trainer.scorer, sequences, tokens, trainer.policy.world),
    )


def scores_by_frozen(
    trainer: Trainer,
    model: Callable[[], FrozenPolicy],
    sequences: Sequence[TokenSequence],
    phase: str,
) -> list[SequenceScores]:
    """By another model, beside the trainer; ``phase`` names it where the memory does not suffice.
    ``model`` is called again for each attempt, so that one which is made for it goes with it.
    """
    return measured_within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        trainer.budget.at(trainer.updates),
        lambda tokens: score_sequences(Scorer(model()), sequences, tokens, trainer.policy.world),
        phase,
    )


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the completions of each step, under one configuration."""

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

    @property
    def recomputes(self) -> bool:
        """Whether old log-probabilities are the trainer's, taken before it learns."""
        if self.old_log_probs == "auto":
            return not self.exact
        return self.old_log_probs == "recomputed"

    def samples_of(self, groups: Sequence[Group]) -> list[list[Sample]]:
        """The completions of graded groups, with the punishment of long ones where there is one;
        what the length limit cut is without a reward where that excludes it.
        """
        return [
            [
                self._sample(completion.sequence, reward, completion.finish_reason == "length")
                for completion, reward in zip(group.completions, group.rewards, strict=True)
            ]
            for group in groups
        ]

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the columns that a forward gives; those without a reward or a response
        as they were.
        """
        wanted = [
            index
            for index, sample in enumerate(samples)
            if sample.reward is not None and not sample.is_empty
        ]
        found = list(samples)
        sequences = self._scored([samples[index].sequence for index in wanted])
        for index, sequence in zip(wanted, sequences, strict=True):
            found[index] = replace(samples[index], sequence=sequence)
        return found

    def credit(
        self,
        groups: Sequence[Sequence[Sample]],
        baselines: Sequence[float | None],
        replayed: Sequence[Sample],
    ) -> tuple[list[list[Credit | None]], list[Credit | None]]:
        """What is learnt from each scored completion, and from each replayed one."""
        judged = [
            JudgedGroup([self._judged(sample) for sample in group], baseline)
            for group, baseline in zip(groups, baselines, strict=True)
        ]
        if not self.algorithm.needs_values:
            kept = [None if s.advantage is None else Credit(s.advantage) for s in replayed]
            return self.algorithm.credit(judged), kept
        again = [JudgedGroup([self._judged(sample)]) for sample in replayed]
        credits = self.algorithm.credit([*judged, *again])
        return credits[: len(judged)], [one for (one,) in credits[len(judged) :]]

    def learnt_from(self, sample: Sample, credit: Credit | None) -> TokenSequence | None:
        """The sequence with its advantages; None for what is not learnt from."""
        masked = sample.truncated and self.config.truncated == "mask"
        if credit is None or sample.is_empty or masked:
            return None
        sequence = sample.sequence.with_columns(advantages=credit.advantages)
        if credit.returns is None:
            return sequence
        return replace(sequence, returns=sequence.spread(credit.returns))

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

    def _sample(self, sequence: TokenSequence, reward: float | None, truncated: bool) -> Sample:
        if truncated and self.config.truncated == "exclude":
            reward = None
        if reward is not None and self.config.overlong_buffer is not None:
            reward += overlong_punishment(
                sequence.response_length,
                self.max_new_tokens,
                self.config.overlong_buffer,
                self.config.overlong_penalty,
            )
        return Sample(sequence, reward, truncated)

    def _scored(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        found = list(sequences)
        if not found:
            return found
        if self.recomputes or self.algorithm.needs_values:
            found = [
                self._with_policy_scores(sequence, scores)
                for sequence, scores in zip(
                    found, scores_by_policy(self.trainer, found), strict=True
                )
            ]
        if self.reference is None:
            return found
        return self._with_reference(self.reference, found)

    def _with_policy_scores(self, sequence: TokenSequence, scores: SequenceScores) -> TokenSequence:
        if not self.recomputes:
            return replace(sequence, values=scores.values)
        return replace(
            sequence,
            old_log_probs=scores.log_probs,
            old_routings=scores.routings,
            values=scores.values,
        )

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
            columns = [one.log_probs for one in scores]
        return [
            replace(sequence, reference_log_probs=column)
            for sequence, column in zip(sequences, columns, strict=True)
        ]

    def _judged(self, sample: Sample) -> Judged:
        sequence, kl = sample.sequence, None
        if sample.reward is not None and self.config.kl_in == "reward":
            kl = self._penalties(sequence)
        values = sequence.values
        if values is not None:
            values = sequence.of_response(values).tolist()
        return Judged(sample.reward, sequence.response_length, kl, values)

    def _penalties(self, sequence: TokenSequence) -> list[float] | None:
        """The coefficient times the divergence at each response token; None without a reference."""
        if sequence.reference_log_probs is None:
            return None
        log_probs = responses([sequence], [sequence.ratio_log_probs])
        reference = responses([sequence], [sequence.reference_log_probs])
        kl = token_kl(self.config.kl_estimator, log_probs, reference)
        return (self.config.kl_coefficient * kl).tolist()
