"""``Backend`` of Hopper GPUs: that of every card, with Hopper's products."""

from collections.abc import Mapping, Sequence

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.hopper import sizes as hopper_sizes
from isobit.kernels.hopper.gemm import describe_back_ends, describe_fallbacks
from isobit.kernels.hopper.products import HopperProducts
from isobit.kernels.sizes import Sizes
from isobit.kernels.triton.backend import TritonBackend
from isobit.kernels.triton.products import Products
from isobit.precision.flow import PrecisionFlow


class HopperBackend(TritonBackend):
    """``Backend`` of one GPU."""

    name = "hopper"
    sizes: Sizes = hopper_sizes
    products: type[Products] = HopperProducts

    def describe(self) -> Mapping[str, str]:
        return describe_back_ends()

    def fallbacks(self, flow: PrecisionFlow) -> Sequence[str]:
        return describe_fallbacks()


def make(device: torch.device) -> Backend:
    assert device.type == "cuda"
    return HopperBackend(device)
