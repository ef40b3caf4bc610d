"""Checks of the doctor on what surrounds a computation: versions, cores and threads, OpenMP,
memory, disk, files, and whether there is a GPU.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from shutil import disk_usage

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file, save_file

import isobit
from isobit.kernels.backend import support, usable_devices
from isobit.proof.doctor_findings import Caution, Check, Fault, bits_of
from isobit.util.machine import openmp_libraries, processor_name, read_memory, usable_cores
from isobit.util.terminal import gib

_ENOUGH_MEMORY = 2 << 30  # the starter model's run with room to spare


_ENOUGH_DISK = 2 << 30


_TEST_BYTES = 8 << 20


_PYTHON = "install Python in that range and make the environment anew: make setup PYTHON=python3.12"


def environment_checks(directory: Path) -> list[Check]:
    """The checks of a machine; files are written to ``directory``, and removed."""
    here = f"in {directory}"
    elsewhere = "name another directory with --directory, and"
    lower = "lower rollout.kv_memory_gib and training.tokens_per_microbatch"
    threads = "set `threads` in the recipe, or OMP_NUM_THREADS, to the number of cores"
    spin = "import isobit before torch, or set GOMP_SPINCOUNT=5000 for the process"
    return [
        Check("python", _python, _PYTHON),
        *(Check(need.name, partial(_version, need), f"pip install '{need}'") for need in _needs()),
        Check("processor", _processor, threads),
        Check("OpenMP", _openmp, spin),
        Check("memory", _memory, f"end other programs, or {lower}"),
        Check(f"disk {here}", partial(_disk, directory), f"{elsewhere} write runs there"),
        Check(
            f"safetensors {here}", partial(_round_trip, directory), f"{elsewhere} check the disk"
        ),
        *(
            Check(f"device {device}", partial(_device, device), support(device).remedy)
            for device in usable_devices()
        ),
    ]


def extras() -> dict[str, list[str]]:
    """The optional parts of Isobit that are not installed here: their names and the packages that
    each lacks.
    """
    if _installed("isobit") is None:
        return {}
    lacking = {
        name: [need.name for need in _needs(name) if _installed(need.name) is None]
        for name in metadata("isobit").get_all("Provides-Extra") or []
    }
    return {name: packages for name, packages in lacking.items() if packages}


def _needs(extra: str = "") -> Iterator[Requirement]:
    """The requirements in ``pyproject.toml``: those of every installation, or of one extra
    alone.
    """
    for text in (requires("isobit") or []) if _installed("isobit") else []:
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            if not extra:
                yield need
        elif extra and need.marker.evaluate({"extra": extra}):
            need.marker = None
            yield need


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _python() -> str:
    if _installed("isobit") is None:
        raise Caution(
            "isobit is not installed, so that its supported versions are not known",
            "pip install --editable . in its checkout",
        )
    running = platform.python_version()
    supported = SpecifierSet(metadata("isobit")["Requires-Python"])
    if not supported.contains(running, prereleases=True):
        raise Fault(f"{running}, supported is {supported}")
    return f"{running}, isobit {isobit.__version__}"


def _version(need: Requirement) -> str:
    installed = _installed(need.name)
    if installed is None:
        raise Fault(f"not installed, needed is {need.specifier}")
    if not need.specifier.contains(installed, prereleases=True):
        raise Fault(f"{installed}, supported is {need.specifier}")
    return installed


def _processor() -> str:
    threads, cores = torch.get_num_threads(), usable_cores()
    detail = (
        f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}: {threads} threads on "
        f"{cores} cores"
    )
    if threads > cores:
        raise Caution(f"{detail}, more threads than cores wait for each other")
    return detail


def _openmp() -> str:
    libraries = openmp_libraries()
    if not any(name.startswith("libgomp") for name in libraries):
        raise Caution(
            f"torch uses {' and '.join(libraries) or 'no OpenMP'}, which GOMP_SPINCOUNT does not "
            "reach",
            "nothing is wrong; if steps are slow beside another busy program, set KMP_BLOCKTIME=0 "
            "for libiomp5",
        )
    if not isobit.spin_count_in_time:
        raise Caution(
            "torch was imported before isobit: idle threads spin for long, and steps wait beside "
            "any other busy program"
        )
    return (
        f"{', '.join(libraries)}, GOMP_SPINCOUNT={os.environ['GOMP_SPINCOUNT']} set before torch "
        "was imported"
    )


def _memory() -> str:
    memory = read_memory()
    if memory is None:
        raise Caution(
            "the operating system does not say",
            "watch it yourself; `isobit train RECIPE --dry-run` estimates what a run takes",
        )
    detail = f"{gib(memory.available)} free of {gib(memory.total)}"
    if memory.available < _ENOUGH_MEMORY:
        raise Caution(f"{detail}, less than {gib(_ENOUGH_MEMORY)}")
    return detail


def _disk(directory: Path) -> str:
    """Write, force to the disk, read back.  Raises OSError as it comes, which names the reason."""
    content = os.urandom(_TEST_BYTES)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".isobit-doctor-") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if Path(file.name).read_bytes() != content:
            raise Fault("what was read back is not what was written")
    free = disk_usage(directory).free
    if free < _ENOUGH_DISK:
        raise Caution(
            f"{gib(free)} free, less than {gib(_ENOUGH_DISK)}",
            "make room, or write runs to another disk",
        )
    return f"{gib(free)} free; wrote, forced to disk and read back {gib(_TEST_BYTES)}"


def _round_trip(directory: Path) -> str:
    """Tensors of every dtype that Isobit stores, through a file and back, bit for bit, its checksum
    unchanged by reading.
    """
    numbers = torch.tensor([0.0, -0.0, 1.5, torch.inf, torch.nan, 1e-30])
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8)
    tensors = {str(dtype): numbers.nan_to_num(3.0, 4.0).to(dtype) for dtype in dtypes} | {
        "special": numbers
    }
    with tempfile.TemporaryDirectory(dir=directory, prefix=".isobit-doctor-") as folder:
        first, second = Path(folder) / "first.safetensors", Path(folder) / "second.safetensors"
        save_file(tensors, first)
        read = load_file(first)
        save_file(read, second)
        checksums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)]
    for name, tensor in tensors.items():
        if not torch.equal(
            bits_of(tensor).view(torch.uint8), bits_of(read[name]).view(torch.uint8)
        ):
            raise Fault(f"{name} came back with other bits")
    if checksums[0] != checksums[1]:
        raise Fault("the same tensors were written as different bytes")
    return f"{len(tensors)} tensors came back bit for bit, SHA-256 {checksums[0][:12]} twice"


def _device(device: str) -> str:
    line, is_worrying = support(device).state()
    if is_worrying:
        raise Caution(line)
    return line
