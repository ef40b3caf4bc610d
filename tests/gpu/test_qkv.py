"""From the qkv GEMM to attention on a Hopper GPU: the CPU's bytes, the same for every batch, in
pages and packed.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from isobit.kernels.operands import QkvTransform, RopeTable
from isobit.kernels.spec.qkv import Heads, fixed_bytes, transform_qkv
from isobit.kernels.spec.quantise import scale_of_byte
from isobit.kernels.triton.attention import SCALES, PackedKeys, PagedKeys
from isobit.kernels.triton.heads import PAGE_TOKENS as TILE
from isobit.kernels.triton.qkv import TILINGS, Queries
from isobit.precision.quant_tensor import DTYPES, E4M3, E8M0_BIAS, Format
from isobit.util.errors import ConfigError
from tests.gpu.kernels import encode_packed, encode_paged, gather_pages
from tests.kernels.comparison import bits, same

LAYOUTS = [(32, 8, 128), (14, 2, 64), (5, 5, 128), (16, 1, 64), (8, 8, 96), (4, 1, 256)]
FORMATS: list[Format] = ["e4m3", "int8", "bf16"]
NARROW: list[Format] = ["e4m3", "int8"]
POSITIONS = 5000
MANY = int(TILINGS[0].most) + 700  # takes the second


class Case:
    """Random qkv of T tokens with vectors of all sizes, and a layer's constants, on the CPU and on
    the GPU.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        norms: bool = True,
        bias: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        vectors = heads + 2 * kv_heads
        x = normal(tokens, vectors, dim) * torch.exp(4 * normal(tokens, vectors, 1))
        x[::7] *= torch.exp(3 * normal(*x[::7].shape))
        x[::11, ::3], x[::13, 1::3] = 0.0, 1e-38 * normal(dim)
        self.shape = (heads, kv_heads, dim)
        self.qkv = x.bfloat16().view(tokens, -1)
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
        self.rope = RopeTable.build(
            10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2)), POSITIONS
        )
        q_norm, k_norm = (normal(dim).bfloat16() if norms else None for _ in range(2))
        added = normal(vectors * dim).bfloat16() if bias else None
        self.on_cpu = QkvTransform(
            heads, kv_heads, dim, self.rope.cos, self.rope.sin, 1e-6, q_norm, k_norm, added
        )
        cos, sin = self.rope.cos.cuda(), self.rope.sin.cuda()
        q_norm, k_norm, added = (None if w is None else w.cuda() for w in (q_norm, k_norm, added))
        self.on_gpu = QkvTransform(heads, kv_heads, dim, cos, sin, 1e-6, q_norm, k_norm, added)

    def transform(self, format: Format) -> QkvTransform:
        """As the layers have it: with a Hadamard matrix before E4M3 and INT8."""
        return replace(self.on_gpu, hadamard=format in NARROW)

    def specification(self, format: Format) -> list[Heads]:
        """Q, K and V as the CPU makes them."""
        rows, on_cpu = self.rope.rows(self.positions), self.on_cpu
        on_cpu = replace(on_cpu, hadamard=format in NARROW)
        return [encoded(x, format) for x in transform_qkv(0, self.qkv, on_cpu, rows)]

    def packed(self, format: Format, rows: slice = slice(None)) -> tuple[Queries, PackedKeys]:
        return encode_packed(
            self.qkv[rows].cuda(), self.transform(format), self.positions[rows].cuda(), format
        )

    def pages(self, count: int, format: Format, fill: int = 0) -> PagedKeys:
        _, kv_heads, dim = self.shape
        vectors = (count, kv_heads, TILE)
        k, v = (
            torch.full((*vectors, dim * DTYPES[format].itemsize), fill, dtype=torch.uint8).cuda()
            for _ in range(2)
        )
        if format == "bf16":
            return PagedKeys(k.view(torch.bfloat16), None, v.view(torch.bfloat16), None)
        dtype = DTYPES[format]
        scale = SCALES[dtype]
        wide = (*vectors[:-1], TILE * scale.itemsize)
        scales = [torch.full(wide, fill, dtype=torch.uint8).cuda().view(scale) for _ in range(2)]
        values = v.view(count, kv_heads, dim, TILE).view(dtype)
        return PagedKeys(k.view(dtype), scales[0], values, scales[1])


def encoded(x: torch.Tensor, format: Format) -> Heads:
    """On the GPU, BF16 stays as it is."""
    return (
        Heads.encode(x, format)
        if format in NARROW
        else Heads(x, torch.full(x.shape[:-1], E8M0_BIAS, dtype=torch.uint8))
    )


def same_keys(a: PackedKeys, b: PackedKeys) -> bool:
    pairs = (
        (a.keys, b.keys),
        (a.key_scales, b.key_scales),
        (a.values, b.values),
        (a.value_scales, b.value_scales),
    )
    return all(same(x, y) for x, y in pairs)


def heads_of(queries: Queries, keys: PackedKeys, format: Format) -> list[Heads]:
    """As the specification has them."""
    tensors = [
        (queries.values, queries.scales),
        (keys.keys, keys.key_scales),
        (keys.values.to(DTYPES[format]), keys.value_scales),
    ]
    ones = [torch.full(x.shape[:2], E8M0_BIAS, dtype=torch.uint8) for x, _ in tensors]
    if format == "e4m3" and queries.scales is not None:
        tensors[0] = (queries.values, (queries.scales.view(torch.int32) >> 23).to(torch.uint8))
    return [
        Heads(x.cpu(), one if scale is None else scale.cpu())
        for (x, scale), one in zip(tensors, ones, strict=True)
    ]


def rows_of(keys: PackedKeys, rows: slice) -> PackedKeys:
    scales = (None if x is None else x[rows] for x in (keys.key_scales, keys.value_scales))
    return PackedKeys(keys.keys[rows], next(scales), keys.values[rows], next(scales))


def gathered(pages: PagedKeys, order: torch.Tensor, tokens: int) -> PackedKeys:
    """The first tokens of the pages in ``order``."""
    table, lengths = order[None].int().cuda(), torch.tensor([tokens], dtype=torch.int32).cuda()
    return gather_pages(pages, table, torch.zeros_like(lengths), lengths, tokens, tokens)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 37, MANY])
def test_without_norms_the_bytes_are_those_of_the_specification(
    tokens: int, layout: tuple[int, int, int], format: Format
) -> None:
    case = Case(tokens, *layout, norms=False, bias=tokens != 37)
    for ours, exact in zip(
        heads_of(*case.packed(format), format), case.specification(format), strict=True
    ):
        assert same(ours.values, exact.values) and same(ours.scales, exact.scales)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_norms_they_differ_only_where_a_sum_of_squares_rounds_differently(
    layout: tuple[int, int, int],
) -> None:
    case = Case(MANY, *layout)
    for ours, exact in zip(
        heads_of(*case.packed("bf16"), "bf16"), case.specification("bf16"), strict=True
    ):
        assert (bits(ours.values) != bits(exact.values)).float().mean() < 1e-3
        assert (
            ours.values.double() - exact.values.double()
        ).abs().max() <= exact.values.abs().max() * 2.0**-8
    for ours, exact in zip(
        heads_of(*case.packed("e4m3"), "e4m3"), case.specification("e4m3"), strict=True
    ):
        assert (bits(ours.values) != bits(exact.values)).float().mean() < 1e-3
        assert (ours.scales != exact.scales).float().mean() < 1e-3
    for ours, exact in zip(
        heads_of(*case.packed("int8"), "int8"), case.specification("int8"), strict=True
    ):
        # A norm's output that rounds differently moves the sums of a whole vector.
        apart = ours.values.int() - exact.values.int()
        assert apart.abs().max() <= 2 and apart.bool().float().mean() < 1e-3
        torch.testing.assert_close(ours.scales, exact.scales, rtol=2.0**-6, atol=0.0)
        assert (ours.scales != exact.scales).float().mean() < 2e-2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_and_packed_and_every_batch_agree(
    layout: tuple[int, int, int], format: Format
) -> None:
    case = Case(MANY, *layout)
    queries, keys = case.packed(format)
    count = -(-MANY // TILE)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    t = torch.arange(MANY)
    slots = order[t // TILE] * TILE + t % TILE
    cuts = [0, 1, 2, 5, 133, 134, 400, 400 + 640, MANY]
    for batches in ([slice(0, MANY)], [slice(a, z) for a, z in pairwise(cuts)]):
        pages = case.pages(count, format)
        for rows in batches:
            got = encode_paged(
                case.qkv[rows].cuda(),
                case.transform(format),
                case.positions[rows].cuda(),
                slots[rows].cuda(),
                pages,
            )
            alone, alone_keys = case.packed(format, rows)
            assert same(got.values, queries.values[rows])
            if got.scales is not None and queries.scales is not None:
                assert same(got.scales, queries.scales[rows])
            assert same(alone, got) and same_keys(alone_keys, rows_of(keys, rows))
        assert same_keys(gathered(pages, order, MANY), keys)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [200, MANY])
def test_slots_in_any_order_and_nothing_else_is_written(tokens: int, format: Format) -> None:
    case = Case(tokens, 14, 2, 64)
    _, keys = case.packed(format)
    count = -(-2 * tokens // TILE)
    places = torch.randperm(count * TILE, generator=torch.Generator().manual_seed(2))
    slots = places[:tokens].clone()
    slots[::5] = -1
    pages = case.pages(count, format, fill=0x55)
    encode_paged(
        case.qkv.cuda(), case.transform(format), case.positions.cuda(), slots.cuda(), pages
    )
    expected = gathered(case.pages(count, format, fill=0x55), torch.arange(count), count * TILE)
    written = slots >= 0
    for target, source in ((expected.keys, keys.keys), (expected.values, keys.values)):
        target.view(torch.uint8)[slots[written].cuda()] = source.view(torch.uint8)[written.cuda()]
    for target, source in (
        (expected.key_scales, keys.key_scales),
        (expected.value_scales, keys.value_scales),
    ):
        if target is not None and source is not None:
            target[slots[written].cuda()] = source[written.cuda()]
    assert same_keys(gathered(pages, torch.arange(count), count * TILE), expected)


@pytest.mark.parametrize("tokens", [40, MANY])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_scales_and_maxima_are_those_of_the_specification(
    layout: tuple[int, int, int], tokens: int
) -> None:
    case = Case(tokens, *layout, norms=False)
    case.qkv.view(tokens, -1, layout[2])[3, 0, 5] = torch.nan
    given = torch.tensor([124, 0, 127], dtype=torch.uint8)
    on_cpu = replace(case.on_cpu, hadamard=True, scale_bytes=given, maxima=torch.zeros(3))
    made = transform_qkv(0, case.qkv, on_cpu, case.rope.rows(case.positions))
    exact = [
        Heads.encode(x, "e4m3", byte) for x, byte in zip(made, fixed_bytes(on_cpu), strict=True)
    ]
    assert sum(int((bits(one.values) & 0x7F == 0x7E).sum()) for one in exact) > 10  # saturated

    def on_gpu(hadamard: bool = True) -> QkvTransform:
        return replace(
            case.on_gpu, hadamard=hadamard, scale_bytes=given.cuda(), maxima=torch.zeros(3).cuda()
        )

    qkv, positions = case.qkv.cuda(), case.positions.cuda()
    packed, plain, paged = on_gpu(), on_gpu(hadamard=False), on_gpu()
    queries, keys = encode_packed(qkv, packed, positions, "e4m3")
    for ours, theirs in zip(heads_of(queries, keys, "e4m3"), exact, strict=True):
        assert same(ours.values, theirs.values) and torch.equal(ours.scales, theirs.scales)
    encode_packed(qkv, plain, positions, "bf16")
    count = -(-tokens // TILE)
    pages, slots = case.pages(count, "e4m3"), torch.arange(tokens).cuda()
    again = encode_paged(qkv, paged, positions, slots, pages)
    assert same(again, queries)
    assert same_keys(gathered(pages, torch.arange(count), tokens), keys)
    for one in (packed, plain, paged):
        assert same(one.maxima, on_cpu.maxima)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("norms", [False, True])
def test_a_vector_that_is_not_finite_is_marked(bad: float, norms: bool) -> None:
    case = Case(40, 14, 2, 64, norms=norms)
    vectors = case.qkv.view(40, 18, 64)
    vectors[3, 5, 7] = vectors[4, 14, 40] = vectors[5, 17, 63] = bad
    for got in heads_of(*case.packed("e4m3"), "e4m3"):
        marked = got.scales == 255
        assert marked.sum() == 1 and (bits(got.values)[marked] == 0x7F).all()
    queries, _ = case.packed("e4m3")
    assert queries.scales is not None and queries.scales[3, 5].isnan()
    assert same(
        queries.scales,
        scale_of_byte((queries.scales.cpu().view(torch.int32) >> 23).to(torch.uint8)),
    )
    if not norms:
        for got, exact in zip(
            heads_of(*case.packed("e4m3"), "e4m3"), case.specification("e4m3"), strict=True
        ):
            assert same(got.values, exact.values) and torch.equal(got.scales, exact.scales)
    for got in heads_of(*case.packed("bf16"), "bf16"):
        assert not got.values.isfinite().all()
    for got in heads_of(*case.packed("int8"), "int8"):
        assert got.scales.isnan().sum() == 1 and not got.values[got.scales.isnan()].any()


@pytest.mark.parametrize("format", NARROW)
def test_gather_lays_a_batch_end_to_end(format: Format) -> None:
    case = Case(900, 16, 8, 128)
    _, keys = case.packed(format)
    count = -(-900 // TILE)
    pages = case.pages(count, format)
    encode_paged(
        case.qkv.cuda(),
        case.transform(format),
        case.positions.cuda(),
        torch.arange(900).cuda(),
        pages,
    )
    table = torch.tensor([[2, 0], [1, 3], [4, 5], [6, 0]], dtype=torch.int32)
    lengths, starts, picks = [TILE + 1, 2 * TILE, 1, 64], [0, 130, 129, 386], []
    for row, length in zip(table.tolist(), lengths, strict=True):
        picks.append(
            torch.cat([torch.arange(page * TILE, (page + 1) * TILE) for page in row])[:length]
        )
    first, counts = (torch.tensor(x, dtype=torch.int32).cuda() for x in (starts, lengths))
    got = gather_pages(pages, table.cuda(), first, counts, 450, 2 * TILE)
    for pick, start, length in zip(picks, starts, lengths, strict=True):
        chosen = PackedKeys(
            *(
                bits(x)[pick]
                for x in (keys.keys, keys.key_scales, keys.values, keys.value_scales)
                if x is not None
            )
        )
        assert same_keys(
            PackedKeys(*(bits(x)[start : start + length] for x in tensors(got))), chosen
        )


def tensors(keys: PackedKeys) -> list[torch.Tensor]:
    return [
        x for x in (keys.keys, keys.key_scales, keys.values, keys.value_scales) if x is not None
    ]


def test_offsets_beyond_two_to_the_31() -> None:
    case = Case(3, 8, 8, 128)
    count = 2**31 // (8 * TILE * 128) + 2
    pages = case.pages(1, "e4m3")
    k, v = (torch.zeros(count, 8, TILE * 128, dtype=torch.uint8, device="cuda") for _ in range(2))
    scales = [torch.zeros(count, 8, TILE, dtype=torch.uint8, device="cuda") for _ in range(2)]
    large = replace(
        pages,
        keys=k.view(count, 8, TILE, 128).view(E4M3),
        values=v.view(count, 8, 128, TILE).view(E4M3),
    )
    large = replace(large, key_scales=scales[0], value_scales=scales[1])
    slots = (count - 1) * TILE + torch.arange(3)
    encode_paged(
        case.qkv.cuda(), case.transform("e4m3"), case.positions.cuda(), slots.cuda(), large
    )
    assert same_keys(gathered(large, torch.tensor([count - 1]), 3), case.packed("e4m3")[1])


def test_it_can_be_captured_in_a_graph() -> None:
    case = Case(64, 32, 8, 128)
    expected, keys = case.packed("e4m3")
    pages, qkv = case.pages(2, "e4m3"), torch.zeros_like(case.qkv).cuda()
    positions, slots = torch.zeros_like(case.positions).cuda(), torch.arange(64).cuda()
    encode_paged(qkv, case.transform("e4m3"), positions, slots, pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queries = encode_paged(qkv, case.transform("e4m3"), positions, slots, pages)
    qkv.copy_(case.qkv)
    positions.copy_(case.positions)
    slots.copy_(torch.arange(63, -1, -1) + 100)
    graph.replay()
    assert same(queries, expected)
    got = gathered(pages, torch.arange(2), 164)
    assert same_keys(
        PackedKeys(*(bits(x)[100:].flip(0) for x in tensors(got))),
        PackedKeys(*(bits(x) for x in tensors(keys))),
    )


def test_what_is_not_supported_is_refused() -> None:
    case = Case(2, 4, 2, 64)
    with pytest.raises(ConfigError, match="fp32"):
        case.packed("fp32")
    with pytest.raises(ValueError, match="contiguous"):
        encode_packed(
            case.qkv.cuda().t().contiguous().t(),
            case.transform("e4m3"),
            case.positions.cuda(),
            "e4m3",
        )
