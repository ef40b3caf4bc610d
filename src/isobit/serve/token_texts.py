"""Prompts, parts of choices, and the text of tokens with their log-probabilities in answers.

Every log-probability is log-softmax(logits / temperature) over all tokens, before top-k, top-p and
min-p, at the request's temperature, or at 1 where that is 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.rollout.scoring import Scored

SMALLEST_LOG_PROB = -9999.0
"""The value for minus infinity, which JSON does not have; OpenAI's figure."""


@dataclass(slots=True)
class ChoicePart:
    """A new part of a choice: all of it, or a piece in a stream."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    alternatives: Sequence[Sequence[tuple[int, float]]] | None = None
    """The likeliest tokens at each token; None where none were asked for."""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt as it was read, and its log-probabilities if they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    scored: Scored | None = None
    begun: str = ""
    """The text of the last message that the model goes on with; the prompt ends with it, but
    perhaps for white space around it.
    """

    @property
    def ahead(self) -> str:
        """The prompt up to ``begun``."""
        return self.text.rstrip().removesuffix(self.begun.strip()) if self.begun else self.text


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Spelling:
    """The text of single tokens, as ``text`` gives it for a token id, special ones included."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self.text = text

    def described(self, token: int, log_prob: float) -> dict[str, Any]:
        """A token as chat completions describe it; bytes are null for a part of a character."""
        text = self.text(token)
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(log_prob), "bytes": known}

    def legacy(self, part: ChoicePart, offset: int) -> dict[str, list[Any]]:
        """The log-probabilities of a part, before whose tokens there are ``offset`` characters."""
        tops = part.alternatives or [[] for _ in part.token_ids]
        texts = [self.text(token) for token in part.token_ids]
        columns: dict[str, list[Any]] = {"tokens": texts, "token_logprobs": [], "top_logprobs": []}
        columns["text_offset"] = []
        for token, text, log_prob, top in zip(
            part.token_ids, texts, part.log_probs, tops, strict=True
        ):
            columns["token_logprobs"].append(_finite(log_prob))
            columns["top_logprobs"].append(self._by_text([*top, (token, log_prob)]))
            columns["text_offset"].append(offset)
            offset += len(text)
        return columns

    def _by_text(self, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by the tokens' texts; of tokens with one text the likeliest stays."""
        by_text = dict[str, float]()
        for token, log_prob in pairs:
            by_text.setdefault(self.text(token), _finite(log_prob))
        return by_text

    def legacy_prompt(self, prompt: ScoredPrompt, alternatives: int) -> dict[str, list[Any]]:
        """The log-probabilities of an echoed prompt; its first token has none."""
        assert prompt.scored is not None
        scored, first = prompt.scored, prompt.token_ids[0]
        tops = [alternative[:alternatives] for alternative in scored.alternatives]
        rest = ChoicePart(0, "", prompt.token_ids[1:], tuple(scored.log_probs), tops)
        is_written = prompt.text.startswith(self.text(first))  # else the tokenizer has added it
        columns = self.legacy(rest, len(self.text(first)) if is_written else 0)
        head = {"tokens": self.text(first), "token_logprobs": None, "top_logprobs": None}
        return {name: [(head | {"text_offset": 0})[name], *columns[name]] for name in columns}

    def prompt_log_probs(self, prompt: ScoredPrompt, alternatives: int) -> list[Any]:
        """vLLM's form: a table of token ids for each token; its first token has none."""
        assert prompt.scored is not None
        scored, tables = prompt.scored, list[Any]([None])
        columns = zip(
            prompt.token_ids[1:], scored.log_probs, scored.ranks, scored.alternatives, strict=True
        )
        for token, log_prob, rank, top in columns:
            entries = {token_id: (value, at) for at, (token_id, value) in enumerate(top, start=1)}
            kept = dict(list(entries.items())[:alternatives]) | {token: (log_prob, rank)}
            tables.append(
                {
                    str(token_id): {
                        "logprob": _finite(value),
                        "rank": at,
                        "decoded_token": self.text(token_id),
                    }
                    for token_id, (value, at) in kept.items()
                }
            )
        return tables

    def chat(self, part: ChoicePart) -> dict[str, Any]:
        """The log-probabilities of a part of a chat completion."""
        tops = part.alternatives or [[] for _ in part.token_ids]
        content = [
            self.described(token, log_prob)
            | {"top_logprobs": [self.described(*one) for one in top]}
            for token, log_prob, top in zip(part.token_ids, part.log_probs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}


def _finite(log_prob: float) -> float:
    return max(log_prob, SMALLEST_LOG_PROB)
