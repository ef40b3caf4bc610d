"""Log-probabilities, sampling and the scalar head compile for sm_80, and their PTX assembles for
every card since.
"""

from typing import Any

import pytest

from isobit.kernels.triton import head, pointwise, sampling
from tests.kernels.hopper.test_compile_head import TYPES, vocabulary
from tests.kernels.triton.assembled import assert_assembles, compile_portable

pytestmark = pytest.mark.usefixtures("generations")

MORE = TYPES | {
    **dict.fromkeys(("TARGET", "KEY"), "*i64"),
    **dict.fromkeys(("D_LOG_PROB", "D_ENTROPY", "SUMS", "D"), "*fp32"),
    **dict.fromkeys(("HIDDEN", "WEIGHT", "D_HIDDEN"), "*bf16"),
    **dict.fromkeys(("count", "rows_of_block"), "i32"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [40, 151936])
def test_log_probabilities(size: int) -> None:
    sizes = ("V", "STRIDE", "CHUNK", "CHUNKS", "PADDED")
    gradient: dict[str, Any] = vocabulary(size, "V", "STRIDE")
    gradient |= {"COLUMNS": size, "WIDTH": head._WIDTH}
    for kernel, constants, warps in (
        (head._chunk_kernel, vocabulary(size, *sizes[:4]), 4),
        (head._combine_kernel, vocabulary(size, *sizes[3:]), 1),
        (head._gradient_kernel, gradient, 4),
        (sampling._draw_kernel, vocabulary(size, *sizes), 8),
    ):
        assert_assembles(compile_portable(kernel, MORE, constants, warps))


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [128, 896, 4096])
def test_scalar_head(columns: int) -> None:
    width, rows, warps = pointwise.layout(columns)
    sizes = {"C": columns, "WIDTH": width, "ROWS": rows}
    for kernel in (head._output_kernel, head._backward_kernel):
        types = MORE | {"OUT": "*fp32"}
        assert_assembles(compile_portable(kernel, types, sizes, warps))
