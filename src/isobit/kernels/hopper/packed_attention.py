"""Attention of the training forward on Hopper: causal within each sequence of a packed batch, over
K and V laid end to end.
"""

from dataclasses import dataclass

import torch

from isobit.kernels.hopper.attention import PackedKeys, prefill_attention
from isobit.kernels.hopper.memory import to_device
from isobit.kernels.hopper.qkv import Queries, encode_packed
from isobit.kernels.operands import QkvTransform
from isobit.kernels.spec.heads import Heads
from isobit.kernels.trace import is_observed, observe_heads
from isobit.precision.flow import Graph
from isobit.precision.formats import DTYPES, Format

_ONE = 127  # the E8M0 byte of the scale 1


@dataclass(frozen=True, slots=True)
class Attended:
    """What attention of a layer read and made: its backward starts from that."""

    queries: Queries
    keys: PackedKeys
    output: torch.Tensor
    """BF16 [T, H, D]"""
    log_sum_exp: torch.Tensor
    """FP32 [T, H], base 2"""
    window: int | None


class PackedAttention:
    """Attention for packed sequences of the given lengths (``AttendWithBackward``); the same object
    serves all layers.
    """

    def __init__(self, graph: Graph, lengths: tuple[int, ...], positions: torch.Tensor) -> None:
        """``positions`` int64 [T], on the GPU."""
        self._formats: list[Format] = [
            site.forward for site in graph.sites if site.kind == "attention"
        ]
        self._positions, self._longest = positions, max(lengths)
        ends = torch.tensor(lengths, dtype=torch.int32)
        self._starts, self._lengths = (
            to_device(x.int(), positions.device) for x in (ends.cumsum(0) - ends, ends)
        )

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Causal attention of each sequence over itself: [T, (H + 2 G) D] -> [T, H D]."""
        return self.attend(layer, qkv, transform)[0]

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """The same, and what the backward reads."""
        format = self._formats[layer]
        queries, keys = encode_packed(qkv, transform, self._positions, format)
        if is_observed():
            observe_heads(layer, query_heads(queries), *_key_heads(keys, format))
        starts, lengths, longest = self._starts, self._lengths, self._longest
        out, lse = prefill_attention(
            queries.values,
            queries.scales,
            keys,
            starts,
            lengths,
            starts,
            lengths,
            longest,
            longest,
            transform.window,
        )
        return out.view(qkv.shape[0], -1), Attended(queries, keys, out, lse, transform.window)

    def backward(
        self, attended: Attended, d_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of one layer: d_output BF16 [T, H D] -> dq [T, H, D], dk and dv [T, G,
        D].
        """
        from isobit.kernels.hopper.attention_backward import (
            attention_backward,
        )  # Gluon, which the forward does without

        queries, keys, output = attended.queries, attended.keys, attended.output
        return attention_backward(
            queries.values,
            queries.scales,
            keys,
            output,
            attended.log_sum_exp,
            d_output.view_as(output),
            self._starts,
            self._lengths,
            self._longest,
            attended.window,
        )


def query_heads(queries: Queries) -> Heads:
    """As an observer compares them: with E8M0 bytes, also where there are no scales."""
    if queries.scales is None:
        return Heads(
            queries.values, torch.full_like(queries.values[..., 0], _ONE, dtype=torch.uint8)
        )
    return Heads(queries.values, (queries.scales.view(torch.int32) >> 23).to(torch.uint8))


def _key_heads(keys: PackedKeys, format: Format) -> tuple[Heads, Heads]:
    ones = torch.full_like(keys.keys[..., 0], _ONE, dtype=torch.uint8)
    values = keys.values.to(DTYPES[format])  # FP16 copies of E4M3 numbers
    return (
        Heads(keys.keys, ones if keys.key_bytes is None else keys.key_bytes),
        Heads(values, ones if keys.value_bytes is None else keys.value_bytes),
    )
