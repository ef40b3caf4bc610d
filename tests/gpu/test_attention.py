"""Attention on a Hopper GPU: decode, prefill, chunks and packed batches give the same bits; the values are right."""

import random

import pytest
import torch

from isobit.kernels.heads import Heads
from isobit.kernels.quantise import scale_of_byte
from isobit.precision.formats import E4M3

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from isobit.kernels.hopper.attention import PART, TILE, PackedKeys, PagedKeys, decode_attention, prefill_attention

LAYOUTS = [(32, 8, 128), (16, 8, 128), (14, 2, 64), (16, 1, 64), (8, 8, 128)]


class Case:
    """Random packed q, k, v, with outliers and a bias on K unless plain; the same K and V in shuffled pages."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, dim: int, plain: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        tokens = sum(lengths)
        q, k = normal(tokens, heads, dim), normal(tokens, kv_heads, dim)
        v = normal(tokens, kv_heads, dim) * torch.exp(normal(tokens, kv_heads, 1))
        if not plain:
            k += 10 * normal(kv_heads, dim)
            q[::17] *= 30
            k[::13, :, 3] *= 20
        self.encoded = [Heads.encode(x.bfloat16(), "e4m3") for x in (q, k, v)]
        (self.q, q_byte), (self.k, self.k_byte), (self.v, self.v_byte) = ((x.values.cuda(), x.bytes.cuda()) for x in self.encoded)
        self.q_scale = scale_of_byte(q_byte.cpu()).cuda()
        self.lengths, self.starts = lengths, [sum(lengths[:b]) for b in range(len(lengths))]
        self.packed = PackedKeys(self.k, self.k_byte, self.v.half(), self.v_byte)
        self.pages, self.table = self._page()

    def _page(self) -> tuple[PagedKeys, torch.Tensor]:
        most = -(-max(self.lengths) // TILE)
        table = torch.randperm(most * len(self.lengths), generator=torch.Generator().manual_seed(1)).view(len(self.lengths), most)
        kv_heads, dim = self.k.shape[1:]
        raw = [torch.zeros(table.numel(), kv_heads, TILE, dim, dtype=torch.uint8, device="cuda") for _ in range(2)]
        byte = [torch.full((table.numel(), kv_heads, TILE), 127, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for b, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            position = torch.arange(length)
            page, offset, rows = table[b, position // TILE].cuda(), (position % TILE).cuda(), slice(start, start + length)
            for target, source in zip(raw, (self.k, self.v), strict=True):
                target[page, :, offset] = source[rows].view(torch.uint8)
            for target, source in zip(byte, (self.k_byte, self.v_byte), strict=True):
                target[page, :, offset] = source[rows]
        values = raw[1].transpose(2, 3).contiguous().view(E4M3)
        return PagedKeys(raw[0].view(E4M3), byte[0], values, byte[1]), table.int().cuda()

    def prefill(self, ranges: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The queries [first, last) of each sequence -> output, log-sum-exp, and the packed rows that they are."""
        rows = torch.cat([torch.arange(s + a, s + z) for s, (a, z) in zip(self.starts, ranges, strict=True)]).cuda()
        counts = [z - a for a, z in ranges]
        starts = [sum(counts[:b]) for b in range(len(counts))]
        last = [z for _, z in ranges]
        q = self.q.view(torch.uint8)[rows].view(E4M3)
        output, lse = prefill_attention(
            q, self.q_scale[rows], self.packed, ints(starts), ints(counts), ints(self.starts), ints(last), max(counts), max(last)
        )
        return output, lse, rows


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_and_chunks_equal_the_training_forward(layout: tuple[int, int, int]) -> None:
    lengths = [1, 63, 64, 65, 127, 128, 129, 700, PART - 1, PART, PART + 1, 2 * PART + 300]
    case = Case(lengths, *layout)
    output, lse, _ = case.prefill([(0, n) for n in lengths])
    choose = random.Random(0)
    compared = 0
    for _ in range(8):
        positions = [choose.choice([n - 1, choose.randrange(n)]) for n in lengths]
        rows = torch.tensor([s + p for s, p in zip(case.starts, positions, strict=True)], device="cuda")
        q = case.q.view(torch.uint8)[rows].view(E4M3)
        limit = max(positions) + 1 + choose.choice([0, 3 * PART])  # the launch is sized for more than there is, as under CUDA graphs
        limit = min(limit, case.table.shape[1] * TILE)
        got, got_lse = decode_attention(q, case.q_scale[rows], case.pages, case.table, ints([p + 1 for p in positions]), limit)
        assert torch.equal(got, output[rows]) and torch.equal(got_lse, lse[rows])
        compared += got.numel()
        firsts = [choose.randrange(n) for n in lengths]
        chunk, chunk_lse, chunk_rows = case.prefill([(a, choose.randint(a + 1, n)) for a, n in zip(firsts, lengths, strict=True)])
        assert torch.equal(chunk, output[chunk_rows]) and torch.equal(chunk_lse, lse[chunk_rows])
    assert compared > 50_000
    assert output.isfinite().all() and lse.isfinite().all()


def test_a_sequence_alone_equals_itself_in_company() -> None:
    lengths = [300, PART + 200, 77]
    case = Case(lengths, 32, 8, 128)
    output, lse, _ = case.prefill([(0, n) for n in lengths])
    for start, n in zip(case.starts, lengths, strict=True):
        rows = slice(start, start + n)
        keys = PackedKeys(case.k[rows], case.k_byte[rows], case.packed.values[rows], case.v_byte[rows])
        alone, alone_lse = prefill_attention(case.q[rows], case.q_scale[rows], keys, ints([0]), ints([n]), ints([0]), ints([n]), n, n)
        assert torch.equal(alone, output[rows]) and torch.equal(alone_lse, lse[rows])


@pytest.mark.parametrize("length", [500, PART + 600])
def test_values_against_fp64(length: int) -> None:
    case = Case([length], 8, 2, 128, plain=True)  # with scores in the thousands the tensor cores' 14 bits are what one would measure
    output, lse, _ = case.prefill([(0, length)])
    q, k, v = (x.dequantised().double().cuda().transpose(0, 1) for x in case.encoded)
    scores = (q @ k.repeat_interleave(4, 0).transpose(1, 2)) / 128**0.5
    scores.masked_fill_(torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    exact = (scores.softmax(-1) @ v.repeat_interleave(4, 0)).transpose(0, 1)
    assert (output.double() - exact).norm() / exact.norm() < 2.5e-3
    exact_lse = scores.logsumexp(-1).t() / torch.log(torch.tensor(2.0, dtype=torch.float64))
    assert ((lse.double() - exact_lse).abs() / exact_lse.abs().clamp(min=1)).max() < 2e-3


def test_a_nan_key_reaches_every_query_that_sees_it() -> None:
    case = Case([PART + 300], 8, 2, 128)
    place = PART + 100
    case.k.view(torch.uint8)[place] = 0x7F
    case.k_byte[place] = 0xFF
    output, _, _ = case.prefill([(0, PART + 300)])
    assert output[:place].isfinite().all() and output[place:].isnan().all()


def test_shapes_that_are_not_supported_are_refused() -> None:
    case = Case([10], 4, 2, 64)
    with pytest.raises(ValueError, match="head sizes 64 and 128"):
        decode_attention(case.q[:1, :, :32], case.q_scale[:1], case.pages, case.table, ints([1]), 10)
