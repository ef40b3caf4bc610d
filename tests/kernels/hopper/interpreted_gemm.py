"""Run in Triton's interpreter by test_interpreted.py: products that are cut along K, in FP32, since
the interpreter has no BF16.
"""

from typing import Any

import torch

from isobit.kernels.hopper import gemm


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(a), len(b)), torch.nan)
    gemm.multiply_in_spans(a, b, out)
    return out


def check(m: int, n: int, k: int) -> None:
    """Small integers, so that every sum is exact in any order."""
    generator = torch.Generator().manual_seed(m + n + k)
    assert gemm.is_narrow(n, k)
    a, b = (torch.randint(-8, 9, (rows, k), generator=generator).float() for rows in (m, n))
    assert torch.equal(product(a, b), (a.double() @ b.double().t()).float()), (m, n, k)


def check_order() -> None:
    """Spans are added from the first on: 2^24 + 1 + 1 is 2^24 in FP32, and 1 + 1 + 2^24 is not."""
    sums, out = torch.tensor([[2.0**24, 1.0], [1.0, 1.0], [1.0, 2.0**24]]), torch.empty(2)
    launch: Any = gemm._spans_kernel
    launch[(1,)](sums, out, 2, 3, 16)
    assert out.tolist() == [2.0**24, 2.0**24 + 2]


def main() -> None:
    assert [gemm.spans_of(k) for k in (1024, 1536, 4096, 12288, 1100)] == [
        (128, 8), (256, 6), (512, 8), (768, 16), (256, 5),
    ]  # fmt: skip
    for m, n, k in ((1, 96, 1024), (65, 32, 1100), (70, 129, 1536), (3, 16, 8320)):
        check(m, n, k)
    check_order()


if __name__ == "__main__":
    main()
