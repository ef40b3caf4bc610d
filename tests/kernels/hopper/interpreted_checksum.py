"""Run in Triton's interpreter by test_interpreted.py: the specification's checksums."""

from itertools import pairwise

import torch

from isobit.kernels.noise import CHUNK, Rows
from isobit.kernels.spec import optimiser as specification
from isobit.kernels.triton import optimiser as ours

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
SHORT_CHUNK, SHORT_WIDTH, SHORT_RUN = 64, 16, 3  # words, words, chunks


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def check(*rows: Rows) -> int:
    """-> what both say."""
    made = ours.checksum(rows)
    described = [(x.tensor.shape, x.tensor.dtype, x.first_byte, x.seed) for x in rows]
    assert made == specification.checksum(rows), described
    return made


def check_sizes() -> None:
    """A part of a word, of a column, of a chunk, of a run; all bits set, which is minus one."""
    for size in (1, 2, 3, 4, 5, 63, 64, 65, 127, 255, 256, 257, 259, 773, 1024, 1999):
        check(Rows(random_bytes(size), 0, size - 5))
    check(Rows(torch.full((1999,), 255, dtype=torch.uint8), 0, 1))
    for seed in (-(1 << 63), -1, 0, (1 << 63) - 1):
        check(Rows(random_bytes(600), 0, seed))


def check_dtypes() -> None:
    """And shapes: without dimensions, of several, transposed."""
    for dtype in DTYPES:
        data = random_bytes(7 * 31 * dtype.itemsize).view(dtype).view(7, 31)
        check(Rows(data, 0, 2))
        check(Rows(data.t(), 0, 2), Rows(data[:, 1:5], 0, 3), Rows(data[1, 2], 0, 4))


def check_alignment() -> None:
    """Bytes that lie anywhere, rows that begin anywhere, and both."""
    data = random_bytes(800)
    for offset in (1, 2, 3, 4, 8, 15, 16):
        check(Rows(data[offset:], 0, 1))
    for first in (1, 2, 3, 4, 16, 60, 63, 64, 65, 252, 255, 256, 259, 764, 768, 400_013):
        check(Rows(data[:700], first, 1))
        check(Rows(data[first % 16 :], first, 1), Rows(data[1:31], first, 2))


def check_ranks() -> None:
    """Rows of several add up to the whole."""
    data = random_bytes(1200)
    whole = check(Rows(data, 0, 9))
    for cuts in ((0, 1200), (0, 512, 1200), (0, 1, 15, 16, 62, 63, 64, 65, 255, 257, 801, 1200)):
        parts = [Rows(data[a:b], a, 9) for a, b in pairwise(cuts)]
        assert sum(map(check, parts)) % (1 << 64) == whole
        assert check(*parts) == whole


def check_flips() -> None:
    """Any bit of what is read in either way, and what has changed places."""
    data = random_bytes(1031)
    rows = Rows(data, 10, 1)
    whole = check(rows)
    for place in (0, 1, 23, 24, 500, 1023, 1027, 1028, 1030):
        data[place] ^= 0x80
        assert check(rows) != whole
        data[place] ^= 0x80
    assert check(Rows(data[: 4 * 256].view(256, 4).flip(0), 10, 1)) != check(
        Rows(data[: 4 * 256], 10, 1)
    )


def check_many() -> None:
    """Small ones beside some that are not."""
    sizes = [1 + (37 * place) % 90 for place in range(60)] + [3000, 2, 1536]
    check(*(Rows(random_bytes(size), size % 5, seed) for seed, size in enumerate(sizes)))


def check_real_chunks() -> None:
    """With the kernel's own sizes: around the border of two chunks, and far behind it."""
    data = torch.randn(9000)
    check(Rows(data, 0, 1), Rows(data[:5].bfloat16(), 0, 2), Rows(data, 4 * CHUNK - 18_001, 3))
    check(Rows(data, 4000 * CHUNK - 16_384, 1), Rows(data[4:], 80 * CHUNK + 16, 2))


def main() -> None:
    """Real sizes, then small ones, with which small tensors have many columns and chunks."""
    torch.manual_seed(0)
    check_real_chunks()
    specification.CHUNK = ours.CHUNK = SHORT_CHUNK
    ours._CHECKED_WIDTH, ours._CHECKED_RUN = SHORT_WIDTH, SHORT_RUN
    for one in (check_sizes, check_dtypes, check_alignment, check_ranks, check_flips, check_many):
        one()
