"""Seconds of a rollout with guesses (``rollout.speculation``) and without, on one card.

    python -m benchmarks.speculation --folder MODEL --prompts FILE.jsonl > ROWS.jsonl
    python -m benchmarks.speculation --shape qwen3-8b --replay 0.7 > ROWS.jsonl

Two engines over the same weights take turns, with so many sequences at once in groups of
``--samples``; prompts are the key "prompt" of the file's rows, or random tokens. Each is visited
twice; on the second visit the table knows the first answers. The first groups of a count warm up
and leave no row, and steps with guesses are measured before all: each size is captured and measured
once, in tens of milliseconds. ``captures`` are those of a row's two rollouts. ``equal`` compares
completions, log-probabilities among them. ``--replay RATE`` takes guesses from the run without any,
each right at that rate: random weights repeat nothing. ``over_device`` is what a step without
guesses takes over what the device takes for it. Without ``--most`` the engine has its defaults: a
model whose steps are too short has no guesses.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from random import Random
from time import perf_counter

from benchmarks.cases import precision_of
from benchmarks.common import card_row, make_parser, printed, run_command
from isobit.config.rollout import RolloutConfig
from isobit.data.stop_tokens import stop_token_ids
from isobit.data.tokenizer import load_tokenizer
from isobit.memory.cache_size import SPECULATED_ROWS
from isobit.models.folder import load_policy
from isobit.models.policy import Policy, random_policy
from isobit.models.shapes import model_shape
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.drafts import GUESSES, Drafter
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.sequence import Sample


class Replaying(Drafter):
    """Guesses what is known to come, each token right at a rate."""

    known: dict[Handle, list[int]]

    rate: float
    chance = Random(0)  # noqa: S311 (no secret)

    def note(self, *samples: Sample) -> None:
        for sample in samples:
            sample.acceptance, sample.foretold = self.rate, 1.0

    def draft(self, sample: Sample, most: int) -> Sequence[int]:
        self.note(sample)
        tokens = self.known[sample.handle][sample.length :][:most]
        return [one if self.chance.random() < self.rate else abs(one - 1) for one in tokens]


def prompts_of(options: argparse.Namespace, policy: Policy) -> Iterator[tuple[int, ...]]:
    if options.prompts is not None:
        tokenizer = load_tokenizer(options.folder)
        rows = map(json.loads, options.prompts.read_text(encoding="utf-8").splitlines())
        yield from cycle([tuple(tokenizer.encode(row["prompt"])) for row in rows])
    random, vocab = Random(1), range(policy.config.vocab_size)  # noqa: S311 (no secret)
    while True:
        yield tuple(random.choices(vocab, k=128))


def timed(
    engine: NativeEngine, requests: Sequence[Request]
) -> tuple[list[list[Completion]], float, int]:
    """-> The completions, the seconds of the rollout, and the steps captured or measured in it."""
    began, captures = perf_counter(), engine._executor.captures
    groups = generate(engine, requests)
    return groups, perf_counter() - began, engine._executor.captures - captures


def run(options: argparse.Namespace) -> None:
    precision, stops = precision_of(options.precision), ()
    if options.folder is not None:
        policy = load_policy(options.folder, precision, "cuda", trainable=False)
        stops = stop_token_ids(load_tokenizer(options.folder), options.folder)
    else:
        policy = random_policy(model_shape(options.shape), precision, 0, "cuda", trainable=False)
    config = RolloutConfig(max_sequences=max(options.counts), kv_memory_gib=options.kv_memory_gib)
    configs = (config.model_copy(update={"speculation": most}) for most in (0, options.most))
    plain, guessing = (NativeEngine(policy, config, None, 0) for config in configs)
    if options.replay is not None:
        drafter = Replaying(options.most or GUESSES, guessing._executor)
        drafter.rate = options.replay
        guessing._drafter = guessing._scheduler._drafter = drafter
    for rows in range(1, SPECULATED_ROWS + 1):
        guessing._executor.step_seconds(rows, options.new_tokens)
    params = SamplingParams(options.new_tokens, stop_token_ids=stops)
    common = {"model": str(options.folder or options.shape), "precision": options.precision}
    common |= {"replay": options.replay, "most": options.most} | card_row()
    prompts = prompts_of(options, policy)
    for count, repeat in product(options.counts, range(options.repeats + 1)):
        n, group = max(1, count // options.samples), min(options.samples, count)
        chosen = [Prompt(f"{count}/{repeat}/{i}", "", next(prompts)) for i in range(n)]
        for visit in range(2):
            requests = [Request(prompt, visit, group, params) for prompt in chosen]
            groups, without_s, once = timed(plain, requests)
            Replaying.known = {
                Handle(one.prompt.id, visit, n): completion.sequence.token_ids.tolist()
                for one, its in zip(requests, groups, strict=True)
                for n, completion in enumerate(its)
            }
            made, with_s, again = timed(guessing, requests)
            stats = guessing.stats
            row = {"sequences": count, "visit": visit, "tokens": stats.generated_tokens}
            row |= {"without_s": without_s, "with_s": with_s, "faster": without_s / with_s}
            row |= {"accepted": stats.accepted_tokens, "proposed": stats.drafted_tokens}
            if (drafter := guessing._drafter) is not None:
                row["over_device"] = drafter.over_device(count)
            row |= {"forwards": stats.forwards, "captures": [once, again]}
            row = common | row | {"equal": made == groups}
            if repeat:
                printed(row)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--folder", type=Path)
    model.add_argument("--shape")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="needs --folder")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 64])
    for name, default in (("samples", 8), ("new-tokens", 256), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--most", type=int, help="guesses behind a sequence")
    parser.add_argument("--kv-memory-gib", type=float, default=12.0)
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--replay", type=float, metavar="RATE")
    parser.set_defaults(run=run)
    sys.exit(run_command(parser))
