"""Which reference model a recipe has, and which it cannot have.

A reference model stays what it was, or follows the policy when it should; resumed it is the same
one, or the run is refused.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.commands.dry_run import plan_training
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.kernels.spec import sizes
from isobit.models.config import ModelConfig
from isobit.models.folder import DescribedModel, describe_model, load_policy, read_config
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.run.frozen_models import Reference, checkpoint_bytes, describe_reference, load_reference
from isobit.run.loop import train
from isobit.run.rl_run import read_rl
from isobit.util.errors import CheckpointError, ConfigError, ModelError
from tests.tiny import tiny_model

MakeConfig = Callable[..., RunConfig]
HELD = {"algorithm": {"kl_coefficient": 0.1}}


@pytest.fixture
def described(tiny_folder: Path) -> DescribedModel:
    return describe_model(tiny_folder)


@pytest.fixture
def make_folder(tmp_path: Path, tiny_folder: Path) -> Callable[..., Path]:
    """A random model like the policy, but for some fields."""

    def make(name: str = "other", **fields: Any) -> Path:
        shape: ModelConfig = replace(read_config(tiny_folder), **fields)
        policy = random_policy(shape, PrecisionConfig(preset="fp32"), seed=7)
        save_policy(policy, tmp_path / name, tokenizer_from=tiny_folder)
        return tmp_path / name

    return make


def test_without_a_penalty_there_is_none(
    make_config: MakeConfig, described: DescribedModel
) -> None:
    config = make_config(reference={"model": "no/such/folder", "refresh_every": 1})
    policy = load_policy(described.folder, config.precision)
    assert describe_reference(config, described, 64) is None
    assert load_reference(config, policy, described.folder) is None
    assert checkpoint_bytes(config, described.config) == 0


def test_by_default_it_is_the_model_that_the_run_begins_with(
    make_config: MakeConfig, described: DescribedModel
) -> None:
    config = make_config(**HELD)
    policy = load_policy(described.folder, config.precision)
    reference = load_reference(config, policy, described.folder)
    planned = describe_reference(config, described, 64)
    assert reference is not None and planned is not None
    assert reference.frozen.is_equal_to(policy)
    assert planned.weight_bytes(sizes) == reference.frozen.num_bytes
    assert (planned.name, planned.table, planned.offload) == ("reference model", "reference", False)
    assert checkpoint_bytes(config, described.config) == 0, "it is never refreshed"
    critic = replace(described, config=replace(described.config, value_head=True))
    assert describe_reference(config, critic, 64) == planned


def test_another_folder_is_another_model(
    make_config: MakeConfig, make_folder: Callable[..., Path], described: DescribedModel
) -> None:
    folder = make_folder(num_layers=2)
    config = make_config(**HELD, reference={"model": str(folder), "offload": True})
    policy = load_policy(described.folder, config.precision)
    reference = load_reference(config, policy, described.folder)
    planned = describe_reference(config, described, 64)
    assert reference is not None and planned is not None
    assert not reference.frozen.is_equal_to(policy)
    assert reference.frozen.is_equal_to(load_policy(folder, config.precision))
    assert planned.shape.num_layers == 2 and planned.offload


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"max_positions": 32}, {}, "context is 32 tokens, but sequences have up to 64"),
        ({"num_layers": 2}, {"refresh_every": 5}, "refresh_every is 5, but reference.model is"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    fields: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    make_config: MakeConfig,
    make_folder: Callable[..., Path],
    described: DescribedModel,
) -> None:
    config = make_config(**HELD, reference={"model": str(make_folder(**fields)), **settings})
    with pytest.raises(ConfigError, match=message):
        describe_reference(config, described, 64)


def test_another_number_of_rows_does_not_matter_where_the_tokens_are_the_same(
    make_config: MakeConfig, make_folder: Callable[..., Path], described: DescribedModel
) -> None:
    """Neither draws nor scores a row that is no token."""
    config = make_config(**HELD, reference={"model": str(make_folder(vocab_size=120))})
    found = describe_reference(config, described, 64)
    assert found is not None and found.shape.vocab_size == 120
    assert found.shape.num_drawn == described.config.num_drawn == len(described.tokenizer)


def test_another_tokenizer_and_a_missing_folder_are_refused(
    make_config: MakeConfig, make_folder: Callable[..., Path], described: DescribedModel
) -> None:
    folder = make_folder()
    config = make_config(**HELD, reference={"model": str(folder)})
    assert describe_reference(config, described, 64) is not None
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="whose tokenizer has other tokens"):
        describe_reference(config, described, 64)
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="is not a folder"):
        describe_reference(config, described, 64)


def test_a_dry_run_shows_it(make_config: MakeConfig) -> None:
    config = make_config(**HELD, reference={"refresh_every": 1})
    plan, plain = plan_training(config, read_rl), plan_training(make_config(), read_rl)
    assert any("reference model" in line for line in plan.describe(None))
    more = plan.disk.checkpoint_bytes - plain.disk.checkpoint_bytes
    assert more == checkpoint_bytes(config, read_config(Path(config.model)))


def test_a_run_holds_to_it_and_its_checkpoint_has_it_byte_for_byte(
    make_config: MakeConfig,
) -> None:
    config = make_config(**HELD, reference={"refresh_every": 2})
    train(config)
    (checkpoint,) = (config.output / "checkpoints").iterdir()
    found = load_file(checkpoint / "reference.safetensors")
    size = sum(tensor.nbytes for tensor in found.values())
    assert size == checkpoint_bytes(config, read_config(Path(config.model)))
    trained = load_policy(config.output / "model", config.precision)
    expected = load_reference(make_config(**HELD), trained, Path(config.model))
    assert expected is not None, "it was refreshed after the last step"
    for name, tensor in expected.frozen.tensors().items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_resumed_run_whose_reference_has_changed_is_refused(
    make_config: MakeConfig, make_folder: Callable[..., Path]
) -> None:
    folder = make_folder()
    settings = {**HELD, "reference": {"model": str(folder)}}
    train(make_config(**settings))
    save_policy(random_policy(read_config(folder), PrecisionConfig(preset="fp32"), 8), folder)
    with pytest.raises(CheckpointError, match=r"step_000002: reference: the weights in .*other"):
        train(make_config(**settings, training={"steps": 3}), resume=True)


TINY = tiny_model(vocab_size=96, num_layers=2, max_positions=64)


def make_policy(seed: int = 0, preset: str = "fp8") -> Policy:
    return random_policy(TINY, PrecisionConfig.model_validate(preset), seed)


def make_reference(policy: Policy, refresh_every: int = 0) -> Reference:
    return Reference(FrozenPolicy.of(policy), policy, "a/folder", refresh_every)


def update(policy: Policy) -> None:
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(torch.randn_like(master).mul_(0.05))
    policy.publish()


def test_it_takes_the_policys_weights_every_so_many_steps() -> None:
    policy = make_policy()
    reference, fixed = make_reference(policy, refresh_every=2), make_reference(policy)
    equal = []
    for step in range(1, 6):
        update(policy)
        assert reference.refresh_if_due(step) == (step in (2, 4))
        assert not fixed.refresh_if_due(step)
        equal.append(reference.frozen.is_equal_to(policy))
    assert equal == [False, True, False, True, False]
    assert reference.refreshes == 2 and fixed.refreshes == 0


def test_a_checkpoint_holds_a_digest_before_the_first_refresh_and_tensors_after_it() -> None:
    policy = make_policy()
    reference = make_reference(policy, refresh_every=1)
    states = [reference.state()]
    assert states[0] == {
        "refreshes": 0,
        "back_end": "spec",
        "sha256": reference.frozen.digest(),
    }
    assert not reference.tensors()
    for step in (1, 2):
        reference.refresh_if_due(step)  # the policy has not moved: the state is another one still
        states.append(reference.state())
        assert reference.tensors() == reference.frozen.tensors()
    assert len({json.dumps(state) for state in states}) == 3


def test_it_comes_back_as_it_was() -> None:
    policy = make_policy()
    reference = make_reference(policy, refresh_every=1)
    for step in (1, 2):
        update(policy)
        reference.refresh_if_due(step)
    state, tensors = reference.state(), dict(reference.tensors())
    resumed = make_reference(make_policy())
    resumed.restore(state, tensors)
    assert resumed.refreshes == 2 and resumed.frozen.is_equal_to(policy)
    with pytest.raises(CheckpointError, match="is only in the model"):
        make_reference(make_policy()).restore(state, {})


def test_another_model_in_the_folder_is_refused_with_both_digests() -> None:
    first = make_reference(make_policy())
    make_reference(make_policy()).restore(first.state(), {})
    other = make_reference(make_policy(seed=1))
    with pytest.raises(CheckpointError) as error:
        other.restore(first.state(), {})
    for part in ("a/folder", first.frozen.digest(), other.frozen.digest(), "start a new run"):
        assert part in str(error.value)
    other.restore({**first.state(), "back_end": "another"}, {})  # which publishes other bytes


def test_the_digest_is_the_folders_own(tiny_folder: Path) -> None:
    digests = {
        FrozenPolicy.load(tiny_folder, PrecisionConfig.model_validate(preset)).digest()
        for preset in ("fp8", "fp8", "bf16")
    }
    assert len(digests) == 2
