"""Two steps as a run on a GPU makes them, engine and trainer by turns, and what each phase takes
beside what was planned.

A rollout with the planned KV cache: prompts of the case's length, and more short ones than fit a
batch.  Then an update over two full micro-batches.  The second step, which has moments from its
beginning, is the one that counts.  Where they are on the host for the rollout, the seconds of a
turn of the trainer hold their way to the GPU and back, and each way is counted by itself too.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle

import torch

from benchmarks.comparison.device import allocate_in_pages, card_planner
from benchmarks.comparison.rows import Row
from benchmarks.passes.cases import Case
from isobit.config.tables import Moments, PrecisionConfig, RolloutConfig, TrainingConfig
from isobit.memory.turns import DeviceTurns
from isobit.models.policy import random_policy
from isobit.records.batch import PackedBatch
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import Request, generate
from isobit.rollout.native import NativeEngine
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer
from isobit.util.terminal import Clock

NEW_TOKENS = 8
SHORT, LONG, SAMPLES = (80, 64), 2, 4  # prompts and their tokens, long prompts, samples of each
_GIB = 1 << 30


class BothWays(Clock):
    """Counts the two ways of the moments apart: a turn of the trainer begins with the one and ends
    with the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ways = cycle(("moments to the GPU", "moments to the host"))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """As a clock, and each ``offload`` under the way that it is."""
        with super().__call__(name):
            if name != "offload":
                yield
                return
            with super().__call__(next(self._ways)):
                yield


def two_steps(
    case: Case,
    moments: Moments,
    offload_moments: bool,
    kv_memory_gib: float | None = None,
    device: str = "cuda",
) -> Row:
    """GiB by phase and part, planned and measured, and the seconds of the second step.  Raises
    ConfigError for a plan that does not fit.
    """
    rollout = RolloutConfig(max_new_tokens=NEW_TOKENS, kv_memory_gib=kv_memory_gib)
    training = TrainingConfig(
        moments=moments,
        recompute=case.recompute,
        tokens_per_microbatch=case.tokens,
        offload_moments=offload_moments,
    )
    precision = PrecisionConfig.model_validate(case.mode)
    plan = card_planner(case.config, case.mode).plan(rollout, training, case.length)
    print("\n".join(plan.describe()), file=sys.stderr, flush=True)
    allocate_in_pages()
    policy = random_policy(case.config, precision, seed=0, device=device)
    engine = NativeEngine(policy, rollout.model_copy(update={"kv_pages": plan.pages}), None, seed=0)
    trainer, batches = Trainer(policy, training, total_updates=1000), _batches(case)
    turns, clock = DeviceTurns(plan, engine, trainer), BothWays()
    seconds: dict[str, float] = {}
    reserved: dict[str, int] = {}
    for step in range(2):
        with clock("rollout"):
            generate(engine, _requests(case, step))
        reserved["rollout"] = torch.cuda.max_memory_reserved()
        with clock("training"), turns.training(clock):
            metrics = trainer.update(batches, SupervisedObjective())
            reserved["training"] = torch.cuda.max_memory_reserved()
        assert metrics.skipped is None, metrics.skipped
        seconds = clock.take()
    return {
        "moments": moments,
        "offload_moments": offload_moments,
        "total_gib": plan.total / _GIB,
        "planned_gib": _in_gib(plan.peaks.items()),
        "peak_gib": {phase: turns.figures()[f"memory/{phase}_peak_gib"] for phase in plan.peaks},
        "reserved_gib": _in_gib(reserved.items()),
        "rollout_parts_gib": _in_gib(plan.rollout.items()),
        "training_parts_gib": _in_gib(plan.training.items()),
        "kv_pages": plan.pages,
        "kv_tokens": plan.pages * plan.page_tokens,
        "seconds": seconds,
    }


def _batches(case: Case) -> list[PackedBatch]:
    return pack_pairs(
        [((first,), rest) for first, *rest in case.token_ids().tolist() * 2], case.tokens
    )


def _requests(case: Case, step: int) -> list[Request]:
    generator = torch.Generator().manual_seed(step)
    longest = case.length - NEW_TOKENS
    lengths = [longest] * LONG + [min(SHORT[1], longest)] * SHORT[0]
    prompts = [
        tuple(torch.randint(case.config.vocab_size, (n,), generator=generator).tolist())
        for n in lengths
    ]
    return [
        Request(Prompt(f"p{i}", "", ids), step, SAMPLES, SamplingParams(NEW_TOKENS))
        for i, ids in enumerate(prompts)
    ]


def _in_gib(sizes: Iterable[tuple[str, int]]) -> dict[str, float]:
    return {name: size / _GIB for name, size in sizes}
