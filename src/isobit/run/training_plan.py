"""What the plans of ``isobit train --dry-run`` and ``isobit sft --dry-run`` share: the model, the
flow, the memory, the disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from isobit.config.load import dump_config
from isobit.config.schema import TrainingConfig
from isobit.kernels.backend import support
from isobit.memory.cache_size import num_pages_for
from isobit.memory.device import DevicePlan
from isobit.memory.host import MemoryEstimate, estimate_memory
from isobit.memory.machine import Memory, gib
from isobit.models.decoder import master_shapes
from isobit.models.loaded import DescribedModel
from isobit.precision.compare import describe_flow
from isobit.precision.flow import PrecisionFlow
from isobit.rollout.native.limits import Limits
from isobit.run.setup import plan_for_device
from isobit.run.training_run import Recipe
from isobit.store.checkpoint.format import folders_by_step
from isobit.store.checkpoint.space import DiskPlan, plan_disk
from isobit.store.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a training would use and take."""

    config: Recipe
    model: DescribedModel
    weight_bytes: int
    """Of the model's files; 0 where it starts from random weights."""
    flow: PrecisionFlow
    longest: int
    """Tokens of the longest sequence that training can meet."""
    memory: MemoryEstimate | DevicePlan
    """Of the device that the run would compute on."""
    disk: DiskPlan

    def describe(self, learning: Sequence[str], memory: Memory | None) -> list[str]:
        """The plan as text: the resolved recipe, the model, what is learnt, the precision flow, and
        the memory against what is free now.
        """
        shape = self.model.config
        parameters = sum(prod(sizes) for sizes in master_shapes(shape).values())
        start = gib(self.weight_bytes) if self.weight_bytes else "from random weights"
        return [
            *dump_config(self.config).splitlines(),
            "",
            f"model {self.model.folder}: {shape.family}, {parameters:,} parameters, "
            f"{shape.num_layers} layers, {start}",
            *learning,
            *(f"  {line}" for line in describe_flow(self.flow)),
            *(
                self.memory.describe()
                if isinstance(self.memory, DevicePlan)
                else _describe_memory(self.memory, memory)
            ),
            self.disk.describe(),
            "nothing was written; leave out --dry-run to start",
        ]


def plan_memory(
    config: Recipe,
    training: TrainingConfig,
    model: DescribedModel,
    flow: PrecisionFlow,
    longest: int,
    device: torch.device,
) -> tuple[MemoryEstimate | DevicePlan, Limits]:
    """The memory of a run whose trainer reads ``training``, and what its engine could take.

    Raises ConfigError for what does not fit the device.
    """
    sizes = support(device.type).sizes
    if support(device.type).has_own_memory:
        memory = plan_for_device(model, config, training, longest, device)
        pages = memory.pages
    else:
        memory = estimate_memory(model.config, flow, config.rollout, training, longest, sizes)
        pages = num_pages_for(model.config, flow, config.rollout, sizes)
    context, vocabulary = model.config.max_positions, model.config.vocab_size
    return memory, Limits(context, vocabulary, pages, sizes.page_tokens, has_tokenizer=True)


def plan_checkpoints(config: Recipe, model: DescribedModel) -> DiskPlan:
    """The disk of a run, beside the checkpoints that it has.  Raises StorageError where there is
    too little room.
    """
    disk = plan_disk(config, folders_by_step(RunDirectory(config.output).checkpoints), model.config)
    disk.check()
    return disk


def _describe_memory(estimate: MemoryEstimate, memory: Memory | None) -> list[str]:
    free = f" of {gib(memory.available)} free" if memory else ""
    lines = [f"memory, about {gib(estimate.total)}{free}:"]
    for item in estimate.items:
        note = "while it lasts; only the largest counts" if item.passing else ""
        lines.append(f"  {item.name:<22} {gib(item.size):>10}  {note}".rstrip())
    warning = estimate.warning(memory.available) if memory else None
    return [*lines, *([warning] if warning else [])]
