"""A PipelineRunner over any ModelRunner: it computes at once, and keeps the tokens to itself until
they are waited for.

It feeds itself, as a device does: what a sample goes on from is what was drawn here, never what the
host has written down.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from isobit.kernels.operands import PagedBatch
from isobit.kernels.spec.head import draw_tokens
from isobit.rollout.draws import Ready, distinct_rows, draws_of
from isobit.rollout.runner import DrawnToken, ForwardBatch, ModelRunner, build_batch, carries_of
from isobit.rollout.scheduler import Plan
from isobit.rollout.sequence import Sample, States


class DelayedTokens:
    def __init__(self, runner: "DelayedRunner", drawn: list[DrawnToken]) -> None:
        self._runner, self._drawn = runner, drawn
        self.step = runner.steps

    def wait(self) -> Iterator[DrawnToken]:
        assert self._runner.waited < self.step, "steps are waited for once, in their order"
        self._runner.waited = self.step
        self._runner.overlapped += self._runner.steps > self.step
        return iter(self._drawn)


class DelayedRunner:
    """``slots``: what a GPU would know of each sample, its newest token, the place of that, and the
    pages as they were seen last.
    """

    def __init__(self, model: ModelRunner) -> None:
        self.model = model
        self.page_tokens = model.page_tokens
        self.slots: dict[Sample, tuple[int, int, list[int]]] = {}
        self.steps = self.waited = self.overlapped = 0
        self._drawn: list[DrawnToken] = []

    @property
    def version(self) -> int:
        return self.model.version

    def decode(self, samples: Sequence[Sample]) -> None:
        pages = [self._pages(sample) for sample in samples]
        counts = tuple(1 + len(sample.draft) for sample in samples)
        rows = [
            (sample, held, place)
            for sample, held, count in zip(samples, pages, counts, strict=True)
            for place in range(count)
        ]
        positions = [sample.cached + place for sample, _, place in rows]
        size = self.page_tokens
        slots = [
            held[position // size] * size + position % size
            for (_, held, _), position in zip(rows, positions, strict=True)
        ]
        table = torch.zeros(len(samples), max(map(len, pages)), dtype=torch.int64)
        for row, held in zip(table, pages, strict=True):
            row[: len(held)] = torch.tensor(held)
        lengths = tuple(one.cached + count for one, count in zip(samples, counts, strict=True))
        carries = carries_of(list(zip(samples, counts, strict=True)))
        paged = PagedBatch(counts, lengths, table, torch.tensor(slots), carries)
        tokens = [token for one in samples for token in (self.slots[one][0], *one.draft)]
        states = self.model.forward(
            ForwardBatch(torch.tensor(tokens), torch.tensor(positions), paged, samples[0].adapter)
        )
        self.draw([(sample, states.row(row)) for row, (sample, _, _) in enumerate(rows)])

    captures = 0

    def step_seconds(self, rows: int, length: int) -> float:
        return 1.0

    def now(self) -> float:
        return 0.0

    def prefill(self, plan: Plan) -> States:
        batch = build_batch(plan, self.page_tokens)
        return self.model.forward(batch).take(torch.tensor(batch.paged.counts).cumsum(0) - 1)

    def draw(self, ready: Ready) -> None:
        states, rows = distinct_rows(ready)
        logits = self.model.logits(states.hidden)
        pairs = zip(rows, (sample for sample, _ in ready), strict=True)
        for sample, its in groupby(pairs, key=lambda pair: pair[1]):
            wanted = [*sample.draft, -1]
            for place, (row, _) in enumerate(its):
                token = _draw_one(logits[row : row + 1], sample, place)
                routing = None if states.routings is None else int(states.routings[row])
                self._drawn.append(DrawnToken(sample, *token, routing))
                if place < len(wanted):
                    self.slots[sample] = token[0], sample.length + place, list(sample.pages)
                    if token[0] != wanted[place]:
                        wanted = []

    def end_step(self) -> DelayedTokens:
        assert self.steps - self.waited <= 1, "the host is a step ahead at most"
        self.steps += 1
        drawn, self._drawn = self._drawn, []
        return DelayedTokens(self, drawn)

    def forget(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.slots.pop(sample, None)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self.model.copy_pages(sources, targets)

    def copy_carries(self, sources: list[int], targets: list[int]) -> None:
        self.model.copy_carries(sources, targets)

    def clear_pages(self, pages: list[int]) -> None:
        self.model.clear_pages(pages)

    def clear(self) -> None:
        self.slots.clear()
        self._drawn = []
        self.waited = self.steps
        self.model.clear()

    def _pages(self, sample: Sample) -> list[int]:
        """The sample's pages, for its newest token: those seen before are where they were."""
        _, position, known = self.slots[sample]
        assert (sample.cached, sample.length) == (position, position + 1)
        assert sample.pages[: len(known)] == known
        return sample.pages


def _draw_one(logits: torch.Tensor, sample: Sample, place: int) -> tuple[int, float, float | None]:
    """Without looking at what the numbers are: the token of logits that are not finite is any
    one. ``place``: guesses before this row.
    """
    if not bool(torch.isfinite(logits).all()):
        return 0, float("nan"), None
    draws = draws_of([0], [sample])
    drawn = draw_tokens(logits, replace(draws, positions=draws.positions + place))
    truncated = None if drawn.truncated is None else float(drawn.truncated)
    return int(drawn.tokens), float(drawn.log_probs), truncated
