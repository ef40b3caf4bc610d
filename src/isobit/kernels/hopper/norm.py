"""The residual stream and its norm on Hopper, one kernel with the quantisation that follows
(``isobit.kernels.hopper.quantise``); WGrad's copy is quantised from the BF16 norm.
"""

import torch

from isobit.kernels.hopper.linear import input_saved
from isobit.kernels.hopper.quantise import rms_norm_quantise
from isobit.kernels.operands import LinearInput, Normed
from isobit.kernels.trace import is_observed
from isobit.precision.flow import Site


def add_rms_norm(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    site: Site | None,
    save: bool = False,
    keep: bool = False,
) -> Normed:
    """h and x BF16 [T, C]; the norm itself is written only where somebody reads it."""
    scales = site.scales if site is not None and site.forward == "e4m3" else None
    keep = keep or scales is None or save or is_observed()
    h, norm, quantised = rms_norm_quantise(h, x, weight, epsilon, scales, keep)
    if site is None:
        return Normed(h, norm, None)
    read = norm if quantised is None else quantised
    assert read is not None
    saved = None
    if save:
        assert norm is not None
        saved = input_saved(norm, site)
    return Normed(h, norm, LinearInput(read, saved))
