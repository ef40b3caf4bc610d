"""The exactness of the GPU kernels on this machine, where there is a Hopper GPU: the bytes of the
quantiser, and a small model.

Two things are asked: the quantiser gives the CPU's bytes for every BF16 number, and rollout and
training agree on a small random model, through captured graphs, chunks, sharing and preemption.
"""

import torch

from isobit.config.schema import PrecisionConfig, Preset
from isobit.kernels.device import hopper_problem
from isobit.kernels.spec import quantise as specification
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.proof.doctor.finding import Caution, Check, Fault, exact_detail
from isobit.proof.verify import VerifyOptions, verify_policy

_PRESETS: tuple[Preset, ...] = ("fp8", "bf16")
_SHAPE = ModelConfig("qwen3", 1000, 512, 768, 2, 8, 2, 128, 1024, 1e-6, 1e6, tied_embeddings=False)
_OPTIONS = VerifyOptions(prompts=5, samples=2, max_new_tokens=12)
_FIX = "reinstall torch with the Triton that it brings, and isobit[hopper]; report this line with `isobit doctor --json`"


def gpu_checks() -> list[Check]:
    """Checks of the GPU's kernels; none where no GPU can be used."""
    if hopper_problem() is not None:
        return []
    return [
        Check(
            "gpu: libraries",
            _libraries,
            "pip install 'isobit[hopper]', and install CUDA's compiler nvcc",
        ),
        Check("gpu: quantiser", _quantiser, _FIX),
        *(
            Check(f"gpu: random model, {preset}", lambda preset=preset: _verify(preset), _FIX)
            for preset in _PRESETS
        ),
    ]


def _libraries() -> str:
    from isobit.kernels.hopper.gemm import describe_back_ends, why_not_deep_gemm

    lines = "; ".join(
        f"{operation}: {library}" for operation, library in describe_back_ends().items()
    )
    if why_not_deep_gemm() is not None:
        raise Caution(lines)
    return lines


def _quantiser() -> str:
    from isobit.kernels.hopper.quantise import quantise_rows

    x = (
        torch.arange(1 << 16, dtype=torch.int32)
        .to(torch.uint16)
        .view(torch.bfloat16)
        .view(512, 128)
    )
    expected, ours = specification.quantise_rows(x), quantise_rows(x.cuda())
    pairs = (
        (expected.values.view(torch.uint8), ours.values.view(torch.uint8)),
        (expected.scales.view(torch.int32), ours.scales.view(torch.int32)),
    )
    for cpu, gpu in pairs:
        if not torch.equal(cpu, gpu.cpu()):
            raise Fault(
                f"{int((cpu != gpu.cpu()).sum())} of {cpu.numel()} bytes or scales are not the "
                "CPU's"
            )
    return "all 65,536 BF16 numbers have the CPU's bytes"


def _verify(preset: Preset) -> str:
    return exact_detail(
        verify_policy(
            random_policy(_SHAPE, PrecisionConfig(preset=preset), 0, "cuda", trainable=False),
            _OPTIONS,
        )
    )
