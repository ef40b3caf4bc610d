"""Runs of blocks, and sizes that are no multiples of 128; without a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import ModelNeeds
from isobit.kernels.hopper import sizes, support
from isobit.kernels.triton import device_functions
from isobit.kernels.triton import support as portable
from isobit.models.folder import model_needs
from isobit.models.shapes import SHAPES, model_shape
from isobit.precision.flow import LinearShape, Site
from isobit.precision.quant_tensor import BLOCK, block_sizes


def runs(*rows: int) -> list[tuple[int, int, int]]:
    return [(run.first, run.size, run.first_block) for run in device_functions.runs(rows)]


def test_parts_of_whole_blocks_are_one_run() -> None:
    assert runs(4096, 1024, 1024) == runs(6144) == [(0, 6144, 0)]
    assert runs(1536, 1536) == [(0, 3072, 0)]


def test_a_run_ends_behind_a_short_block() -> None:
    assert runs(576, 192, 192) == [(0, 576, 0), (576, 192, 5), (768, 192, 7)]
    assert runs(256, 128, 72) == [(0, 456, 0)]  # the last may be short
    assert runs(8, 136, 256, 40) == [(0, 8, 0), (8, 136, 1), (144, 296, 3)]
    assert device_functions.padded_size((576, 192, 192)) == 1152


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_runs_cut_the_blocks_of_the_parts(rows: list[int]) -> None:
    found = device_functions.runs(tuple(rows))
    assert [run.first for run in found[1:]] == [run.first + run.size for run in found[:-1]]
    assert found[-1].first + found[-1].size == sum(rows)
    sizes_of_runs = [size for run in found for size in block_sizes((run.size,))]
    assert tuple(sizes_of_runs) == block_sizes(tuple(rows))
    assert [run.first_block for run in found] == [
        sum(one.blocks for one in found[:i]) for i in range(len(found))
    ]
    assert device_functions.padded_size(tuple(rows)) == BLOCK * len(sizes_of_runs)


def needs(rows: int, columns: int, preset: str = "fp8") -> ModelNeeds:
    return ModelNeeds(8, 2, 64, preset, (LinearShape({"down_proj": rows}, columns),))


@pytest.mark.parametrize(("rows", "columns"), [(576, 100), (100, 576), (1000, 1000)])
def test_sizes_that_the_copy_engine_does_not_take_are_refused_by_name(
    rows: int, columns: int
) -> None:
    problem = support.model_problem(needs(rows, columns))
    assert problem is not None
    assert f"down_proj is [{rows}, {columns}]" in problem
    assert support.model_problem(needs(rows, columns, "bf16")) is None


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_computed(name: str) -> None:
    shape = model_shape(name)
    for preset in ("bf16", "fp8", "int8"):
        needs = model_needs(shape, preset)
        for one in (support, portable):
            assert one.model_problem(needs) is None


@pytest.mark.parametrize("shape", ["smollm2-135m", "smollm2-360m", "qwen3-8b"])
def test_real_models_are_computed_in_fp8(shape: str) -> None:
    wanted = model_needs(model_shape(shape), PrecisionConfig(preset="fp8").preset)
    assert len(wanted.linears) == 4 and support.model_problem(wanted) is None


def test_bytes_of_short_blocks() -> None:
    """Of a token's gradient and of the matrix: as ``QuantRows`` and ``QuantTensor`` store them."""
    site = Site("qkv_proj", "linear", "e4m3", "power_of_two", "e4m3", "e4m3", (576, 192, 192))
    assert sizes.matrix(site, 576) == 960 * 576 + 4 * 9 * 5
    assert sizes.transposed(site, 576) == 1152 * 576
    assert sizes.read(site, 576) == 576 + 4 * 5
    assert sizes.gradient(site, 960, 576) == (1152 + 4 * 9) + (960 + 4 * 8)
