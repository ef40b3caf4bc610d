"""What a check of the doctor finds, what to do about it, and the comparisons that raise it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from isobit.proof.verify import VerifyResult, first_operation

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """What to do; empty where the check passed."""


class Fault(Exception):  # noqa: N818 (a finding, not an error of the program)
    """Raised by a check that fails: what was found, and what to do."""

    status: Status = "fail"

    def __init__(self, detail: str, fix: str = "") -> None:
        super().__init__(detail)
        self.detail, self.fix = detail, fix


class Caution(Fault):
    """Raised by a check that warns."""

    status: Status = "warn"


def exact_detail(result: VerifyResult) -> str:
    """What a passing verification shows; raises Fault for one that does not pass."""
    compared, differing = result.comparison.tokens_compared, result.comparison.tokens_differing
    if differing or not compared:
        raise Fault(
            f"{differing:,} of {compared:,} log-probabilities differ between rollout and training"
        )
    if result.differs:
        raise Fault("operations differ that no log-probability shows: " + first_operation(result))
    if result.missing:
        raise Fault(
            f"not everything happened that has to be compared: {', '.join(result.missing)}",
            "reinstall Isobit",
        )
    rows = sum(one.rows for one in result.operations)
    return (
        f"0 of {compared:,} log-probabilities"
        + (f" and {rows:,} rows of operations" if rows else "")
        + " differ between rollout and training"
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One line to be found out: ``run`` returns what it saw, or raises; ``fix`` is what to do where
    a Fault brings no advice.
    """

    name: str
    run: Callable[[], str]
    fix: str

    def find(self) -> Finding:
        """Run the check.  An exception that it did not foresee is a failure too."""
        try:
            return Finding(self.name, "pass", self.run())
        except Fault as fault:
            return Finding(self.name, fault.status, fault.detail, fault.fix or self.fix)
        except Exception as error:  # whatever breaks here would break a run
            return Finding(self.name, "fail", f"{type(error).__name__}: {error}", self.fix)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """FP32 as int32, so that NaN equals NaN and zeros of both signs differ; anything else as it
    is.
    """
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def require_equal(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises Fault unless the bits are equal."""
    differing = int((bits_of(a) != bits_of(b)).sum())
    if differing:
        raise Fault(f"{what} give different bits: {differing:,} of {a.numel():,} numbers")


def require_close(
    what: str, result: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> None:
    """Raises Fault where the largest difference, over the largest number expected, is above
    ``tolerance`` or not a number.
    """
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise Fault(
            f"{what} is off by {error:.2g} of its largest number, more than {tolerance:.2g}"
        )
