"""Each operation shows its result to an observer, if there is one, in the order of the forward:
``with observing(observer)`` calls ``observer(name, values, scales)`` with rows, one a token.

Names are those of the flow's sites: ``layers.2.qkv_proj.input`` is what the quantiser of that
linear gave, ``layers.2.qkv_proj`` its product.  A rounding to BF16 hides most faults of one ulp in
FP32, so operations round by ``rounded``, and an observer sees the numbers before it first, as
``NAME.unrounded``.
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
"""The numbers that each result was rounded from, while the result exists."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show all results of the forwards in the block to ``observer``; the innermost block counts."""
    global _observer  # noqa: PLW0603 (one process runs one forward at a time)
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def is_observed() -> bool:
    """Whether to compute something only to show it."""
    return _observer is not None


def observe(
    values: torch.Tensor, *name: str | int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Show ``values``, after the numbers that they were rounded from; and return them."""
    if _observer is not None:
        site = ".".join(map(str, name))
        exact = _unrounded.pop(values, None)
        if exact is not None:
            _observer(f"{site}.{UNROUNDED}", exact, None)
        _observer(site, values, scales)
    return values


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in another format, remembered for ``observe`` of the result."""
    result = values.to(dtype)
    if _observer is not None and result is not values:
        _unrounded[result] = values
    return result


def observe_heads(layer: int, queries: Heads, keys: Heads, values: Heads) -> None:
    """Show what a layer's attention reads: K, V and queries, [T, heads, D]."""
    for heads, name in ((keys, "kv_cache.k"), (values, "kv_cache.v"), (queries, "attention.q")):
        observe(heads.values, "layers", layer, name, scales=heads.scales)
