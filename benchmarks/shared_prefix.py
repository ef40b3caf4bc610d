"""Forward and backward of a group's answers with and without ``training.shared_prefix``, side by
side in one process on one card.

    python -m benchmarks.shared_prefix [--modes fp8 int8] [--prompt 2048] [--answer 1024]
        [--samples 8] [--budget 16384] [--recompute mlp] [--shape qwen3-8b]

Random weights and tokens, answers of one length.  Both ways cut the group into micro-batches of at
most ``budget`` tokens (with shared prompts: rows), as training does, and take turns; a row has the
median seconds of each, their quotient, and what torch held at most.
"""

import argparse
from collections.abc import Sequence
from random import Random
from statistics import median
from time import perf_counter

import torch

from benchmarks.cases import MODES, precision_of
from benchmarks.common import allocate_in_pages, card_row, printed
from benchmarks.passes import free_memory, peak_gib
from isobit.config.training import Recompute
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import ScoredPass
from isobit.models.shapes import model_shape
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence

WARM_UP, REPEATS = 1, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fp8", "int8"])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--recompute", default="mlp")
    parser.add_argument("--shape", default="qwen3-8b")
    arguments = parser.parse_args()
    allocate_in_pages()
    printed(card_row())
    for mode in arguments.modes:
        measure(mode, arguments)


def measure(mode: str, arguments: argparse.Namespace) -> None:
    config = model_shape(arguments.shape)
    policy = random_policy(config, precision_of(mode), seed=0, device="cuda")
    random = Random(0)  # noqa: S311 (no secret)

    def tokens(count: int) -> list[int]:
        return random.choices(range(config.vocab_size), k=count)

    prompt = tokens(arguments.prompt)
    group = [
        TokenSequence.of_answer(prompt, tokens(arguments.answer)) for _ in range(arguments.samples)
    ]
    ways = {shared: pack(group, arguments.budget, shared_prefix=shared) for shared in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    peaks = dict.fromkeys(ways, 0.0)
    for turn in range(WARM_UP + REPEATS):
        for shared, batches in ways.items():
            free_memory()
            began = perf_counter()
            train(policy, batches, arguments.recompute)
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[shared].append(perf_counter() - began)
            peaks[shared] = max(peaks[shared], peak_gib())
    alone, shared = median(times[False]), median(times[True])
    printed(
        {"mode": mode, "prompt": arguments.prompt, "answer": arguments.answer}
        | {"samples": arguments.samples, "recompute": arguments.recompute}
        | {"micro_batches": [len(ways[False]), len(ways[True])]}
        | {"alone_s": alone, "shared_s": shared, "quotient": alone / shared}
        | {"all_s": [times[False], times[True]], "peak_gib": [peaks[False], peaks[True]]}
    )
    del policy
    free_memory()


def train(policy: Policy, batches: Sequence[PackedBatch], recompute: Recompute) -> None:
    """Forward and backward of all batches; the gradients add up."""
    for batch in batches:
        scored = ScoredPass(policy, batch, recompute)
        scored.forward()
        scored.backward(torch.ones(len(batch.targets)) / len(batch.targets))


if __name__ == "__main__":
    main()
