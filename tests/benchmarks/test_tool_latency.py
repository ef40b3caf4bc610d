"""The arms of the benchmark draw the same, and each does what it says."""

from argparse import Namespace

import pytest

from benchmarks.tool_latency import ARMS, TINY, latency, play, readable_tokenizer
from isobit.models.policy import random_policy
from isobit.records.text import Completion


@pytest.mark.exhaustive
def test_every_arm_draws_the_same_tokens() -> None:
    arguments = Namespace(
        prompts=2, samples=3, turns=3, turn_tokens=4, median=0.02, sigma=0.5,
        max_sequences=4, kv_pages=None, at_once=None,
    )  # fmt: skip
    tokenizer = readable_tokenizer()
    policy = random_policy(TINY, "fp8", 0, trainable=False)
    made = dict[str, list[list[Completion]]]()
    figures = dict[str, dict[str, float]]()
    for arm in ARMS:
        made[arm], figures[arm] = play(arm, policy, tokenizer, arguments)
    assert all(made[arm] == made["at once"] for arm in ARMS)
    assert all(one["turns"] == 3 and one["episodes"] == 6 for one in figures.values())
    assert figures["recomputes"]["kept_tokens"] == 0 < figures["waits"]["kept_tokens"]
    longest = [
        max(latency(one.episode.turns[turn], 0.02, 0.5) for group in made["waits"] for one in group)  # type: ignore[union-attr]
        for turn in range(2)
    ]
    assert figures["lock-step"]["seconds"] > sum(longest)
    assert figures["at once"]["latency_mean_s"] == pytest.approx(
        figures["waits"]["latency_mean_s"], rel=1e-12
    )
