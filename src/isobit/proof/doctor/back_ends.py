"""The exactness of the other back ends on this machine, where it has their devices: the bytes of
the quantiser, and a small model.

Two things are asked: the quantiser gives the specification's bytes for every BF16 number, and
rollout and training agree on a small random model, through captured steps, chunks, sharing and
preemption.
"""

import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.backend import Backend, backend_of, support, usable_devices
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.proof.doctor.finding import Caution, Check, Fault, exact_detail
from isobit.proof.verify import VerifyOptions, verify_policy

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
        for check in _checks(backend_of(torch.device(device)))
    ]


def _checks(backend: Backend) -> list[Check]:
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
