"""The exactness of every kernel back end on this machine; today there is one, the CPU
specification.

Two things are asked of each operation, at one thread and at all.  Its rows must not depend on their
place: computed alone, in another batch or in another order they have the same bits, and the bits of
one thread are those of many.  And they must be right, as must the gradients of its backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from isobit.precision.formats import Format
from isobit.proof.doctor import gradients, operations
from isobit.proof.doctor.attention import check_attention
from isobit.proof.doctor.bits import require_equal
from isobit.proof.doctor.finding import Check, Fault

_FIX = (
    "rollout and training would part here: reinstall torch in a supported version, and report "
    "this line with `isobit doctor --json`"
)

_FIX_GRADIENT = (
    "training would learn something else here: reinstall torch in a supported version, and report "
    "this line with `isobit doctor --json`"
)
_FORMATS: tuple[Format, ...] = ("e4m3", "bf16")

Outcome = Callable[[], torch.Tensor]
"""Checks one operation, raising Fault, and returns a result whose bits must not depend on the
number of threads.
"""


def kernel_checks(threads: Sequence[int]) -> list[Check]:
    """A check an operation of the CPU specification, run at each of the given numbers of
    threads.
    """
    outcomes: dict[str, Outcome] = {
        "cpu: exp, log and rsqrt": operations.check_elementwise,
        "cpu: GEMM in E4M3": operations.check_fp8_gemm_nt,
        "cpu: GEMM in BF16": operations.check_grid_gemm_nt,
        **{
            f"cpu: linear in {format.upper()}": lambda format=format: operations.check_linear(
                format
            )
            for format in _FORMATS
        },
        "cpu: RMSNorm": operations.check_rms_norm,
        "cpu: rotary positions": operations.check_rope,
        "cpu: Hadamard matrix": operations.check_hadamard,
        "cpu: SwiGLU": operations.check_swiglu,
        "cpu: router": operations.check_route,
        "cpu: experts": operations.check_experts,
        **{
            f"cpu: attention in {format.upper()}": lambda format=format: check_attention(format)
            for format in _FORMATS
        },
        "cpu: scalar head": operations.check_scalar_head,
        "cpu: log-softmax": operations.check_log_softmax,
        "cpu: sampling": operations.check_sampling,
    }
    return [
        Check(name, lambda outcome=outcome: _at_each(threads, outcome), _FIX)
        for name, outcome in outcomes.items()
    ]


def gradient_checks(threads: Sequence[int]) -> list[Check]:
    """A check a backward, run at each of the given numbers of threads; another number may change
    its last bits.
    """
    checks: dict[str, Callable[[], None]] = {
        **{
            f"cpu: gradients of linear in {format.upper()}": partial(gradients.check_linear, format)
            for format in _FORMATS
        },
        "cpu: gradients of RMSNorm": gradients.check_rms_norm,
        "cpu: gradients of Q, K and V": partial(gradients.check_qkv, is_e4m3=False),
        "cpu: gradients of Q, K and V before E4M3": partial(gradients.check_qkv, is_e4m3=True),
        "cpu: gradients of attention": gradients.check_attention,
        "cpu: gradients of SwiGLU": gradients.check_swiglu,
        "cpu: gradients of experts": gradients.check_experts,
        "cpu: gradients of embedding": gradients.check_embedding,
        "cpu: gradients of log-prob": gradients.check_log_probs,
        "cpu: gradients of scalar head": gradients.check_scalar_head,
    }
    return [
        Check(name, partial(_right_at_each, threads, check), _FIX_GRADIENT)
        for name, check in checks.items()
    ]


def _right_at_each(threads: Sequence[int], check: Callable[[], None]) -> str:
    for number in threads:
        with using_threads(number):
            try:
                check()
            except Fault as fault:
                raise Fault(f"{fault.detail}, at {number} threads", fault.fix) from None
    return f"those of FP64, at {' and '.join(map(str, threads))} threads"


def _at_each(threads: Sequence[int], outcome: Outcome) -> str:
    """Run at each number of threads and compare the results' bits."""
    results = []
    for number in threads:
        with using_threads(number):
            try:
                results.append(outcome())
            except Fault as fault:
                raise Fault(f"{fault.detail}, at {number} threads", fault.fix) from None
    for number, result in zip(threads[1:], results[1:], strict=True):
        require_equal(f"{number} threads and {threads[0]}", result, results[0])
    return f"right, and the same bits in every batch, at {' and '.join(map(str, threads))} threads"


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Give torch that many threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
