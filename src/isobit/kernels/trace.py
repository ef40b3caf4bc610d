"""A seam for watching a forward: each operation shows its result here, to whoever is observing.

    with observing(observer):
        hidden = hidden_states(...)

calls ``observer(name, values, scales)`` in the order of the forward, with the rows (one a token)
that each operation made.  Names are those of the flow's sites and of what happens at them:
``layers.2.qkv_proj.input`` is what the quantiser of that linear gave, ``layers.2.qkv_proj`` its
product.  Nobody observes an ordinary forward: a call then is one comparison, and the name is not
even joined.

A rounding to BF16 hides most faults of one ulp in FP32.  So an operation that rounds its result
does it by ``rounded``; an observer sees the numbers before, too, under ``NAME.unrounded``, first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from isobit.kernels.operands import Heads

UNROUNDED = "unrounded"


class Observer(Protocol):
    """Sees each result of a forward and must not change it."""

    def __call__(self, name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """``values`` [T, ...]; a quantised result comes with its scales: FP32 [T, K/128], or E8M0
        bytes [T, heads].
        """
        ...


_observer: Observer | None = None
_unrounded = WeakTensorKeyDictionary()
"""By result, while that is alive: the numbers that it was rounded from."""


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
    """Show ``values`` under the name whose parts are given, after what they were rounded from if
    that is known; and return them.
    """
    if _observer is not None:
        site = ".".join(map(str, name))
        exact = _unrounded.pop(values, None)
        if exact is not None:
            _observer(f"{site}.{UNROUNDED}", exact, None)
        _observer(site, values, scales)
    return values


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in another format; who is shown this very tensor is shown ``values`` too."""
    result = values.to(dtype)
    if _observer is not None and result is not values:
        _unrounded[result] = values
    return result


def observe_heads(layer: int, queries: Heads, keys: Heads, values: Heads) -> None:
    """Show what a layer's attention reads: K and V as the cache holds them, and its queries; [T,
    heads, D].
    """
    for heads, name in ((keys, "kv_cache.k"), (values, "kv_cache.v"), (queries, "attention.q")):
        observe(heads.values, "layers", layer, name, scales=heads.bytes)
