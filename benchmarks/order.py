"""What the order of a rollout's samples saves, on a card: four times as many samples as places, of
skewed lengths, as they come and the longest first (``isobit.rollout.order``).

    python -m benchmarks.order [--mode int8] [--places 64] [--mean 400] [--shape qwen3-8b]

Random weights, groups of 8.  A group's mean length is log-normal (sigma 0.7), and so are the
lengths of its answers about that (0.3); nobody tells the engine.  Three rollouts of the same work:
as samples come, in order at the prompts' first visit, and at their second.  A row has seconds and
tokens a second of each, the completions being equal, their log-probabilities among them.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from time import perf_counter
from typing import Any

from benchmarks.cases import MODES, RolloutCase, make_requests, precision_of, rollout_prompts
from benchmarks.common import allocate_in_pages, card_row, printed
from isobit.config.rollout import RolloutConfig
from isobit.models.policy import random_policy
from isobit.models.shapes import model_shape
from isobit.records.text import Completion
from isobit.rollout import scheduler
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle

SAMPLES, PROMPT, LONGEST = 8, 128, 4096
SAMPLES_A_PLACE = 4
WAYS = ("arrival", "first visit", "second visit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mode", choices=MODES, default="int8")
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--mean", type=int, default=400)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        allocate_in_pages()
        printed(card_row())
    config = model_shape(arguments.shape)
    policy = random_policy(config, precision_of(arguments.mode), seed=0, device=arguments.device)
    groups = arguments.places * SAMPLES_A_PLACE // SAMPLES
    lengths = skewed_lengths(groups, arguments.mean)
    prompts = rollout_prompts(RolloutCase(groups, PROMPT, 1), config.vocab_size)
    sizes = RolloutConfig(
        max_sequences=arguments.places, max_batched_tokens=16384, kv_memory_gib=16
    )
    arranged = scheduler.arranged
    rows, drawn = dict[str, Any](), list[list[Completion]]()
    for _ in range(2):  # the first compiles
        plain, ordered = (NativeEngine(policy, sizes, None, seed=0) for _ in range(2))
        for way, engine in zip(WAYS, (plain, ordered, ordered), strict=True):
            scheduler.arranged = as_they_come if engine is plain else arranged
            visit = int(way == "second visit")
            began = perf_counter()
            completions = roll_out(engine, prompts, lengths, visit)
            seconds = perf_counter() - began
            if not visit:  # a prompt's visits draw other tokens
                drawn.append(completions)
            count = sum(map(sum, lengths))
            rows[way] = {"seconds": seconds, "tokens_per_s": count / seconds}
        assert all(one == drawn[0] for one in drawn), "the order changed what is drawn"
    most = max(map(max, lengths))
    printed(
        {"mode": arguments.mode, "places": arguments.places, "samples": groups * SAMPLES}
        | {"mean": fmean(n for group in lengths for n in group), "longest": most, **rows}
    )


def skewed_lengths(groups: int, mean: int) -> list[list[int]]:
    """Of the answers of each group."""
    chance = random.Random(0)  # noqa: S311 (no secret)
    centre = mean / 1.28  # the mean of a log-normal number of this spread is so much larger
    centres = [centre * chance.lognormvariate(0, 0.7) for _ in range(groups)]
    return [
        [max(1, min(LONGEST, round(one * chance.lognormvariate(0, 0.3)))) for _ in range(SAMPLES)]
        for one in centres
    ]


def as_they_come(line: Sequence[Any], *_: Any) -> Sequence[Any]:
    return line


def roll_out(
    engine: NativeEngine, prompts: list[list[int]], lengths: list[list[int]], visit: int
) -> list[Completion]:
    """Every sample, in the order of the requests; each ends at its length, of which the
    engine knows no more than of a stop token.
    """
    requests = [
        replace(one, visit=visit) for one in make_requests(prompts, LONGEST, samples=SAMPLES)
    ]
    handles = engine.submit(requests)
    for group, its in zip(handles, lengths, strict=True):
        for handle, length in zip(group, its, strict=True):
            engine._live[handle].max_length = PROMPT + length
    ended = dict[Handle, Completion]()
    while len(ended) < sum(map(len, handles)):
        for event in engine.step():
            if event.completion is not None:
                ended[event.handle] = event.completion
    return [ended[handle] for group in handles for handle in group]


if __name__ == "__main__":
    main()
