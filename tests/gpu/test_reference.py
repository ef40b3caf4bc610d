"""A reference model on a GPU: the policy's bits while its bytes are the policy's, and the memory
that was planned for it.
"""

from collections.abc import Callable

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import TrainingConfig
from isobit.kernels.backend import DeviceMemory
from isobit.memory.activations import FrozenModel
from isobit.memory.device import DevicePlanner
from isobit.memory.sharing import DeviceSharing
from isobit.models.decoder import Scorable
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import Scorer
from isobit.models.shapes import model_shape
from isobit.records.batch import PackedBatch
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer
from isobit.util.clock import Clock

MakePolicy = Callable[..., Policy]
PRESETS: list[Preset] = ["bf16", "fp8-linear", "fp8", "fp8-rollout"]
LENGTHS = (5, 300, 131, 64)
MIB = 1 << 20


def batches(lengths: tuple[int, ...], vocab_size: int, tokens: int) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return pack_pairs([((first,), rest) for first, *rest in rows], tokens)


def log_probs(model: Scorable, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    (batch,) = batches(lengths, model.decoder.embedding.vocab_size, 1 << 20)
    return Scorer(model).score(batch).log_probs


def move(policy: Policy) -> None:
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(torch.randn_like(master).mul_(0.02))
    policy.publish()


@pytest.mark.parametrize("preset", PRESETS)
def test_log_probs_are_the_policys_at_step_0_and_after_a_refresh(
    preset: Preset, shape: str, make_policy: MakePolicy
) -> None:
    policy = make_policy(shape, preset)
    frozen, first = FrozenPolicy.of(policy), log_probs(policy)
    assert frozen.is_equal_to(policy) and torch.equal(log_probs(frozen), first)
    move(policy)
    assert not frozen.is_equal_to(policy) and torch.equal(log_probs(frozen), first)
    assert not torch.equal(log_probs(policy), first)
    frozen.take(policy)
    assert frozen.is_equal_to(policy) and torch.equal(log_probs(frozen), log_probs(policy))


@pytest.mark.parametrize("preset", ["bf16", "fp8"])
def test_the_bytes_are_those_planned(preset: Preset, shape: str, make_policy: MakePolicy) -> None:
    policy = make_policy(shape, preset)
    model = FrozenModel("reference model", policy.config, policy.flow, "reference")
    assert FrozenPolicy.of(policy).num_bytes == model.weight_bytes(policy.backend.sizes)


@pytest.mark.parametrize("preset", ["bf16", "fp8"])
def test_offloaded_it_leaves_the_gpu_and_keeps_its_bits(
    preset: Preset, make_policy: MakePolicy
) -> None:
    policy = make_policy("qwen3", preset)
    first, frozen = log_probs(policy), FrozenPolicy.of(policy)
    digest = frozen.digest()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    frozen.offload()
    assert before - torch.cuda.memory_allocated() >= frozen.num_bytes
    assert all(x.device.type == "cpu" and x.is_pinned() for x in frozen.tensors().values())
    assert frozen.is_equal_to(policy) and frozen.digest() == digest
    for _ in range(2):
        away = torch.cuda.memory_allocated()
        with frozen.on_device():
            assert torch.cuda.memory_allocated() - away >= frozen.num_bytes
            assert torch.equal(log_probs(frozen), first)
        assert torch.cuda.memory_allocated() == away
    move(policy)
    assert not frozen.is_equal_to(policy)
    frozen.take(policy)
    with frozen.on_device():
        assert torch.equal(log_probs(frozen), log_probs(policy))
    restored = FrozenPolicy.of(make_policy("qwen3", preset))
    restored.offload()
    restored.restore({name: x.clone() for name, x in frozen.tensors().items()})
    with restored.on_device():
        assert torch.equal(log_probs(restored), log_probs(policy))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_training_with_a_reference_takes_what_is_planned(preset: Preset, offload: bool) -> None:
    """Within 2%, while it scores and at the peak of the phase."""
    torch.cuda.empty_cache()
    standing, shape = torch.cuda.memory_allocated(), model_shape("qwen3-0.6b")
    config = TrainingConfig(
        moments="bf16", recompute="mlp", tokens_per_microbatch=16384, learning_rate=1e-3
    )
    policy = random_policy(shape, PrecisionConfig(preset=preset), 0, "cuda")
    backend, memory = policy.backend, policy.backend.memory
    assert memory is not None
    model = FrozenModel("reference model", shape, policy.flow, "reference", offload)
    frozen = FrozenPolicy.of(policy)
    if offload:
        frozen.offload()
    planner = DevicePlanner(shape, policy.flow, backend.sizes, memory.available(), (model,))
    plan = planner.plan(None, config, 16384)
    trainer = Trainer(policy, config, total_updates=4)
    turns, clock = DeviceSharing(plan, None, trainer), Clock()
    packed = batches((16384, 8192, 8192), shape.vocab_size, config.tokens_per_microbatch)
    scored = 0
    for _ in range(2):
        with turns.training(clock, engine_is_next=False):
            scored = scoring_peak(frozen, packed, memory) - standing
            assert trainer.update(packed, SupervisedObjective()).skipped is None
    planned = sum(planner.standing_bytes(config).values())
    planned += offload * model.weight_bytes(backend.sizes)
    planned += model.scoring_bytes(backend.sizes, 16384, 16384)
    peak = turns.figures()["memory/training_peak_gib"] * (1 << 30) - standing
    print(preset, offload, "MiB, measured and planned:", end=" ")
    print("scoring", scored // MIB, planned // MIB, end=" ")
    print("training", round(peak / MIB), plan.peaks["training"] // MIB)
    assert abs(scored / planned - 1) < 0.02
    assert abs(peak / plan.peaks["training"] - 1) < 0.02
    assert ("reference model" in plan.training) != offload


def scoring_peak(frozen: FrozenPolicy, packed: list[PackedBatch], memory: DeviceMemory) -> int:
    """Bytes in use at most while a frozen model scores."""
    memory.reset_peak()
    with frozen.on_device():
        for batch in packed:
            Scorer(frozen).score(batch)
    return memory.peak()
