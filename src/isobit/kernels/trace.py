"""A seam for watching a forward: each operation shows its result here, to whoever is observing.

    with observing(observer):
        hidden = hidden_states(...)

calls ``observer(name, values, scales)`` in the order of the forward, with the rows (one a token)
that each operation made.  Names are those of the flow's sites and of what happens at them:
``layers.2.qkv_proj.input`` is what the quantiser of that linear gave, ``layers.2.qkv_proj`` its
product.  Nobody observes an ordinary forward: a call then is one comparison, and the name is not
even joined.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from isobit.kernels.operands import Heads


class Observer(Protocol):
    """Sees each result of a forward and must not change it."""

    def __call__(self, name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """``values`` [T, ...]; a quantised result comes with its scales: FP32 [T, K/128], or E8M0
        bytes [T, heads].
        """
        ...


_observer: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show every result of the forwards in the block to ``observer``; the innermost block
    counts.
    """
    global _observer  # noqa: PLW0603 (one process runs one forward at a time)
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def is_observed() -> bool:
    """Whether it is worth computing something only to show it."""
    return _observer is not None


def observe(
    values: torch.Tensor, *name: str | int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Show ``values`` under the name whose parts are given, and return them."""
    if _observer is not None:
        _observer(".".join(map(str, name)), values, scales)
    return values


def observe_heads(layer: int, queries: Heads, keys: Heads, values: Heads) -> None:
    """Show what a layer's attention reads: K and V as the cache holds them, and its queries; [T,
    heads, D].
    """
    for heads, name in ((keys, "kv_cache.k"), (values, "kv_cache.v"), (queries, "attention.q")):
        observe(heads.values, "layers", layer, name, scales=heads.bytes)
