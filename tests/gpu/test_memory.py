"""Engine and trainer by turns on a GPU: memory really comes back, bits stay, and what a phase takes
is what was planned.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.kernels.operands import DeltaShape
from isobit.memory.cache_size import reserve_of
from isobit.memory.device import DevicePlanner
from isobit.memory.sharing import DeviceSharing, HostMoments
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer
from isobit.util.clock import Clock

MakePolicy = Callable[..., Policy]
MIB = 1 << 20
WIDE = ModelConfig("qwen3", 32768, 1024, 3072, 6, 8, 2, 128, 8192, 1e-6, 1e6, tied_embeddings=True)
HYBRID = replace(
    WIDE, family="qwen3_5_text", num_heads=4, num_kv_heads=1, head_dim=256, tied_embeddings=True,
    partial_rotary_factor=0.25, delta=DeltaShape(8, 16, 128, 128, 4), delta_layers=(0, 1, 2, 4),
)  # fmt: skip
PAGES = 2000


def answers(engine: NativeEngine, **sampling: Any) -> list[list[Completion]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [
        tuple(torch.randint(1000, (n,), generator=generator).tolist()) for n in (5, 130, 300)
    ]
    return generate(
        engine,
        [
            Request(Prompt(f"p{i}", "", ids), 0, 3, SamplingParams(24, **sampling))
            for i, ids in enumerate(prompts)
        ],
    )


def update(trainer: Trainer, lengths: tuple[int, ...], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = trainer.policy.config.vocab_size
    rows = [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]
    batches = pack_pairs(
        [((first,), rest) for first, *rest in rows], trainer.config.tokens_per_microbatch
    )
    metrics = trainer.update(batches, SupervisedObjective())
    assert metrics.skipped is None, metrics.skipped


@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 20}])
def test_a_released_engine_holds_nothing_and_draws_the_same_again(
    preset: str, sampling: dict[str, int], make_policy: MakePolicy
) -> None:
    policy = make_policy("qwen3", preset, trainable=False)
    engine = NativeEngine(policy, RolloutConfig(kv_pages=PAGES), None, seed=1)
    first = answers(engine, **sampling)
    engine.release()
    # With what libraries keep.
    allocated = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    assert answers(engine, **sampling) == first
    cache = torch.cuda.memory_allocated() - allocated
    assert cache > 200 * MIB
    engine.release()
    assert torch.cuda.memory_allocated() - allocated < MIB, "the engine's graphs and cache are gone"
    assert torch.cuda.memory_reserved() - reserved < 64 * MIB, "and others may have their memory"
    # Where the cache and the graphs were.
    blocker = torch.full((cache,), 0xFF, dtype=torch.uint8, device="cuda")
    assert answers(engine, **sampling) == first
    assert bool((blocker == 0xFF).all()), "no graph writes where it once did"


def test_kernels_are_not_announced_again(
    make_policy: MakePolicy, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from isobit.rollout import graph_runner

    monkeypatch.setattr(graph_runner, "_SLOW_CAPTURE", 0.0)
    monkeypatch.setattr(graph_runner, "_compiled", set())
    engine = NativeEngine(
        make_policy("qwen3", "fp8", trainable=False), RolloutConfig(kv_pages=PAGES), None, seed=1
    )
    answers(engine)
    assert "were compiled or loaded" in capsys.readouterr().err
    engine.release()
    answers(engine)
    assert "compiled" not in capsys.readouterr().err


@pytest.mark.parametrize("moments", ["fp8", "bf16", "fp32"])
def test_moments_on_the_host_leave_the_gpu_and_keep_their_bits(
    moments: str, make_policy: MakePolicy
) -> None:
    config = TrainingConfig.model_validate({"moments": moments, "learning_rate": 1e-3})
    plain, moved = (Trainer(make_policy("qwen3", "fp8"), config, total_updates=4) for _ in range(2))
    host = HostMoments(moved)
    for seed in range(3):
        host.to_device()
        for trainer in (plain, moved):
            update(trainer, (100, 300), seed)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        host.to_host()
        large = [tensor for name, tensor in moved.moments().items() if not name.endswith(".step")]
        assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in large)
        assert before - torch.cuda.memory_allocated() >= sum(tensor.nbytes for tensor in large)
        assert all(
            torch.equal(tensor.cpu(), plain.moments()[name].cpu())
            for name, tensor in moved.moments().items()
        )
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.policy.parameters(), moved.policy.parameters(), strict=True)
    )


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_a_phase_takes_what_is_planned(preset: str, recompute: Recompute, stays: bool) -> None:
    """Within 4% and 64 MiB: torch rounds blocks up, and libraries take workspaces from it.  The
    engine's cache takes turns with the trainer, or stays.
    """
    gc.collect()  # of the tests before
    torch.cuda.empty_cache()
    standing = torch.cuda.memory_allocated()
    config = TrainingConfig(
        moments="bf16",
        recompute=recompute,
        tokens_per_microbatch=8192,
        offload_moments=True,
        learning_rate=1e-3,
    )
    policy = random_policy(WIDE, PrecisionConfig.model_validate(preset), 0, "cuda")
    rollout = RolloutConfig(kv_pages=PAGES)
    backend = policy.backend
    assert backend.memory is not None
    planner = DevicePlanner(WIDE, policy.flow, backend.sizes, backend.memory.available())
    if not stays:
        needed = sum(planner.training_bytes(config, 8192, 8192).values())
        planner = replace(planner, total=needed + reserve_of(needed))
    plan = planner.plan(rollout, config, 8192)
    assert plan.engine_stays == stays
    engine = NativeEngine(policy, rollout, None, seed=0)
    trainer = Trainer(policy, config, total_updates=4)
    turns, clock = DeviceSharing(plan, engine, trainer), Clock()
    drawn, made = [], weakref.ref(engine._executor.runner)  # which keeps no cache
    for _ in range(2):
        drawn.append(answers(engine))
        with turns.training(clock):
            update(trainer, (8192, 4096, 4096))
    assert drawn[0] != drawn[1], "the second rollout reads the new weights"
    assert (made() is not None) == stays
    assert answers(NativeEngine(policy, rollout, None, seed=0)) == answers(engine)
    measured = {
        phase: turns.figures()[f"memory/{phase}_peak_gib"] * (1 << 30) - standing
        for phase in plan.peaks
    }
    print(
        preset,
        recompute,
        {
            phase: (round(measured[phase] / MIB), round(size / MIB))
            for phase, size in plan.peaks.items()
        },
    )
    assert (
        abs(measured["training"] - plan.peaks["training"])
        < 0.04 * plan.peaks["training"] + 64 * MIB
    )
    assert measured["rollout"] < plan.peaks["rollout"] + 64 * MIB
    assert clock.take()["offload"] > 0


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_hybrid_takes_no_more_than_is_planned(recompute: Recompute) -> None:
    """What autograd keeps of a delta rule is an upper estimate."""
    gc.collect()
    torch.cuda.empty_cache()
    standing = torch.cuda.memory_allocated()
    config = TrainingConfig(
        moments="bf16", recompute=recompute, tokens_per_microbatch=8192, learning_rate=1e-3
    )
    policy = random_policy(HYBRID, PrecisionConfig(preset="int8"), 0, "cuda")
    rollout = RolloutConfig(kv_pages=PAGES)
    backend = policy.backend
    assert backend.memory is not None
    planner = DevicePlanner(HYBRID, policy.flow, backend.sizes, backend.memory.available())
    plan = planner.plan(rollout, config, 8192)
    engine = NativeEngine(policy, rollout, None, seed=0)
    trainer = Trainer(policy, config, total_updates=4)
    turns, clock = DeviceSharing(plan, engine, trainer), Clock()
    for _ in range(2):
        answers(engine)
        with turns.training(clock):
            update(trainer, (8192, *[256] * 32))
    measured = {
        phase: turns.figures()[f"memory/{phase}_peak_gib"] * (1 << 30) - standing
        for phase in plan.peaks
    }
    print(recompute, {n: (round(measured[n] / MIB), round(plan.peaks[n] / MIB)) for n in measured})
    for phase, size in plan.peaks.items():
        assert 0.5 * size < measured[phase] < size + 64 * MIB
