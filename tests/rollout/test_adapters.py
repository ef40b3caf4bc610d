"""Requests for adapters and for the base, in one engine, draw what each of them draws alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, named_precision
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize
from isobit.models.adapter_folder import CONFIG_FILE
from isobit.models.adapters import adapter_masters
from isobit.models.config import Lora
from isobit.models.folder import LoadedModel, load_adapters, load_model, write_model
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.records.text import Completion
from isobit.rollout.engine import generate
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import PolicyRunner
from isobit.rollout.scheduler import Scheduler
from isobit.rollout.scoring import Scored, Scoring, TokenScorer
from isobit.starter import starter_folder
from isobit.util.errors import IsobitError, ModelError, NonFiniteError, RequestError
from tests.models.test_adapters import ALL, SOME, base, config_of, moved, trained
from tests.rollout.delayed_runner import DelayedRunner
from tests.rollout.test_exactness import TIGHT, requests
from tests.rollout.test_open_engine import ended

__all__ = ["base"]  # a fixture

ADAPTERS: dict[str, Lora] = {"first": ALL, "second": replace(ALL, alpha=3.0), "third": SOME}
NAMES = (None, *ADAPTERS)
ROOMY: dict[str, Any] = {"kv_pages": 60}
RUNNERS: dict[str, Callable[[Any, CacheSize], Any]] = {
    "direct": PolicyRunner,
    "delayed": lambda policy, size: DelayedRunner(PolicyRunner(policy, size)),
    "captured": lambda policy, size: GraphRunner(policy, size, 8),
}


@pytest.fixture
def folders(base: Path, tmp_path: Path) -> dict[str, Path]:
    return adapters_of(base, tmp_path)


def adapters_of(base: Path, place: Path) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for seed, (name, lora) in enumerate(ADAPTERS.items()):
        model = trained(base, "fp32", lora)
        moved(model.policy, seed)
        made[name] = place / name
        write_model(model, made[name])
    return made


def served(
    base: Path, folders: Mapping[str, Path], preset: str, device: str = "cpu"
) -> LoadedModel:
    model = load_model(base, preset, device, trainable=False)
    load_adapters(model, named_precision(preset), folders)
    return model


def asked(adapter: str | None, **sampling: Any) -> list[Request]:
    """Seeded, so that a request's noise does not depend on its name."""
    return [
        replace(
            one,
            prompt=replace(one.prompt, id=f"{adapter} {one.prompt.id}"),
            seed=number,
            adapter=adapter,
        )
        for number, one in enumerate(requests(**sampling))
    ]


def drawn(policy: Policy, wanted: list[Request], runner: str, **sizes: Any) -> list[Any]:
    config = RolloutConfig.model_validate({"max_sequences": 8} | sizes)
    return generate(NativeEngine(policy, config, None, 0, RUNNERS[runner]), wanted)


def alone(folder: Path, preset: str, name: str | None, device: str = "cpu") -> list[Any]:
    """By a policy that was loaded from the folder and has nothing beside it."""
    wanted = [replace(one, adapter=None) for one in asked(name)]
    policy = load_model(folder, preset, device, trainable=False).policy
    return drawn(policy, wanted, "direct", **ROOMY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["bf16", "fp8", "fp8-rollout", "int8"])
def test_each_draws_in_one_batch_what_it_draws_alone(
    preset: str, base: Path, folders: Mapping[str, Path]
) -> None:
    """A runner knows nothing of the flow: one flow goes through all of them."""
    runners = ("direct", "delayed", "captured") if preset == "fp8" else ("captured",)
    check_together(base, folders, preset, "cpu", runners)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_so_does_each_of_a_hybrid(preset: str, tmp_path: Path) -> None:
    base, config = tmp_path / "hybrid", config_of("qwen3_5_text", None, tied=False)
    save_policy(random_policy(config, "fp32", 0), base, tokenizer_from=starter_folder())
    check_together(base, adapters_of(base, tmp_path), preset, "cpu", ("direct", "delayed"))


def check_together(
    base: Path, folders: Mapping[str, Path], preset: str, device: str, runners: Sequence[str]
) -> None:
    """With few pages, but for the runner that is one step behind."""
    policy = served(base, folders, preset, device).policy
    columns = [asked(name) for name in NAMES]
    mixed = [one for row in zip(*columns, strict=True) for one in row]  # side by side in the line
    expected = [alone({None: base, **folders}[name], preset, name, device) for name in NAMES]
    assert len({repr(groups[0]) for groups in expected}) == len(NAMES), "adapters count"
    together = [group for row in zip(*expected, strict=True) for group in row]
    for runner in runners:
        found = drawn(policy, mixed, runner, **(ROOMY if runner == "delayed" else TIGHT))
        for ours, theirs in zip(found, together, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(torch.tensor(one.token_ids), torch.tensor(other.token_ids))
                assert torch.equal(torch.tensor(one.log_probs), torch.tensor(other.log_probs))
        assert found == together, "and what else was recorded"


def poison(policy: Policy, name: str) -> None:
    """Make all that an adapter computes a NaN, K and V included, as an alpha of 1e38 may do."""
    adapted = policy.adapters[name]
    linears = dict(adapted.weights.linears)
    config = replace(policy.config, lora=ADAPTERS[name])
    for master_name, master in adapter_masters(config).items():
        path = master_name.removesuffix(".weight")
        values = torch.full(master.shape, torch.nan, device=policy.device)
        matrix = policy.backend.publish(linears[path].site, values)
        linears[path] = replace(linears[path], matrix=matrix)
    policy.adapters[name] = replace(adapted, weights=replace(adapted.weights, linears=linears))


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", ["direct", "delayed"])
def test_an_adapter_of_nans_fails_its_requests_alone(
    runner: str, base: Path, folders: Mapping[str, Path]
) -> None:
    """Those of others have the bits that they have without it, in pages that it has had."""
    policy = served(base, folders, "fp8").policy
    sizes = ROOMY if runner == "delayed" else TIGHT
    wanted = [one for name in (None, "third") for one in asked(name)[3:]]
    expected = drawn(policy, wanted, "direct", **ROOMY)
    poison(policy, "first")
    bad = [replace(one, samples=1) for one in asked("first")[3:]]
    config = RolloutConfig.model_validate({"max_sequences": 8} | sizes)
    engine = NativeEngine(policy, config, None, 0, RUNNERS[runner])
    rows = zip(wanted[: len(bad)], bad, wanted[len(bad) :], strict=True)
    places = {one.prompt.id: at for at, one in enumerate(wanted)}
    engine.submit([one for row in rows for one in row])
    found, failed, is_done = dict[Handle, Completion](), dict[Handle, IsobitError](), False
    while not is_done:
        try:
            events = engine.step()
            found |= ended(events)
            is_done = not events and not engine.num_live
        except NonFiniteError as error:
            failed |= error.samples
    assert {handle.prompt_id for handle in failed} == {one.prompt.id for one in bad}
    assert all("with the adapter 'first'" in str(one) for one in failed.values())
    assert len(found) == sum(one.samples for one in wanted)
    for handle, one in found.items():
        assert one == expected[places[handle.prompt_id]][handle.sample]


def test_a_sequence_without_finite_logits_leaves_those_beside_it_to_be_scored(
    base: Path, folders: Mapping[str, Path]
) -> None:
    policy = served(base, folders, "fp8").policy
    asked_for = {
        (name, place): Scoring(tuple(range(7, 7 + length)), 1, 1.0, 2, name)
        for name in ("second", None, "first")
        for place, length in enumerate((80, 3, 60))
    }

    def scored() -> tuple[dict[Any, Scored], set[Any]]:
        scorer, found, failed = TokenScorer[Any](policy, 100), dict[Any, Scored](), set[Any]()
        for key, one in asked_for.items():
            scorer.add(key, one)
        while scorer.has_work:
            try:
                found |= scorer.step()
            except NonFiniteError as error:
                failed |= set(error.samples)
                scorer.drop(error.samples)
        return found, failed

    expected, _ = scored()
    poison(policy, "second")
    found, failed = scored()
    assert failed == {("second", place) for place in range(3)}
    assert found == {key: one for key, one in expected.items() if key not in failed}


@pytest.mark.exhaustive
def test_prompts_and_answers_are_scored_with_their_adapter(
    base: Path, folders: Mapping[str, Path]
) -> None:
    policy, scorings = served(base, folders, "fp8").policy, dict[str | None, Scoring]()
    recorded: dict[str | None, Completion] = {}
    for name in NAMES:
        one = asked(name)[3]
        recorded[name] = drawn(policy, [one], "direct", **ROOMY)[0][0]
        ids = one.prompt.token_ids
        scorings[name] = Scoring((*ids, *recorded[name].token_ids), len(ids), 1.0, 2, name)
    scorer = TokenScorer[str | None](policy, 100)
    for name, one in scorings.items():
        scorer.add(name, one)
    found = dict[str | None, list[float]]()
    while scorer.has_work:
        found |= {name: scored.log_probs for name, scored in scorer.step()}
    assert found == {name: list(one.log_probs) for name, one in recorded.items()}


def turns(policy: Policy, first: str | None, second: str | None) -> tuple[Completion, int]:
    """A turn with one adapter, and the next of the same sample with another."""
    engine = NativeEngine(policy, RolloutConfig.model_validate(ROOMY), None, 0)
    sampling = replace(
        requests()[0].sampling, max_new_tokens=80, stop_token_ids=(*range(0, 128, 4),)
    )
    request = replace(requests()[3], samples=1, comes_back=True, sampling=sampling, adapter=first)
    ((handle,),) = engine.submit([request])
    before: dict[Handle, Completion] = {}
    while not before:
        before = ended(engine.step())
    sequence = before[handle].sequence.with_given([5, 6, 7])
    engine.admit([replace(request, adapter=second)], {handle: Completion(sequence, "", "aborted")})
    after: dict[Handle, Completion] = {}
    while not after:
        after = ended(engine.step())
    return after[handle], engine.stats.kept_tokens


def test_k_and_v_that_wait_for_a_next_turn_are_one_adapters(
    base: Path, folders: Mapping[str, Path]
) -> None:
    policy = served(base, folders, "fp8").policy
    _, kept = turns(policy, "first", "first")
    assert kept > 0
    taken = Scheduler._check_parked
    for second in ("second", None):
        found, kept = turns(policy, "first", second)
        with pytest.MonkeyPatch.context() as patch:
            # nothing stays parked

            def drop(self: Scheduler, sample: Any) -> None:
                self._allocator.drop_parked([sample.handle])
                taken(self, sample)

            patch.setattr(Scheduler, "_check_parked", drop)
            expected, none = turns(policy, "first", second)
        assert kept == none == 0
        assert found == expected


def test_what_cannot_be_served_is_refused_by_name(
    base: Path, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    model = served(base, folders, "fp8")
    engine = NativeEngine(model.policy, RolloutConfig.model_validate(ROOMY), None, 0)
    with pytest.raises(RequestError, match="adapter 'other'; the policy has 'first', 'second', "):
        engine.submit(asked("other"))
    precision = PrecisionConfig(preset="fp8")
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        load_adapters(model, precision, {"x": base})
    of_another = load_model("starter", "fp8", trainable=False)
    with pytest.raises(ModelError, match=r"is an adapter of .*base, and the model is .*starter"):
        load_adapters(of_another, precision, {"x": folders["first"]})
    itself = load_model(folders["first"], "fp8", trainable=False)
    with pytest.raises(ModelError, match="is an adapter's folder itself"):
        load_adapters(itself, precision, {"x": folders["second"]})
    config = folders["third"] / CONFIG_FILE
    config.write_text(config.read_text().replace('"r": 5', '"r": 6'))
    with pytest.raises(ModelError, match="they do not belong together"):
        load_adapters(model, precision, {"x": folders["third"]})
