"""A rank that is killed while all write a checkpoint ends the run, not the checkpoint before; nor
do weights that arrive otherwise than they were sent.  One process goes on from it, to the bytes of
the run that nothing happened to.
"""

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.models.published import PublishedWeights
from isobit.models.safetensors import FilePlan, Slice
from isobit.parallel.world import World, is_raised_on_all, raised_on_all
from isobit.precision.quant_tensor import QuantTensor
from isobit.rollout.native import NativeEngine
from isobit.run.loop import train
from isobit.run.rollouter_process import train_by_ranks
from isobit.store import checkpoint as checkpoint_format
from isobit.training.trainer import Trainer
from isobit.util.disk_space import LineFile
from isobit.util.errors import IsobitError, MismatchError
from tests.worlds import in_world

MakeConfig = Callable[..., RunConfig]


def train_and_be_killed(world: World, values: dict[str, Any]) -> None:
    """A run whose last rank dies between the masters and the moments of step 4's checkpoint."""
    write_slices = checkpoint_format.write_slices

    def dying(
        path: Path, plan: FilePlan, slices: dict[str, Slice], beat: Callable[[], None]
    ) -> None:
        begun = path.parent.name == ".step_000004.partial" and path.name.startswith("optimiser")
        if begun and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write_slices(path, plan, slices, beat)

    checkpoint_format.write_slices = dying
    train(RunConfig.model_validate(values), world=world)


@pytest.mark.exhaustive
def test_a_rank_killed_while_all_write(
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config(cluster={"processes": 2})
    with pytest.raises(AssertionError, match=rf"rank 1 \(exit {-signal.SIGKILL}\)"):
        in_world(2, f"{__name__}:train_and_be_killed", config.model_dump(mode="json"))
    left = {path.name for path in (config.output / "checkpoints").iterdir()}
    assert left - {".step_000004.partial"} == {"step_000002"}
    train(config, resume=True)
    assert without_ranks(outcome(config.output)) == without_ranks(expected)


def train_with_permuted_weights(world: World, values: dict[str, Any]) -> list[Any]:
    """A run to whose last rank the rows of a matrix come in another order in step 3; -> what was
    raised, the engine's steps after that, and the checkpoints.
    """
    gather, step = PublishedWeights.gather, NativeEngine.step
    publications, steps_after = count(1), list[int]()

    def permuting(published: PublishedWeights, *rest: Any) -> None:
        gather(published, *rest)
        if next(publications) < 5:  # two updates a step
            return
        steps_after.append(0)
        if world.rank == world.size - 1:
            matrix = published.sides["rollout"].linears["layers.0.gate_up_proj"].matrix
            assert isinstance(matrix, QuantTensor)
            rows = matrix.values.view(torch.uint8)
            rows.copy_(rows.flip(0))

    def stepping(engine: NativeEngine) -> Any:
        if steps_after:
            steps_after[0] += 1
        return step(engine)

    raised = "nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PublishedWeights, "gather", permuting)
        patch.setattr(NativeEngine, "step", stepping)
        config = RunConfig.model_validate(values)
        try:
            train(config, world=world)
        except MismatchError as error:
            raised = str(error)
    left = sorted(path.name for path in (config.output / "checkpoints").iterdir())
    return [raised, steps_after, left]


def test_weights_that_arrive_permuted_end_the_run_before_anything_is_sampled_with_them(
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config(cluster={"processes": 2})
    found = in_world(2, f"{__name__}:train_with_permuted_weights", config.model_dump(mode="json"))
    for raised, steps_after, left in found:
        assert raised.startswith("the published weights of rank 1 are not those of rank 0 (version")
        assert steps_after == [0]
        assert left == ["step_000002"]
    train(config, resume=True)
    assert without_ranks(outcome(config.output)) == without_ranks(expected)


def train_with_a_broken_disk(world: World, values: dict[str, Any]) -> list[Any]:
    """A run whose first rank cannot write its second line of metrics or rewards, or another change
    of its micro-batches; -> what was raised, and whether all ranks knew, by file.
    """
    found: list[Any] = []
    write = LineFile.write
    for name in ("metrics.jsonl", "rewards.jsonl", "budget.jsonl"):
        config = RunConfig.model_validate({**values, "output": f"{values['output']}-{name[:-6]}"})

        def failing(file: LineFile, line: bytes, lasting: bool = False, broken: str = name) -> None:
            if file._path.name == broken and (broken[0] == "b" or file._path.stat().st_size):
                raise OSError(5, "Input/output error")
            write(file, line, lasting)

        raised: list[Any] = ["nothing"]
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(LineFile, "write", failing)
            if name == "budget.jsonl":
                short_of_memory(patch)
            try:
                train_by_ranks(config, world=world)
            except (IsobitError, OSError) as error:
                raised = [
                    type(error).__name__,
                    str(error).partition(" in ")[0],
                    is_raised_on_all(error),
                ]
        found.append(raised)
    return found


def short_of_memory(patch: pytest.MonkeyPatch) -> None:
    """All ranks run out of memory in their first update."""
    update, calls = Trainer.update, count(1)

    def failing(trainer: Trainer, *rest: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise raised_on_all(torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))
        return update(trainer, *rest, **options)

    patch.setattr(Trainer, "update", failing)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rollouters", [0, 1])
def test_what_one_rank_alone_writes_ends_all_where_it_cannot(
    rollouters: int, make_config: MakeConfig
) -> None:
    cluster = {"processes": 2, "rollouters": rollouters}
    config = make_config(cluster=cluster, **{"async": {"lag": rollouters}})
    values = config.model_dump(mode="json", by_alias=True)
    found = in_world(2, f"{__name__}:train_with_a_broken_disk", values)
    for of_first, of_second in zip(*found, strict=True):
        kind, text, all_know = of_first
        assert kind == "StorageError" and "could not be written" in text and all_know
        assert of_second[0] == ("PeerError" if rollouters else "StorageError")
        assert of_second[2], "nobody is left waiting"


def without_ranks(outcome: dict[str, Any]) -> dict[str, Any]:
    """An outcome without figures of how ranks shared out the work."""
    metrics = [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("waiting/", "rollout/"))
        }
        for line in outcome["metrics"]
    ]
    return {**outcome, "metrics": metrics}
