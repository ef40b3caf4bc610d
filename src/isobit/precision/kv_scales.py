"""Scales of Q, K and V a tensor, calibrated at every step: the published recipe for an FP8 KV
cache, beside the scales a token and head that are the default (``precision.kv_scales``).

A layer has one scale for Q, one for K and one for V, in E4M3:

    value = E4M3(clamp(x / scale, -448, 448))      scale = amax / divisor, up to a power of two

``x`` is what is quantised with scales a token, too: Q and K behind their Hadamard matrix
(``isobit.kernels.spec.qkv``), V as it is.  A number beyond 448 scales saturates.  Published scales
are FP32; a power of two changes E4M3's relative error only at the ends of its range, and rounding
up leaves up to twice the room.

Where amax comes from (``precision.kv_calibration``):

    trainer   the forwards of an update give the scales that are published with its weights, with
              the divisor 448 / 1.05 (FP8-RL, arXiv 2601.18150, "trainer-side"; NeMo RL's
              ``calibrate_qkv_fp8_scales``: hooks before core attention, behind norms and rotary
              positions, the 99.9th percentile of the micro-batches' maxima times 1.05, the largest
              of all ranks).  NeMo RL runs a further forward of the step's prompts and responses
              with the new weights; here the update's own forward, with the old ones, is read.  Of
              fewer than 500 micro-batches that percentile is the maximum.
    engine    a forward of the next step's prompts with the weights that were just published, with
              the divisors of vLLM's ``calculate_kv_scales``, 200 for Q and K and 100 for V (FP8-RL,
              "inference-side": veRL resets that flag after each update of the weights, so that the
              engine's first forward sets the scales).  vLLM's forward is the first chunk of
              whatever is sampled; here it is one of its own, of every prompt of the step.
    never     the same once before the first step, and never again: what vLLM does unless it is
              reset.  The first scales of ``trainer`` come from the prompts, too.

The calibrating forward has scales a token, so that a maximum depends on no other sequence, and the
maximum of all on no order, batch, chunk or process.  The scales are a property of the published
weights: both sides read the same bytes until the next publication, every process has them, and a
checkpoint holds them.  That is why the flow ``fp8`` stays exact.

A tensor's byte 0 stands for scales a token.  Frozen models (reference, rewards) are never
calibrated and keep those.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from isobit.config.precision import KvCalibration
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import AMAX_FLOOR, E4M3_MAX, E8M0_BIAS

TENSORS = ("Q", "K", "V")
DIVISORS_OF_PROMPTS = (200.0, 200.0, 100.0)
"""vLLM's Q_SCALE_CONSTANT, K_SCALE_CONSTANT and V_SCALE_CONSTANT."""
DIVISORS_OF_UPDATES = (E4M3_MAX / 1.05,) * 3

Maxima = list[list[float]]
"""The largest magnitudes of Q, K and V in each layer."""


def byte_of(amax: float, divisor: float) -> int:
    """The E8M0 byte of ``amax / divisor`` rounded up to a power of two, with the floor of all
    scales on ``amax``.
    """
    mantissa, exponent = math.frexp(max(amax, AMAX_FLOOR) / divisor)
    return (exponent - 1 if mantissa == 0.5 else exponent) + E8M0_BIAS


class KvScales:
    """The scales of Q, K and V of every layer, and the maxima that the next ones come from."""

    def __init__(
        self, count: int, layers: frozenset[int], calibration: KvCalibration, device: torch.device
    ) -> None:
        """``layers`` of a decoder's ``count`` have such scales; others stay in BF16."""
        self.layers, self.calibration = layers, calibration
        shape = (count, len(TENSORS))
        self.bytes = torch.zeros(shape, dtype=torch.uint8, device=device)
        """E8M0, uint8 [layers, 3]; 0 has scales a token.  Changed in place."""
        self.sampled, self.learnt = torch.zeros(2, *shape, device=device, dtype=torch.float32)
        """Maxima, FP32 [layers, 3]: of the rollout side's forwards since ``forget_sampled``, and of
        an update's.  Vectors that are not finite are left out.
        """
        self.is_due = True
        """Whether a forward of prompts is to set the scales before anything is sampled."""
        self.is_set = False
        """Whether there are scales yet."""

    @classmethod
    def of(cls, flow: PrecisionFlow, device: torch.device) -> "KvScales | None":
        """None in a flow that has scales a token."""
        graph = flow.rollout
        if flow.kv_calibration is None:
            return None
        layers = frozenset(filter(graph.has_tensor_scales, range(graph.num_layers)))
        return cls(graph.num_layers, layers, flow.kv_calibration, device)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A block in which the rollout side has scales a token, and ``sampled`` becomes the maxima
        of its forwards; the scales are as before where it raises.
        """
        before = self.bytes.clone()
        self.bytes.zero_()
        self.forget_sampled()
        try:
            yield
        except BaseException:
            self.bytes.copy_(before)
            raise

    def take_prompts(self, maxima: Sequence[Maxima]) -> None:
        """Set the scales by the maxima of a forward of prompts, of each process."""
        first = self.calibration == "trainer"
        self._set(maxima, DIVISORS_OF_UPDATES if first else DIVISORS_OF_PROMPTS)
        self.is_due = False

    def take_update(self, maxima: Sequence[Maxima]) -> None:
        """Set the scales by the maxima of an update's forwards, of each process; a layer in which
        nothing was seen keeps its own.
        """
        self._set(maxima, DIVISORS_OF_UPDATES)

    def forget_sampled(self) -> None:
        """Begin again with the maxima of what is sampled."""
        self.sampled.zero_()

    def forget_learnt(self) -> None:
        self.learnt.zero_()

    def largest_ratio(self) -> float:
        """The largest ``amax / (448 scale)`` of what was sampled: above 1 it was saturated."""
        found = 0.0
        for maxima, layer in zip(self.sampled.tolist(), self.bytes.tolist(), strict=True):
            for amax, byte in zip(maxima, layer, strict=True):
                if byte:
                    found = max(found, amax / (E4M3_MAX * 2.0 ** (byte - E8M0_BIAS)))
        return found

    def state(self) -> dict[str, Any]:
        """The state for ``restore`` on any device, which is serialisable as JSON."""
        return {"bytes": self.bytes.tolist(), "is_due": self.is_due}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._write(state["bytes"])
        self.is_due = state["is_due"]

    def _set(self, maxima: Sequence[Maxima], divisors: Sequence[float]) -> None:
        made: list[list[int]] = []
        for layer, before in enumerate(self.bytes.tolist()):
            amax = [max(one[layer][tensor] for one in maxima) for tensor in range(len(TENSORS))]
            pairs = zip(amax, before, divisors, strict=True)
            made.append([byte_of(x, divisor) if x > 0 else old for x, old, divisor in pairs])
        self._write(made)

    def _write(self, rows: Sequence[Sequence[int]]) -> None:
        self.bytes.copy_(torch.tensor(rows, dtype=torch.uint8))
        self.is_set = any(map(any, rows))
