"""Microseconds of kernels by tiles on one card: INT8 products of few and many tokens, attention's
decode and its prefill.  Which tiles suit best is decided by these figures; no choice changes a bit
but that of attention's tile of keys.

    python -m benchmarks.tiles products [--tokens 32 256] [--back-end triton] > ROWS.jsonl
    python -m benchmarks.tiles decode [--sequences 1 8 32 256] [--formats int8] > ROWS.jsonl
    python -m benchmarks.tiles decode --keys 8192 --part 1024 --in-use > ROWS.jsonl
    python -m benchmarks.tiles prefill > ROWS.jsonl

Products are those of a layer of Qwen3-8B, attention is its 32 heads over 8 of 128.  A row is a
choice: ``us`` in a captured graph, in which weights or layers take turns so that none is read from
the L2 cache, ``in_use`` the choice of the back end, and ``equal``, whether the result has its bits.
``--part`` has other parts of keys than ``isobit.kernels.triton.attention.PART``, which belong to
the bits; up to ``--apart`` parts of all sequences have programs of their own in decode.
``--in-use`` leaves out all other choices.  ``--compile I/N`` only compiles, each N-th choice from
the I-th on, so that N processes fill Triton's cache first: 40 s with 24 of them.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

from benchmarks.attention import DIM, HEADS, KV_HEADS, random_heads
from benchmarks.common import Row, card_row, make_parser, printed, run_command
from benchmarks.rollout_floor import graph_seconds
from isobit.kernels.backend import back_end_of
from isobit.kernels.hopper import attention as hopper_attention
from isobit.kernels.hopper import int8 as hopper_int8
from isobit.kernels.triton import attention, attention_decode, attention_prefill, int8
from isobit.kernels.triton.attention import Build, Form, PackedKeys, PagedKeys
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.kernels.triton.int8 import Tiles
from isobit.kernels.triton.lowering import lower_for_sm_80
from isobit.precision.quant_tensor import DTYPES, EIGHT_BITS, Format, Int8Rows

MATRICES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
}  # fmt: skip
FORMATS: Sequence[Format] = ("int8", "e4m3", "bf16")
PREFILLS = ((4096,) * 2, (512,) * 32)
CACHED = 160 << 20
"""Bytes of operands that no card has an L2 cache for."""
KIB = 1024
MEMORY = {"triton": 96 * KIB, "hopper": 215 * KIB}
"""Shared memory that a program's tiles may take."""


Choice = TypeVar("Choice", bound=Any)


def tiles(tokens: int, most: int) -> Iterator[Tiles]:
    """What a product of so many tokens may be cut into, in so many bytes of shared memory."""
    few = tokens <= 64
    blocks = (
        product((max(16, tokens),), (16, 32, 64, 128))
        if few
        else product((64, 128, 256), (64, 128, 256))
    )
    depths, stages = ((128, 256, 512), (3, 4, 6)) if few else ((64, 128), (3, 4))
    for (m, n), depth, stage, parts in product(blocks, depths, stages, (1, 2, 4)):
        for warps in (2, 4, 8):
            numbers = m * n // (32 * warps)  # of a thread
            if (m + n) * depth * (stage - 1) <= most and 4 <= numbers <= 128:
                yield Tiles(m, n, parts, stage, swaps=few, depth=depth, warps=warps)


def forms(form: Form) -> Iterator[Form]:
    """Of decode, with the same tile and with one of 128 keys."""
    for tile, stages, warps, registers in product(
        sorted({form.tile, 128}), (2, 3, 4, 5, 6), (2, 4, 8), (None, 128)
    ):
        yield replace(
            form, tile=tile, decode_stages=stages, few_stages=None, decode_warps=warps,
            decode_registers=registers,
        )  # fmt: skip


def prefill_forms(form: Form) -> Iterator[Form]:
    for tile, (queries, warps), stages in product(
        sorted({form.tile, 128}), ((64, 4), (128, 4), (128, 8)), (1, 2, 3)
    ):
        yield replace(form, tile=tile, queries=queries, prefill_warps=warps, prefill_stages=stages)


def measure(
    part: tuple[int, int] | None,
    case: Row,
    in_use: Choice,
    others: Sequence[Choice],
    work: Callable[[Choice], Sequence[torch.Tensor]],
) -> None:
    """Time each choice and compare it with the one in use, or compile a ``part`` of them; ``work``
    makes results, one behind the other.
    """
    wanted = None
    for n, choice in enumerate([in_use, *others]):
        if part is not None and n % part[1] != part[0]:
            continue
        row: Row = case | asdict(choice) | {"in_use": n == 0}
        try:
            made = work(choice)
            torch.cuda.synchronize()
            if part is not None:
                continue
            wanted = made[0] if wanted is None else wanted
            row["equal"] = torch.equal(made[0], wanted)
            taken = graph_seconds(partial(work, choice), repeats_ms=10)
            row["us"] = round(1e6 * taken / len(made), 1)
        except Exception as error:  # a choice may be none for this card
            row["error"] = f"{type(error).__name__}: {str(error)[:100]}"
        printed(row)


def lowered(asked: argparse.Namespace) -> str:
    """The back end, for which kernels are lowered from now on."""
    name = back_end_of("cuda")
    attention.PART = getattr(asked, "part", attention.PART)
    attention_decode.MOST_APART = getattr(asked, "apart", attention_decode.MOST_APART)
    if name == "triton":
        lower_for_sm_80()
    if asked.compile is None:
        printed(card_row())
    return name


def products(asked: argparse.Namespace) -> None:
    back_end = lowered(asked)
    for tokens, (name, (n, k)) in product(asked.tokens, MATRICES.items()):
        x = _rows(tokens, k)
        weights = [_rows(n, k) for _ in range(max(2, -(-CACHED // (n * k))))]
        cut = (hopper_int8 if back_end == "hopper" else int8).cut_up(tokens, n, k)
        others = [one for one in tiles(tokens, MEMORY[back_end]) if one.splits == 1 or n <= 8192]
        case = {"product": name, "tokens": tokens, "back_end": back_end}
        measure(asked.compile, case, cut, others, partial(_multiplied, x, weights))


def _multiplied(
    x: Int8Rows, weights: Sequence[Int8Rows], cut: hopper_int8.Cut
) -> list[torch.Tensor]:
    return [hopper_int8.int8_gemm_nt(x, one, cut) for one in weights]


def _rows(count: int, columns: int) -> Int8Rows:
    values = torch.randint(-127, 128, (count, columns), dtype=torch.int8, device="cuda")
    return Int8Rows(values, torch.rand(count, device="cuda") + 0.5)


def _heads(format: Format, *shape: int) -> torch.Tensor:
    if format == "int8":
        return torch.randint(-120, 121, shape, dtype=torch.int8, device="cuda")
    return random_heads("bf16" if format == "bf16" else "fp8", *shape)


def _scales(format: Format, *shape: int, of_queries: bool = False) -> torch.Tensor | None:
    if format not in EIGHT_BITS:
        return None
    if format == "int8" or of_queries:
        return torch.rand(shape, device="cuda")
    return torch.full(shape, 120, dtype=torch.uint8, device="cuda")


def _in_use(back_end: str, format: Format) -> tuple[Form, bool]:
    build = hopper_attention.HOPPER if back_end == "hopper" else attention.PORTABLE
    return build.form(DTYPES[format], DIM), build.is_portable


def decode(asked: argparse.Namespace) -> None:
    back_end = lowered(asked)
    for format, count in product(asked.formats, asked.sequences):
        form, is_portable = _in_use(back_end, format)
        case: Row = {"decode": format, "sequences": count, "keys": asked.keys}
        case |= {"part": attention.PART, "back_end": back_end}
        case |= {"apart": attention_decode.MOST_APART}
        longest = max(asked.keys, asked.longest)
        case |= {"longest": longest}
        pages = -(-longest // PAGE_TOKENS)
        layers = [_pages(format, count * pages) for _ in range(4 if count > 64 else 16)]
        queries = _heads(format, count, HEADS, DIM)
        scales = _scales(format, count, HEADS, of_queries=True)
        table = torch.arange(count * pages, dtype=torch.int32, device="cuda").view(count, pages)
        lengths = torch.full((count,), asked.keys, dtype=torch.int32, device="cuda")
        lengths[0] = longest
        attend = [
            partial(
                attention_decode.decode_attention, queries, scales, keys, table, lengths, longest
            )
            for keys in layers
        ]
        others = [] if asked.in_use else list(forms(form))
        measure(asked.compile, case, form, others, partial(_by, attend, is_portable))


def prefill(asked: argparse.Namespace) -> None:
    back_end = lowered(asked)
    every = PREFILLS if asked.lengths is None else [asked.lengths]
    for format, sequences in product(asked.formats, every):
        form, is_portable = _in_use(back_end, format)
        case: Row = {"prefill": format, "lengths": list(sequences)}
        case |= {"part": attention.PART, "back_end": back_end}
        tokens, longest = sum(sequences), max(sequences)
        values = _heads(format, tokens, KV_HEADS, DIM)
        keys = PackedKeys(
            _heads(format, tokens, KV_HEADS, DIM), _scales(format, tokens, KV_HEADS),
            values.half() if format in EIGHT_BITS else values, _scales(format, tokens, KV_HEADS),
        )  # fmt: skip
        counts = torch.tensor(sequences, dtype=torch.int32, device="cuda")
        starts = (counts.cumsum(0) - counts).int()
        attend = partial(
            attention_prefill.prefill_attention, _heads(format, tokens, HEADS, DIM),
            _scales(format, tokens, HEADS, of_queries=True), keys, starts, counts, starts, counts,
            longest, longest,
        )  # fmt: skip
        others = [] if asked.in_use else list(prefill_forms(form))
        measure(asked.compile, case, form, others, partial(_by, [attend], is_portable))


def _pages(format: Format, count: int) -> PagedKeys:
    """So many pages, one layer's."""
    of_layer = count, KV_HEADS
    page = (DIM, PAGE_TOKENS) if format in EIGHT_BITS else (PAGE_TOKENS, DIM)
    return PagedKeys(
        _heads(format, *of_layer, PAGE_TOKENS, DIM), _scales(format, *of_layer, PAGE_TOKENS),
        _heads(format, *of_layer, *page), _scales(format, *of_layer, PAGE_TOKENS),
    )  # fmt: skip


def _by(attend: Sequence[Callable[..., Any]], is_portable: bool, form: Form) -> list[torch.Tensor]:
    """The outputs of attention in a form."""
    build = Build(lambda *_: form, is_portable)
    return [one(build=build)[0] for one in attend]


def part_of(text: str) -> tuple[int, int]:
    """I and N of I/N."""
    part, _, parts = text.partition("/")
    return int(part), int(parts)


def main() -> int:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (("products", products), ("decode", decode), ("prefill", prefill)):
        command = commands.add_parser(name)
        command.add_argument("--back-end", choices=("auto", "hopper", "triton"), default="auto")
        command.add_argument("--compile", type=part_of, metavar="I/N")
        command.set_defaults(run=run)
        if name == "products":
            command.add_argument("--tokens", type=int, nargs="+", default=[32, 256])
        else:
            command.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8"])
            command.add_argument("--part", type=int, default=attention.PART)
            command.add_argument("--in-use", action="store_true")
        if name == "decode":
            command.add_argument("--keys", type=int, default=665)
            command.add_argument("--longest", type=int, default=0, help="keys of one sequence")
            command.add_argument("--apart", type=int, default=attention_decode.MOST_APART)
            command.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 256])
        if name == "prefill":
            command.add_argument("--lengths", type=int, nargs="+")
    return run_command(parser)


if __name__ == "__main__":
    raise SystemExit(main())
