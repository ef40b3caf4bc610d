"""Run in Triton's interpreter by test_delta_rule.py: a row of the gated delta rule has the same
bits decoded, in a chunk of a prompt and in a packed batch; outputs and gradients are as near to
FP64 as the specification's.

Products are added up as FP32 does on a card: a chain of ``fma`` in ascending order.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from isobit.kernels.operands import DeltaGradients, DeltaInputs, DeltaShape, DeltaWeights
from isobit.kernels.spec import delta_rule as spec
from isobit.kernels.triton import delta_rows, delta_rule
from isobit.kernels.triton.delta_gates import TritonHybrid
from isobit.kernels.triton.delta_rows import CHUNK, DeltaSlots
from isobit.kernels.triton.delta_rule import PagedDeltaRule, RuleForm
from isobit.kernels.triton.delta_rule_training import PackedDeltaRule
from tests.kernels.comparison import relative_error
from tests.kernels.triton.interpreted_qkv import convert

CPU = torch.device("cpu")
SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=16, width=4)
OTHER = DeltaShape(key_heads=2, value_heads=4, key_dim=24, value_dim=40, width=3)
"""Sizes that are no powers of two, with two value heads a key head."""


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _chain(_: object, a: Any, b: Any, d: Any, *how: object) -> Any:
    total = d.data
    for k in range(a.data.shape[1]):
        total = _fused(a.data[:, k, None], b.data[None, k], total)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def prepare() -> None:
    interpreter._convert_float = convert
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = _chain
    builder.create_fma = lambda _, x, y, z: interpreter.TensorHandle(
        _fused(x.data, y.data, z.data), z.dtype.scalar
    )
    delta_rows.VECTORS = 128  # of a program, of which the interpreter takes few
    torch.manual_seed(0)
    random.seed(0)


def weights(shape: DeltaShape) -> DeltaWeights:
    """Of heads that remember hundreds of tokens to one."""
    rates = torch.logspace(-2.5, 0.5, shape.value_heads).log()
    convolution = torch.randn(shape.channels, shape.width) * 0.4
    made = convolution, rates, torch.randn(shape.value_heads)
    return DeltaWeights(shape, *(one.bfloat16() for one in made))


def inputs(shape: DeltaShape, tokens: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    """In FP32, since a rounding of o to BF16 hides most faults of one ulp."""
    sizes = shape.channels, shape.value_heads, shape.value_heads
    return DeltaInputs(*(torch.randn(tokens, size).to(dtype) for size in sizes))


def packed(given: DeltaInputs, learnt: DeltaWeights, lengths: Sequence[int]) -> torch.Tensor:
    return PackedDeltaRule(tuple(lengths), CPU).forward(given, learnt)[0]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of zeros' signs."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@dataclass
class Rollout:
    """Sequences whose tokens come in parts, each with the slot of its last page."""

    given: DeltaInputs
    learnt: DeltaWeights
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        shape = self.learnt.shape
        self.free = list(range(3 * len(self.lengths) + 2))
        random.shuffle(self.free)
        self.slots = DeltaSlots(shape, len(self.free), self.given.x.dtype, CPU)
        for tensor in self.slots.tensors:
            tensor.fill_(torch.nan)
        self.held = [-1] * len(self.lengths)
        self.done = [0] * len(self.lengths)
        self.output = torch.full(
            (sum(self.lengths), shape.values), torch.nan, dtype=self.given.x.dtype
        )

    def slot(self, n: int, last: int, moves: bool) -> int:
        """That a sequence's next tokens up to ``last`` are written to: a new one where the chunk
        ends, or where it ``moves``.
        """
        same = (last - 1) // CHUNK == max(self.done[n] - 1, 0) // CHUNK
        return self.held[n] if same and self.held[n] >= 0 and not moves else self.free.pop()

    def put(self, lasts: dict[int, int], moves: bool = False) -> None:
        """Of each sequence the tokens up to ``last`` - 1."""
        starts = [sum(self.lengths[:n]) for n in lasts]
        positions = [self.done[n] for n in lasts]
        spans = [torch.arange(*one) for one in zip(positions, lasts.values(), strict=True)]
        tokens = torch.cat([start + span for start, span in zip(starts, spans, strict=True)])
        read = [self.held[n] for n in lasts]
        written = [self.slot(n, last, moves) for n, last in lasts.items()]
        part = self.given.map(lambda one: one[tokens])
        counts = [len(span) for span in spans]
        if set(counts) == {1}:
            places = (torch.tensor(x, dtype=torch.int32) for x in (positions, read, written))
            rule = PagedDeltaRule.decoding(*places)
        else:
            rule = PagedDeltaRule.of(positions, counts, read, written, CPU)
        self.output[tokens] = rule.forward(self.slots, part, self.learnt)
        for n, new in zip(lasts, written, strict=True):
            if new != self.held[n] and self.held[n] >= 0:
                self.free.append(self.held[n])
            self.held[n], self.done[n] = new, lasts[n]


def check_parts(
    shape: DeltaShape, lengths: Sequence[int], most: int, moves: bool, dtype: torch.dtype
) -> None:
    """Whatever is in the slots before, however tokens come, and whoever comes with them."""
    learnt, given = weights(shape), inputs(shape, sum(lengths), dtype)
    rollout = Rollout(given, learnt, lengths)
    while left := [n for n, length in enumerate(lengths) if rollout.done[n] < length]:
        lasts = {
            n: min(lengths[n], rollout.done[n] + random.choice([1, 1, 1, 2, 5, most]))
            for n in left
            if random.random() < 0.8
        }
        if lasts:
            rollout.put(lasts, moves and random.random() < 0.5)
    assert same_bits(rollout.output, packed(given, learnt, lengths))


def check_moves() -> None:
    """Slots that change in the middle of a chunk, at its end and behind it; with the specification,
    since a packed batch and a prompt may share a fault.
    """
    length, learnt = 200, weights(SHAPE)
    given = inputs(SHAPE, length)
    rollout = Rollout(given, learnt, [length])
    for last, moves in (
        (30, False), (31, True), (40, True), (64, False), (65, False), (66, True), (67, True),
        (100, False), (101, False), (104, False), (105, True), (128, True), (130, False),
        (131, False), (194, True), (length, False),
    ):  # fmt: skip
        rollout.put({0: last}, moves)
    assert same_bits(rollout.output, packed(given, learnt, [length]))
    theirs, _ = spec.PackedDelta((length,)).forward(given, learnt)
    for part in (slice(0, 64), slice(64, 128), slice(128, 192), slice(192, 200)):
        assert relative_error(rollout.output[part], theirs[part]) < 2e-6


def check_decoding(shape: DeltaShape, start: int, length: int) -> None:
    """A prompt, then token by token, over the ends of chunks."""
    learnt, given = weights(shape), inputs(shape, length)
    rollout = Rollout(given, learnt, [length])
    rollout.put({0: start})
    for last in range(start + 1, length + 1):
        rollout.put({0: last})
    assert same_bits(rollout.output, packed(given, learnt, [length]))


def check_forms(shape: DeltaShape) -> None:
    """Rows at once, columns and depth are in no bit; nor is who is packed together."""
    lengths = 70, 1, 20
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    expected = packed(given, learnt, lengths)
    usual = delta_rule.FORMS
    for form in (*usual, RuleForm(32, 16, 16, 4), RuleForm(4, 32, 32, 4)):
        delta_rule.FORMS = (form,)
        assert same_bits(packed(given, learnt, lengths), expected)
    delta_rule.FORMS = usual
    ends = 0
    for length in lengths:
        one = given.map(lambda x, part=slice(ends, ends + length): x[part].contiguous())
        ends += length
        assert same_bits(packed(one, learnt, [length]), expected[ends - length : ends])


def check_rejected(at: int, accepted: int) -> None:
    """Guesses of which some are wrong, and the rows that replace them; where guesses went to a new
    slot, the one that was read is as it was.
    """
    learnt = weights(SHAPE)
    right, wrong = inputs(SHAPE, 100), inputs(SHAPE, 100)
    rollout = Rollout(right, learnt, [100])
    rollout.put({0: at})
    mixed = right.map(torch.Tensor.clone)
    for one, other in ((mixed.x, wrong.x), (mixed.a, wrong.a), (mixed.b, wrong.b)):
        one[at + accepted :] = other[at + accepted :]
    rollout.given = mixed
    older = rollout.held[0]
    held = [one[older].clone() for one in rollout.slots.tensors]
    rollout.put({0: at + 4})
    if rollout.held[0] != older:
        assert all(
            torch.equal(one[older].nan_to_num(), was.nan_to_num())
            for one, was in zip(rollout.slots.tensors, held, strict=True)
        )
        if not accepted:
            rollout.free.remove(older)
            rollout.held[0] = older
    rollout.given, rollout.done[0] = right, at + accepted
    rollout.put({0: at + accepted + 1})
    rollout.put({0: 100})
    assert same_bits(rollout.output, packed(right, learnt, [100]))


def check_contents() -> None:
    """A slot holds its chunk as the specification's carry does, up to the rounding of sums."""
    length, learnt = 64 + 37, weights(SHAPE)
    given = inputs(SHAPE, length, torch.bfloat16)
    rollout = Rollout(given, learnt, [length])
    for last in (50, 80, 81, length):
        rollout.put({0: last})
    carries = spec.DeltaCarries(SHAPE, 1, torch.bfloat16, lambda n, d: torch.zeros(n, dtype=d))
    none = torch.zeros(1, 0, dtype=torch.int64)
    batch = spec.PagedBatch((length,), (length,), none, none, torch.tensor([[-1], [0]]))
    spec.PagedDelta(batch).forward(carries, given, learnt)
    slots, slot = rollout.slots, rollout.held[0]
    assert torch.equal(slots.inputs[slot, : SHAPE.width - 1 + 37], given.x[64 - SHAPE.width + 1 :])
    for ours, theirs in (
        (slots.keys[slot, :, :37], carries.keys[0, :, :37]),
        (slots.updates[slot, :, :37], carries.updates[0, :, :37]),
        (slots.decays[slot, :, :37], carries.decays[0, :, :37]),
        (slots.states[slot], carries.states[0]),
    ):
        assert relative_error(ours, theirs) < 2e-6
        assert ours.norm() > 0.1


def check_output(shape: DeltaShape, lengths: Sequence[int]) -> None:
    """As near to the recurrence in FP64 as the specification; before the rounding to BF16."""
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    mine, saved = PackedDeltaRule(tuple(lengths), CPU).forward(given, learnt)
    theirs, _ = spec.PackedDelta(tuple(lengths)).forward(given, learnt)
    wanted = exact(given, learnt, lengths)
    first = 0
    for length in lengths:
        part = slice(first, first := first + length)
        error, yardstick = (relative_error(x[part], wanted[part]) for x in (mine, theirs))
        assert error < max(1.5 * yardstick, 5e-7), (length, error, yardstick)
    assert len(saved.kept.states) == sum((length - 1) // CHUNK for length in lengths)


def _differentiable(
    leaves: Sequence[torch.Tensor], shape: DeltaShape, lengths: Sequence[int]
) -> torch.Tensor:
    """Token by token, [T, H DV], of ``_leaves``."""
    x, a, b, convolution, a_log, dt_bias = leaves
    made = list[torch.Tensor]()
    functional = torch.nn.functional
    repeat, keys = shape.value_heads // shape.key_heads, shape.key_heads * shape.key_dim
    for own, own_a, own_b in zip(*(one.split(list(lengths)) for one in (x, a, b)), strict=True):
        padded = functional.pad(own.t(), (shape.width - 1, 0))
        mixed = functional.conv1d(padded, convolution[:, None], groups=shape.channels).t()
        q, k, v = functional.silu(mixed).split([keys, keys, shape.values], 1)
        q, k = (one.view(len(one), shape.key_heads, shape.key_dim) for one in (q, k))
        q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
        q, k = (one.repeat_interleave(repeat, 1) for one in (q / shape.key_dim**0.5, k))
        v = v.view(len(v), shape.value_heads, shape.value_dim)
        decay = -a_log.exp() * functional.softplus(own_a + dt_bias)
        beta = own_b.sigmoid()
        state = x.new_zeros(shape.value_heads, shape.key_dim, shape.value_dim)
        for t in range(len(own)):
            state = state * decay[t].exp()[:, None, None]
            update = beta[t, :, None] * (v[t] - (state * k[t, :, :, None]).sum(1))
            state = state + k[t, :, :, None] * update[:, None]
            made.append((state * q[t, :, :, None]).sum(1).flatten())
    return torch.stack(made)


def _leaves(given: DeltaInputs, learnt: DeltaWeights) -> list[torch.Tensor]:
    held = given.x, given.a, given.b, learnt.convolution, learnt.a_log, learnt.dt_bias
    return [one.double().requires_grad_() for one in held]


def exact(given: DeltaInputs, learnt: DeltaWeights, lengths: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return _differentiable(_leaves(given, learnt), learnt.shape, lengths)


def check_backward(shape: DeltaShape, lengths: Sequence[int]) -> None:
    """As near to FP64 as the specification's, and added to; the same bits again."""
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    learnt = DeltaWeights(
        shape, learnt.convolution.float(), learnt.a_log.float(), learnt.dt_bias.float()
    )
    d_output = torch.randn(sum(lengths), shape.values)
    held = learnt.convolution, learnt.a_log, learnt.dt_bias

    def gradients(rule: Any, add: int = 1) -> list[torch.Tensor]:
        made = DeltaGradients(*(torch.zeros_like(one) for one in held))
        _, saved = rule.forward(given, learnt)
        found = given
        for _ in range(add):
            found = rule.backward(saved, d_output, learnt, made)
        return [found.x, found.a, found.b, made.convolution, made.a_log, made.dt_bias]

    rule = PackedDeltaRule(tuple(lengths), CPU)
    ours, theirs = gradients(rule), gradients(spec.PackedDelta(tuple(lengths)))
    leaves = _leaves(given, learnt)
    output = _differentiable(leaves, shape, lengths)
    wanted = torch.autograd.grad(output, leaves, d_output.double())
    for one, other, true in zip(ours, theirs, wanted, strict=True):
        error, yardstick = relative_error(one, true), relative_error(other, true)
        assert error < max(1.5 * yardstick, 1e-6), (error, yardstick)
    twice = gradients(rule, 2)
    assert all(map(torch.equal, twice[:3], ours[:3]))
    assert all(torch.equal(two, 2 * one) for one, two in zip(ours[3:], twice[3:], strict=True))


def check_gates(size: int, heads: int, tokens: int) -> None:
    """As near to FP64 as the specification's in FP32, and a row's bits are its own in BF16."""
    operations = TritonHybrid()
    shape = tokens, heads * size
    x, gate, dy = (torch.randn(shape) * 3 for _ in range(3))
    weight = torch.randn(size)

    def norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x.view(tokens, heads, size), (size,), weight, 1e-6)
        return normed.flatten(1) * torch.nn.functional.silu(gate)

    leaves = [one.double().requires_grad_() for one in (x, gate, weight)]
    wanted = norm(*leaves)
    gradients = torch.autograd.grad(wanted, leaves, dy.double())
    grad = torch.ones(size)
    made = operations.gated_norm(x, gate, weight, 1e-6)
    of = operations.gated_norm_backward(dy, x, gate, weight, 1e-6, grad)
    for ours, true in zip((made, *of, grad - 1), (wanted.detach(), *gradients), strict=True):
        assert relative_error(ours, true) < 1e-6
    again = operations.gated_norm_backward(dy, x, gate, weight, 1e-6, None)
    assert all(map(torch.equal, again, of))
    leaves = leaves[:2]
    wanted = leaves[0] * leaves[1].sigmoid()
    gradients = torch.autograd.grad(wanted, leaves, dy.double())
    made = operations.sigmoid_gate(x, gate), *operations.sigmoid_gate_backward(dy, x, gate)
    for ours, true in zip(made, (wanted.detach(), *gradients), strict=True):
        assert relative_error(ours, true) < 5e-7
    x, gate = x.bfloat16(), gate.bfloat16()
    later = x[3:].contiguous(), gate[3:].contiguous()
    whole = operations.gated_norm(x, gate, weight, 1e-6)
    assert torch.equal(whole[3:], operations.gated_norm(*later, weight, 1e-6))
    error = (whole.float() - spec.gated_norm(x, gate, weight, 1e-6).float()).abs()
    assert (error <= whole.float().abs() / 128).all()  # one rounding
    assert torch.equal(operations.sigmoid_gate(x, gate)[3:], operations.sigmoid_gate(*later))


def gates() -> None:
    prepare()
    check_gates(24, 3, 40)
    check_gates(128, 2, 9)


def parts() -> None:
    prepare()
    check_moves()
    check_parts(SHAPE, [70, 3], 60, moves=True, dtype=torch.bfloat16)


def contents() -> None:
    prepare()
    check_contents()


def accuracy() -> None:
    prepare()
    check_output(OTHER, [70, 1])
    check_backward(OTHER, [140, 1, 64])


def forms() -> None:
    prepare()
    check_forms(OTHER)


def rejected() -> None:
    prepare()
    for at, accepted in ((1, 1), (60, 2), (62, 0), (64, 0), (64, 2)):
        check_rejected(at, accepted)


def whole() -> None:
    prepare()
    check_parts(OTHER, [130, 200, 64, 5], 100, moves=True, dtype=torch.float32)
    check_parts(SHAPE, [193, 128, 65], 150, moves=False, dtype=torch.float32)
    check_decoding(SHAPE, 1, 70)
    check_decoding(OTHER, 120, 135)
    check_output(SHAPE, [200, 64, 65, 3])
    check_backward(SHAPE, [130, 200, 64, 3])
