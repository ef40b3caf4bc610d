"""Sequences that begin with the same prompt share its rows: a pass computes them once, forward and
backward.

    tokens      prompt a a | prompt b b b        T, as ``PackedBatch`` lays sequences end to end
    rows        prompt a a b b b                 U, in the order in which tokens first need one
    row_of      0 1 2 3 4  0 1 2 5 6 7           the row of each token

Everything but attention works on rows.  A row's bits do not depend on its neighbours (rows are
batch-invariant), and a prompt's rows see the prompt alone, so one computation has the bits of all.
Attention works on tokens: ``SharedAttention`` gathers Q, K and V of every token, with which a back
end's attention over whole sequences does what it does without sharing, on KV tiles that count from
each sequence's own start, and keeps the rows of its results; so does a gated delta rule.

In the backward a shared row has one output, whose gradient stands at its first token and is 0 at
the others; dQ is taken from there.  Its K and V were read once a sequence: dK and dV are the sums
of the sequences' parts, and so is the gradient of the last hidden state of a prompt, which predicts
the first token of every answer.  Sums are in FP32, in the order of the sequences in the
micro-batch, and rounded once (``RowSum``).  A gradient flows through the layers below once.

Attention takes the time that it takes without sharing, and holds the tensors of all tokens while a
layer is computed; between forward and backward only rows are kept, but for the states of delta
rules, which are those of all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from isobit.kernels.operands import (
    Attended,
    AttendWithBackward,
    DeltaGradients,
    DeltaInputs,
    DeltaRuleWithBackward,
    DeltaWeights,
    QkvTransform,
)
from isobit.records.batch import PackedBatch

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowSum:
    """Adds up the parts of each row in their order, in FP32, and rounds once; a row with one part
    is a copy of it, and one without is 0.
    """

    num_rows: int
    rows: torch.Tensor | None
    """int64 [F]: the rows that have a part, by their first; None where that is every row in order.
    """
    first: torch.Tensor
    """int64 [F]: the place of that part."""
    summed: torch.Tensor
    """int64 [S]: those of the F with more parts than one."""
    later: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """The places of second parts, of third ones and so on, and which of the S they belong to, each
    at most once.
    """

    @classmethod
    def of(cls, row_of: torch.Tensor, num_rows: int, move: Move) -> "RowSum":
        """``row_of``, int64 [N], is the row of each part, on the host; ``move`` takes what the sums
        read to where the parts are.
        """
        order = row_of.argsort(stable=True)
        by_row = row_of[order]
        starts = torch.searchsorted(by_row, by_row)
        turn = torch.empty_like(order)
        turn[order] = torch.arange(len(order)) - starts
        first = (turn == 0).nonzero().squeeze(1)
        counts = torch.bincount(row_of, minlength=num_rows)
        summed = (counts[row_of[first]] > 1).nonzero().squeeze(1)
        place = torch.empty(num_rows, dtype=torch.int64)
        place[row_of[first][summed]] = torch.arange(len(summed))
        later = []
        for number in range(1, int(turn.max()) + 1 if len(turn) else 1):
            places = (turn == number).nonzero().squeeze(1)
            later.append((move(places), move(place[row_of[places]])))
        rows = row_of[first]
        is_whole = torch.equal(rows, torch.arange(num_rows))
        given = None if is_whole else move(rows)
        return cls(num_rows, given, move(first), move(summed), tuple(later))

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [rows, ...]."""
        found = parts.index_select(0, self.first)
        if self.later:
            total = found.index_select(0, self.summed).float()
            for places, to in self.later:
                more = parts.index_select(0, places)
                total.index_copy_(0, to, total.index_select(0, to).add_(more))
            found.index_copy_(0, self.summed, total.to(found.dtype))
        if self.rows is None:
            return found
        return found.new_zeros((self.num_rows, *found.shape[1:])).index_copy_(0, self.rows, found)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows of T tokens of which some share theirs, where the pass runs."""

    row_of: torch.Tensor
    """int64 [T]"""
    sum: RowSum
    """[T, ...] -> [U, ...]"""
    predicting: torch.Tensor
    """int64 [N]: the row that predicts each target."""
    predicting_sum: RowSum
    """[N, ...] -> [U, ...]"""

    @classmethod
    def of(cls, batch: PackedBatch, move: Move) -> "SharedRows":
        """The rows of a batch in which sequences share some."""
        assert batch.row_of is not None, "every token has a row of its own"
        row_of, predicting, count = batch.row_of, batch.predicting_rows, batch.num_rows
        own, of_targets = (RowSum.of(rows, count, move) for rows in (row_of, predicting))
        return cls(move(row_of), own, move(predicting), of_targets)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [U, ...], of the first token of each row."""
        return x.index_select(0, self.sum.first)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[U, ...] -> [T, ...]"""
        return x.index_select(0, self.row_of)


class SharedAttention:
    """``AttendWithBackward`` of U rows by that of the T tokens of whole sequences."""

    def __init__(self, tokens: AttendWithBackward, shared: SharedRows) -> None:
        self._tokens = tokens
        self._shared = shared

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """[U, (H + 2 G) D] -> [U, H D]."""
        return self._shared.first(self._tokens(layer, self._shared.spread(qkv), transform))

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """[U, H D], and what the backward reads, of the rows."""
        shared = self._shared
        _, of_tokens = self._tokens.attend(layer, shared.spread(qkv), transform)
        attended = of_tokens.rows(shared.sum.first)
        return attended.output.flatten(1), attended

    def backward(
        self, attended: Attended, d_output: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of [U, H D] -> dq [U, H, D], dk and dv [U, G, D]; and of the sinks, which a
        row has once.
        """
        shared = self._shared
        d_tokens = self._at_first(d_output)
        dq, dk, dv = self._tokens.backward(attended.rows(shared.row_of), d_tokens, sinks)
        return shared.first(dq), shared.sum(dk), shared.sum(dv)

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [U, values]"""
        of_tokens = self._rule.delta_rule(layer, inputs.map(self._shared.spread), weights)
        return self._shared.first(of_tokens)

    def delta_rule_saving(
        self, inputs: DeltaInputs, weights: DeltaWeights
    ) -> tuple[torch.Tensor, Any]:
        """[U, values], and what the backward reads: inputs of the rows, states of the tokens."""
        spread = inputs.map(self._shared.spread)
        of_tokens, saved = self._rule.delta_rule_saving(spread, weights)
        return self._shared.first(of_tokens), replace(saved, inputs=inputs)

    def delta_rule_backward(
        self, saved: Any, d_output: torch.Tensor, weights: DeltaWeights, gradients: DeltaGradients
    ) -> DeltaInputs:
        """The gradient of [U, values] -> those of the inputs of the rows."""
        shared, inputs = self._shared, saved.inputs
        whole = replace(saved, inputs=inputs.map(shared.spread))
        made = self._rule.delta_rule_backward(whole, self._at_first(d_output), weights, gradients)
        return made.map(shared.sum)

    @property
    def _rule(self) -> DeltaRuleWithBackward:
        assert isinstance(self._tokens, DeltaRuleWithBackward)
        return self._tokens

    def _at_first(self, d_output: torch.Tensor) -> torch.Tensor:
        """[U, N] -> [T, N]: at the first token of each row, and 0 at the others."""
        shared = self._shared
        d_tokens = d_output.new_zeros((len(shared.row_of), d_output.shape[1]))
        return d_tokens.index_copy_(0, shared.sum.first, d_output)
