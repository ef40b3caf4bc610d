"""What ``benchmarks.tiles`` goes through has what the back ends use."""

import pytest

from benchmarks import tiles
from isobit.kernels.hopper import int8 as hopper_int8
from isobit.kernels.triton import int8
from isobit.kernels.triton.int8 import Tiles


@pytest.mark.parametrize("tokens", [8, 32, 64, 256])
@pytest.mark.parametrize("back_end", tiles.MEMORY)
def test_tiles_in_use_are_among_those_that_are_tried(back_end: str, tokens: int) -> None:
    tried = list(tiles.tiles(tokens, tiles.MEMORY[back_end]))
    assert len(tried) == len(set(tried)) > 100
    cut_up = (hopper_int8 if back_end == "hopper" else int8).cut_up
    for n, k in tiles.MATRICES.values():
        cut = cut_up(tokens, n, k)
        assert not isinstance(cut, Tiles) or cut in tried
