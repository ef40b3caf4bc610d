"""SHA-256 of INT8 operands and products whose operands come from integers alone: one set of
digests, made on a CPU, for every back end (``int8_products.json``).

Operands are splitmix64's bits as integers times powers of two, exact in BF16 and FP32.  Digests are
of little-endian bytes; every NaN of a product counts as the same one, since its bits are free.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.noise import splitmix64
from isobit.kernels.operands import LinearWeight, Operand, Routing
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Rows

EXPECTED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""By case, then "input", "weight" and "product"."""

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
    nan = torch.tensor(torch.nan, dtype=product.dtype, device=product.device)
    return {
        "input": sha256(read.values, read.scales),
        "weight": sha256(weight.matrix.values, weight.matrix.scales),
        "product": sha256(torch.where(product.isnan(), nan, product)),
    }


def _routing(case: Product, seed: int, device: torch.device) -> Routing:
    drawn = splitmix64(torch.tensor(seed), torch.arange(case.tokens * case.experts))
    logits = (drawn >> 40).view(case.tokens, case.experts).float()
    chosen = logits.argsort(dim=1, descending=True, stable=True)[:, : case.top_k].int().contiguous()
    weights = torch.ones(case.tokens, case.top_k)
    return Routing(chosen.to(device), weights.to(device), logits.to(device))


def sha256(*tensors: torch.Tensor) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return made.hexdigest()
