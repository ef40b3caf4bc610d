"""``experiments.scaling``: what is sent arrives, every sample is done once, one GPU takes what one
GPU was measured to take, and the page holds the tables of the rows.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import read_rows
from experiments.scaling import __main__, rollout
from experiments.scaling.costs import MODELS
from experiments.scaling.rollout import roll
from experiments.scaling.step import Layout, Setting, room, round_s, simulate
from experiments.scaling.table import fewest, overview, rows

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results"
RESULTS = ROOT / "experiments" / "results"
MODEL = MODELS["qwen3-8b"]
SETTING = Setting("none", 256)
ERROR = 0.05
"""Of the model, against what was measured."""


def test_one_gpu_takes_what_it_was_measured_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {
        (row["case"], row["recompute"]): row
        for row in read_rows(MEASURED / "end_to_end")
        if row.get("part") == "whole" and row["mode"] == "fp8"
    }
    whole = measured["2k", "none"]
    setting = Setting("none", 256, whole["tokens_per_microbatch"])
    simulated = simulate(MODEL, Layout(1), setting, ((2048,) * 8,) * 32).phases
    assert simulated.total == pytest.approx(whole["seconds"], rel=ERROR)
    assert simulated.rollout == pytest.approx(whole["phases_s"]["rollout"], rel=ERROR)
    computed = whole["phases_s"]["forward"] + whole["phases_s"]["backward"]
    assert simulated.compute == pytest.approx(computed, rel=ERROR)
    longer = measured["8k", "mlp"]
    assert roll(MODEL, ((8192,) * 8,) * 8, 1, 256).seconds == pytest.approx(
        longer["phases_s"]["rollout"], rel=ERROR
    )
    # Prompts of 512 tokens, each sampled once.
    monkeypatch.setattr(rollout, "PROMPT", 512)
    roll.cache_clear()
    for shape in ("qwen3-8b", "qwen3-32b"):
        model = MODELS[shape]
        for row in read_rows(MEASURED / "rollout"):
            if (row["engine"], row["mode"], row.get("shape")) == ("native", "fp8", shape) and row[
                "case"
            ] in ("short", "long"):
                new = row["stats"]["generated_tokens"] // 256
                seconds = roll(model, ((new,) * 8,) * 32, 1, 256).seconds
                seconds += 512 * (256 - 32) * model.prefill_s
                assert seconds == pytest.approx(row["seconds"], rel=ERROR), (shape, row["case"])
    roll.cache_clear()


@pytest.mark.few(1)
@pytest.mark.parametrize("scaling_", __main__.SCALINGS)
def test_nobody_is_faster_than_one_that_waits_for_none(scaling_: __main__.Scaling) -> None:
    found = list(rows(MODEL, scaling_, (1, 2, 8, 16), seeds=(0,)))
    assert [row["gpus"] for row in found] == [1, 2, 8, 16, 16]
    assert found[0]["efficiency"] == 1
    assert all(0 < row["efficiency"] <= 1 for row in found)
    for row in found:
        assert sum(row["phases_s"].values()) == pytest.approx(row["step_s"])
        assert min(row["phases_s"].values()) >= -1e-9


@pytest.mark.exhaustive
def test_memory_is_that_of_the_plan() -> None:
    """Whole published weights of 70B are too much for 8, 16 and 32 GPUs."""
    assert room(MODEL, 1, 1).recompute == "mlp"
    assert room(MODEL, 8, 1).recompute == "none"
    assert [fewest(model) for model in MODELS.values()] == [1, 8, 64, 4]
    assert not room(MODELS["llama-3.1-70b"], 64, 8).fits, "a sum for each host is 33 GiB a GPU"
    with_slots, without = (room(MODEL, 64, slots).training for slots in (8, 1))
    assert with_slots - without == pytest.approx(30.5 * (1 / 8 - 1 / 64), abs=1.1)


def test_gpus_that_share_engines_hold_70b_on_fewer_and_read_what_is_sent() -> None:
    """Of 32B two GPUs generated 7,719 tokens a second, with 256 samples of 1,024 tokens."""
    shared = replace(MODELS["llama-3.1-70b"], rollout_tp=8)
    assert fewest(shared) == 16
    step = simulate(shared, Layout(16), Setting("full", 64), ((512,) * 8,) * 8)
    for link in ("nvlink", "nic"):
        sent = sum(getattr(one, link) for one in step.sent)
        assert sent == pytest.approx(sum(getattr(one, link) for one in step.received))
    alone = replace(shared, rollout_tp=1)
    assert shared.kv_bytes == alone.kv_bytes / 8 and alone.of_others == 0
    two = replace(MODELS["qwen3-32b"], rollout_tp=2)
    rolled = roll(two, ((1024,) * 8,) * 32, 1, 256)
    assert 256 * 1024 / rolled.seconds == pytest.approx(7719, rel=ERROR)


def test_two_gpus_take_what_they_were_measured_to_take() -> None:
    """A round of 16,384 tokens of 8B: 1.133 s on one, 1.188 s on two."""
    layout = Layout(2)
    more = round_s(MODEL, layout, backward=6.697 / 8)
    assert more == pytest.approx(1.1875 - 1.1327, rel=ERROR)


def test_the_pages_hold_the_tables_of_the_rows() -> None:
    found = __main__.in_order(RESULTS / "scaling")
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert overview(found) in page
    of_8b = [row for row in found if row["shape"] == MODEL.name and row["scaling"] == "weak"]
    readme = (ROOT / "experiments" / "scaling" / "README.md").read_text(encoding="utf-8")
    assert __main__.markdown(of_8b) in readme


def test_the_rows_are_those_of_this_simulation() -> None:
    stored = next(
        row
        for row in read_rows(RESULTS / "scaling")
        if (row["shape"], row["scaling"], row["gpus"]) == (MODEL.name, "weak", 8)
    )
    (found,) = rows(MODEL, "weak", (8,), seeds=range(2))
    del found["peak_gib"], stored["peak_gib"]  # the memory plan has tests of its own
    assert found == stored
