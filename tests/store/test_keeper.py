"""Which checkpoints a run leaves, and the report of slow saves."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from isobit.config.recipes import RunConfig
from isobit.observe import console
from isobit.run.loop import train
from isobit.store import checkpoint as checkpoint_format
from isobit.store import keeper, newest
from isobit.store.keeper import SaveTime, hook_command
from isobit.util.errors import ConfigError, RewardError, StorageError

MakeConfig = Callable[..., RunConfig]


def left_by(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (config.output / "checkpoints").iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("checkpoint", "left"),
    [
        ({"every": 0}, [5]),
        ({"every": 2, "keep_last": 9}, [2, 4, 5]),
        ({"every": 1, "keep_last": 1, "keep_every": 2}, [2, 4, 5]),
    ],
)
def test_the_checkpoints_asked_for_are_left(
    checkpoint: dict[str, int], left: list[int], make_config: MakeConfig
) -> None:
    config = make_config(training={"steps": 5}, checkpoint=checkpoint)
    train(config)
    assert left_by(config) == [f"step_{step:06}" for step in left]


def test_none_is_written_where_none_is_to_be_kept(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(checkpoint={"keep_last": 0, "every": 1})
    train(config)
    assert not (config.output / "checkpoints").exists() and (config.output / "model").exists()
    stopped = make_config(
        write_stopping_reward(config.output.parent),
        output=config.output.with_name("stopped"),
        data={"eval": {}},
        checkpoint={"keep_last": 0},
    )
    with pytest.raises(RewardError):
        train(stopped)
    assert "checkpoint: none, since checkpoint.keep_last is 0" in capsys.readouterr().out
    assert not (stopped.output / "checkpoints").exists()


def write_stopping_reward(folder: Path) -> str:
    (folder / "stop.py").write_text(
        "def reward(prompt, completion):\n    raise KeyError('answer')\n"
    )
    return f"{folder / 'stop.py'}:reward"


def test_large_files_are_announced_with_their_size_and_then_the_seconds(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(training={"steps": 1, "without_signal": "take"})
    train(config)
    assert "writing" not in capsys.readouterr().out, "small ones are not worth a line"
    monkeypatch.setattr(console, "LARGE", 0)
    monkeypatch.setattr(newest, "LARGE", 0)
    train(
        config.model_copy(update={"training": config.training.model_copy(update={"steps": 2})}),
        resume=True,
    )
    printed = capsys.readouterr().out
    assert "checking the checkpoint of step 1: 1.33 MiB" in printed
    assert re.search(
        "writing the checkpoint of step 2: 1\\.\\d+ MiB\nwritten in \\d+ s\nwriting the trained "
        r"model: 2\d\d KiB\nwritten in \d+ s\n",
        printed,
    )


def test_the_best_is_written_and_kept(
    make_config: MakeConfig, write_reward: Callable[[str], str]
) -> None:
    reward = write_reward("return float(completion.token_ids[0] % 7)")
    config = make_config(
        reward,
        training={"steps": 5, "learning_rate": 1e-2},
        evaluation={"every": 1},
        checkpoint={"every": 0, "keep_last": 1, "keep_best": "eval/held_out/accuracy"},
    )
    train(config)
    lines = [
        json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()
    ]
    values = {
        line["step"]: line["eval/held_out/accuracy"]
        for line in lines
        if line["step"] and "eval/held_out/accuracy" in line
    }
    best = max(values, key=values.__getitem__)
    assert len(values) == 5 and best != 5, (
        "the test shows something only if the last is not the best"
    )
    assert left_by(config) == [f"step_{best:06}", "step_000005"]


@pytest.mark.parametrize("name", ["accuracy", "eval/other/accuracy", "eval/held_out/pass@2"])
def test_a_figure_that_no_evaluation_gives_is_refused(name: str, make_config: MakeConfig) -> None:
    config = make_config(checkpoint={"keep_best": name})
    with pytest.raises(
        ConfigError, match="which no evaluation gives; name one of eval/held_out/accuracy"
    ):
        train(config)
    assert not config.output.exists()


def test_a_checkpoint_holds_masters_and_moments_in_fp32_and_no_code(
    make_config: MakeConfig,
) -> None:
    config = make_config(training={"without_signal": "take"})
    train(config)
    folder = config.output / "checkpoints" / "step_000002"
    masters, moments = (
        load_file(folder / "masters.safetensors"),
        load_file(folder / "optimiser.safetensors"),
    )
    assert moments.keys() == {
        f"{name}.{kind}" for name in masters for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    assert all(
        str(tensor.dtype) == "torch.float32" for tensor in (*masters.values(), *moments.values())
    )
    assert {path.name for path in folder.iterdir()} == {
        "masters.safetensors",
        "optimiser.safetensors",
        "state.json",
        "manifest.json",
    }
    model = load_file(config.output / "model" / "model.safetensors")
    assert model["model.norm.weight"].equal(masters["norm.weight"].bfloat16())


class Seconds:
    """A monotonic clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved(times: list[tuple[float, float]]) -> list[list[str]]:
    """The notes of saves, each after so many seconds of steps and taking so many."""
    now, found = Seconds(), list[list[str]]()
    time = SaveTime(10, now)
    for steps, seconds in times:
        now.now += steps
        with time.writing():
            now.now += seconds
        found.append(time.notes(10 * (len(found) + 1), 2_000_000_000, Path("runs/mine")))
    return found


def test_a_save_that_takes_long_and_much_of_the_time_is_told_of_with_its_figures() -> None:
    [[note]] = saved([(105, 45)])
    for part in ("step 10 took 45 s, 30% of", "44.4 MB/s", "checkpoint.every is 10", "runs/mine"):
        assert part in note


def test_short_ones_rare_ones_and_the_same_again_are_not() -> None:
    assert saved([(1, 29), (3600, 300), (0, 0)]) == [[], [], []]
    found = saved([(60, 40), (60, 41), (60, 79), (60, 81)])
    assert [len(notes) for notes in found] == [1, 0, 0, 1]


def test_one_that_fails_counts_for_nothing() -> None:
    now = Seconds()
    time = SaveTime(10, now)
    with suppress(StorageError), time.writing():
        now.now += 100
        raise StorageError("no space")
    with time.writing():
        now.now += 1
    assert time.notes(10, 1, Path()) == []


def test_a_run_on_a_slow_disk_says_it_once(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Syncing takes 45 seconds and steps none; the wall clock, which is not used, runs back."""
    now, sync = Seconds(), checkpoint_format.sync

    def slow(path: Path) -> None:
        sync(path)
        now.now += 25 if path.name == "masters.safetensors" else 0
        now.now += 20 if path.name == "optimiser.safetensors" else 0

    monkeypatch.setattr(checkpoint_format, "sync", slow)
    monkeypatch.setattr(keeper.SaveTime.__init__, "__defaults__", (now,))
    wall = iter(range(10**9, 0, -1000))
    monkeypatch.setattr("time.time", lambda: float(next(wall)))
    train(make_config(training={"steps": 3, "without_signal": "take"}, checkpoint={"every": 1}))
    printed = capsys.readouterr().out
    assert printed.count("of the time since the one before") == 1
    assert "note: the checkpoint of step 1 took 45 s, 100% of the time" in printed


HOOK = """
import sys
from pathlib import Path

def note(folder):
    there = sorted(path.name for path in Path(folder).iterdir())
    with (Path(__file__).parent / "seen.txt").open("a") as file:
        whole = "manifest.json" in there or "model.safetensors" in there
        print(Path(folder).name, whole, file=file)

def fail(folder):
    print("no route to the bucket")
    sys.exit(3)

def hang(folder):
    import time
    time.sleep(600)
"""


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    (tmp_path / "hooks.py").write_text(HOOK)
    return tmp_path / "hooks.py"


def test_on_save_is_called_with_each_complete_checkpoint_and_the_model(
    hooks: Path, make_config: MakeConfig
) -> None:
    config = make_config(training={"steps": 3}, checkpoint={"every": 2, "on_save": f"{hooks}:note"})
    train(config)
    seen = hooks.with_name("seen.txt").read_text().splitlines()
    assert seen == ["step_000002 True", "step_000003 True", "model True"]


def test_on_save_may_be_a_command(make_config: MakeConfig, tmp_path: Path) -> None:
    command = ["cp", "-r", "{folder}", str(tmp_path)]
    config = make_config(checkpoint={"every": 0, "on_save": command})
    train(config)
    assert (tmp_path / "step_000002/manifest.json").is_file()
    assert (tmp_path / "model/model.safetensors").is_file()
    assert hook_command(["echo", "a"], Path("x")) == ["echo", "a", "x"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("fail", "failed with exit status 3: no route to the bucket"),
        ("hang", "was killed after 2 s (on_save_limit_s)"),
        ("nowhere", "has no function 'nowhere'; it has note, fail, hang"),
    ],
)
def test_a_failure_of_on_save_is_told_and_the_run_goes_on(
    function: str,
    told: str,
    hooks: Path,
    make_config: MakeConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = 2 if function == "hang" else 60
    config = make_config(
        checkpoint={"every": 0, "on_save": f"{hooks}:{function}", "on_save_limit_s": limit}
    )
    train(config)
    printed = capsys.readouterr().out
    assert printed.count(told) == 2 and "the run goes on" in printed
    assert (config.output / "summary.json").is_file()


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ("rsync -a x y", "name a Python function as"),
        ("hooks.py", "name a Python function as"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        (["no-such-program"], "there is no program 'no-such-program'"),
        ([], "there is no program ''"),
    ],
)
def test_an_on_save_that_cannot_be_run_is_refused_before_the_run(
    hook: str | list[str], problem: str, make_config: MakeConfig
) -> None:
    config = make_config(checkpoint={"on_save": hook})
    with pytest.raises(ConfigError, match=problem):
        train(config)
    assert not config.output.exists()
