"""What passes between the rooms: prompts, completions, groups and packed batches.

``rollout`` makes completions, ``rewards`` grades them, ``training`` packs and learns from them;
none of the three imports another. Shapes: T tokens of a packed batch, S sequences in it, N response
tokens in it (those that are trained on).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

FinishReason = Literal["stop", "length"]


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

    ``token_ids`` include the stop token if one ended it; ``text`` does not, and is cut before a
    stop string.  ``log_probs`` are the FP32 log-softmax(logits / temperature) over the full
    vocabulary, one a token; ``truncated_log_probs`` those under the truncated distribution,
    recorded only where top-k, top-p or min-p is on.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    temperature: float
    weights_version: int
    truncated_log_probs: tuple[float, ...] | None = None


@dataclass(slots=True)
class Group:
    """The completions of one visit of one prompt, and their rewards.  A reward of None is excluded
    from the group.
    """

    prompt: Prompt
    visit: int
    completions: list[Completion]
    rewards: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Whole sequences laid end to end without padding: what one micro-batch of the trainer sees.

    Row ``i`` of the forward predicts token ``i + 1`` of the same sequence; ``rows`` names the N
    rows whose prediction is a response token and ``targets`` those tokens.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], from 0 in each sequence
    lengths: tuple[int, ...]  # S of them, summing to T
    rows: torch.Tensor  # int64 [N], ascending
    targets: torch.Tensor  # int64 [N]
    sequence: torch.Tensor  # int64 [N], 0..S-1: the sequence each response token belongs to
    temperatures: torch.Tensor  # float32 [N]
    recorded_log_probs: torch.Tensor  # float32 [N], from the engine
    advantages: torch.Tensor  # float32 [N]
