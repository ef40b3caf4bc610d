"""Completions and graded groups as values for a message or a checkpoint, and back, whole: tokens
with all that was recorded of them, texts, why they ended, rewards and their parts, baselines.

A prompt stands there by its id: whoever reads the value has the same data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from isobit.records.kept import joined, parted
from isobit.records.text import Completion, Group, Prompt


def completions_value(completions: Sequence[Completion]) -> dict[str, Any]:
    """Completions as ``isobit.parallel.message`` takes them, none of them judged."""
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
    """Graded groups as ``isobit.parallel.message`` takes them."""
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
