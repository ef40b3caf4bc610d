"""Whether an update has anything to learn from.

With A[i] the advantage of response token i and c[i] the weight of its corrections, the gradient of
the family's losses (``isobit.algorithms.policy_gradient``) is exactly 0 where

    c[i] * A[i] = 0     for every token, and
    the loss has no other term: no KL, no entropy bonus, no value head

That is so where all rewards of each prompt are equal.  AdamW would move the weights all the same,
by the momentum of earlier updates: by the rewards of other prompts, seen long ago.  A router's own
losses (``isobit.training.router``) say nothing of rewards and are no signal.
"""

from collections.abc import Sequence

from isobit.algorithms.objective import Algorithm
from isobit.records.sequence import TokenSequence


def has_signal(sequences: Sequence[TokenSequence], algorithm: Algorithm) -> bool:
    """Whether an update on these sequences can have a gradient; never where there are none.

    Of one's own algorithm that does not say ``has_other_terms`` it is not known, and taken to be
    so.
    """
    if not sequences:
        return False
    return getattr(algorithm, "has_other_terms", True) or any(map(_teaches, sequences))


def _teaches(sequence: TokenSequence) -> bool:
    advantages, weights = sequence.advantages, sequence.importance
    return bool((advantages if weights is None else advantages * weights).any())
