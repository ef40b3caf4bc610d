"""Publishing: one quantisation an update, in place, read by both sides.

The share of published weights that a publication changes, in E4M3 and in BF16.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.models.config import ModelConfig
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy, random_policy
from isobit.precision.flow import graph_differences
from isobit.precision.quant_tensor import QuantTensor
from isobit.util.errors import ConfigError

CONFIG = ModelConfig("qwen2", 64, 128, 256, 2, 4, 2, 64, 128, 1e-6, 1e4, True)


def make_policy(preset: Preset) -> Policy:
    return random_policy(CONFIG, PrecisionConfig(preset=preset), seed=0)


def test_both_sides_hold_the_same_tensors() -> None:
    policy = make_policy("fp8")
    rollout, training = policy.weights("rollout"), policy.weights("training")
    assert rollout.linears.keys() == training.linears.keys() and len(rollout.linears) == 8
    assert all(training.linears[name] is weight for name, weight in rollout.linears.items())
    assert all(training.plain[name] is tensor for name, tensor in rollout.plain.items())


def test_fp8_rollout_holds_two_forms_and_bf16_training() -> None:
    policy = make_policy("fp8-rollout")
    for name, weight in policy.weights("rollout").linears.items():
        assert isinstance(weight.matrix, QuantTensor)
        other = policy.weights("training").linears[name].matrix
        assert isinstance(other, torch.Tensor) and other.dtype == torch.bfloat16


def test_publish_quantises_the_bf16_rounding_of_the_master_in_place() -> None:
    policy = make_policy("fp8")
    name = "layers.1.gate_up_proj"
    matrix = policy.weights("rollout").linears[name].matrix
    assert isinstance(matrix, QuantTensor)
    place, before = matrix.values.data_ptr(), matrix.values.view(torch.uint8).clone()
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(torch.randn_like(master))
    assert torch.equal(matrix.values.view(torch.uint8), before)
    policy.publish()
    assert policy.version == 2
    masters = {name: master.detach() for name, master in policy.masters.items()}
    expected = quantise_blocks(masters[f"{name}.weight"].bfloat16())
    again = policy.weights("training").linears[name].matrix
    assert isinstance(again, QuantTensor) and again.values.data_ptr() == place
    assert torch.equal(again.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(again.scales, expected.scales)
    unrounded = quantise_blocks(masters[f"{name}.weight"]).values
    assert not torch.equal(expected.values.view(torch.uint8), unrounded.view(torch.uint8))
    read = policy.weights("rollout")
    bias = read.linears["layers.0.qkv_proj"].bias
    assert bias is not None and torch.equal(bias, masters["layers.0.qkv_proj.bias"].bfloat16())
    assert torch.equal(read.plain["norm.weight"], masters["norm.weight"].bfloat16())


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_a_value_head_is_published_in_place_and_restored(preset: Preset) -> None:
    config, name = replace(CONFIG, value_head=True), "value_head.weight"
    policy = random_policy(config, PrecisionConfig(preset=preset), seed=0)
    without = make_policy(preset)
    assert list(policy.masters)[:-1] == list(without.masters) and list(policy.masters)[-1] == name
    assert all(torch.equal(policy.masters[n], master) for n, master in without.masters.items())
    published, head = policy.weights("training").plain[name], policy.masters[name]
    assert published is policy.weights("rollout").plain[name] and not published.any()
    with torch.no_grad():
        head.copy_(torch.randn_like(head))
    policy.publish()
    assert published is policy.weights("training").plain[name]
    assert published.dtype == torch.bfloat16 and torch.equal(published, head.detach().bfloat16())
    other = random_policy(config, PrecisionConfig(preset=preset), seed=1)
    other.restore({n: master.detach() for n, master in policy.masters.items()}, version=7)
    assert torch.equal(other.masters[name], head)
    assert torch.equal(other.weights("training").plain[name], published)


def test_the_policy_does_not_share_memory_with_what_it_was_made_from() -> None:
    policy = make_policy("bf16")
    masters = {name: master.detach() for name, master in policy.masters.items()}
    copy, name = Policy(CONFIG, PrecisionConfig(preset="bf16"), masters), "embed_tokens.weight"
    with torch.no_grad():
        next(copy.parameters()).zero_()
    assert not torch.equal(policy.masters[name], copy.masters[name])


CONFIG_PUBLISHED_CHANGE = ModelConfig("qwen3", 64, 128, 256, 2, 2, 2, 64, 128, 1e-6, 1e4, True)
PRESETS: list[Preset] = ["fp8", "bf16", "fp8-rollout", "int8", "int8-rollout"]


def publish_after(policy: Policy, move: float) -> float:
    """Move every master by so much, up or down, as AdamW's first step does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.parameters():
            master += torch.randn(master.shape, generator=generator).sign() * move
    policy.publish()
    return policy.change.share


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_changes_without_a_step_and_almost_all_with_a_large_one(preset: Preset) -> None:
    policy = random_policy(CONFIG_PUBLISHED_CHANGE, PrecisionConfig(preset=preset), seed=0)
    assert policy.change.share == 0, "nothing was published again"
    assert publish_after(policy, 0.0) == 0
    assert publish_after(policy, 0.1) > 0.95


def test_the_share_is_that_of_the_bytes_of_all_linears() -> None:
    policy = random_policy(CONFIG_PUBLISHED_CHANGE, PrecisionConfig(preset="fp8"), seed=0)
    names = [f"{name}.weight" for name in policy.weights("training").linears]

    def published() -> torch.Tensor:
        matrices = [quantise_blocks(policy.masters[name].detach().bfloat16()) for name in names]
        return torch.cat([one.values.view(torch.uint8).flatten() for one in matrices])

    before = published()
    share = publish_after(policy, 1e-5)
    assert share == float((published() != before).double().mean())
    assert 0.01 < share < 0.1


def test_one_changed_number_is_seen() -> None:
    policy = random_policy(CONFIG_PUBLISHED_CHANGE, PrecisionConfig(preset="fp8"), seed=0)
    with torch.no_grad():
        policy.masters["layers.1.down_proj.weight"][5, 7] *= -1
    policy.publish()
    numbers = sum(
        weight.matrix.values.numel()  # pyright: ignore[reportAttributeAccessIssue]
        for weight in policy.weights("rollout").linears.values()
    )
    assert policy.change.share == 1 / numbers


def test_a_policy_frees_its_memory_with_its_last_reference() -> None:
    """Not when the garbage collector runs: on a GPU that is a model's memory too late."""
    gc.disable()
    try:
        gone = weakref.ref(make_policy("fp8"))
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_int8_follows_its_table_in_place(tied: bool) -> None:
    config = replace(CONFIG_PUBLISHED_CHANGE, tied_embeddings=tied)
    policy = random_policy(config, PrecisionConfig(preset="fp8", head="int8"), seed=0)
    head = policy.weights("rollout").lm_head
    assert head is policy.weights("training").lm_head and head.int8 is not None
    values = head.int8.values
    frozen = FrozenPolicy.of(policy)
    with torch.no_grad():
        policy.masters[policy.decoder.lm_head.master].neg_()
    before = values.clone()
    policy.publish()
    assert policy.weights("rollout").lm_head.int8 is not None
    assert torch.equal(values, -before) and not torch.equal(values, before)
    assert not frozen.is_equal_to(policy)
    frozen.restore(FrozenPolicy.of(policy).tensors())
    mine = frozen.weights("training").lm_head.int8
    assert mine is not None and torch.equal(mine.values, values)


def test_a_head_in_int8_of_a_rollout_only_flow_is_not_the_trainers() -> None:
    precision = PrecisionConfig(preset="int8-rollout", head="int8")
    policy = random_policy(CONFIG_PUBLISHED_CHANGE, precision, seed=0)
    rollout, training = (policy.weights(side).lm_head for side in ("rollout", "training"))
    assert rollout.int8 is not None and training.int8 is None
    flow = policy.flow
    assert "lm_head" in {one.name for one in graph_differences(flow.rollout, flow.training)}
    with pytest.raises(ConfigError, match=r"precision\.head"):
        random_policy(CONFIG_PUBLISHED_CHANGE, PrecisionConfig(preset="fp32", head="int8"), seed=0)
