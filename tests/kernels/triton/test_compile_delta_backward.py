"""The kernels of the gated delta rule's backward compile for sm_80 in 99 KiB, at the sizes of
Qwen3.5 9B and in heads of 256, and their PTX assembles for every card since.
"""

from typing import Any

import pytest

from isobit.kernels.triton import delta_chunks_backward as chunks
from isobit.kernels.triton import delta_rows_backward as rows
from isobit.kernels.triton.delta_rows import vectors_at_once
from isobit.kernels.triton.sizes import DELTA_TOKENS
from tests.kernels.triton.assembled import assert_assembles, compile_portable

pytestmark = pytest.mark.usefixtures("generations")

KERNELS = {
    "factors": chunks._chunk_factors_kernel,
    "reads": chunks._reads_kernel,
    "outputs": chunks._outputs_kernel,
    "fronts": chunks._fronts_kernel,
    "states": chunks._states_kernel,
    "told": chunks._told_kernel,
    "updates": chunks._updates_kernel,
    "pairs": chunks._pairs_kernel,
    "ends": chunks._ends_kernel,
    "passed": chunks._passed_kernel,
    "gates": chunks._gates_kernel,
    "keys": chunks._chunk_keys_kernel,
    "mixed": rows._mixed_kernel,
    "inputs": rows._inputs_kernel,
    "sums": rows._convolution_sums_kernel,
}
CONSTANTS = {
    "H": 32, "KH": 16, "DK": 128, "DV": 128, "BK": chunks.WIDEST, "BV": chunks.WIDEST,
    "PART": 16, "channels": 8192, "WIDTH": 4, "SIZE": 128, "ROOT": 128**-0.5,
    "TOKENS": DELTA_TOKENS, "CHANNELS": rows.CHANNELS, "PLACES": 4,
}  # fmt: skip
TYPES = {
    **dict.fromkeys(("X", "CONVOLUTION", "D_OUTPUT", "DX"), "*bf16"),
    **dict.fromkeys(("tokens", "followed"), "i32"),
    **dict.fromkeys(("TOKENS", "POSITION", "STATES"), "*i64"),
    **dict.fromkeys(("SIZES", "FIRSTS", "LENGTHS"), "*i32"),
    "PASSED": "*fp64",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_backward(name: str, size: int) -> None:
    kernel = KERNELS[name]
    sizes = {"DK": size, "DV": size, "SIZE": size, "ROOT": size**-0.5}
    sizes |= {"VECTORS": vectors_at_once(8192, size)}
    sizes |= {"BV": size} if name == "passed" else {}
    summed = {"inputs": rows.ROWS, "sums": rows.SUMMED}
    sizes |= {"ROWS": summed.get(name, chunks.ROWS)}
    sizes |= {"BK": chunks.ROWS} if name == "fronts" else {}
    sizes |= {"SIZE": size, "BV": chunks.COLUMNS * 128 // size} if name == "states" else {}
    constants: dict[str, Any] = {}
    types = dict[str, str]()
    for parameter in kernel.params:
        if parameter.is_constexpr:
            constants[parameter.name] = (CONSTANTS | sizes)[parameter.name]
        else:
            types[parameter.name] = TYPES.get(parameter.name, "*fp32")
    warps = 8 if name == "gates" else 4
    assert_assembles(compile_portable(kernel, types, constants, warps, fuses=name != "mixed"))
