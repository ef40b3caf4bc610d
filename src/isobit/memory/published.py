"""Bytes of published weights, exact: the tests compare them with the tensors."""

from math import prod

from isobit.kernels.sizes import Sizes
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import DTYPES


def published_bytes(shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> int:
    """What both sides read, matrices that they share counted once, and the rotary table."""
    width = DTYPES[flow.training.activations].itemsize
    rope = 4 * shape.max_positions * shape.head_dim
    head = 0
    if not shape.score_head:
        head = sizes.head_copy(shape.vocab_size * shape.hidden_size, width)
    return rope + head + master_bytes(shape, flow, sizes)


def master_bytes(shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> int:
    """What is published of each master, in every form that a side reads."""
    width, total = DTYPES[flow.training.activations].itemsize, 0
    for name, master in build_decoder(shape).masters().items():
        numbers, path = prod(master.shape), name.rpartition(".")[0]
        if master.kind == "matrix":
            sites = {flow.rollout.site(path), flow.training.site(path)}
            total += sum(sizes.matrix(site, master.shape[1]) for site in sites)
        else:
            total += width * numbers
    return total
