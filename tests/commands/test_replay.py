"""Steps done again come out as they were recorded; where anything of a recorded run was changed
afterwards, the first change of each file is named with its step.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from isobit.commands.diff import RunComparison, compare
from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.models.safetensors import TensorFile
from isobit.parallel.world import ALONE, World
from isobit.rollout.contexts import ContextTable
from isobit.run.loop import train
from isobit.run.open_run import OpenRun
from isobit.store.checkpoint import CHUNK_BYTES, _json_sha256
from isobit.store.directory import RunDirectory
from isobit.util.errors import ConfigError, Interrupted
from tests.tiny import json_lines, small_run, with_sections
from tests.worlds import in_world

LAST = 1 << 62  # a step behind all others
REWARD = "def reward(prompt, completion):\n    return float(completion.token_ids[0] % 3)\n"
STEPS = 6


def settings(folder: Path, model: Path, output: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": str(model),
        "output": output,
        "seed": 3,
        "threads": 1,
        "data": {
            "train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 16},
            "eval": {"held_out": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 3}},
        },
        "reward": {"function": f"{folder / 'reward.py'}:reward", "in_process": True},
        "rollout": {"max_new_tokens": 3},
        "training": {
            "steps": STEPS,
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "learning_rate": 1e-2,
        },
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2, "keep_last": 3},
    }
    return RunConfig.model_validate(with_sections(values, sections))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path, tiny_folder: Path) -> Path:
    """A finished run with checkpoints after steps 2, 4 and 6."""
    torch.set_num_threads(1)
    train(settings(folder, tiny_folder, folder / "run"))
    return folder / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def again(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a replay of the run has written."""
    output = tmp_path_factory.mktemp("replay") / "again"
    replay(whole, output=output)
    return output


def compared(run: Path, again: Path) -> list[tuple[int, str]]:
    """As ``replay`` compares a run with what doing its steps again has written."""
    directories = RunDirectory(run), RunDirectory(again)
    differences = compare(*directories, range(STEPS + 1)).differences
    return [(one.step, f"{one.file}: {one.what}") for one in differences]


def found(result: RunComparison) -> list[tuple[int, str]]:
    return [(one.step, f"{one.file}: {one.what}") for one in result.differences]


def first_step(result: RunComparison) -> int:
    """0 for the evaluation before step 1."""
    assert result.steps is not None
    return result.steps[0]


def last_step(result: RunComparison) -> int:
    assert result.steps is not None
    return result.steps[-1]


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def change_line(path: Path, wanted: Callable[[dict[str, Any]], bool], change: Any) -> None:
    """Change the first line that is wanted, as somebody with an editor does."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(next(line for line in lines if wanted(line)))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def make_consistent(folder: Path) -> None:
    """Write the digests of a checkpoint's files as they are now into its manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    for name, recorded in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert len(data) < CHUNK_BYTES
        recorded["sha256"] = [hashlib.sha256(data).hexdigest()]
    path.write_text(json.dumps({**manifest, "sha256": _json_sha256(manifest)}))


def test_all_steps_are_equal_and_nothing_is_written(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(whole)
    said = list[str]()
    result = replay(whole, say=said.append)
    assert found(result) == [] and result.exit_code == 0
    assert result.steps == range(STEPS + 1)
    assert said[0] == f"replaying steps 1 to 6 of {whole} from the start"
    assert said[1:7] == [f"step {n}: all equal in digests.jsonl" for n in range(1, 7)]
    files = ["digests.jsonl", "rewards.jsonl", "completions.jsonl", "metrics.jsonl", "model"]
    assert [line.partition(":")[0] for line in said[7:]] == files
    assert contents(whole) == before
    assert capsys.readouterr().out == ""


@pytest.mark.few(3)
@pytest.mark.parametrize(("step", "first"), [(1, 0), (2, 0), (3, 3), (4, 3), (6, 5)])
def test_a_step_is_done_from_the_checkpoint_before_it(step: int, first: int, whole: Path) -> None:
    result = replay(whole, step)
    assert found(result) == [] and result.steps == range(first, step + 1)


@pytest.mark.exhaustive  # of a run of adapters with all of it: tests/run/test_starts.py
@pytest.mark.parametrize(
    "sections",
    [
        {"async": {"lag": 2}},
        {"precision": "int8", "replay": {"fraction": 0.5}},
        {"precision": "int8", "algorithm": {"name": "ppo"}},
        {"algorithm": {"name": "grpo", "kl_coefficient": 0.1}, "reference": {"refresh_every": 2}},
        {"algorithm": {"name": "remax"}},
        {"precision": "bf16", "training": {"updates_per_batch": 2}},
    ],
    ids=["lag", "buffer, int8", "ppo, int8", "reference", "remax", "bf16"],
)
def test_what_can_be_resumed_can_be_replayed(
    sections: dict[str, Any], folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    sections = {**sections, "training": {"steps": 4, **sections.get("training", {})}}
    train(settings(folder, tiny_folder, tmp_path / "run", **sections))
    for step in (None, 3):
        assert found(replay(tmp_path / "run", step)) == []


@pytest.mark.exhaustive
def test_a_run_that_was_resumed_is_replayed(
    folder: Path, tiny_folder: Path, whole: Path, tmp_path: Path
) -> None:
    """Interrupted after step 4, and with other evaluations than at first."""
    root = tmp_path / "run"
    constant = {"training": {"schedule": "constant"}}
    train(settings(folder, tiny_folder, root, **{"training": {**constant["training"], "steps": 4}}))
    train(settings(folder, tiny_folder, root, **constant, evaluation={"every": 3}), resume=True)
    assert found(replay(root)) == []
    assert found(replay(root, 6)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [2, 4])
def test_a_run_that_was_stopped_before_an_evaluation_is_replayed(
    step: int, folder: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint stands between the step and the evaluation."""
    root, evaluate = tmp_path / "run", OpenRun.evaluate_if_due

    def stopped(self: OpenRun[Any, Any], done: int) -> None:
        if done == step:
            raise Interrupted("SIGTERM", 15)
        evaluate(self, done)

    config = settings(folder, tiny_folder, root)
    with monkeypatch.context() as patch:
        patch.setattr(OpenRun, "evaluate_if_due", stopped)
        with pytest.raises(Interrupted):
            train(config)
    train(config, resume=True)
    for again in (None, step, step + 1, STEPS):
        assert found(replay(root, again)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [None, 6])
def test_a_byte_of_the_trained_model(step: int | None, run: Path) -> None:
    path = run / "model" / "model.safetensors"
    flip_byte(path, path.stat().st_size - 3)
    (difference,) = replay(run, step).differences
    assert difference.where == "after the last step"
    last = list(TensorFile(path).stored)[-1]
    assert difference.what == f"{path.name} differs, {last} first"


@pytest.mark.exhaustive
def test_adapters_are_replayed_in_another_directory(
    folder: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their configuration names the base model as it is seen from the current one."""
    lora = {"lora": {"rank": 4}, "training": {"steps": 1}}
    train(settings(folder, tiny_folder, tmp_path / "run", **lora))
    written = tmp_path / "run" / "model" / "adapter_config.json"
    name = f'"./{tiny_folder.name}"'
    text = written.read_text(encoding="utf-8")
    assert name in text
    for here in (tmp_path, tiny_folder, *list(tiny_folder.parents)[:3]):
        monkeypatch.chdir(here)
        assert found(replay(tmp_path / "run")) == []
    for other in ('"./other"', f'"{tiny_folder.name}"', '"./other/model.json"', "7"):
        written.write_text(text.replace(name, other), encoding="utf-8")
        assert found(replay(tmp_path / "run")) == [(LAST, "model: adapter_config.json differs")]


PARTS = {"masters.safetensors": "masters", "optimiser.safetensors": "moments", "state.json": ""}
"""The files of a checkpoint, and what the digests call what they hold."""


def flip_byte_of(file: str, step: int, run: Path) -> Path:
    """The file of a checkpoint in which it was done."""
    path = run / "checkpoints" / f"step_{step:06}" / file
    flip_byte(path, path.stat().st_size - 30)
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize(("file", "step"), list(zip(PARTS, (4, 5, 5), strict=True)))
def test_a_byte_of_a_checkpoint(file: str, step: int, run: Path) -> None:
    path = flip_byte_of(file, 4, run)
    said = list[str]()
    result = replay(run, step, said.append)
    ((of, what),) = found(result)
    assert of == 4 and what.startswith("checkpoints/step_000004: it is damaged: ")
    assert str(path) in what and any(str(path) in line for line in said)
    assert first_step(result) == 3, "from the one before it"


@pytest.mark.exhaustive
def test_a_byte_of_each_checkpoint(run: Path) -> None:
    """Another file of each."""
    paths = {
        step: flip_byte_of(file, step, run) for file, step in zip(PARTS, (2, 4, 6), strict=True)
    }
    result = replay(run)
    assert [of for of, _ in found(result)] == list(paths) and first_step(result) == 0
    for of, what in found(result):
        assert what.startswith(f"checkpoints/step_00000{of}: it is damaged: ")
        assert str(paths[of]) in what


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("file", "step"),
    [("masters.safetensors", 4), ("masters.safetensors", 5), ("optimiser.safetensors", 5)],
)
def test_a_byte_of_a_checkpoint_whose_manifest_was_changed_with_it(
    file: str, step: int, run: Path
) -> None:
    make_consistent(flip_byte_of(file, 4, run).parent)
    ((of, what),) = found(replay(run, step))
    assert of == 4 and f"does not hold the {PARTS[file]} that digests.jsonl has" in what


@pytest.mark.exhaustive
def test_a_byte_of_each_checkpoint_whose_manifest_was_changed_with_it(run: Path) -> None:
    changed = {2: "masters.safetensors", 4: "optimiser.safetensors"}
    for step, file in changed.items():
        make_consistent(flip_byte_of(file, step, run).parent)
    differences = found(replay(run))
    assert [of for of, _ in differences] == list(changed)
    for of, what in differences:
        assert f"does not hold the {PARTS[changed[of]]} that digests.jsonl has" in what


def test_a_cursor_of_a_checkpoint_whose_manifest_was_changed_with_it(run: Path) -> None:
    """It is in no digest: what follows from it is."""
    path = run / "checkpoints" / "step_000004" / "state.json"
    state = json.loads(path.read_text())
    state["sampler"]["cursor"] -= 1
    path.write_text(json.dumps(state))
    manifest = path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    content["files"]["state.json"]["bytes"] = path.stat().st_size
    manifest.write_text(json.dumps(content))
    make_consistent(path.parent)
    assert {of for of, _ in found(replay(run, 5))} == {5}


def change_reward(run: Path, source: str, version: int, place: tuple[int, int], value: Any) -> None:
    """Of the grading that the weights of a version were given; ``place`` is prompt and sample."""
    change_line(
        run / "rewards.jsonl",
        lambda line: (
            line["prompts"][0][0].startswith(source) and line["weights_version"] == version
        ),
        lambda line: line["rewards"][place[0]].__setitem__(place[1], value),
    )


def test_rewards_of_training(run: Path) -> None:
    values = {1: 7.25, 3: 1.0000000000000002, 5: None}
    for step, value in values.items():
        change_reward(run, "train", step, (1, 2), value)
    ((of, what),) = found(replay(run))
    assert of == 1 and re.match(r"rewards.jsonl: rewards\[1\]\[2\] of train/\d+ is 7.25 and ", what)
    ((of, what),) = found(replay(run, 3))
    assert of == 3 and " is 1.0000000000000002 and " in what
    ((of, what),) = found(replay(run, 5))
    assert of == 5 and " is None and " in what


@pytest.mark.exhaustive
def test_rewards_of_evaluations(run: Path) -> None:
    for version in (5, 1):
        change_reward(run, "held_out", version, (0, 0), 9.0)
        ((of, what),) = found(replay(run))
        assert of == version and "rewards[0][0] of held_out/" in what and " is 9.0 and " in what


KEYS = ("completion", "token_texts", "log_probs", "reward", "prompt")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "places",
    [
        [*((step, "train") for step in (1, 2, 3, 4, 5)), (6, "held_out")],
        [(step, "held_out") for step in (0, 2, 4, 6)],
    ],
    ids=["train", "held_out"],
)
def test_completions(places: list[tuple[int, str]], run: Path, again: Path) -> None:
    """Each key in another place; of the evaluations, which are four, the last one is among those
    of training.
    """
    changes = list(zip((*KEYS, "prompt"), places, strict=False))
    for key, (step, source) in reversed(changes):

        def change(line: dict[str, Any], key: str = key) -> None:
            line[key] = [*line[key][:-1], "x"] if isinstance(line[key], list) else f"{line[key]}x"

        def wanted(line: dict[str, Any], step: int = step, source: str = source) -> bool:
            return (line["step"], line["source"]) == (step, source)

        change_line(run / "completions.jsonl", wanted, change)
        ((of, what),) = compared(run, again)
        assert of == step and what.startswith(f"completions.jsonl: {key}")


def change_digests(run: Path, names: Sequence[str]) -> None:
    def change(line: dict[str, Any]) -> None:
        for name in names:
            line[name] = ("0" if line[name][0] != "0" else "1") + line[name][1:]

    change_line(run / "digests.jsonl", lambda line: line["step"] == 3, change)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["weights", "masters", "moments"])
def test_a_digest_of_what_a_step_left(name: str, run: Path) -> None:
    """No later step could be equal."""
    change_digests(run, [name])
    result = replay(run)
    ((of, what),) = found(result)
    assert of == last_step(result) == 3 and what.startswith(f"digests.jsonl: {name} is ")


def test_digests_of_what_a_step_was_given(run: Path) -> None:
    names = ("tokens", "log_probs", "rewards")
    change_digests(run, names)
    said = list[str]()
    result = replay(run, say=said.append)
    ((of, what),) = found(result)
    assert of == 3 and last_step(result) == STEPS
    assert what.startswith("digests.jsonl: tokens is ") and "2 other keys" in what
    assert "step 3: tokens, log_probs, rewards differ in digests.jsonl" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["digests.jsonl", "rewards.jsonl", "completions.jsonl"])
def test_a_line_that_is_no_line_any_more(file: str, run: Path) -> None:
    path = run / file
    lines = path.read_bytes().splitlines(keepends=True)
    place = len(lines) // 2
    lines[place] = lines[place][:-10] + b"\n"
    path.write_bytes(b"".join(lines))
    result = replay(run)
    ((_, what),) = found(result)
    assert result.exit_code == 1 and what.startswith(f"{file}: {path} has a damaged line")


@pytest.mark.exhaustive
def test_a_last_line_that_is_gone(run: Path) -> None:
    path = run / "digests.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    for step in (None, STEPS):
        result = replay(run, step)
        assert found(result) == [(STEPS, f"digests.jsonl: {path} has no such line")]
        assert last_step(result) == STEPS


@pytest.mark.exhaustive
def test_a_reward_that_does_not_repeat(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """It is a difference; with the recorded rewards the steps are equal."""
    (tmp_path / "reward.py").write_text(
        "import random\n\n"
        "def reward(prompt, completion):\n    return random.SystemRandom().random()\n"
    )
    train(settings(tmp_path, tiny_folder, tmp_path / "run", training={"steps": 4}))
    result = replay(tmp_path / "run", 3)
    assert last_step(result) == 3 and {of for of, _ in found(result)} == {3}
    whats = [what for _, what in found(result)]
    assert any(what.startswith("rewards.jsonl: rewards[0][0] of train/") for what in whats)
    assert any(what.startswith("digests.jsonl: rewards is ") for what in whats)
    for step in (None, 3):
        assert found(replay(tmp_path / "run", step, recorded_rewards=True)) == []


def test_a_recorded_reward_that_was_changed_is_not_believed(run: Path) -> None:
    change_reward(run, "train", 3, (1, 2), 7.25)
    result = replay(run, recorded_rewards=True)
    assert found(result)[0][0] == 3
    assert found(result)[0][1].startswith("digests.jsonl: rewards is ")


def test_other_data_another_reward_and_other_settings_are_refused(
    run: Path, folder: Path, tmp_path: Path
) -> None:
    manifest = json.loads((run / "run.json").read_text())
    manifest["bits"]["torch"] = "1.0"
    (run / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ConfigError, match=r"cannot be replayed(.|\n)*bits\.torch: '1\.0' in the run"
    ):
        replay(run)
    assert found(replay(run, allowed=["bits.torch"])) == []
    with pytest.raises(ConfigError, match=r"cannot be replayed(.|\n)*training\.learning_rate"):
        replay(run, overrides=["--training.learning_rate", "1.0"])
    assert found(replay(run, 1, allowed=["bits"], overrides=["--rollout.max_sequences", "3"])) == []


@pytest.mark.exhaustive
def test_guesses_change_nothing_that_is_compared(
    folder: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong ones, which have the largest Q, K and V that one scale a tensor sees."""
    config = small_run(
        tiny_folder,
        tmp_path / "run",
        f"{folder / 'reward.py'}:reward",
        precision={"preset": "fp8", "kv_scales": "per_tensor"},
        rollout={"max_new_tokens": 12},
        training={"steps": 1, "prompts_per_step": 1},
    )
    train(config)
    chance = Random(0)
    monkeypatch.setattr(ContextTable, "guesses", lambda *_: chance.choices(range(60), k=8))
    again = tmp_path / "again"
    assert found(replay(config.output, output=again, overrides=["--rollout.speculation=8"])) == []
    largest = [
        [line.get("kv_scales/largest_ratio", 0.0) for line in json_lines(root / "metrics.jsonl")]
        for root in (config.output, again)
    ]
    assert max(largest[0]) < max(largest[1])


def test_what_cannot_be_replayed_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step is 7, but of .* steps 1 to 6 can be done again"):
        replay(run, 7)
    with pytest.raises(ConfigError, match=r"holds no run \(there is no run.json\)"):
        replay(tmp_path / "nothing")
    digests = (run / "digests.jsonl").read_bytes()
    (run / "digests.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no digests of its steps"):
        replay(run)
    # of a run that an older Isobit began
    (run / "digests.jsonl").write_bytes(b"".join(digests.splitlines(keepends=True)[2:]))
    with pytest.raises(ConfigError, match="steps 3 to 6 can be done again: the first step with"):
        replay(run, 2)
    result = replay(run)
    assert (first_step(result), found(result)) == (3, [])
    shutil.rmtree(run / "checkpoints" / "step_000002")
    assert first_step(replay(run)) == 5
    with pytest.raises(ConfigError, match="no checkpoint from which step 4 could be done again"):
        replay(run, 4)
    manifest = json.loads((run / "run.json").read_text())
    del manifest["config"]["algorithm"]
    (run / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="a run of `isobit sft`"):
        replay(run)


@pytest.mark.exhaustive
def test_a_run_that_went_on_as_another_one(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(settings(folder, tiny_folder, root, training={"schedule": "constant", "steps": 4}))
    other = settings(
        folder, tiny_folder, root, training={"schedule": "constant", "learning_rate": 2e-2}
    )
    train(other, resume=True, allowed=["training.learning_rate"])
    result = replay(root)
    assert found(result) == [] and result.steps == range(5, 7)
    with pytest.raises(ConfigError, match=r"steps 5 to 6 .*another training\.learning_rate"):
        replay(root, 4)
    for step in (4, 6):  # as keep_last = 1 leaves it
        shutil.rmtree(root / "checkpoints" / f"step_{step:06}", ignore_errors=step == 4)
        with pytest.raises(ConfigError, match="no checkpoint from which step 5"):
            replay(root)


def by_a_rank(world: World, root: str) -> list[list[Any]]:
    return [list(one) for one in found(replay(Path(root), world=world))]


@pytest.mark.exhaustive
def test_several_processes_find_the_same(run: Path) -> None:
    flip_byte(run / "checkpoints" / "step_000004" / "masters.safetensors", 5000)
    change_line(
        run / "completions.jsonl",
        lambda line: line["step"] == 3,
        lambda line: line.update(completion="x"),
    )
    one, other = in_world(2, "tests.commands.test_replay:by_a_rank", str(run))
    assert one == other == by_a_rank(ALONE, str(run))
    assert [of for of, _ in one] == [3, 4]
