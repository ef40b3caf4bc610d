"""The gated delta rule of one layer on a card: microseconds, kernel by kernel, and its bits.

    python -m benchmarks.delta_rule [--against OLDER/src | --forms] [--cases CASE ...] > ROWS.jsonl
    python -m benchmarks.delta_rule --beside-native > ROWS.jsonl

``decode`` is a step of so many sequences, whose rows are ``spread`` over their chunks or all begin
one (``first``), or of which each fourth has ``guesses``; ``forward`` and ``backward`` are those of
training, of packed sequences, and ``prefill`` is of whole prompts.  Random inputs and carries;
layers of a step take turns, so that none is read from the L2 cache.  ``us`` is what a layer takes,
kernels included that make rows of x; ``digest`` is of outputs, carries, states and gradients.

``--against`` measures another tree in a process of its own, and says by how many times this one is
faster and whether both digests are the same; those of ``backward`` may differ.  ``--forms`` goes
through forms of the programs: of rows that decode, of guesses, and in ``forward`` of the walk over
chunks, of its factors and of how many exist at once.  ``--back-end triton`` lowers kernels as that
back end does.

``--beside-native`` measures the cases that flash-linear-attention has too
(``benchmarks.native_delta_rule``), first alone and then beside its BF16 kernels: ``native_us`` is
what those take and ``times_native`` is ours over theirs.  Behind them ``error`` and
``native_error`` are how far outputs and gradients are from FP64, relative to their norms.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType as Module
from typing import Any

import torch

from benchmarks import native_delta_rule as native
from benchmarks.common import Row, card_row, kernel_times, printed
from isobit.kernels.operands import (
    DeltaGradients,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    PagedBatch,
)
from isobit.kernels.spec.delta_rule import DeltaCarries
from isobit.kernels.triton import delta_rule
from isobit.kernels.triton.delta_rule_training import PackedDeltaRule
from isobit.kernels.triton.lowering import lower_for_sm_80
from isobit.models.shapes import model_shape

REPEATS, CHUNK = 5, 64
COUNTS, LENGTHS = (1, 8, 32, 64, 128, 256), ((2048,) * 4, (8192,))
FEW = 32  # sequences of which a card has room for the carries of all layers
LAYERS, OF_MANY = 24, 3
GUESSES = 3
NATIVE_COUNTS = 256, 32, 1  # the most first, since the native kernels' forms are chosen with it
ERROR_LENGTHS = 300, 300
CASES = "decode", "forward", "backward", "prefill"
Work = Callable[[int], list[torch.Tensor]]
"""Of a layer; the tensors that it writes."""


def random_weights(shape: DeltaShape, device: str) -> DeltaWeights:
    rates = torch.logspace(-2.5, 0.5, shape.value_heads).log()
    made = torch.randn(shape.channels, shape.width) * 0.4, rates, torch.randn(shape.value_heads)
    return DeltaWeights(shape, *(one.bfloat16().to(device) for one in made))


def random_inputs(shape: DeltaShape, tokens: int, device: str) -> DeltaInputs:
    sizes = shape.channels, shape.value_heads, shape.value_heads
    made = (torch.randn(tokens, size, device=device).bfloat16() for size in sizes)
    return DeltaInputs(*made)


def paged_rule() -> Any:
    """The rule of the rollout, which has another place in older trees."""
    if hasattr(delta_rule, "PagedDeltaRule"):
        return import_module("isobit.kernels.triton.delta_rule").PagedDeltaRule
    return import_module("isobit.kernels.triton.delta_rule_rollout").PagedDeltaRule


def decode_work(shape: DeltaShape, count: int, case: str, device: str) -> tuple[int, Work]:
    """Steps of so many layers.  A sequence has two carries, of which it reads the first."""
    layers = LAYERS if count <= FEW else OF_MANY
    rows = torch.ones(count, dtype=torch.int64)
    if case == "guesses":
        rows[::4] += GUESSES
    owners = torch.repeat_interleave(torch.arange(count), rows)
    places = torch.arange(len(owners)) - (rows.cumsum(0) - rows)[owners]
    weights, inputs = random_weights(shape, device), random_inputs(shape, len(owners), device)

    def noise(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(sizes, device=device) * 0.1).to(dtype)

    first = DeltaCarries(shape, 2 * count, torch.bfloat16, noise)
    first.decays.copy_(-0.1 * torch.arange(CHUNK))
    carries = [first, *(deepcopy(first) for _ in range(layers - 1))]
    index = torch.arange(count)
    spread = (CHUNK // 2 + index * CHUNK // count) % CHUNK
    position = 2 * CHUNK + (0 * index if case == "first" else spread)
    begins = (position + rows - 1) // CHUNK != (position - 1) // CHUNK
    of_rows = position[owners] + places, 2 * owners, (2 * index + begins)[owners], places
    columns = [one.to(device) for one in of_rows]
    rule = paged_rule().decoding(*columns[: 4 if case == "guesses" else 3])

    def work(layer: int) -> list[torch.Tensor]:
        held = carries[layer]
        return [rule.forward(held, inputs, weights), *held.tensors]

    return layers, work


def prefill_work(shape: DeltaShape, lengths: Sequence[int], device: str) -> tuple[int, Work]:
    """Whole prompts, of which carries are left."""
    count = len(lengths)
    none = torch.zeros(count, 0, dtype=torch.int64)
    carried = torch.stack([torch.full((count,), -1), torch.arange(count)])
    batch = PagedBatch(tuple(lengths), tuple(lengths), none, none, carried)
    rule = paged_rule().of(batch, torch.device(device))
    weights, inputs = random_weights(shape, device), random_inputs(shape, sum(lengths), device)

    def zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    carries = DeltaCarries(shape, count, torch.bfloat16, zeros)

    def work(_: int) -> list[torch.Tensor]:
        return [rule.forward(carries, inputs, weights), *carries.tensors]

    return 1, work


def forward_work(shape: DeltaShape, lengths: Sequence[int], device: str) -> tuple[int, Work]:
    rule = PackedDeltaRule(tuple(lengths), torch.device(device))
    weights, inputs = random_weights(shape, device), random_inputs(shape, sum(lengths), device)

    def work(_: int) -> list[torch.Tensor]:
        output, saved = rule.forward(inputs, weights)
        return [output, saved.kept.states]

    return 1, work


def backward_work(shape: DeltaShape, lengths: Sequence[int], device: str) -> tuple[int, Work]:
    rule = PackedDeltaRule(tuple(lengths), torch.device(device))
    weights, inputs = random_weights(shape, device), random_inputs(shape, sum(lengths), device)
    output, saved = rule.forward(inputs, weights)
    d_output = torch.randn(output.shape, device=device).bfloat16()

    def work(_: int) -> list[torch.Tensor]:
        held = weights.convolution, weights.a_log, weights.dt_bias
        gradients = DeltaGradients(*(torch.zeros_like(one, dtype=torch.float32) for one in held))
        found = rule.backward(saved, d_output, weights, gradients)
        return [found.x, found.a, found.b, gradients.convolution, gradients.a_log]

    return 1, work


def measured(layers: int, work: Work) -> Row:
    """Microseconds of a layer, of each kernel too, and the digest of the first layer."""
    digest = hashlib.sha256()
    for one in work(0):
        digest.update(one.cpu().flatten().view(torch.uint8).numpy().tobytes())

    def all_layers() -> None:
        for layer in range(layers):
            work(layer)

    times = kernel_times(all_layers, REPEATS)
    of_kernels = {name: time / layers for name, (time, _) in times.items()}
    return {"us": sum(of_kernels.values()), "kernels": of_kernels, "digest": digest.hexdigest()}


def cases(shape: DeltaShape, device: str) -> Iterator[tuple[Row, Callable[[], tuple[int, Work]]]]:
    for count in COUNTS:
        for case in ("spread", "first", "guesses"):
            name = {"case": "decode", "rows": case, "sequences": count}
            yield name, lambda count=count, case=case: decode_work(shape, count, case, device)
    for lengths in LENGTHS:
        name = {"case": "forward", "lengths": list(lengths)}
        yield name, lambda lengths=lengths: forward_work(shape, lengths, device)
        name = {"case": "backward", "lengths": list(lengths)}
        yield name, lambda lengths=lengths: backward_work(shape, lengths, device)
        name = {"case": "prefill", "lengths": list(lengths)}
        yield name, lambda lengths=lengths: prefill_work(shape, lengths, device)


def measure(shape: DeltaShape, device: str, wanted: Sequence[str]) -> Iterator[Row]:
    for name, make in cases(shape, device):
        if name["case"] in wanted:
            torch.manual_seed(0)
            yield name | measured(*make())


def forms_of(name: Row) -> Iterator[tuple[Row, Module, str, object]]:
    """Forms for a case: what each is called, and where it is set."""
    from isobit.kernels.triton import delta_factors, delta_rule_rollout

    few, many = delta_rule.FORMS
    if name["case"] == "decode" and name["rows"] == "spread":
        depths = {32: ((32, 168), (16, 96)), 64: ((16, 128),), 128: ((16, 128), (16, 96), (8, 64))}
        rows = [delta_rule_rollout.RowForm(n, *one) for n, its in depths.items() for one in its]
        for form in rows:
            yield {"form": asdict(form)}, delta_rule_rollout, "MANY", form
    elif name["case"] == "decode" and name["rows"] == "guesses":
        for one in ((64, 16, 8), (64, 16, 4), (64, 32, 4), (32, 16, 4), (128, 16, 8)):
            form = delta_rule.RuleForm(few.rows, *one)
            yield {"form": asdict(form)}, delta_rule, "FORMS", (form, many)
    elif name["case"] == "forward":
        wide = (64, 64, 32, 8, 1, 64), (64, 64, 32, 4, 1, 64), (64, 128, 32, 8, 1, 128)
        narrow = (64, 32, 32, 8, 1, 128), (64, 32, 16, 4, 1, 128), (64, 16, 32, 4, 1, 128)
        less = (64, 32, 32, 4, 1, 64), (64, 32, 32, 4, 1, 32), (32, 32, 32, 4, 1, 128)
        ahead = (64, 32, 32, 4, 2, 128), (64, 32, 16, 4, 2, 128), (64, 32, 16, 4, 3, 128)
        every = [delta_rule.RuleForm(*one) for one in (*wide, *narrow, *less, *ahead)]
        for form in (many, *every):
            yield {"form": asdict(form)}, delta_rule, "FORMS", (few, form)
        for depth, warps in ((16, 4), (16, 8), (32, 4), (64, 8)):
            form = delta_factors.FactorsForm(depth, warps)
            of_rows = dict.fromkeys(delta_factors.FORMS, form)
            yield {"factors": asdict(form)}, delta_factors, "FORMS", of_rows
        for numbers in (1 << 22, 1 << 23, 1 << 25, 1 << 26):
            yield {"factors_at_once": numbers}, delta_rule, "FACTORS", numbers


def measure_forms(shape: DeltaShape, device: str, wanted: Sequence[str]) -> Iterator[Row]:
    """Of this tree alone; a digest that differs from another form's is a fault."""
    from isobit.kernels.triton import delta_rule_rollout

    delta_rule_rollout.FEW_PAIRS = 0  # so that the form is that of many
    for name, make in cases(shape, device):
        for form, module, where, value in forms_of(name) if name["case"] in wanted else ():
            usual = getattr(module, where)
            setattr(module, where, value)
            torch.manual_seed(0)
            yield name | form | measured(*make())
            setattr(module, where, usual)


def native_times(name: Row, shape: DeltaShape, device: str, gates: str) -> Row:
    """What the native kernels take for a case."""
    tokens = name["sequences"] if name["case"] == "decode" else sum(name["lengths"])
    weights, inputs = random_weights(shape, device), random_inputs(shape, tokens, device)
    return native.timed(*native.work_of(name, inputs, weights, gates), REPEATS)


def native_rows(found: list[tuple[Row, Row]], shape: DeltaShape, device: str) -> Iterator[Row]:
    """Cases with both kernels, of those that were measured with ours."""
    yield native.caught(native.version)
    lifted = native.caught(lambda: {"native_refusal_lifted": native.lift_refusal(shape)})
    order = {count: place for place, count in enumerate((None, *NATIVE_COUNTS))}
    for name, ours in sorted(found, key=lambda pair: order[pair[0].get("sequences")]):
        for gates in native.GATES:
            torch.manual_seed(0)
            row = name | {"gates": gates, "us": ours["us"]}
            row |= lifted if name["case"] == "backward" else {}
            row |= native.caught(lambda name=name, of=gates: native_times(name, shape, device, of))
            if "native_us" in row:
                row["times_native"] = row["us"] / row["native_us"]
            yield row


def measure_beside_native(shape: DeltaShape, device: str) -> Iterator[Row]:
    """Cases that the native kernels have too: all with ours alone, so that no fault of another
    package takes them along, then with both, and how far both are from FP64.
    """
    found = list[tuple[Row, Row]]()
    for name, make in cases(shape, device):
        if name["case"] == "decode" and name["rows"] != "spread":
            continue
        if name.get("sequences", NATIVE_COUNTS[0]) in NATIVE_COUNTS:
            torch.manual_seed(0)
            found.append((name, measured(*make())))
            yield name | found[-1][1]
    yield from native_rows(found, shape, device)
    yield from error_rows(shape, device)


def our_outputs(
    inputs: DeltaInputs, weights: DeltaWeights, d_output: torch.Tensor
) -> dict[str, torch.Tensor]:
    """o [T, H DV], and the gradients of x, a and b."""
    rule = PackedDeltaRule(ERROR_LENGTHS, inputs.x.device)
    output, saved = rule.forward(inputs, weights)
    held = weights.convolution, weights.a_log, weights.dt_bias
    gradients = DeltaGradients(*(torch.zeros_like(one, dtype=torch.float32) for one in held))
    found = rule.backward(saved, d_output, weights, gradients)
    return {"o": output, "x": found.x, "a": found.a, "b": found.b}


def error_rows(shape: DeltaShape, device: str) -> Iterator[Row]:
    """How far from FP64 outputs and gradients are, in the forms that were measured."""
    torch.manual_seed(0)
    weights = random_weights(shape, device)
    inputs = random_inputs(shape, sum(ERROR_LENGTHS), device)
    d_output = torch.randn(sum(ERROR_LENGTHS), shape.values, device=device).bfloat16()
    output, leaves = native.recurrence(inputs, weights, ERROR_LENGTHS)
    found = torch.autograd.grad(output, leaves[:3], d_output.double())
    exact = {"o": output.detach(), **dict(zip("xab", found, strict=True))}

    def errors(made: dict[str, torch.Tensor]) -> Row:
        """Norms of differences over those of what is exact."""
        return {
            name: float((one.double() - exact[name]).norm() / exact[name].norm())
            for name, one in made.items()
        }

    ours = errors(our_outputs(inputs, weights, d_output))

    def of_native(gates: str, given: torch.Tensor | None) -> Row:
        made = native.outputs_of(inputs, weights, ERROR_LENGTHS, gates, given)
        return {"native_error": errors(made)}

    for case, names, given in (("forward", "o", None), ("backward", "xab", d_output)):
        error = {name: ours[name] for name in names}
        for gates in native.GATES:
            name = {"case": case, "lengths": list(ERROR_LENGTHS), "gates": gates, "error": error}
            yield name | native.caught(lambda of=gates, given=given: of_native(of, given))


def older(source: Path, shape: str, wanted: Sequence[str]) -> list[Row]:
    """The rows of another tree's kernels."""
    root = Path(__file__).resolve().parents[1]
    paths = str(source.resolve()), str(root), os.environ.get("PYTHONPATH", "")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.delta_rule", "--shape", shape, "--cases", *wanted]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, metavar="SRC")
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("--beside-native", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--shape", default="qwen3.5-9b")
    parser.add_argument("--back-end", choices=("hopper", "triton"), default="hopper")
    asked = parser.parse_args()
    apart = asked.beside_native, asked.forms, asked.against is not None
    if sum(apart) > 1 or (asked.beside_native and asked.cases != CASES):
        parser.error("--beside-native, --forms and --against are each by themselves")
    if asked.back_end == "triton" and asked.against:
        parser.error("--against measures the other tree as Hopper's back end lowers it")
    if asked.back_end == "triton":
        lower_for_sm_80()
    shape = model_shape(asked.shape).delta
    assert shape is not None, "the shape has gated delta nets"
    if asked.beside_native:
        printed(card_row())
        for row in measure_beside_native(shape, "cuda"):
            printed(row)
        return
    theirs = older(asked.against, asked.shape, asked.cases) if asked.against else []
    printed(card_row())
    for number, row in enumerate(measure(shape, "cuda", asked.cases)):
        if theirs:
            old = theirs[1 + number]  # behind its card
            row |= {"old_us": old["us"], "faster": old["us"] / row["us"]}
            row |= {"same_bits": old["digest"] == row["digest"], "old_kernels": old["kernels"]}
        printed(row)
    for row in measure_forms(shape, "cuda", asked.cases) if asked.forms else ():
        printed(row)


if __name__ == "__main__":
    main()
