"""``isobit verify``: the proof of exactness for one model and one precision flow.

The native engine completes random prompts in several scenarios.  Together they contain everything
that must not change a bit: preemption, prompts cut into chunks, groups that share pages, few
sequences at once, greedy and truncated sampling, temperatures other than 1, and turns with results
of tools between them (random tokens, so that no environment is needed), behind which other weights
are published while K and V are parked.  Prompts are random
tokens of the model's vocabulary, so any model folder can be checked.  Their lengths lie around the
bounds of a KV page, where pages are shared, copied and added, and completions end at ragged
lengths.

Every recorded log-probability is then compared, bit for bit, with the one that the training forward
computes from packed batches: each sequence alone, and among different neighbours.  In a mixture of
experts, so are the experts that each token was routed to.  Where the back end can be observed (the
CPU specification), every row of every operation is compared as well, before and after its rounding
(``isobit.proof.difference``).  A rounding to BF16 hides most faults of one ulp from the
log-probabilities.

Two things show in no log-probability of a token that was drawn.  Experts whose logits are equal are
rare in a model, so in one scenario every router has groups of equal rows, and each token such ties.
And which token is drawn must depend on its prompt, sample and position alone: scenarios that sample
by the same settings must draw the same completions, in whatever batches.

A scenario counts only if the events that it is made for did happen, by the engine's own counters.
Where one did not, the result says which part was not proved.  In ``fp8-rollout``, whose two sides
are different functions, differences must appear: this shows that the check is able to fail.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import CacheSize, carries_for
from isobit.models.folder import choose_device, load_policy, model_folder, read_config, read_masters
from isobit.models.kv_calibration import calibrate_kv_scales
from isobit.models.policy import Policy
from isobit.models.policy_share import PolicyShare
from isobit.models.scorer import Scorer
from isobit.parallel.world import ALONE, World
from isobit.proof.difference import Checksums, Operations, compared_operations, describe_site
from isobit.proof.observation import Keep, ObservedRunner, TokenObserver, observed_scores
from isobit.proof.scenarios import (
    RESULT_TOKENS,
    Scenario,
    Workload,
    build_workload,
    drawn_by,
    engine_scenarios,
    other_weights,
    packings,
    tied_routers,
)
from isobit.records.batch import PackedBatch
from isobit.records.packing import sequences_of
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group
from isobit.rollout.engine import RolloutEngine, generate
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.runner import page_tokens_of
from isobit.training.comparison import Comparison
from isobit.util.errors import ConfigError, IsobitError


def scenarios_of(policy: Policy, workload: Workload) -> list[Scenario]:
    """The scenarios of ``engine_scenarios`` that the model can be in."""
    has_routers = policy.config.experts is not None
    return [
        scenario
        for scenario in engine_scenarios(workload)
        if has_routers or not scenario.ties_routers
    ]


Packings = Callable[[list[TokenSequence], int], Iterator[tuple[str, list[PackedBatch]]]]
"""Samples and a seed -> named packings of all of them."""


class RanksDifferError(IsobitError):
    """Ranks that share an engine have drawn different samples."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The size of the check."""

    prompts: int = 8
    samples: int = 4
    """Completions of each prompt."""
    max_new_tokens: int = 24
    """Length of the longest completion; the others end anywhere between half of it and this."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The engine's work in one scenario, and the comparison of its log-probabilities in each
    packing.
    """

    name: str
    stats: EngineStats
    comparisons: dict[str, Comparison]
    missing: tuple[str, ...]
    """Events that should have happened and did not, by the names of ``EngineStats``."""
    operations: Operations | None = None
    """The comparison of every operation; None where operations were not observed."""
    draws: tuple[float | bool, ...] = ()
    """See ``Scenario``."""
    drawn: tuple[bytes, ...] = ()
    """The token ids of each completion with its prompt, as bytes."""

    @property
    def differs(self) -> bool:
        """Whether a log-probability or a row of any operation differs."""
        return self.comparison.differs or (
            self.operations is not None and self.operations.difference is not None
        )

    @property
    def comparison(self) -> Comparison:
        """The comparison over all packings: a token counts once in each."""
        return sum(self.comparisons.values(), Comparison())


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The results of all scenarios."""

    flow: str
    scenarios: tuple[ScenarioResult, ...]

    @property
    def comparison(self) -> Comparison:
        return sum((scenario.comparison for scenario in self.scenarios), Comparison())

    @property
    def differs(self) -> bool:
        return self.redrawn[1] > 0 or any(scenario.differs for scenario in self.scenarios)

    @property
    def redrawn(self) -> tuple[int, int]:
        """Completions that another scenario had drawn already by the same settings, and how many of
        them have other tokens.
        """
        first: dict[tuple[float | bool, ...], tuple[bytes, ...]] = {}
        pairs: list[tuple[bytes, bytes]] = []
        for scenario in self.scenarios:
            if scenario.draws in first:
                pairs += zip(first[scenario.draws], scenario.drawn, strict=True)
            first.setdefault(scenario.draws, scenario.drawn)
        return len(pairs), sum(before != after for before, after in pairs)

    @property
    def operations(self) -> tuple[Operations, ...]:
        return tuple(s.operations for s in self.scenarios if s.operations is not None)

    @property
    def missing(self) -> tuple[str, ...]:
        """Everything that should have happened and did not, with its scenario."""
        return tuple(
            f"{scenario.name}: {name} is 0"
            for scenario in self.scenarios
            for name in scenario.missing
        )

    @property
    def exit_code(self) -> int:
        """1 if any bit differs, else 2 if anything could not be compared, else 0."""
        return (
            1 if self.differs else 2 if self.missing or not self.comparison.tokens_compared else 0
        )

    def as_json(self) -> dict[str, Any]:
        """The counts over everything, and the same for each scenario with what the engine did in
        it.
        """
        scenarios = {
            scenario.name: {
                **_counts(scenario.comparison),
                "engine": asdict(scenario.stats),
                "operations": None if (seen := scenario.operations) is None else seen.as_json(),
                "missing": list(scenario.missing),
            }
            for scenario in self.scenarios
        }
        return {
            "precision": self.flow,
            **_counts(self.comparison),
            "completions_redrawn": self.redrawn[0],
            "completions_differing": self.redrawn[1],
            "missing": list(self.missing),
            "scenarios": scenarios,
        }


def verify(
    folder: Path,
    precision: PrecisionConfig,
    options: VerifyOptions | None = None,
    on_scenario: Callable[[ScenarioResult], None] | None = None,
    device: Device = "cpu",
    world: World = ALONE,
) -> VerifyResult:
    """Check a Hugging Face folder, or ``starter``, in a precision flow; ``on_scenario`` is called
    with each result as it comes.  Ranks of ``world`` sample together, each with its share of the
    weights, and each compares with the forward of all of them.

    Raises ModelError for a folder that cannot be loaded, ConfigError for a context too small
    for the options, NonFiniteError where the model's output is not finite: nothing could be
    compared then.
    """
    policy = policy_to_verify(folder, precision, device, world)
    shared = None
    if world.size > 1:
        masters = read_masters(model_folder(folder), policy.config, policy.device)
        shared = PolicyShare(policy.config, precision, masters, world, policy.device)
    return verify_policy(policy, options or VerifyOptions(), on_scenario, shared)


def policy_to_verify(
    name: Path, precision: PrecisionConfig, device: Device, world: World = ALONE
) -> Policy:
    """The policy of a folder, or ``starter``, without masters.  Raises what ``verify`` raises
    before it compares.
    """
    folder = model_folder(name)
    where = world.own_device(choose_device(device, read_config(folder), precision))
    return load_policy(folder, precision, where, trainable=False)


def verify_policy(
    policy: Policy,
    options: VerifyOptions,
    on_scenario: Callable[[ScenarioResult], None] | None = None,
    shared: PolicyShare | None = None,
) -> VerifyResult:
    """Check the published weights of a policy, sampled from by all ranks of ``shared`` together.
    Raises as ``verify`` does.
    """
    workload = random_workload(policy, options)
    scorer, results = Scorer(policy), list[ScenarioResult]()
    observes = _shows_operations(policy) and shared is None
    for scenario in scenarios_of(policy, workload):
        results.append(
            run_scenario(scenario, workload, scorer, options.seed, shared=shared, observes=observes)
        )
        if on_scenario is not None:
            on_scenario(results[-1])
    return VerifyResult(policy.flow.name, tuple(results))


def _cache_size(policy: Policy, config: RolloutConfig) -> CacheSize | None:
    """Few pages with carries for all sequences, of a model with delta rules; else None.  With the
    few carries that belong to so few pages hardly any run side by side, and none is preempted.
    """
    if policy.config.delta is None or config.kv_pages is None:
        return None
    return CacheSize(config.kv_pages, carries_for(config.max_sequences))


def _calibrate(policy: Policy, workload: Workload, shared: PolicyShare | None) -> None:
    """Set scales of Q, K and V a tensor, where the flow has them and none are set yet, by the
    prompts of the check.
    """
    if policy.kv_scales is None or policy.kv_scales.is_set:
        return
    prompts = [prompt.token_ids for prompt in workload.prompts]
    calibrate_kv_scales(policy, prompts, policy.backend.sizes.batched_tokens)
    others = None if shared is None else shared.weights("rollout").kv_scales
    if others is not None:
        others.restore(policy.kv_scales.state())


def random_workload(policy: Policy, options: VerifyOptions) -> Workload:
    """The workload for the model of ``policy``.  Raises ConfigError if the model's context is too
    small for the options.
    """
    config = policy.config
    if config.max_positions <= options.max_new_tokens:
        raise ConfigError(
            f"max_new_tokens is {options.max_new_tokens}, but the model's context holds "
            f"{config.max_positions} tokens; lower it"
        )
    sizes = options.prompts, options.samples, options.max_new_tokens
    return build_workload(
        config.vocab_size, config.max_positions, *sizes, options.seed, page_tokens_of(policy)
    )


def generate_samples(
    engine: RolloutEngine,
    requests: Sequence[Request],
    results: "Results",
    publish: Callable[[], Any] | None = None,
) -> tuple[list[TokenSequence], EngineStats]:
    """The engine's completions as samples to train on, in the order of the requests, and what it
    did.  ``results`` stand behind the turns that end with a stop token; ``publish`` is called
    behind half of the turns.
    """
    completions, stats = generate(engine, requests), engine.stats
    while half_done := results.behind(requests, completions):
        if publish is not None and results.is_half:
            publish()
        engine.admit(requests, half_done)
        while engine.num_live:
            for event in engine.step():
                if event.completion is not None:
                    place = results.places[event.handle]
                    completions[place][event.handle.sample] = event.completion
        stats += engine.stats
    groups = [
        Group(request.prompt, request.visit, made)
        for request, made in zip(requests, completions, strict=True)
    ]
    advantages = [[0.0] * len(group.completions) for group in groups]
    return sequences_of(groups, advantages), stats


class Results:
    """Random tokens in the place of what tools say, for so many ``turns``."""

    def __init__(self, turns: int, workload: Workload, context: int, seed: int) -> None:
        self._turns, self._left = turns, turns - 1
        self._workload, self._context = workload, context
        self._random = Random(seed)  # noqa: S311 (no secret)
        self.places: dict[Handle, int] = {}
        """The place of each handle's request."""

    @property
    def is_half(self) -> bool:
        """Whether half of the turns have results behind them."""
        return self._turns - 1 - self._left == self._turns // 2

    def behind(
        self, requests: Sequence[Request], completions: Sequence[Sequence[Completion]]
    ) -> dict[Handle, Completion]:
        """The samples that go on, with a result; none after the last turn."""
        found: dict[Handle, Completion] = {}
        self._left -= 1
        for index, (request, group) in enumerate(zip(requests, completions, strict=True)):
            for sample, one in enumerate(group if self._left >= 0 else ()):
                count = self._random.randint(1, RESULT_TOKENS)
                given = [self._random.randrange(self._workload.vocab_size) for _ in range(count)]
                has_room = one.sequence.length + count < request.max_length(self._context)
                if one.finish_reason == "stop" and has_room:
                    handle = Handle(request.prompt.id, request.visit, sample)
                    self.places[handle] = index
                    found[handle] = Completion(one.sequence.with_given(given), "", "aborted")
        return found


def run_scenario(
    scenario: Scenario,
    workload: Workload,
    scorer: Scorer,
    seed: int,
    make_packings: Packings = packings,
    shared: PolicyShare | None = None,
    observes: bool = False,
) -> ScenarioResult:
    """Generate the workload in one scenario and compare it in every packing; with ``observes``,
    compare the result of every operation too.  Raises RanksDifferError if ranks that sample
    together have drawn different tokens.
    """
    keeps = [(Checksums(), Checksums()) for _ in range(scenario.weights)] if observes else None
    sampled = sample_and_score(scenario, workload, scorer, seed, keeps, make_packings, shared)
    samples, stats, comparisons = sampled
    missing = tuple(name for name in scenario.must_happen if getattr(stats, name) == 0)
    if scenario.turns > 1 and not any(map(_has_results, samples)):
        missing += ("turns",)
    operations = None if keeps is None else _operations(keeps, samples)
    drawn = tuple(sample.token_ids.tobytes() for sample in samples)
    return ScenarioResult(
        scenario.name, stats, comparisons, missing, operations, scenario.draws, drawn
    )


def _operations(
    keeps: Sequence[tuple[Checksums, Checksums]], samples: Sequence[TokenSequence]
) -> Operations:
    """The operations of the first weights under which any differ, or of all weights."""
    if len(keeps) == 1:
        return compared_operations(*keeps[0], samples)
    parts = [
        compared_operations(*pair, drawn_by(samples, version))
        for pair, version in zip(keeps, _versions(samples), strict=False)
    ]
    parted = next((part for part in parts if part.difference is not None), parts[0])
    return replace(parted, rows=sum(part.rows for part in parts))


def _versions(samples: Sequence[TokenSequence]) -> list[int]:
    """Comparisons of the weights that drew any token."""
    return sorted(
        {int(one) for sample in samples for one in sample.of_response(sample.weights_versions)}
    )


def sample_and_score(
    scenario: Scenario,
    workload: Workload,
    scorer: Scorer,
    seed: int,
    keeps: Sequence[tuple[Keep, Keep]] | None,
    make_packings: Packings = packings,
    shared: PolicyShare | None = None,
) -> tuple[list[TokenSequence], EngineStats, dict[str, Comparison]]:
    """Both sides of a scenario: its samples, in the order of prompts and their completions, what
    the engine did, and the comparison in every packing.  ``keeps`` receive every operation of
    rollout and of training, a pair for each of ``Scenario.weights``.
    """
    if scenario.ties_routers:
        plain = replace(scenario, ties_routers=False)
        with tied_routers(scorer.policy, *([shared] if shared else [])):
            return sample_and_score(plain, workload, scorer, seed, keeps, make_packings, shared)
    _calibrate(scorer.policy, workload, shared)
    observer = TokenObserver(keeps[0][0]) if keeps else None
    engine = NativeEngine(
        shared or scorer.policy,
        scenario.rollout,
        tokenizer=None,
        seed=seed,
        make_runner=partial(ObservedRunner, observer=observer) if observer else None,
        size=_cache_size(scorer.policy, scenario.rollout),
    )
    results = Results(scenario.turns, workload, scorer.policy.config.max_positions, seed)
    requests, comparisons = workload.requests(scenario), dict[str, Comparison]()

    def compare(drawn: list[TokenSequence], which: int) -> None:
        pair = keeps[which] if keeps else None
        for name, batches in make_packings(drawn, seed) if drawn else ():
            for batch in batches:
                if pair and batch.row_of is None:  # rows of one token each can be observed
                    scores = observed_scores(scorer, batch, *pair)
                else:
                    scores = scorer.score(batch)
                found = comparisons.get(name, Comparison())
                comparisons[name] = found + Comparison.of_batch(batch, scores)

    with ExitStack() as others:

        def publish() -> None:
            others.enter_context(other_weights(scorer.policy, *([shared] if shared else [])))
            if observer is not None and keeps is not None:
                observer.keep = keeps[1][0]

        samples, stats = generate_samples(
            engine, requests, results, publish if scenario.publishes else None
        )
        if shared is not None:
            _check_alike(samples, shared.tensor_parallel.world)
        versions = _versions(samples)
        for version in versions[1:]:  # while the others are published
            compare(drawn_by(samples, version), 1)
    compare(drawn_by(samples, versions[0]) if len(versions) > 1 else samples, 0)
    return samples, stats, comparisons


def _has_results(sample: TokenSequence) -> bool:
    return len(sample.given_from(0)) > 1


def first_operation(result: VerifyResult) -> str:
    """The first operation that differs in any scenario, or an empty string."""
    sites = [
        operation.difference.site
        for operation in result.operations
        if operation.difference is not None
    ]
    return describe_site(sites[0]) if sites else ""


def _shows_operations(policy: Policy) -> bool:
    """Whether operations can be compared: both sides are one function, and the back end runs the
    same kernels when it is observed.
    """
    return policy.flow.exact and not policy.backend.is_asynchronous


def _check_alike(samples: Sequence[TokenSequence], world: World) -> None:
    """Raises RanksDifferError unless all ranks have the same tokens and log-probabilities."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.token_ids.tobytes() + sample.log_probs.tobytes())
    digests = world.all_gather(digest.hexdigest())
    others = [str(rank) for rank, found in enumerate(digests) if found != digests[0]]
    if others:
        raise RanksDifferError(
            f"rank 0 has drawn other samples than {', '.join(others)}, though all share one engine"
        )


def _counts(comparison: Comparison) -> dict[str, float]:
    routings = {
        "routings_compared": comparison.routings_compared,
        "routings_differing": comparison.routings_differing,
    }
    return {
        "tokens_compared": comparison.tokens_compared,
        "tokens_differing": comparison.tokens_differing,
        "max_abs_diff": comparison.max_abs_diff,
        **(routings if comparison.routings_compared else {}),
    }
