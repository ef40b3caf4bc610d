"""What ``async.max_staleness`` saves on one GPU, by simulation: the longest samples of a step
decode alone in the synchronous run, and beside those of the next ones otherwise.

    python -m experiments.free_schedule

Groups begin, and steps learn, by the rules that a run has (``isobit.records.schedule``).  Lengths
are log-normal; a decode step takes as long as one was measured to take with so many sequences, with
linear interpolation between; K and V of half-done samples are computed again for each step.  What
is left out: prompts, the host, and that a longer context takes longer to attend to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isobit.records.schedule import Schedule

SEQUENCES = (1, 8, 32, 128, 256)
TOKENS_PER_S = (289, 2_124, 7_126, 14_957, 17_696)
"""Qwen3-8B's shape in ``int8`` on an H200 (docs/performance.md)."""
RECOMPUTED_PER_S = 65_600
"""Tokens whose K and V are computed again: 256 x 2,000 took 7.8 s in ``fp8``."""
LEARN_S = 29.0
"""A backward of 256 samples (docs/cluster.md, one GPU)."""
MEAN, SIGMA, LONGEST = 1_412, 1.0, 8_192
GROUPS, SAMPLES, PLACES, STEPS, SEEDS = 32, 8, 256, 16, 3
_MOST_AT_ONCE = 64
"""Tokens that a sample draws before others may take a place."""


@dataclass(slots=True)
class SimulatedGroup:
    """Lengths of its samples, and the tokens that they have drawn."""

    begun_after: int
    lengths: NDArray[np.int64]
    drawn: NDArray[np.int64]

    @property
    def is_whole(self) -> bool:
        return bool((self.drawn == self.lengths).all())

    @property
    def recomputed(self) -> int:
        """Tokens of its half-done samples."""
        return int(self.drawn[self.drawn < self.lengths].sum())


def decode_s(sequences: int) -> float:
    """Seconds of a decode step."""
    return sequences / float(np.interp(sequences, SEQUENCES, TOKENS_PER_S))


def simulate(max_staleness: int, seed: int, steps: int = STEPS) -> float:
    """Seconds of rollout a step."""
    rng, schedule = np.random.default_rng(seed), Schedule(max_staleness, GROUPS, steps)
    opened, begun, seconds = list[SimulatedGroup](), 0, 0.0
    for step in range(1, steps + 1):
        seconds += sum(group.recomputed for group in opened) / RECOMPUTED_PER_S
        while (
            chosen := schedule.chosen(step, [(g.begun_after, g.is_whole) for g in opened])
        ) is None:
            running = _running(opened)
            while len(running) < PLACES and begun < schedule.groups_begun(step - 1):
                lengths = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, SAMPLES)
                clipped = np.clip(lengths.astype(np.int64), 1, LONGEST)
                opened.append(SimulatedGroup(step - 1, clipped, np.zeros(SAMPLES, np.int64)))
                begun += 1
                running = _running(opened)
            running = running[:PLACES]
            left = min(group.lengths[sample] - group.drawn[sample] for group, sample in running)
            tokens = min(int(left), _MOST_AT_ONCE)
            for group, sample in running:
                group.drawn[sample] += tokens
            seconds += tokens * decode_s(len(running))
        opened = [group for place, group in enumerate(opened) if place not in set(chosen)]
    return seconds / steps


def _running(opened: Sequence[SimulatedGroup]) -> list[tuple[SimulatedGroup, int]]:
    """The samples that are not done, in the order of the prompts."""
    return [
        (group, sample)
        for group in opened
        for sample in np.flatnonzero(group.drawn < group.lengths).tolist()
    ]


def main() -> None:
    synchronous = 0.0
    print("| `max_staleness` | rollout, s a step | step, s | |\n|---|---:|---:|---:|")
    for staleness in (0, 1, 2, 4):
        rollout = sum(simulate(staleness, seed) for seed in range(SEEDS)) / SEEDS
        step = rollout + LEARN_S
        synchronous = synchronous or step
        print(f"| {staleness} | {rollout:.1f} | {step:.1f} | {synchronous / step:.2f}x |")


if __name__ == "__main__":
    main()
