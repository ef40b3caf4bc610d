"""The sizes that decode steps are captured for, without a GPU."""

import pytest

pytest.importorskip("triton", reason="the runner imports the kernels")

from isobit.rollout.native.graph_runner import _parts, graph_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 31, 64, 65, 256, 300, 512, 1024])
def test_every_batch_has_a_size_and_the_largest_is_exact(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert len(sizes) <= 7 + most // 64
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size < 2 * batch or size - batch < 64


def test_parts_of_a_launch_double() -> None:
    assert [_parts(n) for n in (1, 8192, 8193, 16384, 16385, 40960)] == [1, 1, 2, 2, 4, 8]
