"""Prompts, how they are answered, and the answers with their rewards: what people write and read.

Imports no torch, as ``messages`` does: rewards and data work on both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from isobit.records.sequence import TokenSequence

FinishReason = Literal["stop", "length", "aborted", "turns", "time", "failed"]
"""The last three end episodes (``isobit.rollout.episodes``)."""
CUT: tuple[FinishReason, ...] = ("length", "turns", "time", "failed")
"""The reasons that end a completion before its model has ended it."""


HARMONY = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
"""The channels of gpt-oss that its thinking and its answer stand in, one after the other."""
THINK_TAG = re.compile(r"<think(?:ing)?>|\[THINK\]")
THOUGHT_TAG = re.compile(r"</think(?:ing)?>|\[/THINK\]")
"""``THINK_TAG`` and ``THOUGHT_TAG`` match the tags around a model's thinking."""
THINK = re.compile(rf"{THINK_TAG.pattern}|{re.escape(HARMONY[0])}")
THOUGHT = re.compile(rf"{THOUGHT_TAG.pattern}|{re.escape(HARMONY[1])}")
"""``THINK`` and ``THOUGHT`` match the beginning and the end of a model's thinking, which is neither
graded nor searched for calls.
"""


def ends_in_thinking(prompt: str) -> bool:
    """Whether the chat template has begun the thinking at the end of the prompt."""
    last = prompt[-40:].rstrip()
    return any(tag.end() == len(last) for tag in THINK.finditer(last))


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
    content: str | Sequence[Mapping[str, Any]] | None = None
    """The prompt as the dataset has it, before the chat template: text, or chat messages; None
    where it comes from no dataset.
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
    special_tokens: bool | frozenset[int] = False
    """Whether texts show special tokens, or which of them."""

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the recorded log-probability: greedy decoding records it at 1."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution is narrower than the full softmax."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Episode:
    """A completion of several turns, in which a model has called tools."""

    turns: tuple[str, ...]
    """The model's texts, with special tokens and stop strings, but without the tokens that ended a
    turn.
    """
    results: tuple[tuple[tuple[str, str], ...], ...]
    """The results of the calls after each turn: the kind (``ResultKind``) and the text of each."""
    failure: str = ""
    """The kind of the environment's failure, where there was one."""
    failure_message: str = ""
    reward: float | None = None
    """The reward of the environment's own ``get_reward``; those of turns are in the sequence."""
    prompt: str = ""
    """The prompt as it was rendered, where the environment added something to it."""

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> "Episode | None":
        """Undo ``dataclasses.asdict`` and JSON, which turns tuples into lists."""
        if content is None:
            return None
        results = tuple(
            tuple((kind, text) for kind, text in behind) for behind in content["results"]
        )
        return cls(
            tuple(content["turns"]),
            results,
            content["failure"],
            content.get("failure_message", ""),
            content["reward"],
            content["prompt"],
        )

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns and the results as messages."""
        messages: list[dict[str, str]] = []
        for index, turn in enumerate(self.turns):
            messages.append({"role": "assistant", "content": turn})
            behind = self.results[index] if index < len(self.results) else ()
            roles = {"user": "user"}  # all other kinds are of tools
            messages += [
                {"role": roles.get(kind, "tool"), "content": text} for kind, text in behind
            ]
        return messages


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    ``text`` is without the stop token that may have ended the answer, and is cut before a stop
    string.  An aborted answer ends anywhere, and may be empty.
    """

    sequence: TokenSequence
    text: str
    finish_reason: FinishReason
    episode: Episode | None = None
    """The turns and the results of their calls, with an environment; ``text`` is the last turn."""
    stop_string: str = ""
    """The stop string that ended the answer, where one did."""

    @property
    def whole_text(self) -> str:
        """``text`` with the stop string that it is cut before: all that the model wrote."""
        return self.text + self.stop_string

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it, or a failure of its environment (``algorithm.truncated``)."""
        return self.finish_reason in CUT

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
        """The entries of the response as Python's own numbers, which authors of rewards expect."""
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
