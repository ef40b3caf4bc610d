"""Rows are owned once, in whole blocks, and evenly."""

from hypothesis import given
from hypothesis import strategies as st

from isobit.parallel.ownership import Ownership

SHAPES = {"q": (640, 64), "norm": (64,), "up": (1024, 64), "head": (1000, 64), "small": (96, 64)}
PARTS = {"q": (256, 192, 192), "up": (512, 512)}


@given(st.integers(1, 9))
def test_every_row_has_one_owner_and_blocks_are_whole(size: int):
    ownership = Ownership.of(SHAPES, PARTS, size)
    for name, shape in SHAPES.items():
        cuts = ownership.cuts[name]
        assert len(cuts) == size + 1
        assert (cuts[0], cuts[-1]) == (0, shape[0])
        assert list(cuts) == sorted(cuts)
        starts, first = set(), 0
        for part in PARTS.get(name, (shape[0],)):
            starts |= set(range(first, first + part, 128))
            first += part
        assert all(cut in starts and cut % 128 == 0 for cut in cuts[1:-1] if cut < shape[0])


def test_what_does_not_divide_goes_to_who_has_least():
    ownership = Ownership.of({f"layer{n}": (384, 1) for n in range(4)}, {}, 2)
    owned = [
        sum(cuts[rank + 1] - cuts[rank] for cuts in ownership.cuts.values()) for rank in range(2)
    ]
    assert owned == [768, 768]


@given(st.integers(1, 4), st.integers(1, 4))
def test_hosts_share_out_the_rows_that_a_rank_has_inside_one(inside: int, hosts: int):
    size = inside * hosts
    ownership = Ownership.of(SHAPES, PARTS, size, hosts)
    of_host = ownership.of_host()
    assert of_host == Ownership.of(SHAPES, PARTS, inside)
    assert sorted(ownership.places) == list(range(size))
    for name in SHAPES:
        for rank in range(inside):
            rows = of_host.rows(name, rank)
            first = rows.start
            for host in range(hosts):
                part = ownership.rows(name, host * inside + rank)
                assert part.start == first
                assert part.start % 128 == 0 or part.start == part.stop
                first = part.stop
            assert first == rows.stop


def test_what_does_not_divide_among_hosts_goes_to_who_has_least():
    ownership = Ownership.of({f"layer{n}": (768, 1) for n in range(4)}, {}, 4, 2)
    shapes = dict.fromkeys(ownership.cuts, (768, 1))
    assert ownership.numbers(shapes, shapes) == [768] * 4
