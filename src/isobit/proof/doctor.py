"""The exactness of the other back ends on this machine, where it has their devices: the bytes of
the quantiser, and a small model.

Two things are asked: the quantiser gives the specification's bytes for every BF16 number, and
rollout and training agree on a small random model, through captured steps, chunks, sharing and
preemption.

The exactness of every kernel back end on this machine; today there is one, the CPU
specification.

Two things are asked of each operation, at one thread and at all.  Its rows must not depend on their
place: computed alone, in another batch or in another order they have the same bits, and the bits of
one thread are those of many.  And they must be right, as must the gradients of its backward.

``isobit doctor``: every check in turn, and what this machine will do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isobit.config.tables import PrecisionConfig, Preset
from isobit.kernels.backend import Backend, backend_of, is_present, support, usable_devices
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.precision.quant_tensor import Format
from isobit.proof import doctor_gradients, doctor_operations
from isobit.proof.doctor_environment import environment_checks, extras
from isobit.proof.doctor_findings import (
    Caution,
    Check,
    Fault,
    Finding,
    Status,
    exact_detail,
    require_equal,
)
from isobit.proof.doctor_operations import check_attention
from isobit.proof.doctor_quantisers import quantiser_checks
from isobit.proof.verify import VerifyOptions, verify, verify_policy
from isobit.util.errors import ConfigError
from isobit.util.machine import usable_cores

_PRESETS: tuple[Preset, ...] = ("fp8", "bf16")
_SHAPE = ModelConfig("qwen3", 1000, 512, 768, 2, 8, 2, 128, 1024, 1e-6, 1e6, tied_embeddings=False)
_OPTIONS = VerifyOptions(prompts=5, samples=2, max_new_tokens=12)
_FIX = (
    "reinstall torch with the libraries that it brings, and isobit's extra for the device; report "
    "this line with `isobit doctor --json`"
)


def back_end_checks() -> list[Check]:
    """Checks of every back end but the specification that this machine can use."""
    return [
        check
        for device, problem in usable_devices().items()
        if device != "cpu" and problem is None
        for check in _back_end_checks(backend_of(torch.device(device)))
    ]


def _back_end_checks(backend: Backend) -> list[Check]:
    name = backend.name
    return [
        Check(
            f"{name}: libraries",
            lambda: _libraries(backend),
            support(backend.device.type).remedy,
        ),
        Check(f"{name}: quantiser", lambda: _quantiser(backend), _FIX),
        *(
            Check(
                f"{name}: random model, {preset}",
                lambda preset=preset: _verify(preset, backend.device),
                _FIX,
            )
            for preset in _PRESETS
        ),
    ]


def _libraries(backend: Backend) -> str:
    lines = "; ".join(
        f"{operation}: {library}" for operation, library in backend.describe().items()
    )
    if backend.fallbacks():
        raise Caution(lines)
    return lines


def _quantiser(backend: Backend) -> str:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = every.view(512, 128)
    expected = backend_of(torch.device("cpu")).quantise_rows(x, "power_of_two")
    ours = backend.quantise_rows(x.to(backend.device), "power_of_two")
    pairs = (
        (expected.values.view(torch.uint8), ours.values.cpu().view(torch.uint8)),
        (expected.scales.view(torch.int32), ours.scales.cpu().contiguous().view(torch.int32)),
    )
    for specified, found in pairs:
        if not torch.equal(specified, found):
            raise Fault(
                f"{int((specified != found).sum())} of {found.numel()} bytes or scales are not "
                "the specification's"
            )
    return "all 65,536 BF16 numbers have the specification's bytes"


def _verify(preset: Preset, device: torch.device) -> str:
    policy = random_policy(_SHAPE, PrecisionConfig(preset=preset), 0, device, trainable=False)
    return exact_detail(verify_policy(policy, _OPTIONS))


_FIX_KERNEL = (
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
        "cpu: exp, log and rsqrt": doctor_operations.check_elementwise,
        "cpu: GEMM in E4M3": doctor_operations.check_fp8_gemm_nt,
        "cpu: GEMM in BF16": doctor_operations.check_grid_gemm_nt,
        **{
            f"cpu: linear in {format.upper()}": lambda format=format: (
                doctor_operations.check_linear(format)
            )
            for format in _FORMATS
        },
        "cpu: RMSNorm": doctor_operations.check_rms_norm,
        "cpu: rotary positions": doctor_operations.check_rope,
        "cpu: Hadamard matrix": doctor_operations.check_hadamard,
        "cpu: SwiGLU": doctor_operations.check_swiglu,
        "cpu: router": doctor_operations.check_route,
        "cpu: experts": doctor_operations.check_experts,
        **{
            f"cpu: attention in {format.upper()}": lambda format=format: check_attention(format)
            for format in _FORMATS
        },
        "cpu: scalar head": doctor_operations.check_scalar_head,
        "cpu: log-softmax": doctor_operations.check_log_softmax,
        "cpu: sampling": doctor_operations.check_sampling,
    }
    return [
        Check(name, lambda outcome=outcome: _at_each(threads, outcome), _FIX_KERNEL)
        for name, outcome in outcomes.items()
    ]


def gradient_checks(threads: Sequence[int]) -> list[Check]:
    """A check a backward, run at each of the given numbers of threads; another number may change
    its last bits.
    """
    checks: dict[str, Callable[[], None]] = {
        **{
            f"cpu: gradients of linear in {format.upper()}": partial(
                doctor_gradients.check_linear, format
            )
            for format in _FORMATS
        },
        "cpu: gradients of RMSNorm": doctor_gradients.check_rms_norm,
        "cpu: gradients of Q, K and V": partial(doctor_gradients.check_qkv, is_e4m3=False),
        "cpu: gradients of Q, K and V before E4M3": partial(
            doctor_gradients.check_qkv, is_e4m3=True
        ),
        "cpu: gradients of attention": doctor_gradients.check_attention,
        "cpu: gradients of SwiGLU": doctor_gradients.check_swiglu,
        "cpu: gradients of experts": doctor_gradients.check_experts,
        "cpu: gradients of embedding": doctor_gradients.check_embedding,
        "cpu: gradients of log-prob": doctor_gradients.check_log_probs,
        "cpu: gradients of scalar head": doctor_gradients.check_scalar_head,
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


_DEVELOPMENT = "dev"
_SMALL = VerifyOptions(prompts=5, samples=2, max_new_tokens=12)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and what follows from them."""

    findings: tuple[Finding, ...]
    runs_here: tuple[str, ...]
    """What will run where, and what to install for more."""

    @property
    def exit_code(self) -> int:
        """1 if anything failed, else 0."""
        return int(self.count("fail") > 0)

    def count(self, status: Status) -> int:
        """Findings of that status."""
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The findings in order, with their counts."""
        counts = {
            "passed": self.count("pass"),
            "warnings": self.count("warn"),
            "failed": self.count("fail"),
        }
        return {
            **counts,
            "findings": [asdict(finding) for finding in self.findings],
            "runs_here": list(self.runs_here),
        }


def examine(
    directory: Path = Path(),
    on_check: Callable[[str], None] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> Examination:
    """Test this machine; ``directory`` is where files are tried out.

    ``on_check`` is called with the name of each check before it runs, ``on_finding`` with what it
    found.

    Raises ConfigError where ``directory`` is none.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{str(directory)!r} is not a directory; name one that exists, in which runs will be "
            "written"
        )
    findings = []
    for check in _checks(directory.absolute()):
        if on_check is not None:
            on_check(check.name)
        findings.append(check.find())
        if on_finding is not None:
            on_finding(findings[-1])
    return Examination(tuple(findings), tuple(_runs_here(findings)))


def _checks(directory: Path) -> list[Check]:
    threads = sorted({1, max(2, usable_cores())})
    return [
        *environment_checks(directory),
        *quantiser_checks(),
        *kernel_checks(threads),
        *gradient_checks(threads),
        *back_end_checks(),
        Check(
            "starter model, fp8",
            _verify_starter,
            "rollout and training part: `isobit verify starter --bisect` names the first operation",
        ),
    ]


def _verify_starter() -> str:
    return exact_detail(verify(Path("starter"), PrecisionConfig(preset="fp8"), _SMALL))


def _runs_here(findings: list[Finding]) -> Iterator[str]:
    """Where things run, and how to get more."""
    if any(finding.status == "fail" for finding in findings):
        yield "nothing should run here before the failures above are mended"
    else:
        flows = "in fp32, bf16, fp8-rollout, fp8-linear and fp8"
        yield f"rollout, training, evaluation and verify: on the CPU, {flows}"
        for device, problem in usable_devices().items():
            if device != "cpu" and problem is None:
                flows = flows.replace("fp32, ", "")
                yield f"the same on {device}, and there by default, {flows}"
    useless = {support(device).extra for device in usable_devices() if not is_present(device)}
    for extra, lacking in extras().items():
        if extra not in (_DEVELOPMENT, *useless):
            yield f"not installed: {', '.join(lacking)}; pip install 'isobit[{extra}]'"
