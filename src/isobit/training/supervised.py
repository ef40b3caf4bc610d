"""Supervised fine-tuning with the same trainer: the mean negative log-probability of the
completions' tokens.

loss = -1/N * sum over the N completion tokens of a step of log pi(token | everything before it)

Distillation from a teacher, with the same trainer: the mean divergence of the policy from the
teacher over the same N places, each over the whole vocabulary or the teacher's likeliest tokens
(``isobit.models.teacher``).  With the policy's own start in BF16 as the teacher it is
quantisation-aware distillation (arXiv 2601.20088): the policy in 8 bits is pulled to the function
that it was before its rounding.

loss = 1/N * sum over the N completion tokens of a step of KL(teacher, policy) there

Training of a reward model from preferences, with the same trainer: the negative log-likelihood
of the choices under Bradley and Terry's model of them (Biometrika 39, 1952; for language models:
Ouyang et al., arXiv 2203.02155, equation 1, with one pair a prompt).

    P(chosen is preferred) = sigmoid(r_chosen - r_rejected)
    loss = -1/P * sum over the P pairs of a step of log sigmoid(r_chosen - r_rejected)

Both conversations of a pair always lie in one micro-batch, the chosen one first, so that a
micro-batch is scored as

    row       0           1             2           3
    score     chosen 0    rejected 0    chosen 1    rejected 1    ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, fsum, log1p

import torch

from isobit.algorithms.objective import LossOutputs, Shares
from isobit.algorithms.policy_gradient import token_mean_weights
from isobit.models.frozen import last_tokens_batch, without_padding
from isobit.models.scorer import Scorer
from isobit.parallel.world import ALONE, World, map_on_all
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import first_fit_decreasing, pack
from isobit.records.sequence import TokenSequence
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """Bradley-Terry on pairs of scores (an ``Objective``)."""

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """Every pair counts the same; its two scores carry the pair's share both."""
        pairs = sum(batch.rows.numel() for batch in batches) // 2
        return [
            Shares(torch.full((batch.rows.numel(),), 1 / pairs, dtype=torch.float32))
            for batch in batches
        ]

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """The weighted sum over the pairs; reported are the share of pairs that are ranked right,
        the margin of their scores, and the scores themselves.
        """
        chosen, rejected = _by_pair(scores)
        margin = chosen - rejected
        loss = (shares.mean[0::2] * torch.nn.functional.softplus(-margin)).sum()
        values, margin = torch.cat([chosen, rejected]).detach(), margin.detach()
        return LossOutputs(
            loss,
            {  # sums over both scores of each pair: the trainer divides by their number
                "accuracy": 2.0 * int((margin > 0).sum()),
                "margin": 2.0 * float(margin.double().sum()),
                "score_mean": float(values.double().sum()),
                "score_max": float(values.max()),
                "score_min": float(values.min()),
            },
        )


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What a reward model makes of pairs that it does not learn from."""

    loss: float
    """Nats a pair."""
    accuracy: float
    """The share of pairs whose chosen answer has the higher score; equal scores are not right."""
    margin: float
    """The mean of r_chosen - r_rejected."""


def pack_preferences(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    tokens_per_microbatch: int,
    pad_token_id: int | None,
) -> list[PackedBatch]:
    """(chosen, rejected) token ids of whole conversations -> micro-batches of at most so many
    tokens; a longer pair gets a micro-batch of its own.
    """
    trimmed = [[without_padding(ids, pad_token_id) for ids in pair] for pair in pairs]
    lengths = [sum(map(len, pair)) for pair in trimmed]
    return [
        last_tokens_batch([ids for index in members for ids in trimmed[index]])
        for members in first_fit_decreasing(lengths, tokens_per_microbatch)
    ]


def measure_pairs(
    scorer: Scorer, batches: Sequence[PackedBatch], world: World = ALONE
) -> PairFigures:
    """The figures over all pairs of ``batches`` together.  Sums are rounded once: the cut into
    batches changes no bit of them.
    """

    def margins_of(batch: PackedBatch) -> list[float]:
        chosen, rejected = _by_pair(scorer.score(batch))
        return (chosen.double() - rejected.double()).tolist()

    margins = [*chain.from_iterable(map_on_all(world, batches, margins_of))]
    count = len(margins)
    return PairFigures(
        loss=fsum(_softplus(-margin) for margin in margins) / count,
        accuracy=sum(margin > 0 for margin in margins) / count,
        margin=fsum(margins) / count,
    )


def _by_pair(scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
    assert scores.values is not None, "a reward model scores"
    return scores.values[0::2], scores.values[1::2]


def _softplus(x: float) -> float:
    """log(1 + e^x), without overflow."""
    return max(x, 0.0) + log1p(exp(-abs(x)))


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """Cross-entropy of the completions (an ``Objective``); advantages and old log-probabilities
    play no part.
    """

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """See ``token_mean_weights``."""
        return [Shares(mean) for mean in token_mean_weights([one.sequence for one in batches])]

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """Weighted negative log-probabilities of the N tokens, summed."""
        return LossOutputs(-(shares.mean * scores.log_probs).sum())


@dataclass(frozen=True, slots=True)
class DistilObjective:
    """The divergence from the teacher (an ``Objective``)."""

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """See ``token_mean_weights``."""
        return [Shares(mean) for mean in token_mean_weights([one.sequence for one in batches])]

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """Weighted divergences of the N tokens, summed."""
        assert scores.divergences is not None, "the trainer has a teacher"
        return LossOutputs((shares.mean * scores.divergences).sum())


@dataclass(frozen=True, slots=True)
class DistilFigures:
    """What a policy and its teacher make of completions that are not learnt from."""

    kl: float
    """The mean divergence, nats a token."""
    nll: float
    """The mean of -log p by the policy, nats a token: e to it is the perplexity."""
    teacher_nll: float
    """The same by the teacher."""


def measure_distance(trainer: Trainer, batches: Sequence[PackedBatch]) -> DistilFigures:
    """The distance of policy and teacher over all completion tokens of ``batches`` together.  Sums
    are rounded once: the cut into batches changes no bit of them.
    """
    teacher = trainer.teacher
    assert teacher is not None, "the trainer has a teacher"
    scorer, by_teacher = Scorer(trainer.policy, teacher), Scorer(teacher.model)

    def columns(batch: PackedBatch) -> list[list[float]]:
        mine, theirs = scorer.score(batch), by_teacher.score(batch)
        assert mine.divergences is not None
        found = (mine.divergences, -mine.log_probs, -theirs.log_probs)
        return [column.tolist() for column in found]

    by_batch = map_on_all(trainer.policy.world, batches, columns)
    count = sum(batch.targets.numel() for batch in batches)
    return DistilFigures(
        *(
            fsum(total for columns in by_batch for total in columns[number]) / count
            for number in range(3)
        )
    )


def pack_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], tokens_per_microbatch: int
) -> list[PackedBatch]:
    """(prompt ids, completion ids) pairs -> micro-batches at temperature 1; the stop token is among
    the ids if it is to be learnt.
    """
    sequences = [TokenSequence.of_answer(prompt, answer) for prompt, answer in pairs]
    return pack(sequences, tokens_per_microbatch)


def mean_loss(trainer: Trainer, batches: Sequence[PackedBatch]) -> float:
    """The loss over all completion tokens of ``batches`` together, in nats a token, without
    learning from them.  The sum is rounded once: the cut into batches changes no bit of it.
    """
    found = map_on_all(
        trainer.policy.world, batches, lambda batch: trainer.scorer.score(batch).log_probs
    )
    total = fsum(value for log_probs in found for value in log_probs.tolist())
    return -total / sum(batch.targets.numel() for batch in batches)
