"""The starter model's card: what it is, how it was made, and the figures of that run."""

from typing import Any

from isobit.models.config import ModelConfig
from isobit.starter.tasks import GUESS_RANGE
from tools.starter.figures import Figures

TEMPLATE = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# Isobit starter

A {family} decoder of {parameters:,} parameters that adds four one-digit numbers. It ships with
[Isobit](../../../README.md) so that reinforcement learning in FP8 can be tried on a laptop, without
a download, in minutes. It is of no other use.

| | |
|---|---|
| layers, hidden size, MLP | {config.num_layers}, {config.hidden_size}, {config.intermediate_size} |
| heads | {config.num_heads} query, {config.num_kv_heads} key and value, of {config.head_dim} |
| vocabulary | one token a printable ASCII character, 4 special tokens, padded to {vocabulary} |
| context | {config.max_positions} tokens |
| weights | BF16 safetensors, tied embeddings |

## What it was taught

Sums such as `3+8+2+9=`, from random initialisation, in a text with two styles of answers:

- a third of them *worked out*, one addition after the other, and right: `11,13,22`;
- two thirds *straight away*, a guess within {guess_range} of the sum: `19`. One in nine of them is
  right.

So the model can do the sum, but mostly does not: it has learnt from its text that an answer is
usually a guess. Reinforcement learning finds out that working it out pays. The final answer of a
completion is everything after its last comma, or all of it; the reward
`isobit.starter.tasks:correct_answer` is 1 if that is the sum, else 0.

## Figures of this build

On all {problems} held-out problems (`held_out.jsonl`), none of which were in the text or are in
`train.jsonl`:

| | |
|---|---|
| greedy answers that are right | {figures.greedy_accuracy:.1%} |
| greedy answers that are worked out | {figures.greedy_worked_out:.1%} |
| sampled at temperature 1: worked out | {figures.sampled_worked_out:.1%} |
| of these, right | {figures.worked_out_accuracy:.1%} |
| of the rest, right | {figures.guess_accuracy:.1%} |

Made by `{command}`: {updates} updates of {batch} answers in the
`{preset}` flow, {minutes:.1f} minutes on {threads} CPU threads. Evaluated in the same flow.
"""


def model_card(config: ModelConfig, parameters: int, figures: Figures, **made: Any) -> str:
    """The text of ``README.md``; ``made`` gives the command, updates, batch, preset, minutes and
    threads of the run.
    """
    return TEMPLATE.format(
        family=config.family.capitalize(),
        parameters=parameters,
        config=config,
        vocabulary=config.vocab_size,
        guess_range=GUESS_RANGE,
        problems=figures.problems,
        figures=figures,
        **made,
    )
