"""A reference model stays what it was, or follows the policy when it should; resumed it is the same
one, or the run is refused.
"""

import json
from pathlib import Path

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.errors import CheckpointError
from isobit.models.config import ModelConfig
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy, random_policy
from isobit.training.reference import Reference

TINY = ModelConfig("qwen3", 96, 128, 128, 2, 4, 2, 32, 64, 1e-6, 1e4, tied_embeddings=True)


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
