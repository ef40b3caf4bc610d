"""Completions and graded groups as values for a message or a checkpoint, and back, whole: tokens
with all that was recorded of them, texts, why they ended, rewards and their parts, baselines.

A prompt stands there by its id: whoever reads the value has the same data.

Sequences as they are kept for later, and sent: what sampling recorded, in tensors.

    of L tokens, N of them responses:   4 L bytes of token ids, 8 N of log-probabilities (FP32) and
                                        versions, 8 N of experts' digests and 4 N of truncated
                                        log-probabilities where there are any

What was recorded comes back bit for bit; the columns that judgement fills are not kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.records.sequence import GIVEN, Entry, TokenSequence
from isobit.records.text import Completion, Group, Prompt


def joined(sequences: Sequence[TokenSequence]) -> dict[str, torch.Tensor]:
    """Tensors of all sequences end to end.  A column that not all have stands beside the indices of
    those that do; one that none has is not there.

    ``spans`` are the first token and the number of tokens of each run of a response.
    """
    spans = [_spans(one.loss_mask) for one in sequences]
    return {
        "lengths": torch.tensor([one.length for one in sequences], dtype=torch.int64),
        "span_counts": torch.tensor([len(one) // 2 for one in spans], dtype=torch.int64),
        "spans": _end_to_end(spans, np.int64).view(-1, 2),
        "token_ids": _end_to_end([one.token_ids for one in sequences], np.int32),
        "log_probs": _end_to_end([one.of_response(one.log_probs) for one in sequences], np.float32),
        "versions": _end_to_end(
            [one.of_response(one.weights_versions) for one in sequences], np.int32
        ),
        "temperatures": torch.tensor([one.temperature for one in sequences], dtype=torch.float64),
        **_optional("routings", sequences, np.int64),
        **_optional("truncated_log_probs", sequences, np.float32),
    }


def parted(tensors: Mapping[str, torch.Tensor], fresh: bool) -> list[TokenSequence]:
    """The sequences that ``joined`` laid end to end, not yet judged; ``fresh`` says whether the
    weights of now drew them.
    """
    spans = [part.numpy() for part in tensors["spans"].split(tensors["span_counts"].tolist())]
    lengths = tensors["lengths"].tolist()
    masks = [_mask(length, part) for length, part in zip(lengths, spans, strict=True)]
    responses = [int(np.count_nonzero(mask)) for mask in masks]

    def column(name: str, dtype: type[Entry], elsewhere: int) -> list[NDArray[Entry]]:
        parts = tensors[name].split(responses)
        return [
            _spread(part, mask, dtype, elsewhere) for part, mask in zip(parts, masks, strict=True)
        ]

    def optional(name: str, dtype: type[Entry]) -> list[NDArray[Entry] | None]:
        found: list[NDArray[Entry] | None] = [None] * len(masks)
        if name in tensors:
            having = tensors[f"{name}_of"].tolist()
            parts = tensors[name].split([responses[index] for index in having])
            for index, part in zip(having, parts, strict=True):
                found[index] = _spread(part, masks[index], dtype, 0)
        return found

    rows = zip(
        tensors["token_ids"].split(lengths),
        masks,
        column("log_probs", np.float32, 0),
        column("versions", np.int32, GIVEN),
        tensors["temperatures"].tolist(),
        optional("truncated_log_probs", np.float32),
        optional("routings", np.int64),
        strict=True,
    )
    return [
        TokenSequence(
            token_ids=token_ids.numpy().copy(),
            loss_mask=mask,
            log_probs=log_probs,
            weights_versions=versions,
            advantages=np.zeros(len(mask), np.float32),
            temperature=temperature,
            truncated_log_probs=truncated,
            routings=routings,
            fresh=fresh,
        )
        for token_ids, mask, log_probs, versions, temperature, truncated, routings in rows
    ]


def _optional(
    name: str, sequences: Sequence[TokenSequence], dtype: type[np.generic]
) -> dict[str, torch.Tensor]:
    columns = [(index, one, getattr(one, name)) for index, one in enumerate(sequences)]
    given = {index: one.of_response(column) for index, one, column in columns if column is not None}
    if not given:
        return {}
    return {f"{name}_of": torch.tensor(list(given)), name: _end_to_end(list(given.values()), dtype)}


def _end_to_end(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]))


def _spans(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """First index and length of every run of True, one behind the other."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    firsts, ends = edges[::2], edges[1::2]
    return np.stack([firsts, ends - firsts], axis=1).ravel()


def _mask(length: int, spans: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(length, np.bool_)
    for first, count in spans.tolist():
        mask[first : first + count] = True
    return mask


def _spread(
    column: torch.Tensor, mask: NDArray[np.bool_], dtype: type[Entry], elsewhere: int
) -> NDArray[Entry]:
    """A value for each token of the response -> an entry for each token."""
    made = np.full(len(mask), elsewhere, dtype)
    made[mask] = column.numpy()
    return made


def completions_value(completions: Sequence[Completion]) -> dict[str, Any]:
    """Completions as ``isobit.parallel.world`` takes them, none of them judged."""
    return {
        "texts": [one.text for one in completions],
        "finish_reasons": [one.finish_reason for one in completions],
        "sequences": joined([one.sequence for one in completions]),
    }


def completions_of(value: Mapping[str, Any], fresh: bool = True) -> list[Completion]:
    """The completions of ``completions_value``; ``fresh`` says whether the weights of now drew
    them.
    """
    sequences = parted(value["sequences"], fresh)
    rows = zip(sequences, value["texts"], value["finish_reasons"], strict=True)
    return [Completion(*row) for row in rows]


def groups_value(groups: Sequence[Group]) -> dict[str, Any]:
    """Graded groups as ``isobit.parallel.world`` takes them."""
    return {
        "groups": [
            {
                "prompt": group.prompt.id,
                "visit": group.visit,
                "completions": len(group.completions),
                "rewards": group.rewards,
                "reward_parts": group.reward_parts,
                "baseline": group.baseline,
            }
            for group in groups
        ],
        **completions_value([one for group in groups for one in group.completions]),
    }


def groups_of(
    value: Mapping[str, Any], prompt_of: Callable[[str], Prompt], fresh: bool = True
) -> list[Group]:
    """The groups of ``groups_value``, with the prompts that ``prompt_of`` has by their ids."""
    completions = iter(completions_of(value, fresh))
    return [_group(content, prompt_of, completions) for content in value["groups"]]


def _group(
    content: Mapping[str, Any],
    prompt_of: Callable[[str], Prompt],
    completions: Iterator[Completion],
) -> Group:
    return Group(
        prompt_of(content["prompt"]),
        content["visit"],
        [next(completions) for _ in range(content["completions"])],
        list(content["rewards"]),
        {name: list(rewards) for name, rewards in content["reward_parts"].items()},
        content["baseline"],
    )
