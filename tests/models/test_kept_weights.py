"""The weights that trainers keep for rollouters that come back: their bits, and what they take."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.backend import support
from isobit.kernels.hopper import sizes as hopper_sizes
from isobit.memory.activations import kept_bytes, page_locked
from isobit.memory.device import DevicePlanner
from isobit.memory.host import KEPT, estimate_memory
from isobit.models.config import Lora, ModelConfig
from isobit.models.kept_weights import KeptWeights
from isobit.models.policy import Policy, random_policy
from isobit.models.published import SIDES
from isobit.parallel.world import World, is_raised_on_all
from isobit.precision.flow import build_flow
from tests.fixtures import FakeMemory
from tests.memory import meta_memory
from tests.memory.meta_memory import LiveBytes
from tests.models.policies import EXPERTS, delta_nets, disturbed, published_tensors
from tests.ranks import in_ranks
from tests.worlds import in_world

TIED = ModelConfig("qwen3", 256, 128, 384, 2, 4, 2, 32, 128, 1e-6, 1e4, True)
FUSED = replace(TIED, family="qwen2", tied_embeddings=False, hidden_size=160, num_layers=3)
MIXTURE = replace(TIED, family="qwen3_moe", experts=EXPERTS["qwen3_moe"])
HYBRID = replace(TIED, family="qwen3_5_text", **delta_nets("qwen3_5_text", 2))
SHAPES = {
    "tied": TIED,
    "untied, with biases": FUSED,
    "mixture": MIXTURE,
    "delta nets": HYBRID,
    "value head": replace(TIED, value_head=True),
    "adapters": replace(TIED, lora=Lora(8, 16.0, LORA_TARGETS)),
}
FLOWS: dict[str, dict[str, Any]] = {
    "fp32": {"preset": "fp32"},
    "bf16": {"preset": "bf16"},
    "fp8": {"preset": "fp8"},
    "fp8, other sides": {"preset": "fp8-rollout", "first_layers_bf16": 1},
    "int8": {"preset": "int8"},
    "scales a tensor": {"preset": "fp8", "kv_scales": "per_tensor"},
}


def bytes_of(policy: Policy) -> list[torch.Tensor]:
    """Copies of what both sides read, and of scales a tensor."""
    held = [tensor.contiguous() for tensor in published_tensors(policy, SIDES)]
    held += [] if policy.kv_scales is None else [policy.kv_scales.bytes]
    return [tensor.view(torch.uint8).clone() for tensor in held]


def is_equal(policy: Policy, expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, bytes_of(policy), expected))


def kept_while_it_learns(policy: Policy) -> tuple[KeptWeights, list[torch.Tensor]]:
    """Weights that are kept, with their bytes, of a policy that has others by now."""
    kept, scales = KeptWeights(policy), policy.kv_scales
    if scales is not None:
        scales.take_prompts([[[1.0, 2.0, 3.0]] * scales.bytes.shape[0]])
    before = bytes_of(policy)
    kept.keep()
    disturbed(policy)
    if scales is not None:
        scales.take_prompts([[[9.0, 8.0, 7.0]] * scales.bytes.shape[0]])
    return kept, before


@pytest.mark.few(8)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_has_the_kept_bits_and_leaves_its_own(shape: str, flow: str) -> None:
    """Twice, since rollouters may die again."""
    policy = random_policy(SHAPES[shape], PrecisionConfig.model_validate(FLOWS[flow]), seed=0)
    kept, before = kept_while_it_learns(policy)
    now, version = bytes_of(policy), policy.version
    assert not is_equal(policy, before)
    for _ in range(2):
        with kept.in_place():
            assert is_equal(policy, before)
            assert (policy.version, kept.version) == (version - 1, version)
        assert is_equal(policy, now)
        assert (policy.version, kept.version) == (version, version - 1)
    with pytest.raises(KeyError), kept.in_place():
        raise KeyError
    assert is_equal(policy, now)
    assert policy.version == version


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_takes_one_tensor_more(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what a checksum and lm_head's operands take for a while."""
    policy = random_policy(SHAPES[shape], "fp8", seed=0)
    kept, _ = kept_while_it_learns(policy)

    def uncounted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            with _disable_current_modes():
                return call(*arguments)

        return made

    for name in ("checksum", "complete_rows"):
        monkeypatch.setattr(Policy, name, uncounted(getattr(Policy, name)))
    sizes_of_rows = [row.nbytes for row in policy.passed_rows()]
    assert sum(sizes_of_rows) > max(sizes_of_rows)
    with LiveBytes() as live, kept.in_place():
        assert live.now == 0
    assert (live.now, live.peak) == (0, max(sizes_of_rows))


@pytest.mark.few(8)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_planned_bytes_are_those_that_are_kept(shape: str, flow: str, size: int) -> None:
    config, precision = SHAPES[shape], PrecisionConfig.model_validate(FLOWS[flow])

    def kept(world: World) -> int:
        policy = random_policy(config, precision, seed=0, world=world)
        with LiveBytes() as live:
            made = KeptWeights(policy)
            made.keep()
            made.keep()
        return live.now

    made = build_flow(precision, random_policy(config, precision, seed=0).decoder.shape)
    planned = kept_bytes(config, made, support("cpu").sizes, size)
    assert in_ranks(size, kept) == list(planned)
    arguments = config, made, RolloutConfig(), TrainingConfig(), 64, support("cpu").sizes
    without = estimate_memory(*arguments, processes=size)
    estimate = estimate_memory(*arguments, processes=size, keeps=True)
    assert estimate.size(KEPT) == estimate.total - without.total == sum(planned)
    assert KEPT not in [item.name for item in without.items]


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_planned_bytes_are_those_of_the_rows_on_a_gpu(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta_memory.without_launches(monkeypatch)
    policy = meta_memory.meta_policy(TIED, PrecisionConfig.model_validate({"preset": preset}))
    held = sum(row.nbytes for row in policy.passed_rows())
    assert kept_bytes(TIED, policy.flow, hopper_sizes, 1) == (held,)  # pyright: ignore[reportArgumentType] (a module is hashable)
    planner = DevicePlanner(TIED, policy.flow, hopper_sizes, 64 << 30, keeps=True)
    plan = planner.plan(RolloutConfig(), TrainingConfig(), 64)
    assert plan.host == {KEPT: page_locked(held)}
    assert plan.describe()[-1].endswith("hold the weights for rollouters that come back")
    assert not replace(planner, keeps=False).plan(RolloutConfig(), TrainingConfig(), 64).host
    of_three = kept_bytes(TIED, policy.flow, hopper_sizes, 3)  # pyright: ignore[reportArgumentType]
    plan = replace(planner, processes=3).plan(RolloutConfig(), TrainingConfig(), 64)
    assert plan.host == {KEPT: page_locked(max(of_three))}
    assert sum(of_three) == held


REFUSED = "CUDA error: out of memory"


def test_page_locked_memory_that_is_refused_is_ordinary_memory(
    own_memory: Callable[[], FakeMemory],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(REFUSED)

    monkeypatch.setattr(own_memory(), "host_buffer", refuse)
    policy = random_policy(FUSED, "fp8", seed=0)
    kept, before = kept_while_it_learns(policy)
    now = bytes_of(policy)
    with kept.in_place():
        assert is_equal(policy, before)
    assert is_equal(policy, now)
    kept.keep()
    said = capsys.readouterr().err
    assert said.count("are kept in ordinary memory") == said.count(REFUSED) == 1


def test_a_rank_without_memory_raises_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, refused = torch.empty, set[int]()

    def allocate(*arguments: Any, **options: Any) -> torch.Tensor:
        if threading.get_ident() in refused:
            raise RuntimeError("cannot allocate memory")
        return empty(*arguments, **options)

    def keep(world: World) -> tuple[str, bool]:
        kept = KeptWeights(random_policy(TIED, "fp8", seed=0, world=world))
        if world.rank == 1:
            refused.add(threading.get_ident())
        try:
            kept.keep()
        except Exception as error:
            return str(error), is_raised_on_all(error)
        return "nothing", False

    monkeypatch.setattr(torch, "empty", allocate)
    (told, first), (own, second) = in_ranks(2, keep)
    assert (first, second) == (True, True), (told, own)
    assert own == "cannot allocate memory"
    assert "rank 1" in told and own in told


def exchange(world: World, case: dict[str, Any]) -> list[bool]:
    """What a trainer of several finds in a block and after it."""
    config = SHAPES[case["shape"]]
    precision = PrecisionConfig.model_validate(FLOWS[case["flow"]])
    policy = random_policy(config, precision, seed=0, world=world)
    kept, before = kept_while_it_learns(policy)
    now = bytes_of(policy)
    with kept.in_place():
        found = [is_equal(policy, before)]
    return [*found, is_equal(policy, now), not is_equal(policy, before)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shape", "flow", "size"),
    [
        ("untied, with biases", "int8", 2),
        ("adapters", "scales a tensor", 2),
        ("mixture", "fp8", 2),
        ("tied", "fp8, other sides", 3),
    ],
)
def test_several_trainers_take_each_others_rows(shape: str, flow: str, size: int) -> None:
    case = {"shape": shape, "flow": flow}
    assert in_world(size, "tests.models.test_kept_weights:exchange", case) == [[True] * 3] * size
