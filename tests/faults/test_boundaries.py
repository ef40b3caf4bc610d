"""A process that dies at any single step of writing a checkpoint, or of finishing the run, loses
that checkpoint and nothing else.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import RunConfig
from isobit.models import folder as model
from isobit.run.loop import train
from isobit.store import checkpoint as checkpoint_format
from isobit.store import keeper
from isobit.util import files as storage
from tests.death import Death

MakeConfig = Callable[..., RunConfig]
PLACES = [
    (checkpoint_format, "create_file"),
    (checkpoint_format, "write_slices"),
    (checkpoint_format, "own_digests"),
    (checkpoint_format, "sync"),
    (checkpoint_format, "commit_folder"),
    (storage, "sync"),
    (keeper, "sync_journals"),
    (keeper, "write_checkpoint"),
    (keeper, "apply_retention"),
    (model, "write_folder"),
    (storage, "replace_folder"),
    (shutil, "rmtree"),
    (Path, "rename"),
]
"""Whatever touches the disk on the way; some are seen from two modules."""


def die_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Die before operation number ``moment``, which is after the one before it."""
    count = iter(range(10**9))

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if next(count) == moment:
                raise Death
            return operation(*arguments, **options)

        return run

    for module, name in PLACES:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))


@pytest.mark.exhaustive
def test_dying_at_any_write_boundary_loses_nothing(
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    # The state at step 5, from which the last step, the last checkpoint, its retention, model and
    # summary are written.
    checkpoint = {"every": 1, "keep_last": 1}
    train_to_5 = make_config(output=tmp_path / "at5", checkpoint=checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            keeper.CheckpointKeeper,
            "save_if_due",
            stop_after_5(keeper.CheckpointKeeper.save_if_due),
        )
        with pytest.raises(Death):
            train(train_to_5)
    moment, finished = 0, False
    while not finished:
        config = make_config(output=tmp_path / f"death{moment}", checkpoint=checkpoint)
        shutil.copytree(train_to_5.output, config.output)
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, moment)
            try:
                train(config, resume=True)
                finished = True
            except Death:
                pass
        train(config, resume=True)
        assert outcome(config.output) == expected, f"after death at moment {moment}"
        assert [path.name for path in (config.output / "checkpoints").iterdir()] == ["step_000006"]
        shutil.rmtree(config.output)
        moment += 1
    assert moment > 20


def stop_after_5(save_if_due: Callable[..., None]) -> Callable[..., None]:
    def run(self: keeper.CheckpointKeeper, step: int) -> None:
        save_if_due(self, step)
        if step == 5:
            raise Death

    return run
