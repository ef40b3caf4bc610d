"""An infinity in a gradient costs the run that update, and the console says in which layer it
was.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from isobit.store.keeper import CheckpointKeeper
from isobit.training.trainer import Trainer
from tests.death import Death

PLANTED = "layers.0.o_proj.weight"


@pytest.fixture
def infinity_in_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of the gradient of one matrix, in the first of the step's two updates; another
    matrix before it sees one too.
    """
    update = Trainer.update

    def planting(self: Trainer, *arguments: Any) -> Any:
        squares = self.policy.backend.gradient_squares

        def planted(grads: Sequence[torch.Tensor]) -> list[float]:
            for name in ("layers.0.qkv_proj.weight", PLANTED):
                gradient = self.policy.masters[name].grad
                assert gradient is not None
                gradient[5] = math.inf
            return squares(grads)

        with monkeypatch.context() as patch:
            if self.updates == 4:
                patch.setattr(self.policy.backend, "gradient_squares", planted)
            return update(self, *arguments)

    monkeypatch.setattr(Trainer, "update", planting)


@pytest.mark.usefixtures("infinity_in_step_3")
def test_the_update_is_skipped_with_its_layer_and_a_resumed_run_skips_it_again(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    outcome: Callable[[Path], dict[str, Any]],
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    summary = train(config)
    printed = capsys.readouterr().out
    assert printed.count("an update was skipped") == summary.skipped_updates == 1
    assert f"note: an update was skipped: the gradient of {PLANTED} is not finite" in printed
    skipped = outcome(config.output)
    steps = [line for line in skipped["metrics"] if "updates/skipped" in line]
    assert [line["updates/skipped"] for line in steps] == [0, 0, 1, 0, 0, 0]
    assert skipped["masters.safetensors"] != expected["masters.safetensors"]
    killed = make_config(output=config.output.with_name("killed"))

    def die_after_step_3(
        self: CheckpointKeeper, step: int, save_if_due: Any = CheckpointKeeper.save_if_due
    ) -> None:
        save_if_due(self, step)
        if step == 3:
            raise Death

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointKeeper, "save_if_due", die_after_step_3)
        with pytest.raises(Death):
            train(killed)
    train(killed, resume=True)
    assert outcome(killed.output) == skipped
