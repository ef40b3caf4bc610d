"""SHA-256 of INT8 operands and products whose operands come from integers alone: one set of
digests, made on a CPU, for every back end (``int8_products.json``).

Operands are splitmix64's bits as integers times powers of two, exact in BF16 and FP32.  Digests are
of little-endian bytes; every NaN counts as the same one, since its bits are free.

Sums of INT8 are exact by themselves.  What a digest covers beside them, all of it in FP32:

    input, weight      the Hadamard transform, the largest number of a row, rounding, the scale
    product            the integer as FP32, times two scales, rounded to BF16
    dy, turned         DGrad's operands likewise, W^T from the numbers that the forward's INT8
                       stands for, and its scales divided by the size of the Hadamard matrix
    dx                 of each part the integer as FP32 times two scales, the sum over the parts,
                       rounded to BF16
    dy tokens, tokens  WGrad's operands: each token balanced by a power of two, then rounded with
                       one scale a row over all tokens
    gradient           the integer as FP32, times two scales, added to an FP32 gradient
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.noise import splitmix64
from isobit.kernels.operands import LinearWeight, Operand
from isobit.kernels.routing import Routing
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, Int8Parts, Int8Rows, block_sizes

EXPECTED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""By case, then by what is digested."""

Grouped = Callable[[Operand, Routing, LinearWeight], torch.Tensor]
"""Rows [T, K], a routing and the stacked matrices [E N, K] -> the product of each token with each
of its experts' matrices [T, k, N].
"""


@dataclass(frozen=True, slots=True)
class Product:
    tokens: int
    rows: int  # of W, all experts together
    columns: int
    broken: bool = False
    """Whether two rows of X and one of W are not finite."""
    experts: int = 0
    top_k: int = 0


PRODUCTS = {
    "one token": Product(1, 384, 512),
    "few tokens": Product(60, 1536, 2048),
    "many tokens": Product(300, 640, 512),
    "blocks of 64": Product(33, 300, 576),
    "blocks of 16": Product(130, 257, 1040),
    "odd sizes": Product(67, 101, 77),
    "long sums": Product(5, 64, 28672),
    "not finite": Product(70, 300, 576, broken=True),
    "experts": Product(50, 6 * 160, 320, experts=6, top_k=3),
    "experts, not finite": Product(50, 5 * 256, 912, broken=True, experts=5, top_k=2),
}


def numbers(seed: int, rows: int, columns: int, bits: int) -> torch.Tensor:
    """FP32 [rows, columns]: integers of so many bits and a sign, times 2^0 .. 2^-7 by element and
    2^-8 .. 2^7 by row.
    """
    drawn = splitmix64(torch.tensor(seed), torch.arange(rows * columns)).view(rows, columns)
    whole = drawn.bitwise_and((1 << bits + 1) - 1) - (1 << bits)
    small = (drawn >> 40).bitwise_and(7).double()
    by_row = (splitmix64(torch.tensor(-1 - seed), torch.arange(rows)) >> 20).bitwise_and(15) - 8
    return (whole.double() * torch.exp2(by_row[:, None].double() - small)).float()


def digests(name: str, backend: Backend, grouped: Grouped) -> dict[str, str]:
    """What ``EXPECTED`` has of a case, as the back end makes it."""
    case = PRODUCTS[name]
    seed = list(PRODUCTS).index(name)
    x = numbers(2 * seed, case.tokens, case.columns, 7).bfloat16()
    master = numbers(2 * seed + 1, case.rows, case.columns, 20)
    if case.broken:
        x[3, 5], x[9, 7], master[11, 2] = torch.nan, torch.inf, torch.nan
    parts = (case.rows // max(1, case.experts),) * max(1, case.experts)
    site = Site("linear", "linear", "int8", dgrad="e4m3", wgrad="e4m3", parts=parts)
    weight = LinearWeight(site, backend.publish(site, master.to(backend.device)))
    read = backend.linear_input(x.to(backend.device), site).read
    if case.experts:
        product = grouped(read, _routing(case, seed, backend.device), weight)
    else:
        product = backend.linear(read, weight)
    assert isinstance(read, Int8Rows) and isinstance(weight.matrix, Int8Rows)
    return {
        "input": sha256(read.values, read.scales),
        "weight": sha256(weight.matrix.values, weight.matrix.scales),
        "product": sha256(product),
    }


def _routing(case: Product, seed: int, device: torch.device) -> Routing:
    drawn = splitmix64(torch.tensor(seed), torch.arange(case.tokens * case.experts))
    logits = (drawn >> 40).view(case.tokens, case.experts).float()
    chosen = logits.argsort(dim=1, descending=True, stable=True)[:, : case.top_k].int().contiguous()
    weights = torch.ones(case.tokens, case.top_k)
    return Routing(chosen.to(device), weights.to(device), logits.to(device))


@dataclass(frozen=True, slots=True)
class Backward:
    """Operands of DGrad and WGrad of a matrix that is fused of so many rows."""

    parts: tuple[int, ...]
    columns: int
    tokens: int
    power: int = -20
    """dY has numbers of about 2 to this."""
    one_sided: bool = False
    """Whether tokens have a side of zeros, which must set no scale of the other side's rows."""
    broken: Literal["", "tokens", "matrix"] = ""
    """What is not finite: two tokens of dY and one of X, or a row of W, which breaks all of dX."""


BACKWARDS = {
    "backward, one part": Backward((384,), 256, 256),
    "backward, several parts": Backward((576, 192, 192), 576, 300),
    "backward, parts that fill no block": Backward((256, 128, 72), 80, 129),
    "backward, odd sizes": Backward((101,), 77, 67),
    "backward, one token": Backward((384, 128), 192, 1),
    "backward, no tokens": Backward((384, 128), 192, 0),
    "backward, long sums over columns": Backward((28672, 64), 32, 5),
    "backward, long sums over tokens": Backward((64,), 32, 5000),
    "backward, tiny gradients": Backward((300, 300), 160, 200, power=-100),
    "backward, tokens of zeros": Backward((300, 300), 160, 200, one_sided=True),
    "backward, tokens not finite": Backward((256, 96), 160, 200, broken="tokens"),
    "backward, a matrix not finite": Backward((256, 96), 160, 200, broken="matrix"),
}


def backward_digests(name: str, backend: Backend, operands: ModuleType) -> dict[str, str]:
    """What ``EXPECTED`` has of a backward, as the back end makes it; ``operands`` is its module
    ``int8_backward``.
    """
    case, seed = BACKWARDS[name], 100 + 3 * list(BACKWARDS).index(name)
    rows, device = sum(case.parts), backend.device
    x = numbers(seed, case.tokens, case.columns, 7).bfloat16()
    dy = (numbers(seed + 1, case.tokens, rows, 7) * 2.0**case.power).bfloat16()
    master = numbers(seed + 2, rows, case.columns, 20)
    if case.one_sided:
        dy[5], x[6], dy[7], x[7] = 0.0, 0.0, 0.0, 0.0
        x[5], dy[6] = 3e38, 3e38
    if case.broken == "tokens":
        dy[3, 5], dy[4, 300], x[9, 7] = torch.nan, -torch.inf, torch.inf
    elif case.broken == "matrix":
        master[11, 2] = torch.nan
    site = Site("w", "linear", "int8", dgrad="int8", wgrad="int8", parts=case.parts)
    weight = LinearWeight(site, backend.publish(site, master.to(device)))
    made, x = backend.output_gradient(dy.to(device), site), x.to(device)
    gradient = numbers(seed + 2, rows, case.columns, 20).to(device)
    backend.wgrad(made.tokens, x, gradient, site)
    assert isinstance(made.rows, Int8Parts)
    digested = {
        "dy": parts_sha256(made.rows),
        "turned": parts_sha256(operands.transposed_parts(weight.matrix, case.parts)),
        "dx": sha256(backend.dgrad(made.rows, weight)),
        "gradient": sha256(gradient),
    }
    if case.tokens:
        for side, name in zip(operands.balanced_rows(made.tokens, x), _SIDES, strict=True):
            digested[name] = sha256(side.values[:, : case.tokens], side.scales)
    return digested


_SIDES = "dy tokens", "tokens"


def parts_sha256(operand: Int8Parts) -> str:
    """Of the numbers alone, where a back end lays parts out in whole blocks."""
    sizes, values = block_sizes(operand.parts), operand.values
    if values.shape[1] != sum(sizes):
        blocks = values.split(BLOCK, 1)
        values = torch.cat([block[:, :n] for block, n in zip(blocks, sizes, strict=True)], 1)
    return sha256(values, operand.scales)


def sha256(*tensors: torch.Tensor) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
        made.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return made.hexdigest()
