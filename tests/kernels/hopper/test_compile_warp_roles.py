"""Kernels with warp roles compile for sm_90, and no loop of theirs spills."""

from typing import Any

import pytest
from triton.experimental.gluon._runtime import GluonASTSource

from isobit.kernels.hopper import attention_backward, wgrad
from isobit.kernels.triton import attention_backward as portable
from tests.kernels.hopper.ahead_of_time import E4M3, Compiled, compile_for_hopper

TYPES = {
    **dict.fromkeys(("O", "DO", "DQ", "DK", "DV", "Q_OUT", "K_OUT", "V_OUT", "DO_OUT"), "*bf16"),
    **dict.fromkeys(("Q_SCALE", "LSE", "STATS", "K_SCALE_OUT"), "*fp32"),
    **dict.fromkeys(("START", "LENGTH", "PADDED_START"), "*i32"),
    **dict.fromkeys(("c", "scale"), "fp32"), **dict.fromkeys(("padded_tokens", "groups"), "i32"),
    "GRAD": "*fp32", "STARTS": "*i32",
}  # fmt: skip


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], most_stack: int
) -> Compiled:
    """As these kernels are launched."""
    how = {"source": GluonASTSource, "fuses": True, "most_stack": most_stack}
    return compile_for_hopper(kernel, TYPES | types, constants, 4, **how)


def tiles(rows: int, dim: int) -> str:
    return f"tensordesc<bf16[{rows}, {dim}],{attention_backward.SWIZZLED!r}>"


def numbers(count: int) -> str:
    return f"tensordesc<fp32[{count}],{attention_backward.FLAT!r}>"


WIDTH = {False: attention_backward.BLOCK.value, True: 2 * attention_backward.BLOCK.value}
"""Numbers that come with GROUP queries, without and with the scales of INT8."""


def assert_asynchronous(made: Compiled) -> None:
    """Where registers run short, the compiler waits for every product before it issues the next
    one.
    """
    products, waits = made.sass.count("HGMMA"), made.sass.count("WARPGROUP.DEPBAR")
    assert products >= 64 and waits <= products // 4
    assert made.products == {"bf16"} and "UTMALDG" in made.sass
    assert made.ptx.count("setmaxnreg") > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("dim", "group", "window"), [(64, 16, 0), (128, 1, 0), (128, 4, 0), (128, 4, 4096)]
)
def test_keys(dim: int, group: int, window: int, int8: bool) -> None:
    block = tiles(attention_backward.GROUP.value, dim)
    types = dict.fromkeys(("q_desc", "k_desc", "v_desc", "do_desc"), block)
    types |= {"stats_desc": numbers(WIDTH[int8]), "K_SCALE": "*fp32"}
    stages = attention_backward.KEY_STAGES
    constants: dict[str, Any] = {
        "H": 2 * group, "G": 2, "D": dim, "STAGES": stages, "WINDOW": window
    }  # fmt: skip
    constants |= {} if int8 else {"K_SCALE": None}
    most_stack = 64 if dim == 128 else 0
    assert_asynchronous(compiled(attention_backward._keys_kernel, types, constants, most_stack))


@pytest.mark.few(1)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("dim", "window"), [(64, 0), (128, 0), (128, 4096)])
def test_queries(dim: int, window: int, int8: bool) -> None:
    group, block = (
        tiles(rows.value, dim) for rows in (attention_backward.GROUP, attention_backward.BLOCK)
    )
    types = {"q_desc": group, "do_desc": group, "k_desc": block, "v_desc": block}
    types |= {"scale_desc": numbers(attention_backward.BLOCK.value)}
    stages = attention_backward.QUERY_STAGES
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "WIDTH": WIDTH[int8], "STAGES": stages, "WINDOW": window
    }  # fmt: skip
    constants |= {} if int8 else {"scale_desc": None}
    # Where a tile is cut by the window's edge, too; by Triton 3.6 more than by 3.7.
    most_stack = (40 if int8 else 24) if window else 0
    assert_asynchronous(compiled(attention_backward._queries_kernel, types, constants, most_stack))


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("qk", "v", "scale"),
    [("*bf16", "*bf16", None), (E4M3, "*fp16", "*u8"), ("*i8", "*fp16", "*fp32")],
)
def test_prepare(dim: int, qk: str, v: str, scale: str | None) -> None:
    types = TYPES | {"Q": qk, "K": qk, "V": v}
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "ROW": dim, "WIDTH": WIDTH[qk == "*i8"]
    }  # fmt: skip
    constants |= {} if qk == "*i8" else {"K_SCALE_OUT": None}
    if scale is None:
        constants |= dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE"))
    else:
        types |= dict.fromkeys(("K_SCALE", "V_SCALE"), scale)
    made = compile_for_hopper(portable._prepare_kernel, types, constants, 4, fuses=True)
    assert made.wide_loads and made.wide_stores


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("n", "k", "experts"), [(24576, 4096, False), (960, 576, False), (1536, 2048, True)]
)
def test_wgrad(n: int, k: int, experts: bool) -> None:
    rows, block, part = wgrad.ROWS.value, wgrad.BLOCK.value, wgrad.PART.value
    types = {
        **{
            name: f"tensordesc<fp8e4nv[{size}, {block}],{wgrad.SWIZZLED!r}>"
            for name, size in (("a_desc", part), ("b_desc", block))
        },
        **{
            name: f"tensordesc<fp32[{size}],{wgrad.FLAT!r}>"
            for name, size in (("a_scale_desc", rows), ("b_scale_desc", block))
        },
    }
    constants = {"N": n, "K": k, "STAGES": wgrad.STAGES} | ({} if experts else {"STARTS": None})
    made = compiled(wgrad._wgrad_kernel, types, constants, most_stack=64)
    lines = made.sass.splitlines()
    products = [i for i, line in enumerate(lines) if "QGMMA.64x128x32.F32.E4M3.E4M3" in line]
    assert len(products) == 16 and "UTMALDG" in made.sass  # two of a token group a warpgroup
    for first, last in ((products[0], products[7]), (products[8], products[15])):
        assert not any("STL" in line or "LDL" in line for line in lines[first:last])
