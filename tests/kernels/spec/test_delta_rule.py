"""The gated delta rule: packed sequences, chunks of prompts and decoding have the same bits, and
results and gradients are as near to FP64 as transformers' in FP32.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.kernels.operands import (
    DeltaGradients,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    PagedBatch,
)
from isobit.kernels.sizes import AttentionShape, WorkShape
from isobit.kernels.spec import sizes
from isobit.kernels.spec.delta_rule import (
    CHUNK,
    DeltaCarries,
    PackedDelta,
    PagedDelta,
    Rows,
    gated_norm,
    gated_norm_backward,
    rows_of,
    sigmoid_gate,
    sigmoid_gate_backward,
)
from isobit.precision.flow import LinearShape
from tests.memory.meta_memory import LiveBytes
from tests.suites import examples

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=12, value_dim=8, width=4)
LENGTHS = 130, 70, 64, 3, 200


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    torch.manual_seed(seed)
    convolution = torch.randn(SHAPE.channels, SHAPE.width) * 0.4
    rates = torch.empty(SHAPE.value_heads).uniform_(0.01, 16).log()
    made = convolution, rates, torch.randn(SHAPE.value_heads)
    return DeltaWeights(SHAPE, *(one.to(dtype) for one in made))


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    x, a, b = (torch.randn(tokens, n) for n in (SHAPE.channels, *[SHAPE.value_heads] * 2))
    return DeltaInputs(x, a, b).map(lambda one: one.to(dtype))


def rows(given: DeltaInputs, lengths: Sequence[int], learnt: DeltaWeights) -> Rows:
    """By a convolution of torch's."""
    windows = torch.zeros(SHAPE.width, *given.x.shape, dtype=given.x.dtype)
    for one, part in zip(given.x.split(list(lengths)), _spans(lengths), strict=True):
        padded = F.pad(one, (0, 0, SHAPE.width - 1, 0))
        for place in range(SHAPE.width):
            windows[place, part] = padded[place : place + len(one)]
    return rows_of(given, windows, learnt)


def _spans(lengths: Sequence[int]) -> list[slice]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [slice(first, last) for first, last in pairwise(ends)]


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Token by token, [n, H, L, ...] in the dtype of the arguments."""
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    made: list[torch.Tensor] = []
    for t in range(q.shape[2]):
        state = state * decay[:, :, t].exp()[..., None, None]
        told = (state * k[:, :, t, :, None]).sum(2)
        update = (v[:, :, t] - told) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * update[:, :, None]
        made.append((state * q[:, :, t, :, None]).sum(2))
    return torch.stack(made, 2)


def by_transformers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Its chunks, in FP32."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    turned = [one.transpose(1, 2) for one in (q * q.shape[-1] ** 0.5, k, v, decay, beta)]
    return torch_chunk_gated_delta_rule(*turned)[0].transpose(1, 2)


def of_sequence(made: Rows, span: slice) -> list[torch.Tensor]:
    return [one[span].transpose(0, 1)[None] for one in made.all]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("seed", [0, 1])
def test_output_is_as_near_to_fp64_as_theirs(seed: int) -> None:
    learnt, given = weights(seed), inputs(sum(LENGTHS))
    output, _ = PackedDelta(LENGTHS).forward(given, learnt)
    made = rows(given, LENGTHS, learnt)
    for span in _spans(LENGTHS):
        its = of_sequence(made, span)
        exact = recurrence(*(one.double() for one in its))
        ours = output[span].view(-1, SHAPE.value_heads, SHAPE.value_dim).transpose(0, 1)[None]
        assert error(ours, exact) <= max(1.5 * error(by_transformers(*its), exact), 3e-7)


@dataclass
class Rollout:
    """Sequences whose tokens come in parts, with what each carries in one of a few carries."""

    given: DeltaInputs
    learnt: DeltaWeights
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        count = 2 * len(self.lengths) + 1
        self.free = list(range(count))
        random.shuffle(self.free)
        self.held: dict[int, tuple[int, int]] = {}
        """Of each sequence that has begun its carry, and the chunk in it."""
        self.carries = DeltaCarries(
            SHAPE, count, self.given.x.dtype, lambda n, d: torch.full(n, torch.nan, dtype=d)
        )
        self.output = torch.empty(sum(self.lengths), SHAPE.values, dtype=self.given.x.dtype).fill_(
            torch.nan
        )

    def put(self, parts: dict[int, tuple[int, int]], settled: int | None = None) -> None:
        """Of each sequence the tokens first to last - 1, of which those before ``settled`` stay; by
        default all.
        """
        spans = [torch.arange(first, last) for first, last in parts.values()]
        starts = [_spans(self.lengths)[n].start for n in parts]
        tokens = torch.cat([start + span for start, span in zip(starts, spans, strict=True)])
        lasts = tuple(last for _, last in parts.values())
        reads, writes = list[int](), list[int]()
        for n, (_, last) in parts.items():
            carry, chunk = self.held.get(n, (-1, -1))
            reads.append(carry)
            writes.append(carry if (last - 1) // CHUNK == chunk else self.free.pop())
        carries, none = torch.tensor([reads, writes]), torch.zeros(len(parts), 0, dtype=torch.int64)
        batch = PagedBatch(tuple(map(len, spans)), lasts, none, none, carries)
        part = self.given.map(lambda one: one[tokens])
        made = PagedDelta(batch).forward(self.carries, part, self.learnt)
        self.output[tokens] = made
        for n, read, write, last in zip(parts, reads, writes, lasts, strict=True):
            chunk = ((last if settled is None else settled) - 1) // CHUNK
            if read >= 0 and chunk == self.held[n][1]:
                read, write = write, read
            self.held[n] = write, chunk
            if read not in (-1, write):
                self.free.append(read)


@settings(max_examples=examples(8), deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(1, 140), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parts_have_the_bits_of_the_whole(
    seed: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """Whatever is in the carries before, however tokens come, and whoever comes with them."""
    learnt = weights(seed, dtype)
    given = inputs(sum(lengths), dtype)
    expected, _ = PackedDelta(tuple(lengths)).forward(given, learnt)
    random.seed(seed)
    rollout, done = Rollout(given, learnt, lengths), [0] * len(lengths)
    while left := [n for n, length in enumerate(lengths) if done[n] < length]:
        chosen = [n for n in left if random.random() < 0.7]
        parts = {
            n: (done[n], min(lengths[n], done[n] + random.choice([1, 1, 2, 5, 40, 100])))
            for n in chosen
        }
        if parts:
            rollout.put(parts)
        for n, (_, last) in parts.items():
            done[n] = last
    assert torch.equal(rollout.output, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("at", [1, 60, 62, 63, 64, 65, 127])
def test_rows_of_guesses_that_are_rejected_leave_nothing(at: int, accepted: int) -> None:
    """A row at position ``at``, and guesses behind it, over the end of a chunk; wrong ones are
    overwritten.
    """
    learnt = weights()
    right, wrong = inputs(140), inputs(140)
    random.seed(0)
    rollout = Rollout(right, learnt, [140])
    rollout.put({0: (0, at)})
    for count in (8, 3):
        rollout.given = right.map(lambda one: one.clone())
        for one, other in zip(
            (rollout.given.x, rollout.given.a, rollout.given.b),
            (wrong.x, wrong.a, wrong.b),
            strict=True,
        ):
            one[at + 1 + accepted :] = other[at + 1 + accepted :]
        rollout.put({0: (at, at + 1 + count)}, settled=at + 1 + accepted)
        at += 1 + accepted
    rollout.given = right
    rollout.put({0: (at, at + 1)})
    rollout.put({0: (at + 1, 140)})
    assert torch.equal(rollout.output, PackedDelta((140,)).forward(right, learnt)[0])


@pytest.mark.parametrize("taken", [1, 64])
def test_the_first_row_of_a_chunk_is_computed_again_from_its_own_carry(taken: int) -> None:
    """A sequence that comes back may stand a token before the end of what it carries."""
    learnt, given = weights(), inputs(140)
    random.seed(0)
    rollout = Rollout(given, learnt, [140])
    rollout.put({0: (0, 64)})
    rollout.put({0: (64, 65)})
    rollout.output[64:65] = torch.nan
    rollout.put({0: (64, 64 + taken)})
    rollout.put({0: (64 + taken, 140)})
    assert torch.equal(rollout.output, PackedDelta((140,)).forward(given, learnt)[0])


@pytest.mark.parametrize("begun", [80, 64])
def test_two_samples_of_a_prompt_go_on_alone(begun: int) -> None:
    """From a copy of its carry if it ends within a chunk, and else from the same one, which neither
    changes.
    """
    learnt = weights()
    both, other = inputs(100), inputs(100)
    random.seed(0)
    rollout = Rollout(both, learnt, [100])
    rollout.put({0: (0, begun)})
    prompt, chunk = rollout.held[0]
    if begun % CHUNK:
        spare = rollout.free.pop()
        for tensor in rollout.carries.tensors:
            tensor[spare] = tensor[prompt]
        prompt, rollout.held[0] = spare, (prompt, chunk)
    kept = [tensor[prompt].view(torch.uint8).clone() for tensor in rollout.carries.tensors]
    rollout.put({0: (begun, 100)})
    for tensor, before in zip(rollout.carries.tensors, kept, strict=True):
        assert torch.equal(tensor[prompt].view(torch.uint8), before)
    first = rollout.output.clone()
    for name in ("x", "a", "b"):
        getattr(both, name)[begun:] = getattr(other, name)[begun:]
    rollout.held[0] = prompt, chunk
    rollout.free = [one for one in rollout.free if one != prompt]
    rollout.put({0: (begun, 100)})
    assert torch.equal(rollout.output, PackedDelta((100,)).forward(both, learnt)[0])
    assert torch.equal(rollout.output[:begun], first[:begun])
    assert not torch.equal(rollout.output[begun:], first[begun:])


@pytest.mark.parametrize(("seed", "far"), [(0, 0.0), (1, 0.0), (1, 100.0)])
def test_gradients_are_as_near_to_fp64_as_theirs(seed: int, far: float) -> None:
    """Also where exp(-x) of a few inputs is beyond FP32, and where a step is exactly 0, as of some
    in BF16.
    """
    learnt, given = weights(seed), inputs(sum(LENGTHS))
    given.a[::5] = -learnt.dt_bias
    for one in (given.x, given.b) if far else ():
        one[::7] -= far
        one[3::7] += far
    packed = PackedDelta(LENGTHS)
    d_output = torch.randn(sum(LENGTHS), SHAPE.values)
    _, saved = packed.forward(given, learnt)
    held = learnt.convolution, learnt.a_log, learnt.dt_bias
    grads = DeltaGradients(*(torch.zeros_like(one) for one in held))
    ours = packed.backward(saved, d_output, learnt, grads)

    def found(dtype: torch.dtype, rule: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [
            one.to(dtype, copy=True).requires_grad_() for one in (given.x, given.a, given.b, *held)
        ]
        x, a, b, convolution, a_log, dt_bias = leaves
        total = torch.zeros((), dtype=dtype)
        for span in _spans(LENGTHS):
            padded = F.pad(x[span].t(), (SHAPE.width - 1, 0))
            mixed = F.conv1d(padded, convolution[:, None], groups=SHAPE.channels).t()
            keys = SHAPE.key_heads * SHAPE.key_dim
            q, k, v = F.silu(mixed).split([keys, keys, SHAPE.values], 1)
            q, k = (
                one.view(len(one), SHAPE.key_heads, -1).repeat_interleave(2, 1) for one in (q, k)
            )
            q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
            v = v.view(len(v), SHAPE.value_heads, -1)
            decay = -a_log.exp() * F.softplus(a[span] + dt_bias)
            its = q / SHAPE.key_dim**0.5, k, v, decay, b[span].sigmoid()
            output = rule(*(one.transpose(0, 1)[None] for one in its))
            wanted = d_output[span].view(-1, SHAPE.value_heads, SHAPE.value_dim)
            total = total + (output * wanted.to(dtype).transpose(0, 1)[None]).sum()
        return torch.autograd.grad(total, leaves)

    exact, theirs = found(torch.float64, recurrence), found(torch.float32, by_transformers)
    mine = ours.x, ours.a, ours.b, grads.convolution, grads.a_log, grads.dt_bias
    for one, other, true in zip(mine, theirs, exact, strict=True):
        assert error(one, true) <= max(2 * error(other, true), 1e-6)


def test_gradients_are_added_and_repeat() -> None:
    learnt, given = weights(), inputs(90).map(torch.Tensor.bfloat16)
    packed, d_output = PackedDelta((70, 20)), torch.randn(90, SHAPE.values).bfloat16()
    _, saved = packed.forward(given, learnt)
    held = learnt.convolution, learnt.a_log, learnt.dt_bias
    once, twice = (DeltaGradients(*(torch.zeros_like(one) for one in held)) for _ in range(2))
    first = packed.backward(saved, d_output, learnt, once)
    for _ in range(2):
        again = packed.backward(saved, d_output, learnt, twice)
        for a, b in ((first.x, again.x), (first.a, again.a), (first.b, again.b)):
            assert a.dtype == torch.bfloat16 and torch.equal(a, b)
    for name in ("convolution", "a_log", "dt_bias"):
        assert torch.equal(getattr(twice, name), 2 * getattr(once, name))


@pytest.mark.few(2)
@pytest.mark.parametrize("lengths", [(8,) * 32, (64,) * 3, (65, 3), (200,)])
def test_memory_is_what_plans_say(lengths: tuple[int, ...]) -> None:
    """Of heads that are large enough for states and chunks to show."""
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=64, value_dim=64, width=4)
    learnt = DeltaWeights(shape, torch.randn(shape.channels, 4), torch.zeros(4), torch.zeros(4))
    tokens, planned = sum(lengths), sizes.delta(shape)
    work = WorkShape(
        AttentionShape(1, 1, 2),
        (LinearShape({"x": 1}, 1),),
        1,
        1,
        tokens,
        max(lengths),
        delta=shape,
    )
    once = sizes.workspaces(work)["delta rule"]
    given = DeltaInputs(torch.randn(tokens, shape.channels), *torch.randn(2, tokens, 4).unbind(0))
    packed, grads = PackedDelta(lengths), (learnt.convolution, learnt.a_log, learnt.dt_bias)
    with LiveBytes() as live:
        output, saved = packed.forward(given, learnt)
    states = sum(one.nbytes for group in saved.states for one in group)
    assert states <= planned.saved * tokens
    most = (planned.saved + planned.made + 8 * shape.values) * tokens
    assert live.peak <= most + once
    zeros = DeltaGradients(*(torch.zeros_like(one) for one in grads))
    with LiveBytes() as live:
        packed.backward(saved, torch.randn_like(output), learnt, zeros)
    assert live.peak <= (planned.gradients + 8 * shape.channels) * tokens + once


@pytest.mark.parametrize("rows_before", [0, 1, 5])
@pytest.mark.parametrize("far", [0.0, 100.0])
def test_gates_and_norm(far: float, rows_before: int) -> None:
    """As near to FP64 as torch's own, also where exp(-x) of some gates is beyond FP32, and a row's
    bits do not depend on its place.
    """
    torch.manual_seed(0)
    x, gate, dy = (torch.randn(40, 24) * 3 for _ in range(3))
    gate[::7] -= far
    gate[3::7] += far
    weight = torch.randn(8)

    def norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), -1, 8)
        return F.rms_norm(heads, (8,), weight, 1e-6).flatten(1) * F.silu(gate)

    grad = torch.zeros(8)
    made = gated_norm(x, gate, weight, 1e-6), *gated_norm_backward(dy, x, gate, weight, 1e-6, grad)
    leaves = [one.double().requires_grad_() for one in (x, gate, weight)]
    exact = norm(*leaves)
    for ours, true in zip(
        (*made, grad), (exact, *torch.autograd.grad(exact, leaves, dy.double())), strict=True
    ):
        assert error(ours, true.detach()) <= 3e-7
    leaves = leaves[:2]
    exact = leaves[0] * leaves[1].sigmoid()
    made = sigmoid_gate(x, gate), *sigmoid_gate_backward(dy, x, gate)
    for ours, true in zip(
        made, (exact, *torch.autograd.grad(exact, leaves, dy.double())), strict=True
    ):
        assert error(ours, true.detach()) <= 3e-7
    later = x[rows_before:], gate[rows_before:]
    assert torch.equal(sigmoid_gate(x, gate)[rows_before:], sigmoid_gate(*later))
    assert torch.equal(
        gated_norm(x, gate, weight, 1e-6)[rows_before:], gated_norm(*later, weight, 1e-6)
    )
