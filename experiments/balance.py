"""How WGrad's tokens are balanced in INT8 (``isobit.kernels.spec.int8_backward``): the error of
dY^T X by what is taken for the size of a token.

    python -m experiments.balance [MODEL]         # planted outliers; the linears of a checkpoint

    amax         the largest number of each side, as the kernels have it
    mean         the mean of |x|
    mixed        the largest of dY, and of X its mean, truncated to multiples of 2^-12 of its
                 largest: integers, whose sum has no order
    rms          the root of the mean square
    none         no token is balanced

Each cell has two relative errors in percent, over all of dW and over the columns of X whose largest
number is at most eight times that of the median column.  Products are FP64.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch

from benchmarks.common import markdown
from benchmarks.real_checkpoint import QUESTIONS
from experiments.error_by_site import sample
from experiments.proof.gradients import policy_gradient
from isobit.config.precision import PrecisionConfig
from isobit.kernels.spec import linear
from isobit.kernels.spec.backend import SpecBackend
from isobit.kernels.spec.int8_backward import balance
from isobit.kernels.spec.quantise import round_to_int8
from isobit.models.folder import load_policy
from isobit.precision.flow import Site

_SMALLEST = 1e-300
_KEPT_BITS = 12
Errors = Mapping[str, tuple[float, float]]


def _amax(side: torch.Tensor) -> torch.Tensor:
    return side.abs().amax(1)


def _mean(side: torch.Tensor) -> torch.Tensor:
    return side.abs().mean(1)


def _truncated(side: torch.Tensor) -> torch.Tensor:
    unit = torch.exp2(torch.log2(_amax(side).clamp_min(_SMALLEST)).floor() - _KEPT_BITS)
    return (side.abs() / unit[:, None]).floor().mean(1) * unit


def _rms(side: torch.Tensor) -> torch.Tensor:
    return side.square().mean(1).sqrt()


SIZES: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "amax": (_amax, _amax),
    "mean": (_mean, _mean),
    "mixed": (_amax, _truncated),
    "rms": (_rms, _rms),
}


def errors(dy: torch.Tensor, x: torch.Tensor) -> Errors:
    """dY [T, N] and X [T, K] -> of each way the error of all columns, and of the ordinary ones."""
    left, right = dy.double(), x.double()
    exact, largest = left.t() @ right, right.abs().amax(0)
    ordinary = largest <= 8 * largest.median()
    adds = balance(dy, x)[0] != 0
    shifts = {"none": torch.zeros(len(dy), dtype=torch.float64)}
    for name, (of_dy, of_x) in SIZES.items():
        ratio = of_dy(left).clamp_min(_SMALLEST) / of_x(right).clamp_min(_SMALLEST)
        shifts[name] = (torch.log2(ratio) / 2).round().clamp(-126, 126)
    found = dict[str, tuple[float, float]]()
    for name, shift in shifts.items():
        made = _rounded(left, adds * torch.exp2(-shift)) @ _rounded(right, adds * shift.exp2()).t()
        wrong = made - exact
        found[name] = (
            float(wrong.norm() / exact.norm()),
            float(wrong[:, ordinary].norm() / exact[:, ordinary].norm()),
        )
    return found


def _rounded(side: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    values, scales = round_to_int8((side * factors[:, None]).float().t().contiguous())
    return values.double() * scales.double()[:, None]


def planted() -> Iterator[tuple[str, Errors]]:
    """512 tokens of sizes that differ, with outliers in a column of X."""
    torch.manual_seed(0)
    cases: dict[str, tuple[float, slice]] = {
        "none": (1.0, slice(0)),
        "10^4, one column, all tokens": (1e4, slice(None)),
        "10^3, one column, every second token": (1e3, slice(0, None, 2)),
        "10^4, one column, every second token": (1e4, slice(0, None, 2)),
        "10^6, one column, one token": (1e6, slice(3, 4)),
    }
    for name, (factor, tokens) in cases.items():
        dy = torch.randn(512, 256) * torch.exp(1.5 * torch.randn(512, 1))
        x = torch.randn(512, 512) * torch.exp(torch.randn(512, 1))
        x[tokens, 7] *= factor
        yield name, errors(dy.bfloat16(), x.bfloat16())


def of_checkpoint(folder: Path) -> Iterator[tuple[str, Errors]]:
    """Of each linear, all layers: the mean of the first error and the largest of the second, at a
    step of the policy gradient.
    """
    batches = sample(folder, QUESTIONS[:4], 2, 24, 8192, "cpu")
    policy = load_policy(folder, PrecisionConfig(), torch.device("cpu"))
    seen = dict[str, list[Errors]]()

    def measured(dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, site: Site) -> None:
        seen.setdefault(site.name.rpartition(".")[2], []).append(errors(dy, x))
        linear.wgrad(dy, x, grad, site)

    with mock.patch.object(SpecBackend, "wgrad", staticmethod(measured)):
        policy_gradient(policy, batches, exact=False)
    for name, layers in seen.items():
        yield (
            f"{name}, {len(layers)} layers",
            {
                way: (fmean(one[way][0] for one in layers), max(one[way][1] for one in layers))
                for way in layers[0]
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path)
    model = parser.parse_args().model
    rows = [*planted(), *(of_checkpoint(model) if model else ())]
    ways = list(rows[0][1])
    print(markdown(["", *ways]), markdown(["---", *("---:" for _ in ways)]), sep="\n")
    for name, found in rows:
        print(markdown([name, *(f"{100 * a:.1f}, {100 * b:.1f}" for a, b in found.values())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
