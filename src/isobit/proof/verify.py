"""``isobit verify``: the proof of exactness for one model and one precision flow.

The native engine completes random prompts in several scenarios.  Together they contain everything
that must not change a bit: preemption, prompts cut into chunks, groups that share pages, few
sequences at once, greedy and truncated sampling, and temperatures other than 1.  Prompts are random
tokens of the model's vocabulary, so any model folder can be checked.  Their lengths lie around the
bounds of a KV page, where pages are shared, copied and added, and completions end at ragged
lengths.

Every recorded log-probability is then compared, bit for bit, with the one that the training forward
computes from packed batches: each sequence alone, and among different neighbours.  In a mixture of
experts, so are the experts that each token was routed to.  Where the back end can be observed (the
CPU specification), every row of every operation is compared as well, before and after its rounding
(``isobit.proof.difference``).  A rounding to BF16 hides most faults of one ulp from the
log-probabilities.

A scenario counts only if the events that it is made for did happen, by the engine's own counters.
Where one did not, the result says which part was not proved.  In ``fp8-rollout``, whose two sides
are different functions, differences must appear: this shows that the check is able to fail.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from isobit.config.base import Device
from isobit.config.tables import PrecisionConfig, RolloutConfig
from isobit.memory.cache_size import pages_for
from isobit.models.folder import choose_device, load_policy, model_folder, read_config, read_masters
from isobit.models.policy import Policy
from isobit.models.policy_share import PolicyShare
from isobit.models.scorer import Scorer
from isobit.parallel.world import ALONE, World
from isobit.proof.difference import (
    Checksums,
    Keep,
    ObservedRunner,
    Operations,
    TokenObserver,
    compared_operations,
    describe_site,
    observed_scores,
)
from isobit.records.batch import PackedBatch, pack, sequences_of
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rollout.engine import EngineStats, Request, RolloutEngine, generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.runner import page_tokens_of
from isobit.training.comparison import Comparison
from isobit.util.errors import ConfigError, IsobitError


@dataclass(frozen=True, slots=True)
class Scenario:
    """One setting of the engine, and the counts of ``EngineStats`` that must not be zero under
    it.
    """

    name: str
    rollout: RolloutConfig
    must_happen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Random prompts and the limit of each one's completions."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: tuple[int, ...]
    samples: int
    page_tokens: int
    """Tokens of a page of the cache whose bounds the lengths are around."""

    @property
    def longest(self) -> int:
        return max(
            len(prompt.token_ids) + limit
            for prompt, limit in zip(self.prompts, self.max_new_tokens, strict=True)
        )

    def requests(self, scenario: Scenario) -> list[Request]:
        """Requests to the engine; each completion ends at its own limit, never at a stop token."""
        rollout = scenario.rollout
        return [
            Request(
                prompt,
                0,
                self.samples,
                SamplingParams(
                    limit, rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p
                ),
            )
            for prompt, limit in zip(self.prompts, self.max_new_tokens, strict=True)
        ]


def build_workload(
    vocab_size: int,
    context: int,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    seed: int,
    page_tokens: int,
) -> Workload:
    """Random prompts that leave room for ``max_new_tokens`` in the context."""
    random = Random(seed)  # noqa: S311 (no secret)
    longest = context - max_new_tokens
    lengths = _prompt_lengths(page_tokens)
    made, limits = [], []
    for index in range(prompts):
        shortest, most = lengths[index % len(lengths)]
        length = min(random.randint(shortest, most), longest)
        made.append(
            Prompt(
                f"verify/{index}", "", tuple(random.randrange(vocab_size) for _ in range(length))
            )
        )
        limits.append(random.randint(max_new_tokens // 2, max_new_tokens))
    return Workload(tuple(made), tuple(limits), samples, page_tokens)


def engine_scenarios(workload: Workload) -> tuple[Scenario, ...]:
    limit = max(workload.max_new_tokens)
    few_pages = pages_for(workload.longest, workload.page_tokens)
    return (
        Scenario(
            "roomy",
            RolloutConfig(max_new_tokens=limit, max_batched_tokens=4096),
            ("shared_pages", "copied_pages"),
        ),
        Scenario(
            "few pages",
            RolloutConfig(max_new_tokens=limit, kv_pages=few_pages),
            ("preemptions", "recomputed_tokens"),
        ),
        Scenario(
            "small chunks", RolloutConfig(max_new_tokens=limit, max_batched_tokens=40), ("chunks",)
        ),
        Scenario("two sequences", RolloutConfig(max_new_tokens=limit, max_sequences=2)),
        Scenario("greedy", RolloutConfig(max_new_tokens=limit, temperature=0.0)),
        Scenario(
            "few pages, small chunks, temperature 0.7",
            RolloutConfig(
                max_new_tokens=limit,
                temperature=0.7,
                kv_pages=few_pages,
                max_batched_tokens=56,
                max_sequences=8,
            ),
            ("preemptions", "chunks", "shared_pages"),
        ),
        Scenario(
            "truncated, temperature 1.3",
            RolloutConfig(max_new_tokens=limit, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
        ),
    )


def packings(
    samples: Sequence[TokenSequence], seed: int
) -> Iterator[tuple[str, list[PackedBatch]]]:
    """The same samples in several packings, by name."""
    yield "alone", pack(samples, 1)
    yield "300 tokens", pack(samples, 300)
    yield "2048 tokens", pack(samples, 2048)
    yield (
        "random neighbours",
        [
            batch
            for part in _random_parts(samples, seed)
            for batch in pack(part, sum(s.length for s in part))
        ],
    )


def _prompt_lengths(page: int) -> tuple[tuple[int, int], ...]:
    """Ranges of prompt lengths, in tokens, taken in turn, for pages of ``page`` tokens."""
    return (
        (1, page // 4),
        (page - 6, page),  # completions grow into a second page,
        (page - 6, page),  # those of two prompts at about the same time
        (page + 1, page + 16),  # a full page to share and a partial one to copy
        (2 * page, 3 * page),
    )


def _random_parts(samples: Sequence[TokenSequence], seed: int) -> Iterator[list[TokenSequence]]:
    """The samples in a random order, cut into runs of 2 to 9."""
    random = Random(seed)  # noqa: S311 (no secret)
    shuffled = random.sample(list(samples), len(samples))
    while shuffled:
        size = random.randint(2, 9)
        yield shuffled[:size]
        shuffled = shuffled[size:]


Packings = Callable[[list[TokenSequence], int], Iterator[tuple[str, list[PackedBatch]]]]
"""Samples and a seed -> named packings of all of them."""


class RanksDifferError(IsobitError):
    """Ranks that share an engine have drawn different samples."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The size of the check."""

    prompts: int = 10
    samples: int = 3
    """Completions of each prompt."""
    max_new_tokens: int = 24
    """Length of the longest completion; the others end anywhere between half of it and this."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """What the engine did in one scenario, and how its log-probabilities compare in each
    packing.
    """

    name: str
    stats: EngineStats
    comparisons: dict[str, Comparison]
    missing: tuple[str, ...]
    """Events that should have happened and did not, by the names of ``EngineStats``."""
    operations: Operations | None = None
    """The comparison of every operation; None where operations were not observed."""

    @property
    def differs(self) -> bool:
        """Whether a log-probability or a row of any operation differs."""
        return self.comparison.differs or (
            self.operations is not None and self.operations.difference is not None
        )

    @property
    def comparison(self) -> Comparison:
        """Over all packings: a token counts once in each."""
        return sum(self.comparisons.values(), Comparison())


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The results of all scenarios."""

    preset: str
    scenarios: tuple[ScenarioResult, ...]

    @property
    def comparison(self) -> Comparison:
        return sum((scenario.comparison for scenario in self.scenarios), Comparison())

    @property
    def differs(self) -> bool:
        return any(scenario.differs for scenario in self.scenarios)

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
            "precision": self.preset,
            **_counts(self.comparison),
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
    for scenario in engine_scenarios(workload):
        results.append(
            run_scenario(scenario, workload, scorer, options.seed, shared=shared, observes=observes)
        )
        if on_scenario is not None:
            on_scenario(results[-1])
    return VerifyResult(policy.flow.preset, tuple(results))


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


def generate_samples(engine: RolloutEngine, requests: Sequence[Request]) -> list[TokenSequence]:
    """What the engine generates, as samples to train on, in the order of the requests."""
    completions = generate(engine, requests)
    groups = [
        Group(request.prompt, request.visit, made)
        for request, made in zip(requests, completions, strict=True)
    ]
    return sequences_of(groups, [[0.0] * len(group.completions) for group in groups])


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
    keeps = (Checksums(), Checksums()) if observes else None
    sampled = sample_and_score(scenario, workload, scorer, seed, keeps, make_packings, shared)
    samples, stats, comparisons = sampled
    missing = tuple(name for name in scenario.must_happen if getattr(stats, name) == 0)
    operations = None if keeps is None else compared_operations(*keeps, samples)
    return ScenarioResult(scenario.name, stats, comparisons, missing, operations)


def sample_and_score(
    scenario: Scenario,
    workload: Workload,
    scorer: Scorer,
    seed: int,
    keeps: tuple[Keep, Keep] | None,
    make_packings: Packings = packings,
    shared: PolicyShare | None = None,
) -> tuple[list[TokenSequence], EngineStats, dict[str, Comparison]]:
    """Both sides of a scenario: its samples, in the order of prompts and their completions, what
    the engine did, and the comparison in every packing.  ``keeps`` receive every operation of
    rollout and of training.
    """
    engine = NativeEngine(
        shared or scorer.policy,
        scenario.rollout,
        tokenizer=None,
        seed=seed,
        make_runner=partial(ObservedRunner, observer=TokenObserver(keeps[0])) if keeps else None,
    )
    samples = generate_samples(engine, workload.requests(scenario))
    if shared is not None:
        _check_alike(samples, shared.tensor_parallel.world)

    def compared(batch: PackedBatch) -> Comparison:
        scores = observed_scores(scorer, batch, *keeps) if keeps else scorer.score(batch)
        return Comparison.of_batch(batch, scores)

    comparisons = {
        name: sum(map(compared, batches), Comparison())
        for name, batches in make_packings(samples, seed)
    }
    return samples, engine.stats, comparisons


def first_operation(result: VerifyResult) -> str:
    """The first operation that differs in any scenario, or an empty string."""
    found = [one.difference.site for one in result.operations if one.difference is not None]
    return describe_site(found[0]) if found else ""


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
