"""Milliseconds of a decode step, from the seconds of two rollouts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common import RowWriter
from benchmarks.rollout_engines import time_steps
from isobit.models.shapes import model_shape


def test_a_step_is_what_more_tokens_take_and_prompts_do_not_count(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def seconds(prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        asked.append((len(prompts), new_tokens))
        return 5.0 * len(prompts) + 0.002 * new_tokens

    card, config = {"copy_tb_per_s": 4.0}, model_shape("qwen3-0.6b")
    writer = RowWriter(tmp_path, "steps-vllm", "bf16", "qwen3-0.6b", card, {})
    time_steps(seconds, config, "bf16", [1, 8], card, writer)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["step-1", "step-8"]
    assert [row["step_ms"] for row in rows] == pytest.approx([2.0, 2.0])
    assert asked[:4] == [(1, 24), (1, 24), (1, 280), (1, 280)]
    # weights in BF16 at 4 TB/s; seven sequences more read 664 tokens each of 28 layers' K and V
    token = 2 * 28 * 8 * 128 * 2
    more = 1e3 * 7 * (512 + 24 + 128) * token / 4e12
    assert rows[1]["floor_ms"] - rows[0]["floor_ms"] == pytest.approx(more)
