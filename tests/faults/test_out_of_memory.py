"""A run that runs out of memory goes on with smaller micro-batches, and a resumed one makes that
change again where it was made.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.records.batch import PackedBatch
from isobit.run.loop import train
from isobit.store import keeper
from isobit.training.trainer import Trainer
from isobit.util.errors import OutOfMemoryError
from tests.death import Death
from tests.tiny import json_lines

MakeConfig = Callable[..., RunConfig]
Outcome = Callable[[Path], dict[str, Any]]
UPDATE, STEP = 5, 3
"""The second update of step 3 of 6: updates are counted from 0, and a step has two.  Checkpoints
follow steps 2, 4 and 6.
"""
BUDGET = {"tokens_per_microbatch": 64}


@contextmanager
def little_memory(update: int = UPDATE, tokens: int = 32) -> Iterator[None]:
    """One update has no memory for micro-batches of more tokens than that."""
    run = Trainer.update

    def limited(self: Trainer, batches: Sequence[PackedBatch], *more: Any) -> Any:
        if self.updates == update and max(b.token_ids.numel() for b in batches) > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run(self, batches, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", limited)
        yield


@contextmanager
def death_after(step: int) -> Iterator[None]:
    """The process dies once that step is done, and its checkpoint, if one is due, written."""
    save_if_due = keeper.CheckpointKeeper.save_if_due

    def die(self: keeper.CheckpointKeeper, done: int) -> None:
        save_if_due(self, done)
        if done == step:
            raise Death

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper.CheckpointKeeper, "save_if_due", die)
        try:
            yield
        except Death:
            return
    pytest.fail("the run ended before that step")


@pytest.fixture(scope="module")
def lowered(
    shared_values: dict[str, Any], outcome: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The outcome of a run with little memory that nothing else happens to."""
    output = tmp_path_factory.mktemp("lowered") / "run"
    config = RunConfig.model_validate(
        {**shared_values, "training": shared_values["training"] | BUDGET, "output": output}
    )
    with little_memory():
        train(config)
    return outcome(output) | {"budget.jsonl": (output / "budget.jsonl").read_bytes()}


@pytest.mark.exhaustive
def test_the_change_is_journalled_and_said_and_decides_bits(
    lowered: dict[str, Any],
    make_config: MakeConfig,
    outcome: Outcome,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = json.loads(lowered["budget.jsonl"])
    assert line == {"step": STEP, "update": UPDATE, "old": 64, "new": 32}
    config = make_config(training=BUDGET)
    with death_after(STEP), little_memory():
        train(config)
    said = (
        "step 3: out of memory with 64 tokens a micro-batch; the update is done again with 32, "
        "as is every later one"
    )
    assert said in capsys.readouterr().out
    train(make_config(training=BUDGET, output=config.output.with_name("plenty")))
    plenty = outcome(config.output.with_name("plenty"))
    assert plenty["masters.safetensors"] != lowered["masters.safetensors"], (
        "else the tests below show nothing"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [STEP, 4, 5])
def test_a_killed_run_makes_the_change_again_without_running_out_of_memory(
    step: int,
    lowered: dict[str, Any],
    make_config: MakeConfig,
    outcome: Outcome,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After step 3 the newest checkpoint is older than the change; after steps 4 and 5 it holds
    it.
    """
    config = make_config(training=BUDGET)
    with death_after(step), little_memory():
        train(config)
    capsys.readouterr()
    train(config, resume=True)
    assert (
        outcome(config.output) | {"budget.jsonl": (config.output / "budget.jsonl").read_bytes()}
        == lowered
    )
    assert "out of memory" not in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_kill_while_the_line_is_written_runs_out_of_memory_once_more(
    lowered: dict[str, Any], make_config: MakeConfig, outcome: Outcome
) -> None:
    """Nothing was learnt with the smaller budget yet; what there is of the line goes."""
    config = make_config(training=BUDGET)
    with death_after(2):
        train(config)
    (config.output / "budget.jsonl").write_bytes(lowered["budget.jsonl"][:20])
    with little_memory():
        train(config, resume=True)
    assert (
        outcome(config.output) | {"budget.jsonl": (config.output / "budget.jsonl").read_bytes()}
        == lowered
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokens", [16, 128])
def test_another_setting_that_is_allowed_holds_from_the_checkpoint_on(
    tokens: int, make_config: MakeConfig, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in further parts of the run, and where its steps are done again."""
    allowed, sizes = ["training.tokens_per_microbatch"], list[int]()
    config, update = make_config(training={"tokens_per_microbatch": tokens}), Trainer.update
    straight = config.model_copy(update={"output": config.output.with_name("straight")})

    def seen(self: Trainer, batches: Sequence[PackedBatch], *more: Any) -> Any:
        sizes.append(max(batch.token_ids.numel() for batch in batches))
        return update(self, batches, *more)

    with death_after(4), little_memory():
        train(make_config(training=BUDGET))
    shutil.copytree(config.output, straight.output)
    monkeypatch.setattr(Trainer, "update", seen)
    train(straight, resume=True, allowed=allowed)
    with death_after(5):
        train(config, resume=True, allowed=allowed)
    train(config, resume=True, allowed=allowed)
    assert replay(config.output, 6, say=lambda _: None).differences == []
    assert outcome(config.output) == outcome(straight.output)
    assert len(sizes) == 4 + 2 + 4 + 4
    assert all(32 < size <= tokens if tokens > 32 else size <= tokens for size in sizes)
    for output in (config.output, straight.output):
        assert json_lines(output / "budget.jsonl") == [
            {"step": STEP, "update": UPDATE, "old": 64, "new": 32},
            {"step": 5, "update": 8, "old": 32, "new": tokens, "allowed": True},
        ]


def test_a_run_that_cannot_go_on_keeps_what_it_has_learnt(
    make_config: MakeConfig, outcome: Outcome, expected: dict[str, Any]
) -> None:
    config = make_config()
    with (
        little_memory(2 * STEP, tokens=1),
        pytest.raises(OutOfMemoryError, match=r"each micro-batch is one sequence, of at most \d+ "),
    ):
        train(config)
    assert sorted(path.name for path in (config.output / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000003",
    ]
    recomputing = make_config(
        training={"recompute": "full"}
    )  # what the message advises; it leaves every bit as it is
    train(recomputing, resume=True)
    assert outcome(config.output) == expected
