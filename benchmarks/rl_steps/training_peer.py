"""The outside baseline's training: transformers in BF16, on completions of full length (random
tokens), alone on the card.

    old log-probabilities    a forward over the batch without gradients: its rollout is another
                             function, so what that recorded will not do
    forward, backward        GRPO's ratio times the advantage, in micro-batches of the fastest
                             setting that fits
    optimiser, publish       ``passes.peer.PeerOptimiser``: AdamW over FP32 masters, then the copy
                             to its own BF16 weights

The fastest setting is found by trying: micro-batches with and without recomputation, the
optimiser's state being there, each timed once after a run that warms up; those that do not fit are
out.  ``sequences`` measures a part of the batch, whose micro-batches are all alike, and scales the
three passes to the whole of it.  Nothing that happens once may be in them: before the timed step
comes a small one with every shape of it, after which cuDNN has its plans and torch the memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from benchmarks.comparison.card import measure_card
from benchmarks.comparison.device import allocate_in_pages
from benchmarks.comparison.rows import Row, RowWriter
from benchmarks.passes.peer import PeerModel, PeerOptimiser, fastest_attention
from benchmarks.passes.phases import Phases
from benchmarks.passes.timing import free_memory, measured, peak_gib, peer_versions
from benchmarks.rl_steps.cases import CASES, Case
from isobit.config.tables import Recompute, TrainingConfig
from isobit.models.config import ModelConfig, model_shape
from isobit.util.errors import ConfigError

FORWARD_TOKENS = 16384
"""Of a forward without gradients, about."""
SETTINGS: dict[Recompute, tuple[int, ...]] = {"none": (4, 2, 1), "full": (8, 4, 2, 1)}
"""Sequences of a micro-batch to be tried."""
PASSES = ("old_log_probs", "forward", "backward")


@dataclass(frozen=True, slots=True)
class Batch:
    """The completions of a step, or a part of them."""

    ids: torch.Tensor  # int64 [S, L]
    advantages: torch.Tensor  # float32 [S]
    first: int  # the position that predicts the first token of a completion
    tokens: int  # of all completions of the step: the loss is their mean

    def part(self, sequences: int) -> "Batch":
        """The first so many."""
        return replace(self, ids=self.ids[:sequences], advantages=self.advantages[:sequences])


def run_training(shape: str, names: Sequence[str], sequences: int | None, out: Path) -> None:
    """One timed training phase of each case."""
    writer = RowWriter(out, "transformers", "bf16", shape, measure_card(), peer_versions())
    allocate_in_pages()
    trainer = PeerTrainer(model_shape(shape))
    for name in names:
        row = measured(lambda name=name: trainer.time(CASES[name], sequences))
        writer.write(kind="rl", part="training", case=name, **row)


class PeerTrainer:
    """A model of transformers and its optimiser, whose moments are there."""

    def __init__(self, config: ModelConfig, device: str = "cuda") -> None:
        self._device, self._vocab_size = device, config.vocab_size
        self._peer = PeerModel(config, device)
        self._optimiser = PeerOptimiser(self._peer.model, TrainingConfig(moments="bf16"))
        self._phases = Phases(on_gpu=device != "cpu")
        self._peer.log_probs(torch.zeros((1, 8), dtype=torch.int64, device=device)).sum().backward()
        self._optimiser.step(self._phases)

    def time(self, case: Case, sequences: int | None) -> Row:
        """The figures of a row, from so many sequences (by default all)."""
        (size, recompute), tried = self._fastest(case)
        count = (
            case.sequences
            if sequences is None
            else min(case.sequences, ceil(sequences / size) * size)
        )
        batch, phases = self._batch(case, count), self._phases
        self._warm_up(batch, size, recompute)
        phases.start()
        old = self._old_log_probs(batch)
        self._gradients(batch, old, size, recompute)
        self._optimiser.step(phases)
        seconds = {
            name: value * (case.sequences / count if name in PASSES else 1.0)
            for name, value in phases.stop().items()
        }
        return {
            "seconds": sum(seconds.values()),
            "phases_s": seconds,
            "recompute": recompute,
            "tokens_per_microbatch": size * case.length,
            "sequences_measured": count,
            "tried": tried,
            "memory": {"training": {"peak_gib": peak_gib()}},
        }

    def _warm_up(self, batch: Batch, size: int, recompute: Recompute) -> None:
        """A step with every shape of the one to be timed: a full forward and the one that is left
        over, a micro-batch, the optimiser.

        What torch then keeps of freed memory stays with it.
        """
        count, full = batch.ids.shape[0], _forward_sequences(batch)
        self._old_log_probs(batch.part(full + count % full))
        self._gradients(batch.part(size), None, size, recompute)
        self._optimiser.step(self._phases)

    def _fastest(self, case: Case) -> tuple[tuple[int, Recompute], list[Row]]:
        """The setting with the most tokens a second, and what all of them did."""
        tried: list[Row] = []
        rates: dict[tuple[int, Recompute], float] = {}
        for recompute, sizes in SETTINGS.items():
            for size in sizes:
                row = measured(
                    lambda size=size, recompute=recompute: self._try(case, size, recompute)
                )
                tried.append({"sequences": size, "recompute": recompute} | row)
                if "error" not in row:
                    rates[size, recompute] = row["tokens_per_s"]
        self._peer.model.zero_grad()
        free_memory()
        if not rates:
            raise ConfigError(
                f"no micro-batch of sequences of {case.length} tokens fits: tried {tried}"
            )
        return max(rates, key=lambda setting: rates[setting]), tried

    def _try(self, case: Case, size: int, recompute: Recompute) -> Row:
        batch, seconds = self._batch(case, size), 0.0
        for _ in range(2):
            self._phases.start()
            self._gradients(batch, None, size, recompute)
            seconds = sum(self._phases.stop().values())
        return {"tokens_per_s": size * case.length / seconds}

    def _batch(self, case: Case, sequences: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._vocab_size, (sequences, case.length), generator=generator)
        advantages = torch.randn(sequences, generator=generator)
        tokens = case.sequences * case.new_tokens
        return Batch(
            ids.to(self._device), advantages.to(self._device), case.prompt_tokens - 1, tokens
        )

    @torch.no_grad()
    def _old_log_probs(self, batch: Batch) -> torch.Tensor:
        """FP32 [S, completion tokens]."""
        self._peer.recompute("none")
        with self._phases("old_log_probs"), fastest_attention():
            found = [
                self._peer.log_probs(ids, batch.first)
                for ids in batch.ids.split(_forward_sequences(batch))
            ]
            return torch.cat(found).view(batch.ids.shape[0], -1)

    def _gradients(
        self, batch: Batch, old: torch.Tensor | None, size: int, recompute: Recompute
    ) -> None:
        """Forward and backward of all micro-batches; without ``old`` the ratio is 1."""
        self._peer.recompute(recompute)
        with fastest_attention():
            for first in range(0, batch.ids.shape[0], size):
                part = slice(first, first + size)
                with self._phases("forward"):
                    log_probs = self._peer.log_probs(batch.ids[part], batch.first).view(
                        -1, batch.ids.shape[1] - 1 - batch.first
                    )
                    ratio = torch.exp(
                        log_probs - (log_probs.detach() if old is None else old[part])
                    )
                    loss = -(ratio * batch.advantages[part, None]).sum() / batch.tokens
                with self._phases("backward"):
                    loss.backward()


def _forward_sequences(batch: Batch) -> int:
    """Of a forward without gradients, but for the last one."""
    return max(1, FORWARD_TOKENS // batch.ids.shape[1])
