"""Sequences of several turns, and groups as they are judged, from Python's own numbers."""

from collections.abc import Sequence

import numpy as np

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt


def turns_of(
    token_ids: Sequence[int],
    loss_mask: Sequence[bool],
    log_probs: Sequence[float],
    weights_versions: Sequence[int],
    advantages: Sequence[float] | None = None,
    temperature: float = 1.0,
    truncated_log_probs: Sequence[float] | None = None,
) -> TokenSequence:
    """A column each; advantages are 0 until they are given."""
    cut, zeros = truncated_log_probs, [0.0] * len(token_ids)
    return TokenSequence(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.array(loss_mask, np.bool_),
        log_probs=np.array(log_probs, np.float32),
        weights_versions=np.array(weights_versions, np.int32),
        advantages=np.array(zeros if advantages is None else advantages, np.float32),
        temperature=temperature,
        truncated_log_probs=None if cut is None else np.array(cut, np.float32),
    )


def answer_of(length: int, **columns: Sequence[float]) -> Completion:
    """So many response tokens with these columns."""
    sequence = TokenSequence.of_answer([5], [7] * length).with_columns(**columns)
    return Completion(sequence, "", "stop")


def group_of(
    completions: Sequence[Completion],
    rewards: Sequence[float | None],
    baseline: float | None = None,
) -> Group:
    """Of a prompt without a name."""
    return Group(Prompt("", "", (5,)), 0, list(completions), list(rewards), baseline=baseline)
