"""Several ranks begin a run's directory and write at its end together, or all fail."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.models import saving
from isobit.models.config import ModelConfig
from isobit.models.folder import LoadedModel, write_model
from isobit.models.policy import random_policy
from isobit.models.safetensors import write_shards
from isobit.observe.console import Console
from isobit.parallel.world import ALONE, World, raised_on_all
from isobit.starter import starter_folder
from isobit.store import shared_disk, state
from isobit.store.checkpoint import read_checkpoint
from isobit.store.keeper import CheckpointKeeper
from isobit.store.resume import begin
from isobit.store.state import take_boundary
from isobit.training.trainer import Trainer
from isobit.util.errors import CheckpointError, StorageError
from tests.store.test_ranks import raised
from tests.worlds import in_world

CONFIG = ModelConfig("qwen3", 300, 128, 256, 1, 4, 2, 64, 128, 1e-6, 1e4, True)


class Sampler:
    """Nothing is sampled."""

    def state(self) -> dict[str, int]:
        return {"place": 3}

    def restore(self, saved: Any, other_prompts: bool) -> None:
        assert saved == {"place": 3}
        assert not other_prompts


@dataclass
class SmallRun:
    """A training whose trainer has taken one update, of gradients made up."""

    config: RunConfig
    model: LoadedModel
    trainer: Trainer
    sampler: Any = field(default_factory=Sampler)
    extras: Any = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=lambda: {"data.train.content": "the same"})

    def data_figures(self) -> dict[str, Any]:
        return {}

    def engine_figures(self) -> None:
        return None

    @classmethod
    def of(cls, world: World, output: Path, seed: int = 0) -> "SmallRun":
        config = RunConfig.model_validate(
            {
                "model": "starter",
                "output": output,
                "reward": {"function": "isobit.starter.tasks:correct_answer"},
                "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl"}},
                "training": {"steps": 4, "moments": "fp8"},
            }
        )
        policy = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed, world=world)
        trainer = Trainer(policy, config.training, total_updates=4)
        model = LoadedModel(starter_folder(), policy, None, ())  # pyright: ignore[reportArgumentType] (no text here)
        return cls(config, model, trainer)

    def update(self) -> None:
        """One step of AdamW by gradients that depend on the element's number alone."""
        policy = self.model.policy
        for name, master in policy.masters.items():
            shape = policy.shapes[name]
            whole = torch.arange(int(torch.tensor(shape).prod())).sin().reshape(shape)
            master.grad = whole[policy.rows(name)].clone()
        self.trainer._step(1.0, 1e-3)
        self.trainer.updates += 1


def saved(world: World, root: Path, error: Exception) -> list[str]:
    """The files in a run's directory after its keeper was left with an error in step 2."""
    run = SmallRun.of(world, root)
    run.update()
    with begin(run.config, CONFIG, False, print, world=world) as start:
        start.open(run)
        boundary = take_boundary(1, run, {"evaluations": {}}, {}, {})
        with suppress(type(error)), CheckpointKeeper(run, start, boundary, dict, Console()):
            raise error
    world.barrier("saved")
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def everything(world: World, argument: dict[str, str]) -> dict[str, Any]:
    """All that is shown of two ranks, in one world."""
    place = Path(argument["place"])
    return {
        "by one alone": saved(world, place / "alone", ValueError("of one rank")),
        "by all": saved(world, place / "all", raised_on_all(CheckpointError("of all ranks"))),
        "restored": restored(world, place / "all"),
        "from one process": restored(world, Path(argument["one"])),
        "full disk": model_on_a_full_disk(world, place),
        "refusals": refusals(world, place),
    }


def restored(world: World, root: Path) -> bool:
    """Whether another policy and trainer become what they were."""
    run, expected = SmallRun.of(world, root, seed=9), SmallRun.of(world, root)
    expected.update()
    state.restore(read_checkpoint(root / "checkpoints" / "step_000001", world), run)
    pairs = [
        *(
            (run.model.policy.masters[name], one)
            for name, one in expected.model.policy.masters.items()
        ),
        *((run.trainer.moments()[name], one) for name, one in expected.trainer.moments().items()),
    ]
    run.update()
    expected.update()
    return all(torch.equal(bits(one), bits(other)) for one, other in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def model_on_a_full_disk(world: World, place: Path) -> list[Any]:
    """What each rank raises where rank 0 cannot write the second tensor; and what is left."""
    run = SmallRun.of(world, place / "full")
    (place / "full").mkdir(exist_ok=True)

    def full(folder: Path, layout: Any, value: Any, limit: int) -> Any:
        asked = iter(range(1000))

        def fails(name: str) -> torch.Tensor:
            if next(asked) == 1:
                raise OSError(28, "No space left on device")
            return value(name)

        return write_shards(folder, layout, fails, limit)

    target = place / "full" / "model"
    with patch.object(saving, "write_shards", full):
        text = raised(lambda: write_model(run.model, target))
    write_model(run.model, target)
    world.barrier("written")
    return [text, sorted(path.name for path in target.parent.iterdir())]


def refusals(world: World, place: Path) -> list[str]:
    """What each rank says of a directory that is used, and of disks that are not shared."""
    used = SmallRun.of(world, place / "all")
    apart = SmallRun.of(world, place / f"disk{world.rank}" / "run")
    apart.config.output.parent.mkdir()
    with patch.object(shared_disk, "PATIENCE_S", 0.3):
        return [raised(partial(enter, world, one)) for one in (used, apart)]


def enter(world: World, run: SmallRun) -> None:
    """Begin a run in its directory."""
    with begin(run.config, CONFIG, False, print, world=world):
        pass


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*.safetensors"))
    }


@pytest.mark.exhaustive
def test_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    one = tmp_path / "one"
    files = saved(ALONE, one, StorageError("of the only rank"))
    argument = {"place": str(tmp_path / "two"), "one": str(one)}
    found = in_world(2, f"{__name__}:everything", argument)
    host = os.uname().nodename
    for rank, by in enumerate(found):
        assert by["by one alone"] == [".lock", "ending.json", "rewards.jsonl", "run.json"]
        assert by["by all"] == files
        assert by["restored"]
        assert by["from one process"]
        text, left = by["full disk"]
        assert text.startswith(f"NoSpaceError: rank 0 on {host}: the trained model could not be ")
        assert "No space left" in text
        assert left == ["model"]
        used, apart = by["refusals"]
        kinds = ("ConfigError: ", "PeerError: rank 0 failed: ConfigError: ")
        assert used.startswith(kinds[rank])
        assert "which already holds files of a run" in used
        assert apart.startswith("ConfigError: output is ")
        assert f"  rank 1 on {host}: {tmp_path}/two/disk1\n" in apart
        assert "rank 0 on" not in apart
        assert "put it on a file system that all hosts share" in apart
    assert restored(ALONE, one)
    assert "checkpoints/step_000001/optimiser.safetensors" in files
    assert "model/model.safetensors" in files
    assert digests(tmp_path / "two" / "all") == digests(one)
