"""The class of bits of a machine: two of one class compute the same bits from the same inputs at
the same number of threads; of two classes nobody promises it.

    device          cpu or cuda
    instructions    of the processor: AVX2 and AVX-512 are one class, since the same operations come
                    out of both (benchmarks/instruction_sets.py); older ones are another
    torch           its version
    kernels         SHA-256 of the source of Isobit's kernels and formats, and the versions of the
                    packages that compute for them
"""

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

_SAME = {"AVX2": "AVX2 or AVX-512", "AVX512": "AVX2 or AVX-512"}
_COMPUTE = ("kernels", "precision")
"""Folders of the package."""


def class_of_bits(device: torch.device, libraries: Mapping[str, str]) -> dict[str, str]:
    """Of this machine; ``libraries`` are the versions of those that the device's back end needs."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "device": device.type,
        "instructions": _instructions(platform.machine(), capability),
        "torch": torch.__version__,
        "kernels": kernels_sha256(),
        **libraries,
    }


def recorded_class(environment: Mapping[str, Any]) -> dict[str, str]:
    """The class in a record of versions and machine, as far as an older one, which does not name
    it, lets it be known.
    """
    if "bits" in environment:
        return dict(environment["bits"])
    device, versions = environment.get("device", {}), environment.get("versions", {})
    found = {"device": device.get("type"), "torch": versions.get("torch")}
    if "instructions" in device:
        found["instructions"] = _instructions(device.get("machine", ""), device["instructions"])
    return {name: value for name, value in found.items() if value is not None}


def _instructions(machine: str, capability: str) -> str:
    return f"{machine} {_SAME.get(capability, capability)}"


@cache
def kernels_sha256() -> str:
    """Of the source that decides what an operation computes."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in _COMPUTE:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
