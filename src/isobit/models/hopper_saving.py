"""The forward of a pass with a backward on a GPU: each linear's input is made twice, as FProp reads
it and as WGrad will.

WGrad reads X in E4M3 groups of 128 tokens, transposed, or in BF16 (``precision.wgrad``, and layers
that stay in BF16).  Where one kernel can write both copies, the input is read from memory once:

    a norm's output                      written in BF16 by the norm, beside what FProp reads, and
                                         quantised from there
    attention's output, silu(gate) * up  both copies at once

What FProp reads has the bits of ``isobit.models.hopper_decoder.Forward``.
"""

import torch

from isobit.kernels.hopper.quantise import QuantRows, swiglu
from isobit.kernels.hopper.token_groups import (
    quantise_both,
    quantise_tokens,
    swiglu_both,
    swiglu_tokens,
)
from isobit.models.hopper_decoder import Forward, Input, LinearInput
from isobit.precision.formats import ScaleKind


class SavingForward(Forward):
    """A forward whose inputs of linears all have ``saved``."""

    saves = True

    def activation_saved(self, layer: int, gate_up: torch.Tensor) -> LinearInput:
        """What ``activation`` saves, alone: for an MLP that is computed again without its end."""
        scales = self._wgrad_scales(f"layers.{layer}.down_proj")
        return swiglu(gate_up) if scales is None else swiglu_tokens(gate_up, scales)

    def _normed(
        self, linear: str, normed: torch.Tensor | None, quantised: QuantRows | None
    ) -> Input:
        assert normed is not None
        scales = self._wgrad_scales(linear)
        return Input(
            normed if quantised is None else quantised,
            normed if scales is None else quantise_tokens(normed, scales),
        )

    def _input(self, linear: str, x: torch.Tensor) -> Input:
        scales = self._wgrad_scales(linear)
        return (
            Input(super()._input(linear, x).read, x)
            if scales is None
            else Input(*quantise_both(x, scales))
        )

    def _gated(self, linear: str, gate_up: torch.Tensor) -> Input:
        scales = self._wgrad_scales(linear)
        return (
            self._input(linear, swiglu(gate_up))
            if scales is None
            else Input(*swiglu_both(gate_up, scales))
        )

    def _wgrad_scales(self, linear: str) -> ScaleKind | None:
        """Those of its input as WGrad reads it; None where that is in BF16."""
        site = self.weights.linears[linear].site
        return site.scales if site.wgrad == "e4m3" else None
