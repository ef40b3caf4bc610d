"""Supervised fine-tuning with the same trainer: the mean negative log-probability of the
completions' tokens.

loss = -1/N * sum over the N completion tokens of a step of log pi(token | everything before it)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from isobit.algorithms.mean import token_mean_weights
from isobit.algorithms.objective import LossOutputs, Shares
from isobit.parallel.agreement import shared_out
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores
from isobit.records.sequence import TokenSequence
from isobit.training.packing import pack
from isobit.training.trainer import Trainer


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
    found = shared_out(
        trainer.policy.world, batches, lambda batch: trainer.scorer.score(batch).log_probs
    )
    total = fsum(value for log_probs in found for value in log_probs.tolist())
    return -total / sum(batch.targets.numel() for batch in batches)
