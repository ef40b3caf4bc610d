"""The exactness check must catch arithmetic that is only a little wrong: each mutant is one line of
a kernel changed.
"""

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.routing import Routing
from isobit.kernels.spec import experts, head
from isobit.kernels.spec.backend import SpecBackend
from isobit.memory.cache_size import PageAllocator
from isobit.models.config import Experts, ModelConfig
from isobit.models.policy import random_policy
from isobit.models.shared_prefix import SharedRows
from isobit.proof import verify as verify_module
from isobit.proof.scenarios import drawn_by, other_weights
from isobit.proof.verify import VerifyOptions, VerifyResult, verify, verify_policy
from isobit.records.sequence import TokenSequence
from isobit.rollout.native import NativeEngine
from isobit.rollout.runner import PolicyRunner
from tests.proof.faults import (
    exp2_in_attention,
    later_chunks_one_position_off,
    rollouts_attention_in_fp32,
)

OPTIONS = VerifyOptions(prompts=5, samples=2, max_new_tokens=6)


def check(folder: Path, preset: Preset = "fp8") -> VerifyResult:
    return verify(folder, PrecisionConfig(preset=preset), OPTIONS)


@pytest.mark.few(1)
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize(
    ("fault", "preset"), [(exp2_in_attention, "fp32"), (rollouts_attention_in_fp32, "bf16")]
)
def test_other_arithmetic_in_attention(
    fault: Callable[[pytest.MonkeyPatch], None],
    preset: Preset,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert check(tiny_folder, preset).exit_code == 1


@pytest.mark.usefixtures("one_scenario")
def test_one_unit_in_the_last_place_of_one_log_probability(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of each forward, in its last bit, is enough."""
    exact = head.log_softmax

    def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        log_probs = exact(logits, temperatures)
        log_probs[0] = torch.nextafter(log_probs[0], torch.tensor(-torch.inf))
        return log_probs

    monkeypatch.setattr(head, "log_softmax", log_softmax)
    result = check(tiny_folder)
    assert result.exit_code == 1
    assert 0 < result.comparison.tokens_differing < result.comparison.tokens_compared
    assert result.comparison.max_abs_diff < 1e-6


@pytest.mark.usefixtures("one_scenario")
def test_a_prompt_whose_rows_are_taken_from_the_token_before(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In attention of sequences that share their prompts, and in no other packing."""
    exact = SharedRows.first

    def first(self: SharedRows, x: torch.Tensor) -> torch.Tensor:
        return exact(self, x.roll(1, 0) if x.is_floating_point() else x)

    monkeypatch.setattr(SharedRows, "first", first)
    (scenario,) = check(tiny_folder).scenarios
    differing = {name for name, found in scenario.comparisons.items() if found.differs}
    assert differing == {"shared prefixes"}


@pytest.mark.usefixtures("one_scenario")
def test_a_shared_partial_page_that_is_not_copied(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyRunner, "copy_pages", lambda self, sources, targets: None)
    assert check(tiny_folder).exit_code == 1


@pytest.mark.exhaustive
def test_later_pieces_of_a_prompt_one_position_off(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the scenarios that go on with a prompt in the middle can see it, and all of them do."""
    later_chunks_one_position_off(monkeypatch)
    result = check(tiny_folder)
    differing = {
        scenario.name for scenario in result.scenarios if scenario.comparison.tokens_differing
    }
    assert differing == {
        scenario.name
        for scenario in result.scenarios
        if scenario.stats.chunks
        or scenario.stats.recomputed_tokens
        or scenario.name == "turns with results"  # behind what is cached of the prompt
    }
    assert 0 < len(differing) < len(result.scenarios)


MIXTURE = ModelConfig(
    "qwen3_moe", 96, 72, 64, 2, 4, 2, 16, 192, 1e-6, 1e4, True, experts=Experts(6, 2, 40, True)
)


@pytest.mark.exhaustive
def test_ties_of_experts_broken_the_other_way_in_rollout(
    in_rollout: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a model's own routers hardly ever tie; in the scenario that makes them tie, they
    do, and nowhere else does anything differ.
    """

    def route(
        x: torch.Tensor, router: torch.Tensor, top_k: int, renormalise: bool, bias: None
    ) -> Routing:
        found = experts.route(x, router, top_k, renormalise)
        if not in_rollout():
            return found
        last_first = found.logits.flip(1).argsort(dim=1, descending=True, stable=True)[:, :top_k]
        chosen = (router.shape[0] - 1 - last_first).to(found.experts.dtype)
        return Routing(chosen, found.weights, found.logits)

    policy = random_policy(MIXTURE, PrecisionConfig(preset="fp8"), seed=0)
    before = policy.checksum()
    monkeypatch.setattr(SpecBackend, "route", staticmethod(route))
    result = verify_policy(policy, OPTIONS)
    assert [one.name for one in result.scenarios if one.differs] == ["tied routers"]
    assert result.exit_code == 1
    assert policy.checksum() == before, "the routers are as they were"


@pytest.mark.exhaustive
def test_noise_keyed_by_the_row_in_the_batch(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every log-probability is right for the token that was drawn, but a sample is another one in
    other company.
    """
    exact = head.draw

    def draw(log_probs: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return exact(log_probs, keys + torch.arange(len(keys)), positions)

    result = check(tiny_folder)
    assert result.redrawn[0] > 0 == result.redrawn[1] and result.exit_code == 0
    monkeypatch.setattr(head, "draw", draw)
    result = check(tiny_folder)
    assert not result.comparison.differs, "no log-probability shows it"
    assert result.redrawn[1] > 0 and result.exit_code == 1
    assert result.as_json()["completions_differing"] == result.redrawn[1]


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["bf16", "fp8-linear", "fp8-rollout", "int8", "fp32"])
def test_completions_are_the_same_in_every_batch(tiny_folder: Path, preset: Preset) -> None:
    assert check(tiny_folder, preset).redrawn == (30, 0)


@pytest.fixture
def only_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario in which K and V are parked while other weights are published."""
    every = verify_module.engine_scenarios
    monkeypatch.setattr(
        verify_module,
        "engine_scenarios",
        lambda workload: tuple(one for one in every(workload) if one.publishes),
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("only_turns")
def test_what_is_parked_survives_a_publication(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = VerifyOptions(prompts=5, samples=2, max_new_tokens=8)
    precision = PrecisionConfig(preset="fp8")
    whole = verify(tiny_folder, precision, few)
    (scenario,) = whole.scenarios
    assert whole.exit_code == 0 and scenario.stats.weight_changes and scenario.stats.kept_tokens
    drop = PageAllocator.drop_parked

    def keep_all(self: PageAllocator, names: Iterable[Hashable] | None = None) -> None:
        if names is not None:
            drop(self, names)

    monkeypatch.setattr(PageAllocator, "drop_parked", keep_all)
    found = verify(tiny_folder, precision, few)
    assert found.exit_code == 1 and found.comparison.tokens_differing > 0
    monkeypatch.setattr(PageAllocator, "drop_parked", drop)

    def notice_alone(self: NativeEngine) -> None:
        self._executor.take_weights()

    monkeypatch.setattr(NativeEngine, "_notice_weights", notice_alone)
    assert verify(tiny_folder, precision, few).exit_code == 1


def test_other_weights_are_published_and_taken_back() -> None:
    policy = random_policy(MIXTURE, "fp8", seed=1, trainable=False)
    before, version = policy.checksum(), policy.version
    with other_weights(policy):
        assert policy.checksum() != before and policy.version == version + 1
    assert policy.checksum() == before and policy.version == version + 2


def test_tokens_are_parted_by_the_weights_that_drew_them() -> None:
    versions = [1, 1, 2, 2]
    whole = TokenSequence.of_answer(
        (7,), (1, 2, 9, 3, 4), [-1.0, -2.0, -3.0, -4.0], versions, given=[(3, 4)]
    )
    (first,), (second,) = drawn_by([whole], 1), drawn_by([whole], 2)
    assert first.token_ids.tolist() == [7, 1, 2] and second.token_ids.tolist() == [7, 1, 2, 9, 3, 4]
    assert first.of_response(first.log_probs).tolist() == [-1.0, -2.0]
    assert second.of_response(second.log_probs).tolist() == [-3.0, -4.0]
    assert drawn_by([whole], 3) == []
