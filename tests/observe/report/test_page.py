"""The page: self-contained, escaped, small, and there for every run however it ended."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isobit.config.run import RunConfig
from isobit.errors import ConfigError
from isobit.observe.report.page import write_report
from isobit.observe.report.settings import view_settings
from isobit.observe.report.template import visible
from isobit.observe.report.watching import watch_run
from isobit.run.rl.loop import train
from isobit.store.lock import locked
from tests.observe.pages import Page, assert_self_contained

from .run_files import completion_line, evaluation_line, manifest, step_line

WriteRun = Callable[..., Path]


def test_a_real_run_has_every_part(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        evaluation={"every": 1, "temperature": 1.0, "samples": 2},
        precision={"preset": "fp8-rollout"},
    )
    train(config)
    page = Page(write_report(config.output))
    assert_self_contained(page)
    headings = (
        "Reward",
        "Response length",
        "Entropy",
        "Differing tokens",
        "Mean difference",
        "Largest difference",
        "The same in every step",
        "Clip fraction",
    )
    headings += (
        "Gradient norm",
        "Learning rate",
        "Time a step",
        "Throughput",
        "Precision flow",
        "Completions",
        "Configuration",
    )
    for heading in (
        *headings,
        "held_out",
        "pass@2",
        "finished, 2 of 2 steps",
        "qkv_proj",
        "training.samples_per_prompt",
    ):
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
    line = completion_line(1, tokens=3, text=evil) | {
        "prompt": evil,
        "prompt_id": evil,
        "source": evil,
    }
    plain = {
        name: value
        for name, value in (line | {"prompt_id": "b"}).items()
        if name not in ("token_texts", "log_probs")
    }
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
    foreign = view_settings({"training": {"learning_rate": 0.5, "unknown": 1}})
    assert not foreign.changed and len(foreign.others) == 2


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
