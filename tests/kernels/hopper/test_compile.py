"""The Hopper kernels compile for sm_90 ahead of time, without a GPU, to the instructions that their exactness and speed rest on."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: kernels are not compiled ahead of time")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import attention  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MOST_SHARED = 227 * 1024
E4M3 = "*fp8e4nv"
POINTERS = {
    **dict.fromkeys(("Q", "K"), E4M3),
    **dict.fromkeys(("Q_SCALE", "LSE", "PART_O", "PART_M", "PART_L", "JOINED"), "*fp32"),
    **dict.fromkeys(("K_BYTE", "V_BYTE"), "*u8"),
    **dict.fromkeys(("TABLE", "LENGTH", "Q_START", "Q_COUNT", "K_START"), "*i32"),
    **dict.fromkeys(("table_stride", "max_parts"), "i32"),
    "O": "*bf16",
    "c": "fp32",
}


def compile_for_hopper(
    kernel: Any, values: str, constants: dict[str, Any], warps: int, stages: int, tmp_path: Path
) -> tuple[Any, str, str]:
    """-> the compiled kernel, its SASS and its resource usage."""
    names = [parameter.name for parameter in kernel.params]
    types = POINTERS | {"V": values} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(fn=kernel, signature={name: types[name] for name in names}, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    sass, usage = (
        subprocess.run([CUOBJDUMP, flag, cubin], capture_output=True, text=True, check=True).stdout for flag in ("-sass", "-res-usage")
    )
    return compiled, sass, usage


def stack_bytes(usage: str) -> int:
    return max(int(number) for number in re.findall(r"STACK:(\d+)", usage))


def shape(dim: int, **more: Any) -> dict[str, Any]:
    return {"H": 32, "G": 8, "D": dim, "TILE": attention.TILE, "PART": attention.PART, **more}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("split", [False, True])
def test_decode(dim: int, split: bool, tmp_path: Path) -> None:
    compiled, sass, usage = compile_for_hopper(attention._decode_kernel, E4M3, shape(dim, N=16, SPLIT=split), 4, 5, tmp_path)
    assert "QGMMA" in sass and "HGMMA" in sass and "HMMA" not in sass.replace("HGMMA", "")
    assert stack_bytes(usage) == 0 and compiled.metadata.shared <= MOST_SHARED // 2  # two programs a multiprocessor


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("split", [False, True])
def test_prefill(dim: int, split: bool, tmp_path: Path) -> None:
    compiled, sass, usage = compile_for_hopper(attention._prefill_kernel, "*fp16", shape(dim, NQ=64, SPLIT=split), 4, 2, tmp_path)
    assert "QGMMA" in sass and "HGMMA" in sass and "HMMA" not in sass.replace("HGMMA", "")
    assert compiled.metadata.shared <= MOST_SHARED // 2
    assert split or stack_bytes(usage) <= 16  # joining parts costs some registers, one part must not


def test_join(tmp_path: Path) -> None:
    _, _, usage = compile_for_hopper(attention._join_kernel, E4M3, {"H": 32, "D": 128, "PART": attention.PART}, 1, 2, tmp_path)
    assert stack_bytes(usage) == 0
