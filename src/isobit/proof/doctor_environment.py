"""What surrounds a computation: versions, cores and threads, OpenMP, memory, disk, files, whether
there is a GPU, and the quantisers of this machine against stored bytes.

``golden.safetensors`` holds inputs of the quantisers and the bytes that must come out, for every
granularity and kind of scale.  ``tests/proof/golden.py`` makes it from the written specification,
in plain Python.  The inputs hold what a quantiser can meet: zeros of both signs, every E4M3 number
and the midpoints between neighbours, subnormals, amax at and just above 448 times a power of two,
1e-12 and smaller, the largest FP32, infinities, NaN, and numbers over wide ranges.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.resources import files
from pathlib import Path
from shutil import disk_usage
from typing import get_args

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file, save_file

import isobit
from isobit.kernels.backend import backend_of, support, usable_devices
from isobit.kernels.spec import quantise
from isobit.kernels.spec.linear import has_int8_products, int_mm_is_exact
from isobit.precision.quant_tensor import E4M3, QuantTensor, ScaleKind
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
    """What ``pyproject.toml`` asks for: always, or for one extra alone."""
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
    found = platform.python_version()
    supported = SpecifierSet(metadata("isobit")["Requires-Python"])
    if not supported.contains(found, prereleases=True):
        raise Fault(f"{found}, supported is {supported}")
    return f"{found}, isobit {isobit.__version__}"


def _version(need: Requirement) -> str:
    found = _installed(need.name)
    if found is None:
        raise Fault(f"not installed, needed is {need.specifier}")
    if not need.specifier.contains(found, prereleases=True):
        raise Fault(f"{found}, supported is {need.specifier}")
    return found


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


Tensors = dict[str, torch.Tensor]

_FIX = (
    "do not train in 8 bits here: every stored weight would differ; reinstall torch in a supported "
    "version, and report this line"
)


_SLOWER = (
    "nothing is wrong: the bits are the same, and int8 flows are slower; a processor with VNNI or "
    "AMX has exact ones"
)
INT8_COLUMNS = (128, 96)
"""Of the stored rows, with Hadamard matrices of 128 and of 32 rows."""


def golden_file() -> Path:
    """The file shipped with Isobit."""
    return Path(str(files("isobit.proof"))) / "golden.safetensors"


def load_golden() -> Tensors:
    """The stored tensors: ``decode``, ``rows``, ``tokens``, ``blocks``, ``heads`` and ``grid``,
    each with its input and results, and ``int8`` of rows and heads.
    """
    return load_file(golden_file())


def quantiser_checks() -> list[Check]:
    """A check a granularity, with both kinds of scales, infinities, NaN and every edge that the
    stored inputs hold; and whether torch multiplies INT8 exactly.
    """
    golden = load_golden()
    return [
        Check("E4M3 bytes to numbers", partial(_decode, golden), _FIX),
        Check("quantise 1x128", partial(_both_kinds, golden, "rows", "quantise_rows"), _FIX),
        Check("quantise 128x128", partial(_both_kinds, golden, "blocks", "quantise_blocks"), _FIX),
        Check("quantise 128x1", partial(_both_kinds, golden, "tokens", "quantise_tokens"), _FIX),
        Check("quantise Q, K and V", partial(_heads, golden), _FIX),
        Check("quantise INT8", partial(_int8, golden), _FIX),
        Check("snap to the grid", partial(_grid, golden), _FIX),
        Check("INT8 products of torch", _int8_products, _SLOWER),
    ]


def _both_kinds(golden: Tensors, name: str, quantiser: str) -> str:
    function: Callable[[torch.Tensor, ScaleKind], QuantTensor] = getattr(quantise, quantiser)
    x = golden[f"{name}.input"]
    for kind in get_args(ScaleKind):
        made, stored = function(x.clone(), kind), f"{name}.{kind}"
        codes = made.values.view(torch.uint8)
        _compare(f"bytes with {kind} scales", codes, golden[f"{stored}.values"])
        _compare(f"{kind} scales", made.scales, golden[f"{stored}.scales"])
    return f"{2 * x.numel():,} bytes and their scales as stored, power-of-two and FP32"


def _heads(golden: Tensors) -> str:
    values, scale_bytes = quantise.quantise_heads(golden["heads.input"].clone())
    _compare("bytes", values.view(torch.uint8), golden["heads.power_of_two.values"])
    _compare("scale bytes", scale_bytes, golden["heads.power_of_two.bytes"])
    return f"{values.numel():,} bytes and their scales as stored"


def _int8(golden: Tensors) -> str:
    total = 0
    for columns in INT8_COLUMNS:
        made = quantise.quantise_int8(golden["rows.input"][:, :columns])
        _compare(f"bytes of {columns} columns", made.values, golden[f"int8.{columns}.values"])
        _compare(f"scales of {columns} columns", made.scales, golden[f"int8.{columns}.scales"])
        total += made.values.numel()
    values, scales = quantise.round_to_int8(golden["heads.input"].clone())
    _compare("bytes of Q, K and V", values, golden["int8.heads.values"])
    _compare("scales of Q, K and V", scales, golden["int8.heads.scales"])
    return f"{total + values.numel():,} bytes and their scales as stored, with and without Hadamard"


def _int8_products() -> str:
    product = backend_of(torch.device("cpu")).describe()["INT8 GEMM"]
    if has_int8_products() and not int_mm_is_exact():
        raise Caution(f"linears in INT8 use {product}")
    return f"exact: linears in INT8 use {product}"


def _grid(golden: Tensors) -> str:
    _compare("numbers", quantise.snap_rows(golden["grid.input"].clone()), golden["grid.values"])
    return f"{golden['grid.values'].numel():,} numbers as stored"


def _decode(golden: Tensors) -> str:
    codes = golden["decode.input"]
    _compare("numbers", quantise.decode_e4m3(codes.view(E4M3)), golden["decode.values"])
    _compare("numbers of torch's cast", codes.view(E4M3).float(), golden["decode.values"])
    return f"all {codes.numel()} finite ones"


def _compare(what: str, made: torch.Tensor, stored: torch.Tensor) -> None:
    """Bit for bit, NaN included.  Raises Fault naming the first difference."""
    if made.shape != stored.shape:
        raise Fault(f"{what}: shape {tuple(made.shape)}, stored is {tuple(stored.shape)}")
    differing = (bits_of(made) != bits_of(stored)).nonzero()
    if len(differing):
        place = tuple(differing[0].tolist())
        raise Fault(
            f"{len(differing):,} of {stored.numel():,} {what} differ, the first at {list(place)}: "
            f"{made[place].item():.9g}, stored is {stored[place].item():.9g}"
        )
