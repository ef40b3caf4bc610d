"""Attention on a Hopper GPU: decode, prefill, chunks and packed batches give the same bits; the
values are right.
"""

import random
from typing import Any

import pytest
import torch

from isobit.kernels.spec.qkv import Heads, factors
from isobit.kernels.triton.attention import PART, PackedKeys, PagedKeys
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.precision.quant_tensor import E4M3, Format
from tests.gpu.kernels import decode_attention, prefill_attention

LAYOUTS = [
    (32, 8, 128), (16, 8, 128), (14, 2, 64), (16, 1, 64), (8, 8, 128), (8, 8, 96), (4, 1, 256),
]  # fmt: skip
FORMS: list[Format] = ["e4m3", "int8", "bf16"]
# Windows below a tile, of whole tiles and not, of a part and one key more, beyond all sequences.
WINDOWS = [1, 20, 64, 100, 128, 129, 1000, 4096, PART, PART + 1, 3 * PART]
WINDOWED = [
    *((layout, None) for layout in LAYOUTS),
    *((LAYOUTS[0], window) for window in WINDOWS),
    *((LAYOUTS[2], window) for window in (20, 4096)),
    *((LAYOUTS[6], window) for window in (20, 512)),
]


class Case:
    """Random packed q, k, v, with outliers and a bias on K unless plain; the same K and V in
    shuffled pages.
    """

    def __init__(
        self,
        form: Format,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        plain: bool = False,
    ) -> None:
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
        self.lengths, self.starts = lengths, [sum(lengths[:b]) for b in range(len(lengths))]
        inputs = [x.bfloat16() for x in (q, k, v)]
        if form != "bf16":
            encoded = [Heads.encode(x, form) for x in inputs]
            self.exact = [x.dequantised().double().cuda() for x in encoded]
            self.q, k8, v8 = (x.values.cuda() for x in encoded)
            self.q_scale = factors(encoded[0].scales).cuda()
            k_scale, v_scale = (x.scales.cuda() for x in encoded[1:])
            self.packed = PackedKeys(k8, k_scale, v8.half(), v_scale)
            values = self._page(v8).transpose(2, 3).contiguous().view(v8.dtype)
            self.pages = PagedKeys(
                self._page(k8).view(k8.dtype), self._page(k_scale), values, self._page(v_scale)
            )
        else:
            self.exact = [x.double().cuda() for x in inputs]
            self.q, k16, v16 = (x.cuda() for x in inputs)
            self.q_scale = None
            self.packed = PackedKeys(k16, None, v16, None)
            self.pages = PagedKeys(self._page(k16), None, self._page(v16), None)

    @property
    def table(self) -> torch.Tensor:
        most = -(-max(self.lengths) // PAGE_TOKENS)
        shuffled = torch.randperm(
            most * len(self.lengths), generator=torch.Generator().manual_seed(1)
        )
        return shuffled.view(len(self.lengths), most).int().cuda()

    def _page(self, packed: torch.Tensor) -> torch.Tensor:
        """[T, G, ...] -> [page, G, PAGE_TOKENS, ...]; E4M3 as bytes."""
        source = packed.view(torch.uint8) if packed.dtype == E4M3 else packed
        table = self.table
        paged = torch.zeros(
            table.numel(),
            source.shape[1],
            PAGE_TOKENS,
            *source.shape[2:],
            dtype=source.dtype,
            device="cuda",
        )
        for b, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            position = torch.arange(length, device="cuda")
            paged[table[b, position // PAGE_TOKENS].long(), :, position % PAGE_TOKENS] = source[
                start : start + length
            ]
        return paged

    def queries(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The queries of some packed rows and their scales."""
        if self.q_scale is None:
            return self.q[rows], None
        return self.q.view(torch.uint8)[rows].view(self.q.dtype), self.q_scale[rows]

    def prefill(
        self,
        ranges: list[tuple[int, int]],
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The queries [first, last) of each sequence -> output, log-sum-exp, and the packed rows
        that they are.
        """
        rows = torch.cat(
            [torch.arange(s + a, s + z) for s, (a, z) in zip(self.starts, ranges, strict=True)]
        ).cuda()
        counts = [z - a for a, z in ranges]
        starts = [sum(counts[:b]) for b in range(len(counts))]
        last = [z for _, z in ranges]
        output, lse = prefill_attention(
            *self.queries(rows),
            self.packed,
            ints(starts),
            ints(counts),
            ints(self.starts),
            ints(last),
            max(counts),
            max(last),
            window,
            sinks,
        )
        return output, lse, rows


def packed_rows(packed: PackedKeys, rows: torch.Tensor) -> PackedKeys:
    def take(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8)[rows].view(x.dtype)

    key_scales, value_scales = (
        None if x is None else x[rows] for x in (packed.key_scales, packed.value_scales)
    )
    return PackedKeys(take(packed.keys), key_scales, take(packed.values), value_scales)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(
    ("layout", "window", "with_sinks"),
    [
        *((*one, False) for one in WINDOWED),
        *((LAYOUTS[2], window, True) for window in (None, 128, PART + 1)),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_decode_and_chunks_equal_the_training_forward(
    form: Format, layout: tuple[int, int, int], window: int | None, with_sinks: bool
) -> None:
    lengths = [1, 63, 64, 65, 127, 128, 129, 700, PART - 1, PART, PART + 1, 2 * PART + 300]
    case = Case(form, lengths, *layout)
    sinks = torch.linspace(-3, 20, layout[0]).bfloat16().cuda() if with_sinks else None
    output, lse, _ = case.prefill([(0, n) for n in lengths], window, sinks)
    choose = random.Random(0)
    compared = 0
    for _ in range(8):
        positions = [choose.choice([n - 1, choose.randrange(n)]) for n in lengths]
        rows = torch.tensor(
            [s + p for s, p in zip(case.starts, positions, strict=True)], device="cuda"
        )
        # The launch is sized for more than there is, as under CUDA graphs.
        limit = max(positions) + 1 + choose.choice([0, 3 * PART])
        limit = min(limit, case.table.shape[1] * PAGE_TOKENS)
        got, got_lse = decode_attention(
            *case.queries(rows),
            case.pages,
            case.table,
            ints([p + 1 for p in positions]),
            limit,
            window,
            sinks,
        )
        assert torch.equal(got, output[rows]) and torch.equal(got_lse, lse[rows])
        compared += got.numel()
        firsts = [choose.randrange(n) for n in lengths]
        chunk, chunk_lse, chunk_rows = case.prefill(
            [(a, choose.randint(a + 1, n)) for a, n in zip(firsts, lengths, strict=True)],
            window,
            sinks,
        )
        assert torch.equal(chunk, output[chunk_rows]) and torch.equal(chunk_lse, lse[chunk_rows])
    assert compared > 50_000
    assert output.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_window_that_covers_everything_changes_no_bit(form: Format) -> None:
    lengths = [300, PART + 200, 77]
    case = Case(form, lengths, 32, 8, 128)
    ranges = [(0, n) for n in lengths]
    for one, other in zip(case.prefill(ranges), case.prefill(ranges, PART + 200), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_keys_before_the_window_are_not_read(form: Format) -> None:
    """What a page holds there, NaN even, does not matter: tiles before the window are skipped."""
    window, last = 100, PART + 1000
    case = Case(form, [last], 8, 2, 128)
    rows, counts = torch.tensor([last - 1], device="cuda"), ints([last])
    clean = decode_attention(*case.queries(rows), case.pages, case.table, counts, last, window)
    for page in case.table[0, : (last - window) // PAGE_TOKENS].tolist():
        for x in (case.pages.keys, case.pages.values):
            if x.dtype == E4M3:
                x.view(torch.uint8)[page] = 0x7F
            elif form == "bf16":
                x[page] = torch.nan
        for x in (case.pages.key_scales, case.pages.value_scales):
            if x is not None and form == "int8":
                x[page] = torch.nan
    dirty = decode_attention(*case.queries(rows), case.pages, case.table, counts, last, window)
    assert all(map(torch.equal, clean, dirty)) and clean[0].isfinite().all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_alone_equals_itself_in_company(form: Format, window: int | None) -> None:
    lengths = [300, PART + 200, 77]
    case = Case(form, lengths, 32, 8, 128)
    output, lse, _ = case.prefill([(0, n) for n in lengths], window)
    for start, n in zip(case.starts, lengths, strict=True):
        rows = torch.arange(start, start + n, device="cuda")
        keys = packed_rows(case.packed, rows)
        alone, alone_lse = prefill_attention(
            *case.queries(rows), keys, ints([0]), ints([n]), ints([0]), ints([n]), n, n, window
        )
        assert torch.equal(alone, output[rows]) and torch.equal(alone_lse, lse[rows])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 100, 4096])
@pytest.mark.parametrize("length", [500, PART + 600])
@pytest.mark.parametrize("form", FORMS)
def test_values_against_fp64(
    form: Format, length: int, window: int | None, with_sinks: bool
) -> None:
    # With scores in the thousands the tensor cores' 14 bits are what one would measure.
    case = Case(form, [length], 8, 2, 128, plain=True)
    sinks = torch.linspace(-3, 8, 8).bfloat16().cuda() if with_sinks else None
    output, lse, _ = case.prefill([(0, length)], window, sinks)
    q, k, v = (x.transpose(0, 1) for x in case.exact)
    scores = (q @ k.repeat_interleave(4, 0).transpose(1, 2)) / 128**0.5
    place = torch.arange(length, device="cuda")
    behind = place[:, None] - place[None, :]
    scores.masked_fill_((behind < 0) | (behind >= (window or length)), -torch.inf)
    if sinks is not None:
        last = sinks.double()[:, None, None].expand(-1, length, 1)
        scores = torch.cat([scores, last], 2)
    weights = scores.softmax(-1)[:, :, :length]
    exact = (weights @ v.repeat_interleave(4, 0)).transpose(0, 1)
    # 1.7e-3 of it is the rounding of the output to BF16.
    assert (output.double() - exact).norm() / exact.norm() < 3e-3
    exact_lse = scores.logsumexp(-1).t() / torch.log(torch.tensor(2.0, dtype=torch.float64))
    assert ((lse.double() - exact_lse).abs() / exact_lse.abs().clamp(min=1)).max() < 2e-3


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_reaches_every_query_that_sees_it(form: Format, which: str) -> None:
    length, place = PART + 300, PART + 100
    case = Case(form, [length], 8, 2, 128)
    for stored in (case.packed, case.pages):
        # A vector that is not finite has the bytes 0x7F and the scale 255; in INT8 the scale NaN.
        scales = getattr(stored, {"keys": "key_scales", "values": "value_scales"}[which])
        values = scales if form == "int8" else getattr(stored, which)
        where: Any = place
        if stored is case.pages:
            where = (int(case.table[0, place // PAGE_TOKENS]), slice(None), place % PAGE_TOKENS)
        if form == "e4m3":
            scales[where] = 255
        if stored is case.pages and form == "e4m3" and which == "values":
            where = (*where[:2], slice(None), where[2])
        if values.dtype == E4M3:
            values.view(torch.uint8)[where] = 0x7F
        else:
            values[where] = torch.nan
    output, _, _ = case.prefill([(0, length)])
    # A tile's values are multiplied with a masked key's weight too: 0 NaN.
    clean = place if which == "keys" else place // PAGE_TOKENS * PAGE_TOKENS
    assert output[:clean].isfinite().all() and output[place:].isnan().all()
    positions = [place - PAGE_TOKENS, place, length - 1]
    for position in positions:
        rows = torch.tensor([position], device="cuda")
        got, _ = decode_attention(
            *case.queries(rows), case.pages, case.table, ints([position + 1]), length
        )
        assert got.isnan().all() if position >= place else got.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_query_stays_one(form: Format) -> None:
    case = Case(form, [PART + 300], 8, 2, 128)
    if form == "e4m3":
        case.q.view(torch.uint8)[PART + 200] = 0x7F
    if case.q_scale is not None:
        case.q_scale[PART + 200] = torch.nan
    else:
        case.q[PART + 200] = torch.nan
    output, _, _ = case.prefill([(0, PART + 300)])
    bad = output.isnan().flatten(1)
    assert bad[PART + 200].all() and not bad[: PART + 200].any() and not bad[PART + 201 :].any()


def test_shapes_that_are_not_supported_are_refused() -> None:
    case = Case("bf16", [10], 4, 2, 64)
    with pytest.raises(ValueError, match="head sizes 64"):
        decode_attention(case.q[:1, :, :32], None, case.pages, case.table, ints([1]), 10)


def test_forms_are_not_mixed() -> None:
    narrow, wide = Case("e4m3", [10], 4, 2, 64), Case("bf16", [10], 4, 2, 64)
    whole = Case("int8", [10], 4, 2, 64)
    assert whole.q_scale is not None
    for queries, scales in ((wide.q, None), (narrow.q, None), (whole.q, whole.q_scale[:1])):
        with pytest.raises(
            ValueError, match="E4M3 with scales and bytes, INT8 with FP32 scales, or BF16"
        ):
            decode_attention(queries[:1], scales, narrow.pages, narrow.table, ints([1]), 10)
