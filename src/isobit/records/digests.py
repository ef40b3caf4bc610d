"""SHA-256 digests of what a step was given."""

import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

from isobit.records.sequence import RECORDED
from isobit.records.text import Completion, Group


def group_digests(groups: Sequence[Group]) -> dict[str, str]:
    """SHA-256 of what a step was given, by name.

    tokens       prompts by id with their visits, and of each completion its length, why it ended,
                 int32 of all its tokens, prompt included, and of the weights that drew each
    log_probs    the bits of all else that sampling recorded of the responses (``RECORDED``):
                 log-probabilities of the full distribution, and of the truncated one and of the
                 experts where there are any
    rewards      of each group as JSON, whose decimals keep every bit: rewards, those of several
                 parts, the baseline, and those of turns where there are any

    Numbers are little-endian and end to end, completion by completion, in the order of the groups.
    """
    return {
        "tokens": _tokens(groups),
        "log_probs": _log_probs(groups),
        "rewards": rewards_digest(groups),
    }


def rewards_digest(groups: Sequence[Group]) -> str:
    """The digest of the groups' rewards, alone."""
    contents = [
        [group.rewards, group.reward_parts, group.baseline, *_turn_rewards(group)]
        for group in groups
    ]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _turn_rewards(group: Group) -> list[list[tuple[float | None, ...] | None]]:
    rewards = [completion.sequence.rewards_of_turns for completion in group.completions]
    return [rewards] if any(of_turns is not None for of_turns in rewards) else []


def _tokens(groups: Sequence[Group]) -> str:
    contents = [
        [
            group.prompt.id,
            group.visit,
            [[answer.sequence.length, answer.finish_reason] for answer in group.completions],
        ]
        for group in groups
    ]
    digest = hashlib.sha256(json.dumps(contents).encode())
    for completion in _all(groups):
        sequence = completion.sequence
        digest.update(_bytes(sequence.token_ids))
        digest.update(_bytes(sequence.weights_versions))
    return digest.hexdigest()


def _log_probs(groups: Sequence[Group]) -> str:
    digest = hashlib.sha256()
    for completion in _all(groups):
        sequence = completion.sequence
        for name in RECORDED:
            column = getattr(sequence, name)
            if column is not None and name != "weights_versions":  # part of the tokens' digest
                digest.update(_bytes(sequence.of_response(column)))
    return digest.hexdigest()


def _all(groups: Sequence[Group]) -> Iterable[Completion]:
    return (completion for group in groups for completion in group.completions)


def _bytes(column: np.ndarray) -> bytes:
    return column.astype(column.dtype.newbyteorder("<")).tobytes()
