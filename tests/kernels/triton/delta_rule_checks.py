"""Checks of the gated delta rule in Triton, on a card or in the interpreter (``use``): a row has
the same bits decoded, in a chunk of a prompt and in a packed batch; outputs and gradients are as
near to FP64 as the specification's.  Tensors are on the host but for what the kernels take.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.native_delta_rule import recurrence
from isobit.kernels.operands import (
    DeltaGradients,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    PagedBatch,
)
from isobit.kernels.spec import delta_rule as spec
from isobit.kernels.spec import hybrid
from isobit.kernels.triton import (
    delta_rows,
    delta_rule,
    delta_rule_rollout,
    delta_rule_training,
)
from isobit.kernels.triton.delta_rows import CHUNK
from isobit.kernels.triton.delta_rule import RuleForm
from isobit.kernels.triton.delta_rule_rollout import FEW, MANY, PagedDeltaRule, RowForm
from isobit.kernels.triton.delta_rule_training import PackedDeltaRule
from isobit.kernels.triton.hybrid import TritonHybrid
from tests.kernels.comparison import relative_error

SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=16, width=4)
OTHER = DeltaShape(key_heads=2, value_heads=4, key_dim=24, value_dim=40, width=3)
"""Sizes that are no powers of two, with two value heads a key head."""
ENDS = 30, 31, 40, 64, 65, 66, 67, 100, 104, 105, 128, 130, 131, 194, 200


_device = torch.device("cpu")


def use(device: torch.device) -> None:
    """Compute there, with the same random numbers again."""
    global _device  # noqa: PLW0603 (one device a test)
    _device = device
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


def sent(learnt: DeltaWeights) -> DeltaWeights:
    held = (one.to(_device) for one in (learnt.convolution, learnt.a_log, learnt.dt_bias))
    return DeltaWeights(learnt.shape, *held)


def sent_inputs(given: DeltaInputs) -> DeltaInputs:
    return given.map(lambda one: one.contiguous().to(_device))


def packed(given: DeltaInputs, learnt: DeltaWeights, lengths: Sequence[int]) -> torch.Tensor:
    rule = PackedDeltaRule(tuple(lengths), _device)
    return rule.forward(sent_inputs(given), sent(learnt))[0].cpu()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of zeros' signs."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@dataclass
class Rollout:
    """Sequences whose tokens come in parts, each with the carry of its last token."""

    given: DeltaInputs
    learnt: DeltaWeights
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        shape = self.learnt.shape
        self.free = list(range(3 * len(self.lengths) + 2))
        random.shuffle(self.free)
        self.carries = empty_carries(shape, len(self.free), self.given.x.dtype, _device)
        for tensor in self.carries.tensors:
            tensor.fill_(torch.nan)
        self.held = [-1] * len(self.lengths)
        self.done = [0] * len(self.lengths)
        self.output = torch.full(
            (sum(self.lengths), shape.values), torch.nan, dtype=self.given.x.dtype
        )

    def carry(self, n: int, last: int) -> int:
        """The carry that a sequence's next tokens up to ``last`` are written to: another one where
        they go on to a further chunk.
        """
        same = (last - 1) // CHUNK == max(self.done[n] - 1, 0) // CHUNK
        return self.held[n] if same and self.held[n] >= 0 else self.free.pop()

    def put(self, lasts: dict[int, int]) -> None:
        """Of each sequence the tokens up to ``last`` - 1."""
        starts = [sum(self.lengths[:n]) for n in lasts]
        positions = [self.done[n] for n in lasts]
        spans = [torch.arange(*one) for one in zip(positions, lasts.values(), strict=True)]
        tokens = torch.cat([start + span for start, span in zip(starts, spans, strict=True)])
        read = [self.held[n] for n in lasts]
        written = [self.carry(n, last) for n, last in lasts.items()]
        part = self.given.map(lambda one: one[tokens])
        counts = [len(span) for span in spans]
        if set(counts) == {1}:
            places = (torch.tensor(x, device=_device) for x in (positions, read, written))
            rule = PagedDeltaRule.decoding(*places)
        else:
            rule = paged(positions, counts, read, written)
        self.output[tokens] = computed(rule, self.carries, part, self.learnt)
        for n, new in zip(lasts, written, strict=True):
            if new != self.held[n] and self.held[n] >= 0:
                self.free.append(self.held[n])
            self.held[n], self.done[n] = new, lasts[n]

    def go_back(self, n: int, carry: int, done: int) -> None:
        """A sequence has so many tokens, the last ones in that carry, which is free or its own."""
        if carry != self.held[n]:
            self.free.remove(carry)
            self.free.append(self.held[n])
        self.held[n], self.done[n] = carry, done


def batch_of(
    positions: Sequence[int], counts: Sequence[int], read: Sequence[int], written: Sequence[int]
) -> PagedBatch:
    lengths = tuple(map(sum, zip(positions, counts, strict=True)))
    none = torch.zeros(len(counts), 0, dtype=torch.int64)
    return PagedBatch(tuple(counts), lengths, none, none, torch.tensor([read, written]))


def paged(*columns: Sequence[int]) -> PagedDeltaRule:
    return PagedDeltaRule.of(batch_of(*columns), _device)


def computed(
    rule: PagedDeltaRule, carries: spec.DeltaCarries, given: DeltaInputs, learnt: DeltaWeights
) -> torch.Tensor:
    return rule.forward(carries, sent_inputs(given), sent(learnt)).cpu()


def empty_carries(
    shape: DeltaShape, count: int, dtype: torch.dtype, device: torch.device
) -> spec.DeltaCarries:
    def zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    return spec.DeltaCarries(shape, count, dtype, zeros)


def check_parts(shape: DeltaShape, lengths: Sequence[int], most: int, dtype: torch.dtype) -> None:
    """Whatever is in the carries before, however tokens come, and whoever comes with them."""
    learnt, given = weights(shape), inputs(shape, sum(lengths), dtype)
    rollout = Rollout(given, learnt, lengths)
    while left := [n for n, length in enumerate(lengths) if rollout.done[n] < length]:
        lasts = {
            n: min(lengths[n], rollout.done[n] + random.choice([1, 1, 1, 2, 5, most]))
            for n in left
            if random.random() < 0.8
        }
        if lasts:
            rollout.put(lasts)
    assert same_bits(rollout.output, packed(given, learnt, lengths))


def check_ends(lasts: Sequence[int] = ENDS) -> None:
    """Parts that end in the middle of a chunk, at its end and behind it; with the specification,
    since a packed batch and a prompt may share a fault.
    """
    length, learnt = lasts[-1], weights(SHAPE)
    given = inputs(SHAPE, length)
    rollout = Rollout(given, learnt, [length])
    for last in lasts:
        rollout.put({0: last})
    assert same_bits(rollout.output, packed(given, learnt, [length]))
    theirs, _ = spec.PackedDelta((length,)).forward(given, learnt)
    for part in (slice(first, first + 64) for first in range(0, length, 64)):
        assert relative_error(rollout.output[part], theirs[part]) < 2e-6


def check_decoding(shape: DeltaShape, start: int, length: int) -> None:
    """A prompt, then token by token, over the ends of chunks."""
    learnt, given = weights(shape), inputs(shape, length)
    rollout = Rollout(given, learnt, [length])
    rollout.put({0: start})
    for last in range(start + 1, length + 1):
        rollout.put({0: last})
    assert same_bits(rollout.output, packed(given, learnt, [length]))


def check_far(shape: DeltaShape, near: int, written: int) -> None:
    """Positions beyond 2^31 numbers of x: what comes depends on where in its chunk a row is."""
    learnt, given, found = weights(shape), inputs(shape, 3), list[list[torch.Tensor]]()
    for position in (near, near + 64 * ((1 << 31) // (64 * shape.channels) + 1)):
        carries = empty_carries(shape, 2, torch.float32, _device)
        torch.manual_seed(1)
        for one in carries.tensors:
            one.copy_(torch.randn(one.shape) * 0.1)
        made = computed(paged([position], [3], [0], [written]), carries, given, learnt)
        found.append([made, *carries.tensors])
    assert all(map(torch.equal, *found))


def check_forms(shape: DeltaShape) -> None:
    """Rows at once, columns and depth are in no bit; nor is who is packed or launched together."""
    lengths = 70, 1, 20
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    expected = packed(given, learnt, lengths)
    usual = delta_rule.FORMS
    for form in (*usual, RuleForm(64, 16, 16, 4), RuleForm(32, 32, 32, 4, made=16)):
        delta_rule.FORMS = form, form
        assert same_bits(packed(given, learnt, lengths), expected)
    delta_rule.FORMS = usual
    ends = 0
    for length in lengths:
        one = given.map(lambda x, part=slice(ends, ends + length): x[part].contiguous())
        ends += length
        assert same_bits(packed(one, learnt, [length]), expected[ends - length : ends])


def check_pieces(shape: DeltaShape) -> None:
    """Pieces that end inside sequences, and that have some of them, are in no bit: of a packed
    batch, of the states that it keeps, and of prompts and the row behind them.
    """
    lengths = 70, 140, 1
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    made, usual = list[tuple[torch.Tensor, torch.Tensor]](), delta_rule.FACTORS
    for chunks in (1, 2, 4, 1000):
        delta_rule.FACTORS = chunks * shape.value_heads * 2 * CHUNK * CHUNK
        packed_rule, rollout = PackedDeltaRule(lengths, _device), Rollout(given, learnt, lengths)
        output, saved = packed_rule.forward(sent_inputs(given), sent(learnt))
        for lasts in ({0: 40, 1: 2, 2: 1}, {0: 69, 1: 139}, {0: 70, 1: 140}):
            rollout.put(lasts)
        assert same_bits(rollout.output, output.cpu())
        made.append((output, saved.kept.states))
    delta_rule.FACTORS = usual
    assert all(same_bits(*pair) for other in made for pair in zip(made[0], other, strict=True))


def check_vectors(shape: DeltaShape) -> None:
    """How many tokens of a head a program makes rows of is in no bit."""
    learnt, given, usual = weights(shape), inputs(shape, 140), delta_rows.MANY_TOKENS
    made = list[torch.Tensor]()
    for many in (1, 1 << 30):
        delta_rows.MANY_TOKENS = many
        made.append(packed(given, learnt, [70, 1, 69]))
    delta_rows.MANY_TOKENS = usual
    assert same_bits(*made)


def check_row_forms(shape: DeltaShape) -> None:
    """What a program of one row has is in no bit, nor is who decodes beside it: sequences that
    begin, that go on to a further chunk and that stand anywhere in theirs.
    """
    lengths = 2, 66, 65, 130
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    expected = packed(given, learnt, lengths)
    prompted = Rollout(given, learnt, lengths)
    prompted.put({n: length - 2 for n, length in enumerate(lengths) if length > 2})
    usual = FEW, delta_rule_rollout.SEQUENCES
    for form in (FEW, MANY, RowForm(16, 4, 64)):
        rollout = deepcopy(prompted)
        delta_rule_rollout.FEW, delta_rule_rollout.SEQUENCES = form, 3
        for left in (1, 0):
            rollout.put({n: length - left for n, length in enumerate(lengths)})
        assert same_bits(rollout.output, expected)
    delta_rule_rollout.FEW, delta_rule_rollout.SEQUENCES = usual


def check_rejected(at: int, accepted: int) -> None:
    """Guesses of which some are wrong, and the rows that replace them. Where they reach a further
    chunk, the carry that was read has those of its own chunk, and what it had before.
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
    rollout.put({0: at + 4})
    done = at + accepted
    if (done - 1) // CHUNK == (at - 1) // CHUNK:
        rollout.go_back(0, older, done)
    rollout.given, rollout.done[0] = right, done
    rollout.put({0: done + 1})
    rollout.put({0: 100})
    assert same_bits(rollout.output, packed(right, learnt, [100]))


def check_begun_again() -> None:
    """A sequence that stands in front of its carry's first row, since the token there is put
    through again.
    """
    learnt = weights(SHAPE)
    given = inputs(SHAPE, 140)
    rollout = Rollout(given, learnt, [140])
    rollout.put({0: 129})
    for last in (129, 132):
        rollout.done[0] = 128
        rule = paged([128], [last - 128], rollout.held, rollout.held)
        part = given.map(lambda one, last=last: one[128:last])
        rollout.output[128:last] = computed(rule, rollout.carries, part, learnt)
        rollout.done[0] = last
    rollout.put({0: 140})
    assert same_bits(rollout.output, packed(given, learnt, [140]))


def check_carries(at: int, stop: int) -> None:
    """Both carries of a forward hold what the specification's do, up to the rounding of sums."""
    learnt = weights(SHAPE)
    given = inputs(SHAPE, stop, torch.bfloat16)
    devices = _device, torch.device("cpu")
    ours, theirs = (empty_carries(SHAPE, 2, torch.bfloat16, device) for device in devices)
    parts = ([0, at, -1, 0], [at, stop, 0, 1]) if at else ([0, stop, -1, 0],)
    for first, last, read, written in parts:
        part = given.map(lambda one, some=slice(first, last): one[some])
        batch = batch_of([first], [last - first], [read], [written])
        computed(PagedDeltaRule.of(batch, _device), ours, part, learnt)
        spec.PagedDelta(batch).forward(theirs, part, learnt)
    width = SHAPE.width - 1
    for carry, rows in enumerate([CHUNK, stop - stop // CHUNK * CHUNK] if at else [stop]):
        mine, its = (one.inputs[carry, : width + rows].cpu() for one in (ours, theirs))
        assert torch.equal(mine, its) and mine[width:].any(1).all()
        for mine, its in (
            (ours.keys[carry, :, :rows], theirs.keys[carry, :, :rows]),
            (ours.updates[carry, :, :rows], theirs.updates[carry, :, :rows]),
            (ours.decays[carry, :, :rows], theirs.decays[carry, :, :rows]),
            (ours.states[carry], theirs.states[carry]),
        ):
            assert relative_error(mine.cpu(), its) < 2e-6 if its.any() else not mine.any()


def check_rows_of_guesses(
    shape: DeltaShape, counts: Sequence[int] = (3, 1, 5, 1, 2),
    starts: Sequence[int] = (62, 64, 5, 0, 127),
) -> None:  # fmt: skip
    """Rows of one sequence in a decode step are a part of it, over the end of a chunk too."""
    learnt = weights(shape)
    given, before = inputs(shape, sum(counts)), inputs(shape, sum(starts))
    made = list[tuple[torch.Tensor, spec.DeltaCarries]]()
    read = [2 * n if start else -1 for n, start in enumerate(starts)]
    stops = map(sum, zip(starts, counts, strict=True))
    chunks = zip(starts, stops, strict=True)
    goes_on = [(start - 1) // CHUNK < (stop - 1) // CHUNK for start, stop in chunks]
    written = [2 * n + further for n, further in enumerate(goes_on)]
    owner = [n for n, count in enumerate(counts) for _ in range(count)]
    places = [place for count in counts for place in range(count)]
    positions = [starts[n] + place for n, place in zip(owner, places, strict=True)]
    columns = [read[n] for n in owner], [written[n] for n in owner]
    for rule in (
        paged(starts, counts, read, written),
        PagedDeltaRule.decoding(
            *(torch.tensor(x, device=_device) for x in (positions, *columns, places))
        ),
    ):
        carries = empty_carries(shape, 2 * len(read), torch.float32, _device)
        held = [n for n in range(len(read)) if read[n] >= 0]
        its = [starts[n] for n in held]
        first = paged([0] * len(held), its, [-1] * len(held), [read[n] for n in held])
        computed(first, carries, before, learnt)
        made.append((computed(rule, carries, given, learnt), carries))
    (one, of_part), (other, of_rows) = made
    assert same_bits(one, other)
    assert all(map(same_bits, of_part.tensors, of_rows.tensors))


def check_output(shape: DeltaShape, lengths: Sequence[int]) -> None:
    """As near to the recurrence in FP64 as the specification; before the rounding to BF16."""
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    rule = PackedDeltaRule(tuple(lengths), _device)
    mine, saved = rule.forward(sent_inputs(given), sent(learnt))
    mine = mine.cpu()
    theirs, _ = spec.PackedDelta(tuple(lengths)).forward(given, learnt)
    wanted = recurrence(given, learnt, lengths)[0].detach()
    first = 0
    for length in lengths:
        part = slice(first, first := first + length)
        error, yardstick = (relative_error(x[part], wanted[part]) for x in (mine, theirs))
        assert error < max(1.5 * yardstick, 5e-7), (length, error, yardstick)
    assert len(saved.kept.states) == sum((length - 1) // CHUNK for length in lengths)


def check_backward(shape: DeltaShape, lengths: Sequence[int], far: float = 0.0) -> None:
    """As near to FP64 as the specification's, and added to; the same bits again.  Some inputs are
    so far from zero.
    """
    learnt, given = weights(shape), inputs(shape, sum(lengths))
    for one in (given.x, given.b):
        one[::7] -= far
        one[3::7] += far
    learnt = DeltaWeights(
        shape, learnt.convolution.float(), learnt.a_log.float(), learnt.dt_bias.float()
    )
    d_output = torch.randn(sum(lengths), shape.values)
    held = learnt.convolution, learnt.a_log, learnt.dt_bias

    def gradients(
        rule: Any, given: DeltaInputs, learnt: DeltaWeights, add: int = 1
    ) -> list[torch.Tensor]:
        own = given.x.device
        made = DeltaGradients(*(torch.zeros_like(one, device=own) for one in held))
        _, saved = rule.forward(given, learnt)
        found = given
        for _ in range(add):
            found = rule.backward(saved, d_output.to(own), learnt, made)
        every = found.x, found.a, found.b, made.convolution, made.a_log, made.dt_bias
        return [one.cpu() for one in every]

    rule, here = PackedDeltaRule(tuple(lengths), _device), (sent_inputs(given), sent(learnt))
    ours = gradients(rule, *here)
    theirs = gradients(spec.PackedDelta(tuple(lengths)), given, learnt)
    output, leaves = recurrence(given, learnt, lengths)
    wanted = torch.autograd.grad(output, leaves, d_output.double())
    # A head's rate and step are sums over tokens, whose rounded terms may cancel: their errors are
    # relative to what the terms come to without signs.
    step = given.a.double() + learnt.dt_bias.double()
    rates = torch.nn.functional.softplus(step) / torch.sigmoid(step)  # dg/da_log over dg/da
    kept = [1.0] * 4
    for terms in (wanted[1] * rates, wanted[1]):
        kept.append(float(terms.sum(0).norm() / terms.abs().sum(0).norm()))
    for one, other, true, share in zip(ours, theirs, wanted, kept, strict=True):
        error, yardstick = (share * relative_error(it, true) for it in (one, other))
        assert error < max(1.5 * yardstick, 1e-6), (error, yardstick)
    twice = gradients(rule, *here, 2)
    assert all(map(torch.equal, twice[:3], ours[:3]))
    assert all(torch.equal(two, 2 * one) for one, two in zip(ours[3:], twice[3:], strict=True))


def check_blocks(shape: DeltaShape, lengths: Sequence[int]) -> None:
    """Gradients of chunks that are taken in several blocks, over which sequences go on."""
    usual = delta_rule_training.DELTA_CHUNKS
    for chunks in (2, 3):
        delta_rule_training.DELTA_CHUNKS = chunks
        check_backward(shape, lengths)
    delta_rule_training.DELTA_CHUNKS = usual


def check_gates(size: int, heads: int, tokens: int) -> None:
    """As near to FP64 as the specification's in FP32, and a row's bits are its own in BF16."""
    operations = TritonHybrid()
    shape = tokens, heads * size
    x, gate, dy = ((torch.randn(shape) * 3).to(_device) for _ in range(3))
    weight = torch.randn(size).to(_device)

    def norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x.view(tokens, heads, size), (size,), weight, 1e-6)
        return normed.flatten(1) * torch.nn.functional.silu(gate)

    leaves = [one.double().requires_grad_() for one in (x, gate, weight)]
    wanted = norm(*leaves)
    gradients = torch.autograd.grad(wanted, leaves, dy.double())
    grad = torch.ones_like(weight)
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
    expected = spec.gated_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-6)
    error = (whole.cpu().float() - expected.float()).abs()
    assert (error <= expected.float().abs() / 128).all()  # one rounding
    made = operations.sigmoid_gate(x, gate)
    assert torch.equal(made[3:], operations.sigmoid_gate(*later))
    apart = torch.cat([gate, gate], 1)[:, : gate.shape[1]]  # rows with others between
    assert torch.equal(made, operations.sigmoid_gate(x, apart))


def check_shared(columns: int, tokens: int) -> None:
    """As near to FP64 as FP32 is, rounded once; a row's bits are its own."""
    operations = TritonHybrid()
    routed, shared, dy = (torch.randn(tokens, columns).to(_device) for _ in range(3))
    gate = (torch.randn(tokens) * 3).to(_device)
    leaves = [one.double().requires_grad_() for one in (routed, shared, gate)]
    wanted = leaves[0] + leaves[2].sigmoid()[:, None] * leaves[1]
    gradients = torch.autograd.grad(wanted, leaves, dy.double())[1:]
    made = operations.add_shared(routed, shared, gate)
    of = operations.add_shared_backward(dy, shared, gate)
    for ours, true in zip((made, *of), (wanted.detach(), *gradients), strict=True):
        assert relative_error(ours, true) < 5e-7
    routed, shared, dy = (one.bfloat16() for one in (routed, shared, dy))
    whole = operations.add_shared(routed, shared, gate)
    later = [one[3:].contiguous() for one in (routed, shared, gate, dy)]
    assert torch.equal(whole[3:], operations.add_shared(*later[:3]))
    of = operations.add_shared_backward(dy, shared, gate)
    again = operations.add_shared_backward(later[3], later[1], later[2])
    assert all(torch.equal(one[3:], other) for one, other in zip(of, again, strict=True))
    error = (whole.float() - hybrid.add_shared(routed, shared, gate).float()).abs()
    assert (error <= whole.float().abs() / 128).all()  # one rounding
