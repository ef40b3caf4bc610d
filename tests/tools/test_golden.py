"""What small runs come to: a changed byte is seen and named, what is another each time is not; no
run is done here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import golden
from tools.golden import CommandError, Place
from tools.run_files import differences, read_run, read_steps

STEP = {"step": 1, "loss": -0.25, "time/rollout_s": 0.5, "tokens_per_s/rollout": 90.0}
EVALUATION = {"step": 1, "eval/held_out/accuracy": 0.5, "time/evaluation_s": 0.1}
MANIFEST = {
    "started": "2026-01-01",
    "bits": {"device": "cpu", "kernels": "1f"},
    "model": {"folder": "/somewhere", "parameters": 7},
    "inputs": {"model.config": "2e"},
    "config": {"training": {"learning_rate": 1e-3}},
}
CHECKPOINT = "run/checkpoints/step_000001"
FILES: dict[str, Any] = {
    "run/metrics.jsonl": [STEP, EVALUATION],
    "run/digests.jsonl": [{"step": 1, "tokens": "ab", "weights": "cd"}],
    "run/completions.jsonl": [{"step": 0, "completion": "5"}, {"step": 1, "completion": "7"}],
    "run/rewards.jsonl": [{"rewards": [[1.0]]}],
    "run/summary.json": {"steps": 1, "train_seconds": 0.7, "gpu_memory": None},
    "run/run.json": MANIFEST,
    f"{CHECKPOINT}/state.json": {"step": 1, "files": {"metrics.jsonl": 99}, "log": {"seconds": {}}},
    f"{CHECKPOINT}/manifest.json": {"versions": "1"},
    f"{CHECKPOINT}/masters.safetensors": "masters",
    "run/model/model.safetensors": "weights",
    "run/tensorboard/events": "events",
    "run/.lock": "4711",
}


def write(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A run's directory ``run`` in the folder; None leaves a file out."""
    for name, content in {**FILES, **(changes or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            path.write_text("".join(f"{json.dumps(line)}\n" for line in content))
        elif content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture
def found(tmp_path: Path) -> Callable[[dict[str, Any]], list[str]]:
    """What differs between the run and one with other files."""

    def compare(changes: dict[str, Any]) -> list[str]:
        runs = [write(tmp_path / "one"), write(tmp_path / "other", changes)]
        one, other = (read_run(folder, "run") for folder in runs)
        return list(differences(one, other, ("before", "now")))

    return compare


def test_times_rates_paths_versions_and_sizes_are_ignored(
    found: Callable[[dict[str, Any]], list[str]],
) -> None:
    step = {**STEP, "time/rollout_s": 0.6, "tokens_per_s/rollout": 80.0, "waiting/max_s": 3.0}
    bits, model = {"device": "cpu", "kernels": "2f"}, {"folder": "/elsewhere", "parameters": 7}
    changes = {
        "run/metrics.jsonl": [step, {**EVALUATION, "time/evaluation_s": 0.2}],
        "run/summary.json": {"steps": 1, "train_seconds": 0.8, "gpu_memory": 5},
        "run/run.json": {**MANIFEST, "started": "2027", "bits": bits, "model": model},
        f"{CHECKPOINT}/state.json": {
            "step": 1,
            "files": {"metrics.jsonl": 101},
            "log": {"seconds": {"rollout": 1.5}},
        },
        f"{CHECKPOINT}/manifest.json": {"versions": "2"},
        "run/tensorboard/events": "others",
        "run/.lock": "4712",
    }
    assert changes.keys() <= FILES.keys()
    assert found(changes) == []


@pytest.mark.parametrize(
    ("file", "content", "place"),
    [
        ("run/metrics.jsonl", [{**STEP, "loss": -0.5}, EVALUATION], "step 1, loss"),
        (
            "run/metrics.jsonl",
            [STEP, {**EVALUATION, "eval/held_out/accuracy": 0.0}],
            "step 1 again, eval/held_out/accuracy",
        ),
        (
            "run/completions.jsonl",
            [{"step": 0, "completion": "5"}, {"step": 1, "completion": "8"}],
            "step 1, SHA-256",
        ),
        ("run/rewards.jsonl", [{"rewards": [[0.0]]}], "line 1, SHA-256"),
        ("run/summary.json", {"steps": 2}, "steps"),
        ("run/run.json", {**MANIFEST, "inputs": {"model.config": "3"}}, "inputs.model.config"),
        (f"{CHECKPOINT}/state.json", {"step": 2, "log": {}}, "step"),
        (f"{CHECKPOINT}/masters.safetensors", "mastert", "SHA-256"),
        ("run/model/model.safetensors", "weightt", "SHA-256"),
    ],
)
def test_a_change_is_named_by_file_step_and_key(
    found: Callable[[dict[str, Any]], list[str]], file: str, content: Any, place: str
) -> None:
    lines = found({file: content})
    assert lines[0].startswith(f"{file}, {place}: ")
    assert all(line.startswith(f"{file}, ") for line in lines)


def test_both_values_are_said_and_the_same_number_may_have_other_bits(
    found: Callable[[dict[str, Any]], list[str]],
) -> None:
    digests = [{"step": 1, "tokens": "ab", "weights": "ce"}]
    assert found({"run/digests.jsonl": digests})[0] == (
        'run/digests.jsonl, step 1, weights: "cd" before, "ce" now'
    )
    zeros = [read_steps(json.dumps({**STEP, "loss": zero}).encode()) for zero in (0.0, -0.0)]
    one, other = ({"metrics.jsonl": zero} for zero in zeros)
    assert list(differences(one, other, ("before", "now"))) == [
        "metrics.jsonl, step 1, loss: 0.0 before, -0.0 now"
    ]


def test_files_and_keys_that_one_side_lacks_are_named(
    found: Callable[[dict[str, Any]], list[str]],
) -> None:
    step = {key: value for key, value in STEP.items() if key != "loss"}
    changes = {"run/metrics.jsonl": [step, EVALUATION], "run/model/model.safetensors": None}
    assert found({**changes, "run/budget.jsonl": "x"}) == [
        "run/budget.jsonl: only now",
        "run/metrics.jsonl, step 1, loss: -0.25 before, none now",
        "run/model/model.safetensors: only before",
    ]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Of two runs, the second of which repeats the first, what they change in the files; no program
    is started.
    """
    changes: dict[str, dict[str, Any]] = {"fp8": {}, "processes": {}}

    def run(name: str) -> golden.Run:
        return lambda place: read_run(write(place.folder, changes[name]), "run")

    monkeypatch.setattr(golden, "RUNS", {name: run(name) for name in changes})
    monkeypatch.setattr(golden, "machine", lambda tree: {"cpu": "this"})
    return changes


def test_the_command_records_checks_and_names_the_run_that_differs(
    outcomes: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "golden.json")
    assert golden.main(["record", file]) == 0
    assert golden.main(["check", file]) == 0
    assert capsys.readouterr().out.endswith("all equal\n")
    outcomes["fp8"] = outcomes["processes"] = {"run/model/model.safetensors": "others"}
    assert golden.main(["check", file, "--only", "fp8"]) == 1
    *_, named, last = capsys.readouterr().out.splitlines()
    assert named.startswith("fp8: run/model/model.safetensors, SHA-256: ")
    assert last == "wrong: fp8"
    assert golden.main(["check", file]) == 1
    assert " in fp8" not in capsys.readouterr().out


def test_a_run_that_differs_from_the_one_it_repeats_is_not_recorded(
    outcomes: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes["processes"] = {"run/metrics.jsonl": [{**STEP, "loss": 1.0}, EVALUATION]}
    file = tmp_path / "golden.json"
    assert golden.main(["record", str(file), "--only", "processes"]) == 1
    assert capsys.readouterr().out.endswith(
        "processes: run/metrics.jsonl, step 1, loss: -0.25 in fp8, 1.0 in processes\n"
        "wrong: processes\n"
    )
    assert not file.exists()


def test_another_machine_a_failed_run_and_one_that_is_not_recorded_are_told_of(
    outcomes: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(tmp_path / "golden.json")
    assert golden.main(["record", file, "--only", "fp8"]) == 0
    monkeypatch.setattr(golden, "machine", lambda tree: {"cpu": "that"})
    assert golden.main(["check", file]) == 0
    told = "recorded on another machine, {'cpu': 'this'}; this one is {'cpu': 'that'}\n"
    assert told in capsys.readouterr().out
    assert golden.main(["check", file, "--only", "processes"]) == 1
    assert capsys.readouterr().out.endswith("not both known and recorded: processes\n")

    def fail(place: Place) -> golden.Record:
        raise CommandError("isobit train: exit code 2")

    monkeypatch.setitem(golden.RUNS, "fp8", fail)
    assert golden.main(["check", file]) == 1
    told = "fp8: CommandError: isobit train: exit code 2\nwrong: fp8\n"
    assert capsys.readouterr().out.endswith(told)
