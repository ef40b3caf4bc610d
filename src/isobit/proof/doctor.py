"""``isobit doctor``: every check of this machine in turn, and what will run on it.

The CPU specification is checked operation by operation, at one thread and at all, on the cases of
``isobit.proof.cases``.  Of every other back end that has a device here, the quantiser must give the
specification's bytes for every BF16 number, DGrad and WGrad in INT8 its bits, and rollout and
training must agree on a small random model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.backend import (
    Backend,
    back_end_extras,
    back_end_of,
    backend_of,
    is_present,
    support,
    usable_devices,
)
from isobit.kernels.operands import LinearWeight, Quantised
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.folder import model_needs
from isobit.models.policy import random_policy
from isobit.precision.flow import Site, build_flow
from isobit.proof import cases, expert_cases, linear_cases
from isobit.proof.attention_cases import AttentionCase, check_attention
from isobit.proof.cases import Case, check_gradients, check_rows
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
from isobit.proof.doctor_quantisers import quantiser_checks
from isobit.proof.verify import VerifyOptions, verify, verify_policy
from isobit.util.errors import ConfigError
from isobit.util.machine import usable_cores

_PRESETS: tuple[Preset, ...] = ("fp8", "int8", "bf16")
_SHAPE = ModelConfig("qwen3", 1000, 512, 768, 2, 8, 2, 128, 1024, 1e-6, 1e6, tied_embeddings=False)
_SMALL = VerifyOptions(prompts=5, samples=2, max_new_tokens=12)
_ON_DEVICE = VerifyOptions(max_new_tokens=12)
"""More samples of a prompt than ``_SMALL``, so that few pages preempt some."""
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
    name, remedy = backend.name, support(backend.device.type).remedy
    return [
        Check(f"{name}: libraries", partial(_libraries, backend), remedy),
        Check(f"{name}: quantiser", partial(_quantiser, backend), _FIX),
        Check(f"{name}: backward in INT8", partial(_int8_backward, backend), _FIX),
        *(
            Check(f"{name}: random model, {preset}", partial(_verify, preset, backend.device), _FIX)
            for preset in _PRESETS
        ),
    ]


def _libraries(backend: Backend) -> str:
    lines = "; ".join(f"{name}: {library}" for name, library in backend.describe().items())
    if backend.fallbacks(build_flow(PrecisionConfig(), decoder_shape(_SHAPE))):
        raise Caution(lines)
    return lines


def _quantiser(backend: Backend) -> str:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = every.view(512, 128)
    specification = backend_of(torch.device("cpu"))
    expected = specification.quantise_rows(x, "power_of_two")
    ours = backend.quantise_rows(x.to(backend.device), "power_of_two")
    _require_same("E4M3", ours, expected)
    site = Site("case", "linear", "int8", dgrad="e4m3", wgrad="e4m3", parts=(128,))
    ours, expected = (
        side.linear_input(x.to(side.device), site).read for side in (backend, specification)
    )
    assert not isinstance(ours, torch.Tensor)
    assert not isinstance(expected, torch.Tensor)
    _require_same("INT8", ours, expected)
    return "all 65,536 BF16 numbers have the specification's bytes, in E4M3 and in INT8"


def _int8_backward(backend: Backend) -> str:
    """The backward of a linear of several parts, over tokens that fill no block."""
    parts, columns, tokens = (256, 72), 160, cases.ROWS
    x, dy = (cases.wide(tokens, n, seed=n, dtype=cases.BF16) for n in (columns, sum(parts)))
    site, dy[0], x[1] = linear_cases.int8_site(parts), 0.0, 0.0
    made = list[dict[str, torch.Tensor]]()
    for side in (backend, backend_of(torch.device("cpu"))):
        matrix = side.publish(site, cases.wide(sum(parts), columns).to(side.device))
        gradient = side.output_gradient(dy.to(side.device), site)
        grad = cases.wide(sum(parts), columns, seed=1).to(side.device)
        side.wgrad(gradient.tokens, x.to(side.device), grad, site)
        d_x = side.dgrad(gradient.rows, LinearWeight(site, matrix))
        made.append({"DGrad": d_x.cpu(), "WGrad": grad.cpu()})
    for name, ours in made[0].items():
        require_equal(f"{name} in INT8 and the specification's", ours, made[1][name])
    return "DGrad and WGrad have the specification's bits"


def _require_same(name: str, ours: Quantised, expected: Quantised) -> None:
    codes = (made.values.cpu().view(torch.uint8) for made in (ours, expected))
    require_equal(f"this quantiser's bytes in {name} and the specification's", *codes)
    scales = (made.scales.cpu().contiguous() for made in (ours, expected))
    require_equal(f"this quantiser's scales in {name} and the specification's", *scales)


def _verify(preset: Preset, device: torch.device) -> str:
    policy = random_policy(_SHAPE, PrecisionConfig(preset=preset), 0, device, trainable=False)
    return exact_detail(verify_policy(policy, _ON_DEVICE))


_FIX_KERNEL = (
    "rollout and training would part here: reinstall torch in a supported version, and report "
    "this line with `isobit doctor --json`"
)
_FIX_GRADIENT = (
    "training would learn something else here: reinstall torch in a supported version, and report "
    "this line with `isobit doctor --json`"
)

VALUES: dict[str, tuple[Callable[[], Case], ...]] = {
    "exp, log and rsqrt": (
        partial(cases.elementwise, "exp", math.exp),
        partial(cases.elementwise, "log", math.log),
        partial(cases.elementwise, "rsqrt", lambda x: 1 / math.sqrt(x)),
        partial(cases.elementwise, "log", math.log, torch.float64),
    ),
    "GEMM in E4M3": (linear_cases.e4m3_gemm,),
    "GEMM in INT8": (linear_cases.int8_gemm, partial(linear_cases.int8_gemm, 67)),
    "GEMM in BF16": (linear_cases.grid_gemm,),
    **{
        f"linear in {format.upper()}": (partial(linear_cases.linear, format),)
        for format in ("e4m3", "int8", "bf16")
    },
    "RMSNorm": (cases.rms_norm,),
    "rotary positions": (cases.rotation,),
    "Hadamard matrix": (cases.hadamard,),
    "Q, K and V": (cases.transformed_qkv, partial(cases.transformed_qkv, is_rotated=True)),
    "SwiGLU": (cases.swiglu, cases.swiglu_columns),
    "router": (expert_cases.router,),
    "experts": (
        partial(expert_cases.experts, "e4m3"),
        partial(expert_cases.experts, "int8"),
    ),
    "scalar head": (cases.scalar_head,),
    "log-softmax": (cases.log_softmax,),
    "log-prob": (cases.token_log_probs, partial(cases.token_log_probs, in_int8=True)),
    "embedding": (cases.embedding,),
    "sampling": (cases.noise, cases.draw),
}
"""Operations whose rows are independent of each other, by the name of their check."""

ATTENTION: dict[str, tuple[Callable[[], AttentionCase], ...]] = {
    f"attention in {format.upper()}": (partial(AttentionCase, format, (1, 40, 67, 130)),)
    for format in ("e4m3", "int8", "bf16")
}

GRADIENTS: dict[str, tuple[Callable[[], Case], ...]] = {
    **{
        f"linear in {format.upper()}": (
            partial(linear_cases.dgrad, format),
            partial(linear_cases.wgrad, format),
        )
        for format in ("e4m3", "int8", "bf16")
    },
    "linear with a backward in INT8": (linear_cases.dgrad_in_int8, linear_cases.wgrad_in_int8),
    "RMSNorm": (cases.rms_norm,),
    "Q, K and V": (cases.transformed_qkv,),
    "Q, K and V before 8 bits": (partial(cases.transformed_qkv, is_rotated=True),),
    "attention": (AttentionCase("fp32", (40, 97)).case,),
    "SwiGLU": (cases.swiglu,),
    "experts": (expert_cases.expert_gradients, partial(expert_cases.router, dtype=torch.float32)),
    "embedding": (cases.embedding,),
    "log-prob": (cases.token_log_probs, partial(cases.token_log_probs, in_int8=True)),
    "scalar head": (cases.scalar_head,),
}
"""Backwards, by the name of their check."""


def kernel_checks(threads: Sequence[int]) -> list[Check]:
    """A check an operation of the CPU specification, whose bits must be the same at each of the
    given numbers of threads.
    """
    spoken = f"right, and the same bits in every batch, at {_spoken(threads)} threads"
    return [
        Check(f"cpu: {name}", partial(_at_each, threads, check, made, spoken), _FIX_KERNEL)
        for table, check in ((VALUES, check_rows), (ATTENTION, check_attention))
        for name, made in table.items()
    ]


def gradient_checks(threads: Sequence[int]) -> list[Check]:
    """A check a backward, run at each of the given numbers of threads; another number may change
    its last bits.
    """
    spoken = f"those of FP64, at {_spoken(threads)} threads"
    return [
        Check(
            f"cpu: gradients of {name}",
            partial(_at_each, threads, check_gradients, made, spoken),
            _FIX_GRADIENT,
        )
        for name, made in GRADIENTS.items()
    ]


def _spoken(threads: Sequence[int]) -> str:
    return " and ".join(map(str, threads))


def _at_each(
    threads: Sequence[int],
    check: Callable[[Any], torch.Tensor | None],
    made: Sequence[Callable[[], Any]],
    passed: str,
) -> str:
    """Check the cases at each number of threads, and that those results that are returned have the
    same bits.
    """
    first = list[torch.Tensor | None]()
    for number in threads:
        with using_threads(number):
            try:
                results = [check(make()) for make in made]
            except Fault as fault:
                raise Fault(f"{fault.detail}, at {number} threads", fault.fix) from None
        first = first or results
        for result, expected in zip(results, first, strict=True):
            if result is not None and expected is not None:
                require_equal(f"{number} threads and {threads[0]}", result, expected)
    return passed


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Give torch that many threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and what follows from them."""

    findings: tuple[Finding, ...]
    runs_here: tuple[str, ...]
    """Lines on what will run where, and what to install for more."""

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
    findings = list[Finding]()
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
            f"starter model, {PrecisionConfig().name}",
            _verify_starter,
            "rollout and training part: `isobit verify starter --bisect` names the first operation",
        ),
    ]


def _verify_starter() -> str:
    return exact_detail(verify(Path("starter"), PrecisionConfig(), _SMALL))


def _flows(device: str) -> str:
    """The presets that a device computes."""
    presets = [
        preset
        for preset in get_args(Preset)
        if support(device).model_problem(model_needs(_SHAPE, preset)) is None
    ]
    return f"in {', '.join(presets[:-1])} and {presets[-1]}"


def _runs_here(findings: list[Finding]) -> Iterator[str]:
    """Lines that say what runs here, and how to get more."""
    if any(finding.status == "fail" for finding in findings):
        yield "nothing should run here before the failures above are mended"
    else:
        yield f"rollout, training, evaluation and verify: on the CPU, {_flows('cpu')}"
        for device, problem in usable_devices().items():
            if device != "cpu" and problem is None:
                by = f"by the back end {back_end_of(device)}"
                yield f"the same on {device}, and there by default, {by}, {_flows(device)}"
    here = {support(device).extra for device in usable_devices() if is_present(device)}
    useless = back_end_extras() - here
    for extra, lacking in extras().items():
        if extra not in ("dev", *useless):
            yield f"not installed: {', '.join(lacking)}; pip install 'isobit[{extra}]'"
