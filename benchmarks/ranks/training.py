"""The training phase of one update on W ranks: the same micro-batches whatever W, so the same bits,
which digests show.

A round takes as long as one micro-batch does on one GPU, and what of the exchange is not hidden
behind the backward: seconds a round are the ``backward`` and ``forward`` phases over the rounds.
"""

from pathlib import Path
from statistics import median

import torch

from benchmarks.passes.cases import Case
from benchmarks.passes.phases import Phases
from benchmarks.ranks.digests import master_digest, published_digest
from benchmarks.ranks.links import published_gather, timed
from benchmarks.ranks.writing import RankRows
from isobit.config.tables import PrecisionConfig, TrainingConfig
from isobit.models.policy import random_policy
from isobit.parallel.world import World
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer

REPEATS = 3


def run_training(
    world: World, case: Case, microbatches: int, out: Path, note: str, device: str = "cuda"
) -> None:
    """A row: medians over updates of so many micro-batches, after one of ``world.size``."""
    own = world.own_device(torch.device(device))
    phases = Phases(on_gpu=own.type == "cuda")
    precision = PrecisionConfig.model_validate(case.mode)
    policy = random_policy(case.config, precision, 0, own, world=world)
    config = TrainingConfig(moments="bf16", recompute=case.recompute, learning_rate=5e-5)
    trainer = Trainer(policy, config, total_updates=1000, timing=phases)
    pairs = [((first,), rest) for first, *rest in case.token_ids().tolist() * microbatches]
    batches = pack_pairs(pairs, case.tokens)
    trainer.update(batches[: world.size], SupervisedObjective())
    if own.type == "cuda":
        torch.cuda.reset_peak_memory_stats(own)
    found = []
    for _ in range(REPEATS):
        world.barrier("the others")
        phases.start()
        trainer.update(batches, SupervisedObjective())
        found.append(phases.stop())
    seconds = median(sum(one.values()) for one in found)
    middle = {name: median(one[name] for one in found) for name in found[0]}
    rounds = -(-len(batches) // world.size)
    arriving, gather = published_gather(policy, world)
    gathers = [timed(world, gather, own) for _ in range(5)]
    RankRows(world, out, case.mode, case.shape).write(
        kind="training",
        case=str(case),
        note=note,
        microbatches=len(batches),
        rounds=rounds,
        seconds=seconds,
        phases_s=middle,
        round_s=(middle["forward"] + middle["backward"]) / rounds,
        tokens_per_s=len(batches) * case.tokens / seconds,
        peak_gib=torch.cuda.max_memory_allocated(own) / 2**30 if own.type == "cuda" else None,
        gather_s=median(gathers),
        gather_bytes=arriving,
    )


def run_digests(
    world: World, case: Case, microbatches: int, out: Path, device: str = "cuda"
) -> None:
    """Rows: the digests after an update of an odd number of micro-batches, so that a rank idles in
    the last round.
    """
    own = world.own_device(torch.device(device))
    precision = PrecisionConfig.model_validate(case.mode)
    policy = random_policy(case.config, precision, 0, own, world=world)
    config = TrainingConfig(moments="bf16", recompute=case.recompute, learning_rate=5e-5)
    trainer = Trainer(policy, config, total_updates=1000)
    pairs = [((first,), rest) for first, *rest in case.token_ids().tolist() * microbatches]
    figures = trainer.update(pack_pairs(pairs, case.tokens), SupervisedObjective())
    RankRows(world, out, case.mode, case.shape).write(
        kind="digests",
        case=str(case),
        microbatches=microbatches,
        loss=figures.metrics["loss"],
        grad_norm=figures.metrics["grad_norm"],
        published=published_digest(policy),
        masters=master_digest(policy),
    )
