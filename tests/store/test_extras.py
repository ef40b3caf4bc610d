"""What else has a state is saved and put back with its tensors, as exactly as the policy."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.config.recipes import RunConfig
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import random_policy
from isobit.models.safetensors import Slice
from isobit.records.metrics import Metrics
from isobit.run import log, loop, run
from isobit.run.frozen_models import Reference
from isobit.run.loop import train
from isobit.run.rl_run import RlRun, prepare_rl
from isobit.store.checkpoint import (
    FORMAT,
    Snapshot,
    folders_by_step,
    read_checkpoint,
    write_checkpoint,
)
from isobit.training.trainer import Trainer
from isobit.util.errors import CheckpointError, Interrupted, StoppedAtOnce

MakeConfig = Callable[..., RunConfig]
STEPS = {
    "training": {"steps": 4, "without_signal": "take"},
    "checkpoint": {"every": 1, "keep_last": 9},
}


class Diary:
    """An extra that grows by an entry a step."""

    def __init__(self) -> None:
        self.pages: list[torch.Tensor] = []

    def write(self, version: int) -> None:
        self.pages.append(torch.full((3,), version))

    def state(self) -> dict[str, Any]:
        return {"pages": len(self.pages)}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {f"page {n}": page for n, page in enumerate(self.pages)}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        if len(tensors) != state["pages"]:
            raise CheckpointError(f"{state['pages']} pages were written")
        self.pages = [tensors[f"page {n}"] for n in range(state["pages"])]


class Extras:
    """Those of the runs of a test; the latest run's are in ``diary`` and ``reference``."""

    def __init__(self) -> None:
        self.refresh_every = 2
        self.diary, self.reference = Diary(), None

    def of(self, run: RlRun) -> RlRun:
        self.diary = Diary()
        policy = run.model.policy
        frozen = FrozenPolicy.of(policy)
        self.reference = Reference(frozen, policy, str(run.model.folder), self.refresh_every)
        run.extras = {"diary": self.diary, "reference": self.reference}
        return run


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> Extras:
    """Runs keep a diary and a reference model, changed at the end of each step."""
    made = Extras()
    monkeypatch.setattr(loop, "prepare_rl", lambda *given: made.of(prepare_rl(*given)))
    step = log.RlLog.step

    def with_extras(log: Any, number: int, *rest: Any) -> Metrics:
        made.diary.write(log._run.model.policy.version)
        assert made.reference is not None
        made.reference.refresh_if_due(number)
        return step(log, number, *rest)

    monkeypatch.setattr(log.RlLog, "step", with_extras)
    return made


def content(root: Path, step: int) -> dict[str, bytes]:
    folder = root / "checkpoints" / f"step_{step:06}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.exhaustive
def test_their_files_are_written_once_they_hold_something(
    make_config: MakeConfig, extras: Extras
) -> None:
    config = make_config(**STEPS)
    train(config)
    files = [set(content(config.output, step)) for step in (1, 2, 4)]
    own = {"masters.safetensors", "optimiser.safetensors", "diary.safetensors"}
    assert files == [own, own | {"reference.safetensors"}, own | {"reference.safetensors"}]
    checkpoint = read_checkpoint(config.output / "checkpoints" / "step_000004")
    found = checkpoint.extras()
    assert found.keys() == {"diary", "reference"}
    assert torch.equal(found["diary"]["page 2"], torch.full((3,), 4))
    assert checkpoint.state["extras"] == {"diary": {"pages": 4}, "reference": {"refreshes": 2}}
    assert extras.reference is not None
    published = load_file(checkpoint.folder / "reference.safetensors")
    for name, tensor in extras.reference.frozen.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), published[name].view(torch.uint8))
    first = read_checkpoint(config.output / "checkpoints" / "step_000001")
    loaded = FrozenPolicy.load(Path(config.model), config.precision)
    assert first.state["extras"]["reference"]["sha256"] == loaded.digest()
    entry = checkpoint.manifest["files"]["diary.safetensors"]
    data = (checkpoint.folder / "diary.safetensors").read_bytes()
    assert entry == {"bytes": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}


@pytest.mark.few(1)
@pytest.mark.parametrize("broken_after", [1, 3])
def test_a_resumed_run_has_them_as_they_were(
    broken_after: int, make_config: MakeConfig, extras: Extras, tmp_path: Path
) -> None:
    whole = make_config(output=tmp_path / "whole", **STEPS)
    train(whole)

    def break_off(_: RunConfig, step: int) -> bool:
        if step == broken_after + 1:
            raise StoppedAtOnce  # nothing more is saved
        return step == 0

    broken = make_config(output=tmp_path / "broken", **STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "evaluation_is_due", break_off)
        with pytest.raises(StoppedAtOnce):
            train(broken)
    assert max(folders_by_step(broken.output / "checkpoints")) == broken_after
    train(broken, resume=True)
    assert content(broken.output, 4) == content(whole.output, 4)


def test_an_extra_that_moved_in_an_abandoned_step_is_not_saved_under_the_step_before(
    make_config: MakeConfig, extras: Extras, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Trainer.update

    def interrupted(trainer: Trainer, *rest: Any, **settings: Any) -> Any:
        if len(extras.diary.pages) == 2:
            extras.diary.write(0)
            raise Interrupted("SIGTERM", 15)
        return update(trainer, *rest, **settings)

    config = make_config(**STEPS | {"checkpoint": {"every": 0}})
    monkeypatch.setattr(Trainer, "update", interrupted)
    with pytest.raises(Interrupted):
        train(config)
    assert not (config.output / "checkpoints").exists()


def test_another_folder_of_the_reference_is_refused_on_resume(
    make_config: MakeConfig, extras: Extras, tmp_path: Path, tiny_folder: Path
) -> None:
    extras.refresh_every = 0
    config = make_config(training={"steps": 2, "schedule": "constant"}, checkpoint={"every": 1})
    train(config)
    more = make_config(training={"steps": 3, "schedule": "constant"}, checkpoint={"every": 1})
    prepare = extras.of

    def another(run: RlRun) -> RlRun:
        prepare(run)
        other = random_policy(run.model.policy.config, config.precision, seed=5)
        extras.reference = Reference(FrozenPolicy.of(other), run.model.policy, "its/folder")
        run.extras["reference"] = extras.reference
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "of", another)
        with pytest.raises(
            CheckpointError, match=r"step_000002: reference: the weights in its/fol"
        ):
            train(more, resume=True)
    train(more, resume=True)


def test_extras_that_the_run_does_not_have_are_refused_by_name(
    make_config: MakeConfig, extras: Extras, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_config(training={"steps": 2}))
    prepare = extras.of

    def without_diary(run: RlRun) -> RlRun:
        del prepare(run).extras["diary"]
        return run

    monkeypatch.setattr(extras, "of", without_diary)
    with pytest.raises(
        CheckpointError, match="the checkpoint has diary, and the run has none: it is not"
    ):
        train(make_config(training={"steps": 3}), resume=True)

    def with_more(run: RlRun) -> RlRun:
        prepare(run).extras["more"] = Diary()
        return run

    monkeypatch.setattr(extras, "of", with_more)
    with pytest.raises(
        CheckpointError, match="the run has more, and the checkpoint has none: it is not"
    ):
        train(make_config(training={"steps": 3}), resume=True)


@pytest.mark.parametrize(("version", "advice"), [(2, "an older Isobit"), (4, "a newer Isobit")])
def test_a_checkpoint_of_another_format_is_refused(
    version: int, advice: str, make_config: MakeConfig
) -> None:
    config = make_config(training={"steps": 2})
    train(config)
    path = config.output / "checkpoints" / "step_000002" / "manifest.json"
    content = json.loads(path.read_text())
    assert content["format"] == FORMAT == 3
    path.write_text(json.dumps({**content, "format": version}))
    with pytest.raises(CheckpointError, match=f"has the format {version}, .* use {advice}"):
        read_checkpoint(path.parent)


def test_the_bytes_announced_cover_extras(tmp_path: Path) -> None:
    diary = Diary()
    diary.pages = [torch.zeros(100_000, dtype=torch.int32)]
    masters = {"weight": Slice.whole(torch.zeros(5))}
    files = {"diary": diary.tensors(), "empty": {}}
    made = Snapshot(3, masters, {}, {}, {"config": {}}, files)
    without = Snapshot(3, masters, {}, {}, {"config": {}})
    assert made.num_bytes - without.num_bytes == 400_000
    folder = write_checkpoint(tmp_path, made)
    assert read_checkpoint(folder).extras().keys() == {"diary"}
    assert sum(file.stat().st_size for file in folder.iterdir()) < made.num_bytes


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "its bytes have changed"),
    (cut, "it was cut or overwritten"),
    (Path.unlink, "is missing"),
]


@pytest.mark.exhaustive
def test_a_damaged_file_of_an_extra_rules_the_checkpoint_out(
    make_config: MakeConfig, extras: Extras, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_config(output=tmp_path / "whole", **STEPS)
    train(whole)
    last = whole.output / "checkpoints" / "step_000004"
    for name in ("diary.safetensors", "reference.safetensors"):
        for number, (damage, reason) in enumerate(DAMAGES):
            copy = tmp_path / f"{name}{number}" / last.name
            shutil.copytree(last, copy)
            read_checkpoint(copy)
            damage(copy / name)
            with pytest.raises(CheckpointError) as error:
                read_checkpoint(copy)
            assert str(copy / name) in str(error.value) and reason in str(error.value)
    before = content(whole.output, 4)
    flip(last / "reference.safetensors")
    train(whole, resume=True)
    assert "using the one before it: step_000003" in capsys.readouterr().out
    assert content(whole.output, 4) == before
