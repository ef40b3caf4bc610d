"""Sequences, completions and graded groups as values for a message or a checkpoint, and back, bit
for bit: tokens with what was recorded of them, texts, why they ended, rewards and their parts, and
baselines.

    of L tokens, N of them responses    4 L bytes of token ids, 8 N of log-probabilities (FP32) and
                                        versions; 8 N of experts' digests and 4 N of truncated
                                        log-probabilities where there are any

``isobit.records.sequence.COLUMNS`` says which columns are kept; those that a step adds when it
judges a sequence are not.  A prompt is kept as its id: every reader of the value has the same data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.records.sequence import COLUMNS, Column, TokenSequence
from isobit.records.text import Completion, Episode, Group, Prompt

SENT = [column for column in COLUMNS if column.sent]
_UNCOUNTED = -1


def joined(sequences: Sequence[TokenSequence]) -> dict[str, torch.Tensor]:
    """Tensors of all sequences end to end, a column by its name: its entries of the responses.

    ``spans`` are the first token and the number of tokens of each run of a response.  An optional
    column stands beside ``NAME_of``, the indices of the sequences that have it; one that none has
    is left out.
    """
    spans = [_spans(sequence.loss_mask) for sequence in sequences]
    tensors = {
        "lengths": torch.tensor([sequence.length for sequence in sequences], dtype=torch.int64),
        "span_counts": torch.tensor([len(bounds) // 2 for bounds in spans], dtype=torch.int64),
        "spans": _end_to_end(spans, np.int64).view(-1, 2),
        "token_ids": _end_to_end([sequence.token_ids for sequence in sequences], np.int32),
        "temperatures": torch.tensor(
            [sequence.temperature for sequence in sequences], dtype=torch.float64
        ),
        "drawn": torch.tensor(
            [_UNCOUNTED if sequence.drawn is None else sequence.drawn for sequence in sequences],
            dtype=torch.int64,
        ),
    }
    for column in SENT:
        arrays = [getattr(sequence, column.name) for sequence in sequences]
        having = [index for index, array in enumerate(arrays) if array is not None]
        if having or not column.optional:
            parts = [sequences[index].of_response(arrays[index]) for index in having]
            tensors[column.name] = _end_to_end(parts, column.dtype)
        if having and column.optional:
            tensors[f"{column.name}_of"] = torch.tensor(having)
    return tensors


def parted(tensors: Mapping[str, torch.Tensor], fresh: bool) -> list[TokenSequence]:
    """The sequences that ``joined`` laid end to end, not yet judged; ``fresh`` says whether the
    present weights drew them.
    """
    spans = [part.numpy() for part in tensors["spans"].split(tensors["span_counts"].tolist())]
    lengths = tensors["lengths"].tolist()
    # earlier versions kept no counts
    drawn = tensors["drawn"].tolist() if "drawn" in tensors else [_UNCOUNTED] * len(lengths)
    masks = [_mask(length, part) for length, part in zip(lengths, spans, strict=True)]
    columns = {column.name: _columns(tensors, column, masks) for column in SENT}
    return [
        TokenSequence(
            token_ids=token_ids.numpy().copy(),
            loss_mask=mask,
            advantages=np.zeros(len(mask), np.float32),
            temperature=temperature,
            fresh=fresh,
            drawn=None if drawn[index] == _UNCOUNTED else drawn[index],
            **{name: arrays[index] for name, arrays in columns.items()},
        )
        for index, (token_ids, mask, temperature) in enumerate(
            zip(
                tensors["token_ids"].split(lengths),
                masks,
                tensors["temperatures"].tolist(),
                strict=True,
            )
        )
    ]


def _columns(
    tensors: Mapping[str, torch.Tensor], column: Column, masks: Sequence[NDArray[np.bool_]]
) -> list[Any]:
    """A column of each sequence, of which there are the masks; None where it has none."""
    arrays: list[Any] = [None] * len(masks)
    if column.name not in tensors:
        return arrays
    indices = list(range(len(masks)))
    having = tensors[f"{column.name}_of"].tolist() if column.optional else indices
    counts = [int(np.count_nonzero(masks[index])) for index in having]
    for index, part in zip(having, tensors[column.name].split(counts), strict=True):
        arrays[index] = np.full(len(masks[index]), column.fill, column.dtype)
        arrays[index][masks[index]] = part.numpy()
    return arrays


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


def completions_value(completions: Sequence[Completion]) -> dict[str, Any]:
    """Completions as ``isobit.parallel.world`` takes them, none of them judged."""
    episodes = [completion.episode for completion in completions]
    stops = [completion.stop_string for completion in completions]
    return {
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "sequences": joined([completion.sequence for completion in completions]),
        **(
            {"episodes": [episode and asdict(episode) for episode in episodes]}
            if any(episodes)
            else {}
        ),
        **({"stop_strings": stops} if any(stops) else {}),
    }


def completions_of(value: Mapping[str, Any], fresh: bool = True) -> list[Completion]:
    """The completions of ``completions_value``; ``fresh`` says whether the present weights
    drew them.
    """
    sequences = parted(value["sequences"], fresh)
    episodes = [Episode.of(one) for one in value.get("episodes", [None] * len(sequences))]
    stops = value.get("stop_strings", [""] * len(sequences))
    rows = zip(sequences, value["texts"], value["finish_reasons"], episodes, stops, strict=True)
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
                "baseline_length": group.baseline_length,
            }
            for group in groups
        ],
        **completions_value([completion for group in groups for completion in group.completions]),
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
        content.get("baseline_length", 0),
    )
