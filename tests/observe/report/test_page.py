"""The page: self-contained, escaped, small, and there for every run however it ended.

Several runs on one page.

The colours of the page: text and curves stand out from what is behind them, in light and in dark
mode (WCAG 2.2, 1.4.3 and 1.4.11).
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import isobit
from isobit.config.recipes import RunConfig
from isobit.observe.report.comparison import write_comparison
from isobit.observe.report.page import watch_run, write_report
from isobit.observe.report.settings import view_settings
from isobit.observe.report.templates import visible
from isobit.run.loop import train
from isobit.store.lock import locked
from isobit.util.errors import ConfigError
from tests.observe.pages import Page, assert_self_contained
from tests.observe.report.run_files import completion_line, evaluation_line, manifest, step_line

WriteRun = Callable[..., Path]


def test_a_real_run_has_every_part(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        evaluation={"every": 1, "temperature": 1.0, "samples": 2},
        precision={"preset": "fp8-rollout"},
    )
    train(config)
    page = Page(write_report(config.output))
    assert_self_contained(page)
    for words in (
        "Reward; Response length; Entropy; Differing tokens; Log-probability difference",
        "Largest difference; The same in every step; Clip fraction; Gradient norm; Learning rate",
        "Time a step; Throughput; Precision flow; Completions; Configuration; held_out; pass@2",
        "finished, 2 of 2 steps; qkv_proj; training.samples_per_prompt",
    ):
        for heading in words.split("; "):
            assert heading in page.text, heading
    assert "rollout E4M3, training BF16" in page.text, "a site whose sides differ says so"
    assert [
        value for name, value in page.attributes if name == "data-p" and value.endswith("nats")
    ], "tokens have log-probabilities"
    assert str(config.output) in page.text, "the resolved configuration"


def test_five_hundred_steps_stay_below_two_megabytes(write_run: WriteRun) -> None:
    metrics = [
        line
        for step in range(1, 501)
        for line in (step_line(step), evaluation_line(step, 0.5 + step / 1200))
    ]
    completions = [
        completion_line(step, source, text="<&>\"'")
        for step in range(1, 501)
        for source in ("train", "held_out")
    ]
    page = Page(write_report(write_run(metrics, completions, manifest())))
    assert_self_contained(page)
    assert 50_000 < len(page.source.encode()) < 2_000_000
    assert "A point is the mean of 4 steps; band: their lowest to highest." in page.text
    assert "something/new" in page.text, "a figure that no panel names is drawn as well"


def test_a_mean_reward_is_not_called_an_accuracy(write_run: WriteRun) -> None:
    metrics = [evaluation_line(0, 0.5), evaluation_line(1, 1.25)]
    text = Page(write_report(write_run(metrics, None, manifest()))).text
    assert "held_out mean reward" in text and "held_out accuracy" not in text


def test_what_the_model_and_the_data_wrote_is_text(write_run: WriteRun) -> None:
    evil = (
        "<script>alert(1)</script>\x1b[31m\u202e\x00\ud800\" onmouseover='x' {{ 7 * 7 }} {% raw %}"
    )
    line = completion_line(1, tokens=3, text=evil)
    line |= dict.fromkeys(("prompt", "prompt_id", "source"), evil)
    tokens = {"token_texts", "log_probs"}
    plain = {name: value for name, value in line.items() if name not in tokens} | {"prompt_id": "b"}
    run = manifest(
        config={"model": evil, "data": {evil: evil}}, versions={evil: evil}, started=evil
    )
    run["precision"] |= {"preset": evil}
    metrics = [
        step_line(1) | {evil: 1.0},
        {"step": 1, f"eval/{evil}/accuracy": 0.5, f"eval/{evil}/problems": 3},
    ]
    page = Page(write_report(write_run(metrics, [line, plain], run)))
    assert_self_contained(page)
    assert page.text.count("<script>alert(1)</script>") >= 10
    assert "{{ 7 * 7 }} {% raw %}" in page.text
    assert not set("\x1b\x00\u202e\ud800") & set(page.source)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[0m", "a\u241b[0m"),
        ("\x7f\r", "\u2421\u240d"),
        ("\u200b", "[U+200B]"),
        ("é\t\n漢", "é\t\n漢"),
    ],
)
def test_invisible_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_run_killed_before_its_first_step(write_run: WriteRun) -> None:
    page = Page(write_report(write_run([], [], manifest(), finished=False)))
    assert "No step has been written yet" in page.text
    assert "not finished (stopped, or running elsewhere): 0 of 500 steps so far" in page.text
    assert "Precision flow" in page.text


def test_a_full_disk_leaves_no_part_of_a_page(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: .report.html.partial stayed."""
    root = write_run([step_line(1)], [], manifest())

    def full(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"cannot be written.*No space left on device"):
        write_report(root)
    assert not list(root.glob(".*"))


def test_a_run_that_was_stopped_says_why(write_run: WriteRun) -> None:
    """Seen before: "still running, or stopped" of a run whose rewards had all failed."""
    ending = {"step": 1, "kind": "error", "reason": "all <8> rewards failed", "checkpoint": 1}
    root = write_run([step_line(1)], [], manifest(), finished=False, ending=ending)
    page = Page(write_report(root))
    assert "stopped early: 1 of 500 steps" in page.text
    assert "Stopped early: all <8> rewards failed. Last checkpoint: step 1" in page.text
    (root / "summary.json").write_text("{}")
    assert "Stopped early" not in Page(write_report(root)).text, "it went on and finished"


def test_a_run_under_way_is_read_again_until_it_ends(write_run: WriteRun) -> None:
    root = write_run([step_line(1)], [], manifest(), finished=False)
    seen: list[str] = []
    with ExitStack() as running:
        running.enter_context(locked(root))

        def pause(seconds: float) -> None:
            page = Page(root / "report.html")
            assert_self_contained(page)
            assert ("http-equiv", "refresh") in page.attributes
            seen.append(page.text)
            if len(seen) == 2:
                running.close()

        watch_run(root, pause=pause)
    assert len(seen) == 2 and "running: 1 of 500 steps so far" in seen[0]
    last = Page(root / "report.html")
    assert ("http-equiv", "refresh") not in last.attributes and "running:" not in last.text


def test_the_configuration_has_what_was_changed_first(
    make_config: Callable[..., RunConfig], write_run: WriteRun
) -> None:
    config = make_config(training={"learning_rate": 0.5}).model_dump(mode="json", by_alias=True)
    page = Page(write_report(write_run([step_line(1)], None, manifest(config=config))))
    changed, _, others = page.text.partition("keys that have their defaults")
    assert "training.learning_rate" in changed and "0.5" in changed
    assert "training.weight_decay" in others and "training.weight_decay" not in changed
    changed, others = view_settings({"training": {"learning_rate": 0.5, "unknown": 1}})
    assert not changed and len(others) == 2


def test_an_evaluation_without_a_step(write_run: WriteRun) -> None:
    page = Page(write_report(write_run([evaluation_line(0, 0.25)], [], manifest(), finished=False)))
    assert "25.0%" in page.text and "0 of 500 steps" in page.text


@pytest.mark.parametrize("missing", ["run.json", "metrics.jsonl", "completions.jsonl"])
def test_a_missing_file_is_named_and_the_rest_shown(missing: str, write_run: WriteRun) -> None:
    root = write_run([step_line(1), step_line(2)], [completion_line(1)], manifest())
    (root / missing).unlink()
    page = Page(write_report(root))
    assert f"{missing} is missing" in page.text
    assert ("Entropy" in page.text) == (missing != "metrics.jsonl")
    assert ("What is 6 x 7?" in page.text) == (missing != "completions.jsonl")


@pytest.mark.parametrize(
    "value",
    [None, [], "text", 7, {"rollout": [None, 3, {}], "training": 5}, {"rollout": [{"name": "x"}]}],
)
def test_a_manifest_of_another_shape_does_not_matter(value: Any, write_run: WriteRun) -> None:
    root = write_run(
        [step_line(1)],
        [{"step": 1, "token_texts": [None, 1], "log_probs": [None, "x"], "reward": "y"}],
        {"precision": value},
    )
    assert "Entropy" in Page(write_report(root)).text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither run\.json nor metrics\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        write_report(tmp_path / "nowhere")


def test_only_a_page_is_overwritten(write_run: WriteRun) -> None:
    root = write_run([step_line(1)], [], manifest())
    before = (root / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="there already and no report"):
        write_report(root, root / "metrics.jsonl")
    assert (root / "metrics.jsonl").read_bytes() == before
    assert write_report(root) == write_report(root) == root / "report.html"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(root, root / "no" / "folder.html")


def runs(write_run: WriteRun, *names: str) -> list[Path]:
    """Runs that differ in their learning rate and in where they end."""
    return [
        write_run(
            [step_line(1), step_line(2 + place), evaluation_line(2, 0.5 + place / 10)],
            [],
            manifest(config={"output": name, "training": {"learning_rate": place}}),
            name=name,
        )
        for place, name in enumerate(names)
    ]


def test_each_chart_has_a_curve_of_each_run(write_run: WriteRun, tmp_path: Path) -> None:
    page = Page(write_comparison(runs(write_run, "one", "<b>two"), tmp_path / "both.html"))
    assert_self_contained(page)
    assert "one against <b>two" in page.text
    assert "training.learning_rate" in page.text and "\noutput" not in page.text
    assert "50.0%" in page.text and "60.0%" in page.text
    for heading in ("Reward", "held_out", "Entropy", "Throughput", "Time a step"):
        assert heading in page.text, heading
    assert "one 1, <b>two 1" in page.text.replace("\n", " ") or "step 1, one" in page.source


def test_a_run_keeps_its_colour_where_another_has_no_figure(
    write_run: WriteRun, tmp_path: Path
) -> None:
    one, two = (
        write_run([{**step_line(1), "entropy": None if name == "one" else 1.0}], [], name=name)
        for name in ("one", "two")
    )
    source = write_comparison([one, two], tmp_path / "both.html").read_text(encoding="utf-8")
    entropy = source[source.index("<h3>Entropy</h3>") :].partition("</figure>")[0]
    assert 'class="k2"' in entropy and 'class="k1"' not in entropy


def test_intervals_of_several_runs_are_bands_that_do_not_hide_each_other(
    write_run: WriteRun, tmp_path: Path
) -> None:
    names = [
        write_run([step_line(1), evaluation_line(1, 0.5), evaluation_line(2, 0.6)], [], name=name)
        for name in ("one", "two")
    ]
    source = write_comparison(names, tmp_path / "both.html").read_text(encoding="utf-8")
    assert 'class="band"' in source and 'class="whisker"' not in source


@pytest.mark.parametrize("functions", [("a.py:f", "a.py:f"), ("a.py:f", "b.py:g")])
def test_runs_with_different_rewards_are_marked(
    functions: tuple[str, str], write_run: WriteRun, tmp_path: Path
) -> None:
    made = [
        write_run([step_line(1)], [], manifest(config={"reward": {"function": f}}), name=str(place))
        for place, f in enumerate(functions)
    ]
    text = Page(write_comparison(made, tmp_path / "both.html")).text
    assert ("different rewards (reward.function)" in text) == (functions[0] != functions[1])


def test_different_rewards_are_named_by_their_tables(write_run: WriteRun, tmp_path: Path) -> None:
    parts = {"accuracy": {"function": "exact_match", "weight": 1.0, "model": None}}
    rewards = ({"function": "a.py:f", "parts": {}}, {"function": "a.py:f", "parts": parts})
    made = [
        write_run([step_line(1)], [], manifest(config={"reward": reward}), name=str(place))
        for place, reward in enumerate(rewards)
    ]
    text = Page(write_comparison(made, tmp_path / "both.html")).text
    assert "different rewards (reward.parts):" in text


def test_partial_credit_is_a_mean_reward_beside_the_share_that_is_right(
    write_run: WriteRun,
) -> None:
    line = {**evaluation_line(2, 0.52), "eval/held_out/right": 0.036}
    text = Page(write_report(write_run([step_line(1), evaluation_line(0, 0.0), line]))).text
    assert "held_out mean reward" in text and "3.6% exactly right" in text
    assert "accuracy" not in text.partition("What")[0].partition("Every figure")[0]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("masked", 'algorithm.truncated = "mask"'),
        ("zero", "fine-tune it first"),
        ("level", "equal"),
    ],
)
def test_a_notice_has_the_reason_of_a_step_without_a_signal(
    reason: str, said: str, write_run: WriteRun
) -> None:
    line = {**step_line(1), "updates/without_signal": 1, "updates/taken": 0}
    text = Page(write_report(write_run([line | {f"no_signal/{reason}": 16, "updates/skipped": 0}])))
    assert said in text.text and "16 completions, all" in text.text


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce_pp", "remax"])
def test_level_groups_are_a_notice_only_where_groups_are_compared(
    name: str, write_run: WriteRun
) -> None:
    line = {**step_line(1), "reward/level_share": 1.0, "updates/skipped": 0}
    root = write_run([line], [], manifest(config={"algorithm": {"name": name}}))
    assert ("groups were level" in Page(write_report(root)).text) == (name == "grpo")


def test_runs_of_one_name_are_told_apart_and_equal_recipes_are_said_to_be(
    write_run: WriteRun, tmp_path: Path
) -> None:
    root = write_run([step_line(1)], [], manifest())
    text = Page(write_comparison([root, root], tmp_path / "both.html")).text
    assert f"1: {root} against 2: {root}" in text
    assert "Their recipes are the same" in text


def test_one_run_or_eight_are_refused(write_run: WriteRun, tmp_path: Path) -> None:
    root = write_run([step_line(1)], [], manifest())
    for number in (1, 8):
        with pytest.raises(ConfigError, match=f"{number} runs cannot be compared; name 2 to 7"):
            write_comparison([root] * number, tmp_path / "all.html")


def test_python_has_the_command(write_run: WriteRun, tmp_path: Path) -> None:
    one, two = runs(write_run, "one", "two")
    assert isobit.report(str(one)) == one / "report.html"
    assert isobit.report(one, two, out=tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(ConfigError, match="--watch shows one run"):
        isobit.report(one, two, watch=True)


TEMPLATE = "".join(
    files("isobit.observe.report").joinpath(name).read_text(encoding="utf-8")
    for name in ("chart_style.html", "style.html")
)
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): #(\w{6})", block))
    for block in re.findall(r":root \{(.*?)\}", TEMPLATE, re.DOTALL)
)
BACKGROUNDS = ("page", "card", "grid", "warn", "e4m3", "bf16", "fp32", "s1", "s2", "s3", "s4", "s5")


def luminance(code: str) -> float:
    channels = [int(code[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_curves_stand_out(colours: dict[str, str]) -> None:
    pairs = [("text", behind) for behind in BACKGROUNDS] + [
        (text, behind) for text in ("soft", "accent") for behind in ("page", "card")
    ]
    for text, behind in [*pairs, ("tip-text", "tip"), ("good", "card")]:
        assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    for curve in ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "warn-line"):
        assert contrast(colours[curve], colours["card"]) >= 3.0, curve


def test_both_modes_have_every_colour() -> None:
    assert LIGHT.keys() == DARK.keys() and len(LIGHT) > 20
    assert set(re.findall(r"var\(--([\w-]+)\)", TEMPLATE)) - {"k"} <= LIGHT.keys()
