"""The engine's only view of the model: put tokens through it, turn hidden states into logits, copy a page.

``ModelRunner`` is the seam; ``PolicyRunner`` is the policy's rollout side over a paged cache.  Later back ends (captured graphs, a
GPU) and the tests' models stand in the same place.
"""

from typing import Protocol

import torch
from torch import Tensor

from isobit.config.schema import RolloutConfig
from isobit.errors import ConfigError
from isobit.kernels.kv_cache import PAGE_TOKENS, KvCache
from isobit.kernels.paged_attention import PagedAttention
from isobit.models.config import ModelConfig
from isobit.models.decoder import hidden_states
from isobit.models.head import head_logits
from isobit.models.policy import Policy
from isobit.precision.flow import PrecisionFlow
from isobit.rollout.batch import ForwardBatch
from isobit.rollout.pages import pages_for

_GIB = 1 << 30


class ModelRunner(Protocol):
    """One model with its KV cache."""

    @property
    def version(self) -> int:
        """Which weights: K and V computed under another version are worthless."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the new tokens' K and V into their slots; their final hidden states, [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [N, V] from [N, hidden]."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy the K and V of a page, in all layers."""
        ...

    def clear(self) -> None:
        """Forget everything in the cache, non-finite numbers included."""
        ...


class PolicyRunner:
    """The rollout side of a policy."""

    def __init__(self, policy: Policy, num_pages: int) -> None:
        self._policy = policy
        self._num_pages = num_pages
        self._cache = KvCache(policy.config, policy.flow, num_pages)

    @property
    def version(self) -> int:
        """The policy's count of publications."""
        return self._policy.version

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states [T, hidden]; K and V of the new tokens go into the cache."""
        attention = PagedAttention(self._cache, batch.paged)
        return hidden_states(self._policy, "rollout", batch.token_ids, batch.positions, attention)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 [N, V] from [N, hidden]."""
        return head_logits(self._policy, "rollout", hidden)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of all layers."""
        self._cache.copy_page(source, target)

    def clear(self) -> None:
        """Start over with an empty cache."""
        self._cache = KvCache(self._policy.config, self._policy.flow, self._num_pages)


def choose_num_pages(policy: Policy, config: RolloutConfig) -> int:
    """The pages of a policy's cache.  Raises ConfigError as ``num_pages_for`` does."""
    return num_pages_for(policy.config, policy.flow, config)


def num_pages_for(shape: ModelConfig, flow: PrecisionFlow, config: RolloutConfig) -> int:
    """``kv_pages``, or what ``max_sequences`` of the longest sequences need, as far as ``kv_memory_gib`` goes.

    Raises:
        ConfigError: if the memory does not hold a single page.
    """
    if config.kv_pages is not None:
        return config.kv_pages
    page_bytes = KvCache.page_bytes(shape, flow)
    affordable = int(config.kv_memory_gib * _GIB) // page_bytes
    if affordable == 0:
        raise ConfigError(
            f"rollout.kv_memory_gib = {config.kv_memory_gib} holds no page of the KV cache: a page of {PAGE_TOKENS} tokens "
            f"takes {page_bytes / _GIB:.3g} GiB in this model"
        )
    return min(affordable, config.max_sequences * pages_for(shape.max_positions))
