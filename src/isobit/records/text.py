"""What people write and read: prompts, how they are answered, the answers with their rewards, and
why some of these teach nothing.

Imports no torch: rewards and data import nothing else of the records.

A record as a line of a JSONL file, in UTF-8: text as it stands, but half of a surrogate pair,
which JSON can hold and UTF-8 cannot, as an escape.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from isobit.records.sequence import TokenSequence


def json_line(record: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """The record with a line end; ``default`` is asked for what JSON does not know."""
    try:
        return _dumped(record, default, ensure_ascii=False)
    except UnicodeEncodeError:
        return _dumped(record, default, ensure_ascii=True)


def _dumped(
    record: Mapping[str, Any], default: Callable[[Any], Any] | None, ensure_ascii: bool
) -> bytes:
    text = json.dumps(record, ensure_ascii=ensure_ascii, default=default)
    return f"{text}\n".encode()


FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered and tokenised.

    ``id`` is stable across runs (dataset name and row): sampling noise is keyed by it.  ``row``
    holds the columns of the dataset that a reward function may read.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    content: str | Sequence[Mapping[str, str]] | None = None
    """As the dataset has it, before the chat template: text, or chat messages; None where it comes
    from no dataset.
    """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.  ``temperature`` 0 is greedy; 0 for ``top_k`` and ``min_p`` and 1 for
    ``top_p`` switch a filter off.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    special_tokens: bool = False
    """Whether texts show special tokens."""

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the recorded log-probability: greedy decoding records it at 1."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution is narrower than the full softmax."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    ``text`` is without the stop token that may have ended the answer, and is cut before a stop
    string.  An aborted answer ends anywhere, and may be empty.
    """

    sequence: TokenSequence
    text: str
    finish_reason: FinishReason

    @property
    def length(self) -> int:
        """Tokens drawn."""
        return self.sequence.response_length

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens drawn, with the stop token if one ended the answer."""
        return self._drawn(self.sequence.token_ids)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """One for each of ``token_ids``; see ``TokenSequence``."""
        return self._drawn(self.sequence.log_probs)

    @property
    def truncated_log_probs(self) -> tuple[float, ...] | None:
        """One for each of ``token_ids``; see ``TokenSequence``."""
        column = self.sequence.truncated_log_probs
        return None if column is None else self._drawn(column)

    @property
    def routings(self) -> tuple[int, ...] | None:
        """One for each of ``token_ids``; see ``TokenSequence``."""
        column = self.sequence.routings
        return None if column is None else self._drawn(column)

    @property
    def weights_versions(self) -> tuple[int, ...]:
        """One for each of ``token_ids``: the weights that it was drawn from."""
        return self._drawn(self.sequence.weights_versions)

    def _drawn(self, column: np.ndarray) -> tuple:
        """Python's own numbers, as who writes a reward expects them."""
        return tuple(self.sequence.of_response(column).tolist())


@dataclass(slots=True)
class Group:
    """The completions of one visit of one prompt, and their rewards.  A reward of None is excluded
    from the group.
    """

    prompt: Prompt
    visit: int
    completions: list[Completion]
    rewards: list[float | None] = field(default_factory=list)
    reward_parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Each of several rewards by name, before its weight; empty where there is one reward."""
    baseline: float | None = None
    """The reward of the prompt's greedy completion, where the algorithm asks for one."""
    baseline_length: int = 0
    """Tokens of that completion."""
    advantages: list[float | None] = field(default_factory=list)
    """The mean over each completion's tokens, once a step has judged the group; None for one that
    is not learnt from.
    """

    @property
    def is_level(self) -> bool:
        """Whether no two of its valid rewards differ: then the group teaches nothing."""
        valid = [reward for reward in self.rewards if reward is not None]
        return not valid or min(valid) == max(valid)


UNTAUGHT: Mapping[str, tuple[str, str]] = {
    "failed": ("without a valid reward", "the first error of the reward is noted above"),
    "excluded": (
        'cut off by the length limit (algorithm.truncated = "exclude")',
        "raise rollout.max_new_tokens",
    ),
    "masked": (
        'cut off by the length limit (algorithm.truncated = "mask")',
        "raise rollout.max_new_tokens",
    ),
    "empty": ("empty", "see completions.jsonl, and which tokens end a completion"),
    "alone": (
        "with the only valid reward of their prompt, where it takes two",
        "see why the other rewards are missing",
    ),
    "no_baseline": (
        "of prompts whose greedy completion has no valid reward",
        "see why that reward is missing",
    ),
    "left_out": ("left out by the algorithm", "see its method credit"),
    "rejected": ("given the weight 0 by corrections", "widen their bounds"),
    "zero": (
        "with reward 0, as all others of their prompt",
        "see whether the reward reads the answers (completions.jsonl); if it does, the model never "
        "gets one right: fine-tune it first (docs/tutorial.md)",
    ),
    "cancelled": (
        "with the same total reward as all others of their prompt, though its parts differ",
        "see reward.parts.NAME.weight",
    ),
    "level": (
        "with the same reward as all others of their prompt: rewards are equal",
        "see whether the reward tells right answers from wrong ones (completions.jsonl)",
    ),
    "as_greedy": (
        "with the reward of their prompt's greedy completion",
        "see whether the reward tells right answers from wrong ones (completions.jsonl)",
    ),
    "no_advantage": ("with an advantage of 0", "see their rewards in completions.jsonl"),
}
"""Why a completion taught nothing, by name: the rest of a sentence, and what to do."""


def describe_untaught(untaught: Mapping[str, float], advise: bool = False) -> str:
    """Why completions, counted by the names of ``UNTAUGHT``, taught nothing; with ``advise`` also
    what to do about most of them.
    """
    found = [(name, untaught[name]) for name in UNTAUGHT if untaught.get(name)]
    total = sum(count for _, count in found)
    if not found:
        return "no completions"
    parts = [f"{count:,.0f} {UNTAUGHT[name][0]}" for name, count in found]
    if len(found) == 1:
        text = f"{total:,.0f} completions, all {UNTAUGHT[found[0][0]][0]}"
    else:
        text = f"{total:,.0f} completions, {', '.join(parts[:-1])} and {parts[-1]}"
    most = max(found, key=lambda pair: pair[1])[0]
    return f"{text}; {UNTAUGHT[most][1]}" if advise else text
