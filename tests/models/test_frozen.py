"""A frozen model scores with the policy's own bits while its bytes are the policy's, and knows
whether they are.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.errors import CheckpointError, ModelError
from isobit.models.config import ModelConfig
from isobit.models.folder import load_policy
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.models.scorable import Scorable
from isobit.models.scorer import Scorer
from isobit.precision.quant_tensor import QuantTensor
from isobit.records.batch import PackedBatch

TIED = ModelConfig("qwen3", 64, 128, 256, 2, 4, 2, 64, 128, 1e-6, 1e4, tied_embeddings=True)
SHAPES = {
    "tied": TIED,
    "untied": replace(TIED, tied_embeddings=False),
    "qwen2": replace(TIED, family="qwen2"),
}
PRESETS: list[Preset] = ["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8"]
LENGTHS = (9, 4)


def make_policy(preset: Preset = "fp8", shape: str = "tied", seed: int = 0) -> Policy:
    policy = random_policy(SHAPES[shape], PrecisionConfig(preset=preset), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms that are not 1, biases that are not 0
        for master in policy.parameters():
            master.add_(torch.randn(master.shape, generator=generator).mul_(0.1))
    policy.publish()
    return policy


def batch() -> PackedBatch:
    total = sum(LENGTHS)
    ids = torch.randint(64, (total,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    rows, numbers = torch.arange(total), torch.ones(total)
    return PackedBatch(
        ids, positions, LENGTHS, rows, ids.roll(-1), rows, numbers, numbers, numbers, numbers
    )


def log_probs(model: Scorable) -> torch.Tensor:
    return Scorer(model).score(batch()).log_probs


def move(policy: Policy, by: float = 0.05) -> None:
    """An update that every matrix notices."""
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(torch.randn_like(master).mul_(by))
    policy.publish()


def masters_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: master.detach() for name, master in policy.masters.items()}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", PRESETS)
def test_log_probs_are_the_policys_until_it_moves_and_again_when_it_is_taken(
    preset: Preset, shape: str
) -> None:
    policy = make_policy(preset, shape)
    published = FrozenPolicy.publish(
        policy.config, PrecisionConfig(preset=preset), masters_of(policy)
    )
    copied, first = FrozenPolicy.of(policy), log_probs(policy)
    for frozen in (published, copied):
        assert frozen.is_equal_to(policy)
        assert torch.equal(log_probs(frozen), first)
    move(policy)
    for frozen in (published, copied):
        assert not frozen.is_equal_to(policy)
        assert torch.equal(log_probs(frozen), first), "it does not follow the policy"
    assert not torch.equal(log_probs(policy), first)
    copied.take(policy)
    assert copied.is_equal_to(policy) and not published.is_equal_to(policy)
    assert torch.equal(log_probs(copied), log_probs(policy))


def test_only_the_training_side_is_held_and_each_tensor_once() -> None:
    policy = make_policy("fp8-rollout")
    for frozen in (
        FrozenPolicy.of(policy),
        FrozenPolicy.publish(TIED, PrecisionConfig(preset="fp8-rollout"), masters_of(policy)),
    ):
        for linear in frozen.weights("training").linears.values():
            assert isinstance(linear.matrix, torch.Tensor)
            assert linear.matrix.dtype == torch.bfloat16
        with pytest.raises(AssertionError, match="only scores"):
            frozen.weights("rollout")
    linears = FrozenPolicy.of(make_policy("fp8")).weights("training").linears
    assert all(isinstance(linear.matrix, QuantTensor) for linear in linears.values())


def test_a_publication_that_changes_no_byte_leaves_them_equal() -> None:
    policy = make_policy()
    frozen = FrozenPolicy.of(policy)
    policy.publish()
    assert policy.version == 3 and frozen.is_equal_to(policy)
    with torch.no_grad():
        policy.masters["norm.weight"][5] *= 1 + 2.0**-12  # less than BF16 can show
    policy.publish()
    assert frozen.is_equal_to(policy)


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.qkv_proj.bias", "embed_tokens.weight"])
def test_one_changed_number_makes_them_differ_also_where_no_matrix_has_changed(name: str) -> None:
    policy = make_policy(shape="qwen2")
    frozen = FrozenPolicy.of(policy)
    with torch.no_grad():
        policy.masters[name].view(-1)[3] += 0.5
    policy.publish()
    assert policy.change.share == 0, "the linears' matrices are as they were"
    assert not frozen.is_equal_to(policy)


def test_changed_scales_alone_are_a_difference() -> None:
    policy = make_policy()
    frozen = FrozenPolicy.of(policy)
    with torch.no_grad():
        policy.masters["layers.1.down_proj.weight"].mul_(2)
    policy.publish()
    assert policy.change.share == 0 and not frozen.is_equal_to(policy)


def test_bytes_are_compared_once_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.models import frozen as module

    policy, asked = make_policy(), []
    same_bytes = module._same_bytes
    monkeypatch.setattr(
        module, "_same_bytes", lambda *tensors: asked.append(1) or same_bytes(*tensors)
    )
    frozen = FrozenPolicy.of(policy)
    assert frozen.is_equal_to(policy) and not asked, "nothing was published since it was taken"
    move(policy)
    assert not frozen.is_equal_to(policy) and not frozen.is_equal_to(policy)
    assert len(asked) == 1
    assert frozen.is_equal_to(make_policy()), "another policy is another question"


def test_another_function_is_never_equal_however_equal_its_bytes() -> None:
    policy = make_policy()
    masters, precision = masters_of(policy), PrecisionConfig(preset="fp8")
    other = replace(TIED, rope_theta=5e3)
    assert not FrozenPolicy.publish(other, precision, masters).is_equal_to(policy)
    linear = PrecisionConfig(preset="fp8-linear")
    assert not FrozenPolicy.publish(TIED, linear, masters).is_equal_to(policy)
    assert FrozenPolicy.publish(TIED, precision, masters).is_equal_to(policy)


def test_a_folder_is_read_one_master_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobit.models import frozen as module

    policy = make_policy(shape="untied")
    save_policy(policy, tmp_path)
    read: list[weakref.ref[Any]] = []
    read_masters = module.read_masters

    def watched(folder: Path, config: ModelConfig, device: torch.device | str) -> Any:
        for name, master in read_masters(folder, config, device):
            assert sum(before() is not None for before in read) < 2
            read.append(weakref.ref(master))
            yield name, master

    monkeypatch.setattr(module, "read_masters", watched)
    frozen = FrozenPolicy.load(tmp_path, PrecisionConfig(preset="fp8"))
    assert len(read) == len(policy.masters)
    loaded = load_policy(tmp_path, PrecisionConfig(preset="fp8"))
    assert frozen.is_equal_to(loaded) and torch.equal(log_probs(frozen), log_probs(loaded))
    with pytest.raises(ModelError, match="not a folder"):
        FrozenPolicy.load(tmp_path / "none", PrecisionConfig())


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", ["bf16", "fp8"])
def test_tensors_put_another_one_where_this_one_was(preset: Preset, shape: str) -> None:
    policy, other = make_policy(preset, shape), make_policy(preset, shape, seed=7)
    frozen, restored = FrozenPolicy.of(policy), FrozenPolicy.of(other)
    assert frozen.digest() != restored.digest()
    assert not restored.is_equal_to(policy)
    restored.restore({name: tensor.clone() for name, tensor in frozen.tensors().items()})
    assert restored.is_equal_to(policy) and not restored.is_equal_to(other)
    assert restored.digest() == frozen.digest()
    assert torch.equal(log_probs(restored), log_probs(policy)), "lm_head's own form is there too"


def test_tensors_of_another_model_are_refused_by_name() -> None:
    frozen = FrozenPolicy.of(make_policy())
    tensors = frozen.tensors()
    assert {"layers.0.qkv_proj.weight", "layers.0.qkv_proj.weight.scales"} < tensors.keys()
    missing = {name: x for name, x in tensors.items() if name != "norm.weight"}
    refused: list[tuple[dict[str, torch.Tensor], str]] = [
        (missing, "norm.weight is only in the model"),
        ({**tensors, "lm_head.weight": torch.zeros(1)}, "lm_head.weight is only in the checkpoint"),
        ({**tensors, "norm.weight": torch.zeros(128)}, r"norm.weight is torch.float32 of \(128,\)"),
        ({**tensors, "norm.weight": torch.zeros(64).bfloat16()}, r"of \(64,\), and the model has"),
    ]
    for found, message in refused:
        with pytest.raises(CheckpointError, match=message):
            frozen.restore(found)


def test_the_digest_is_of_the_published_bytes() -> None:
    policy = make_policy()
    frozen = FrozenPolicy.of(policy)
    first = frozen.digest()
    assert FrozenPolicy.of(policy).digest() == first
    with torch.no_grad():
        policy.masters["layers.1.down_proj.weight"].mul_(2)
    policy.publish()
    assert frozen.digest() == first
    frozen.take(policy)
    assert frozen.digest() != first, "scales count"


def test_offloaded_weights_are_on_the_device_only_while_they_score(
    own_memory: Callable[[], Any],
) -> None:
    policy = make_policy(shape="qwen2")
    own_memory()
    frozen, first = FrozenPolicy.of(policy), log_probs(policy)
    digest, before = frozen.digest(), frozen.num_bytes
    frozen.offload()
    (buffer,) = storages(frozen)
    with frozen.on_device():
        assert buffer not in storages(frozen)
        with frozen.on_device():
            assert buffer not in storages(frozen)
        assert torch.equal(log_probs(frozen), first)
        with pytest.raises(AssertionError, match="for a while"):
            frozen.take(policy)
    assert storages(frozen) == {buffer}, "nothing is left on the device"
    assert frozen.is_equal_to(policy) and frozen.num_bytes == before
    move(policy)
    assert not frozen.is_equal_to(policy) and frozen.digest() == digest
    frozen.take(policy)
    assert storages(frozen) == {buffer}
    with frozen.on_device():
        assert torch.equal(log_probs(frozen), log_probs(policy))
    other = FrozenPolicy.of(make_policy(shape="qwen2", seed=3))
    frozen.restore(other.tensors())
    with frozen.on_device():
        assert torch.equal(log_probs(frozen), log_probs(other))


def test_a_cpu_has_nowhere_else_to_put_them() -> None:
    frozen = FrozenPolicy.of(make_policy())
    before = storages(frozen)
    frozen.offload()
    with frozen.on_device():
        assert storages(frozen) == before


def storages(frozen: FrozenPolicy) -> set[int]:
    weights = frozen.weights("training")
    tensors = [*frozen.tensors().values(), *weights.plain.values(), weights.rope.cos]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_value_head_is_the_policys_own_business() -> None:
    """PPO's critic is no part of the function that a policy is held to."""
    critic = replace(TIED, value_head=True)
    policy = random_policy(critic, PrecisionConfig(preset="fp8"), 0)
    frozen = FrozenPolicy.of(policy)
    plain = FrozenPolicy.of(random_policy(TIED, PrecisionConfig(preset="fp8"), 0))
    assert not any("value" in name for name in frozen.tensors())
    assert frozen.config == TIED and frozen.digest() == plain.digest()
    assert plain.is_equal_to(policy)
    with torch.no_grad():
        policy.masters["value_head.weight"].add_(1)
    policy.publish()
    assert frozen.is_equal_to(policy) and torch.equal(log_probs(frozen), log_probs(policy))
    move(policy)
    assert not plain.is_equal_to(policy)
    plain.take(policy)
    assert plain.is_equal_to(policy) and torch.equal(log_probs(plain), log_probs(policy))


def test_a_reward_model_has_no_lm_head(own_memory: Callable[[], Any]) -> None:
    judge = replace(TIED, score_head=True)
    policy = random_policy(judge, PrecisionConfig(preset="fp8"), 0)
    own_memory()
    precision, masters = PrecisionConfig(preset="fp8"), masters_of(policy)
    frozen = FrozenPolicy.publish(judge, precision, masters)
    expected = Scorer(policy).score(batch()).values
    assert expected is not None and frozen.is_equal_to(policy)
    frozen.offload()
    frozen.restore({name: tensor.clone() for name, tensor in frozen.tensors().items()})
    with frozen.on_device():
        found = Scorer(frozen).score(batch())
    assert found.values is not None and torch.equal(found.values, expected)
    assert found.log_probs.numel() == 0
