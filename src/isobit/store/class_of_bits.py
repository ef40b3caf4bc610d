"""The class of bits of a machine.  Machines of one class compute the same bits from the same inputs
at the same number of threads:

    device        cpu; of a GPU also its generation and the back end, such as cuda-sm90-hopper
    arithmetic    of a CPU: SHA-256 of the results of torch's operations on fixed inputs.  The
                  instruction set alone is not enough: AVX2 and AVX-512 multiply matrices to the
                  same bits and differ in softmax, and MKL and oneDNN choose for themselves
                  (benchmarks/instruction_sets.py)
    torch         its version
    kernels       SHA-256 of the syntax of Isobit's kernels and formats, without comments,
                  docstrings and names of files
    PACKAGE       versions of the packages that compute for the kernels
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from isobit.kernels.backend import support
from isobit.store.kernels_digest import kernels_sha256

_GEMMS = ((1, 128, 128), (7, 300, 130), (64, 1024, 512), (257, 2048, 96))
"""M, K, N: one row, odd sizes, and longer than a block of each library."""


def class_of_bits(device: torch.device, libraries: Mapping[str, str]) -> dict[str, str]:
    """The class of this machine; ``libraries`` are those that the back end needs, by version."""
    return {
        "device": support(device.type).device_class(device),
        **({"arithmetic": arithmetic_sha256()} if device.type == "cpu" else {}),
        "torch": torch.__version__,
        "kernels": kernels_sha256(),
        **libraries,
    }


def recorded_bits(bits: Mapping[str, str]) -> dict[str, str]:
    """The class that a run recorded; ``cuda`` was Hopper alone, by the back end of that name."""
    found = dict(bits)
    return found | {"device": "cuda-sm90-hopper"} if found.get("device") == "cuda" else found


@cache
def arithmetic_sha256() -> str:
    """SHA-256 of the results of the specification's operations, on one thread."""
    threads, digest = torch.get_num_threads(), hashlib.sha256()
    torch.set_num_threads(1)
    try:
        for result in _results():
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()


def _results() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    for m, k, n in _GEMMS:
        a, b = drawn(m, k), drawn(n, k)
        yield a @ b.T
        yield a.T @ drawn(m, n)
        yield a.bfloat16() @ b.bfloat16().T
    x = drawn(64, 1000) * 5
    size = x.abs()
    yield from (x.exp(), x.expm1(), size.log(), size.log1p(), size.sqrt(), size.rsqrt())
    yield from (x.sigmoid(), silu(x), x.cos(), x.sin(), x.bfloat16().float())
    yield from (x.sum(-1), x.sum(0), x.double().sum(-1), x.square().mean(-1), x.cumsum(-1))
    yield from (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1))
