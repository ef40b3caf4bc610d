"""An estimate of a step's time rests on rows that are there, and comes near those it was not made
from.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory import RESULTS, speed_rows, whole_steps
from isobit.memory.cards import read_card
from isobit.memory.speed import (
    ROWS,
    Decoding,
    SpeedShape,
    StepWork,
    describe_step,
    estimate_step,
    measured_speed,
)
from tests.suites import examples

COMMITTED = json.loads(ROWS.read_text(encoding="utf-8"))
STEP = StepWork(
    shape=SpeedShape.named("qwen3-8b", "fp8"),
    sequences=256,
    length=2304,
    prompts=32,
    prompt_tokens=256,
    samples=8,
    new_tokens=2048,
)


def test_the_rows_are_those_of_the_benchmarks() -> None:
    whole = [row for row in COMMITTED if row["phase"] == "whole"]
    assert [row for row in COMMITTED if row["phase"] != "whole"] == speed_rows(), (
        "python -m benchmarks.memory speed writes them anew"
    )
    for row, now in zip(whole, whole_steps(), strict=True):
        estimated = now.pop("estimated_s")
        assert row == now | {"estimated_s": pytest.approx(estimated, abs=0.11)}


def test_each_row_names_its_source_and_card() -> None:
    for row in COMMITTED:
        file, _, line = row["source"].rpartition(":")
        measured = json.loads((RESULTS / file).read_text().splitlines()[int(line) - 1])
        assert (row["card"], row["mode"]) == (measured["card"]["name"], measured["mode"])
        times = {measured["seconds"], measured.get("round_s")}
        phases = measured.get("phases_s", {})
        times |= {phases.get("forward"), phases.get("other")}
        if "forward" in phases:
            times.add(phases["forward"] + phases["backward"])
        assert row["seconds"] in times


def test_shared_prompts_save_rows_and_neither_attention_nor_the_head() -> None:
    shared = estimate_step(replace(STEP, length=3072, rows=10240 / 24576))
    plain, short = estimate_step(replace(STEP, length=3072)), estimate_step(STEP)
    assert shared.trained == plain.trained and shared.rollout == plain.rollout
    assert 10240 / 24576 < shared.training / plain.training < 0.7
    assert estimate_step(replace(STEP, rows=0.5)).training < short.training


def test_what_was_measured_is_met() -> None:
    speed = measured_speed()
    assert speed.card == "NVIDIA H200" and speed.ranks == 2
    assert speed.decode.error < 0.06 and speed.forward.error < 0.03 and speed.training.error < 0.05
    for rates in (speed.decode, speed.forward, speed.training):
        assert all(seconds > 0 for seconds in rates.seconds.values())
    errors = sorted(
        abs(row["estimated_s"] / row["seconds"] - 1) for row in COMMITTED if row["phase"] == "whole"
    )
    assert errors[len(errors) // 2] < 0.06 and errors[-1] < 0.2
    assert speed.error == errors[-1]


def test_an_estimate_follows_its_work() -> None:
    plain = estimate_step(STEP)
    assert plain.total == plain.rollout + plain.training + plain.other and not plain.scoring
    assert estimate_step(replace(STEP, recompute="mlp")).training > plain.training
    assert estimate_step(replace(STEP, recompute="full")).training > plain.training
    assert estimate_step(replace(STEP, epochs=2)).training == pytest.approx(2 * plain.training)
    assert estimate_step(replace(STEP, idle=0.5)).training == pytest.approx(2 * plain.training)
    assert estimate_step(replace(STEP, scored=(STEP.shape,))).scoring > 0
    assert estimate_step(replace(STEP, cached_tokens=1e5)).rollout > plain.rollout
    several = estimate_step(replace(STEP, trainers=2, samplers=2))
    assert plain.training / 2 < several.training < plain.training
    assert plain.rollout / 2 < several.rollout < plain.rollout
    shared = estimate_step(replace(STEP, trainers=2, samplers=2, sharing=2))
    assert plain.rollout / 2 < shared.rollout < plain.rollout, "half of all but the launches"
    assert shared.training == several.training
    note = "messages between the 2 GPUs that share an engine come on top"
    assert note in "\n".join(describe_step(shared, 100, read_card("h200"), 2))
    assert note not in "\n".join(describe_step(several, 100, read_card("h200"), 2))
    beside = estimate_step(replace(STEP, beside=True))
    assert beside.total == max(plain.rollout, plain.training) + plain.other
    slower = estimate_step(replace(STEP, shape=SpeedShape.named("qwen3-8b", "bf16")))
    assert slower.rollout > plain.rollout and slower.training > plain.training
    alone = estimate_step(replace(STEP, prompts=0))
    assert alone.rollout == 0 and alone.generated_per_s == 0


def test_int8_takes_as_much_longer_than_fp8_as_its_rows() -> None:
    speed, plain = measured_speed(), estimate_step(STEP)
    step = estimate_step(replace(STEP, shape=SpeedShape.named("qwen3-8b", "int8")))
    passes = [row for row in COMMITTED if row["phase"] == "training"]
    of_int8 = [row["source"] for row in passes if row["mode"] == "int8"]
    assert of_int8 and all(source.startswith("int8/backward/") for source in of_int8)
    assert step.training == pytest.approx(speed.training.int8 * plain.training)
    assert 1 < step.rollout / plain.rollout < max(speed.decode.int8, speed.forward.int8) + 0.01
    note = f"INT8 as FP8 times {speed.decode.int8:.2f} (decode)"
    assert note in "\n".join(describe_step(step, 100, read_card("h200"), 1))
    assert note not in "\n".join(describe_step(plain, 100, read_card("h200"), 1))
    scored = replace(STEP, scored=(SpeedShape.named("qwen3-8b", "int8-linear"),))
    assert estimate_step(scored).has_int8


def test_lines_say_what_an_estimate_rests_on() -> None:
    step = estimate_step(STEP)
    text = "\n".join(describe_step(step, 100, read_card("h200"), 1))
    assert "hours for 100 steps" in text and "generated" in text and "NVIDIA H200" in text
    assert f"within {measured_speed().error:.0%}" in text and "no row" not in text
    text = "\n".join(describe_step(step, None, read_card("79"), 8))
    assert "no row is of a card like this one (79-GiB GPU)" in text
    assert "as 2 GPUs scale" in text and "steps" not in text.splitlines()[0]


@settings(max_examples=examples(50), deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 500),
    st.integers(1, 1000),
    st.integers(1, 64),
    st.floats(1, 1e6),
)
def test_every_sequence_gets_its_tokens(
    sequences: int, prompt: int, new: int, most: int, cached: float
) -> None:
    decoding = Decoding.of(sequences, prompt, new, most, cached)
    tick = max(1, new // 64)
    tokens = sum(count * steps for count, steps in decoding.steps.items())
    assert sequences * new <= tokens < sequences * (new + tick)
    assert max(decoding.steps) <= most
    assert decoding.keys >= sequences * new * prompt
    if cached >= most * (prompt + new + tick):
        assert max(decoding.steps) == min(most, sequences), "nothing waits for the cache"


def test_a_short_time_has_no_exponent() -> None:
    step = replace(estimate_step(STEP), training=9e-6, rollout=0.0056)
    first = describe_step(step, 2, read_card("h200"), 1)[0]
    assert "rollout 0.0056 s" in first and "training less than 1 ms" in first
