"""``isobit verify --bisect``: the first layer and operation at which rollout and training differ.

One scenario of ``isobit verify`` is generated and trained on once more while every operation of
both forwards is observed: ``isobit.proof.difference`` keeps a checksum for each token at each site.
The first site in the order of the forward pass whose rows are not all equal is the place of the
fault: everything before it is equal, and everything behind it may differ because of it.  A third
pass reads the values of that site alone, to measure by how much they differ.
``describe_bisect`` puts the result into lines of text.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig
from isobit.kernels.observing import UNROUNDED
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.proof.difference import Extremes, Operations, SiteDifference, describe_site
from isobit.proof.observation import keys_of_batch
from isobit.proof.scenarios import Scenario, Workload
from isobit.proof.verify import (
    ScenarioResult,
    VerifyOptions,
    VerifyResult,
    policy_to_verify,
    random_workload,
    run_scenario,
    sample_and_score,
    scenarios_of,
    verify_policy,
)
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence

TOKENS_MEASURED = 256
"""Tokens whose values are compared.  More would fill the memory where a row holds logits."""

_KINDS = {
    "embed_tokens": "embedding",
    "input": "quantiser",
    "q": "quantiser",
    "rope.q": "RoPE",
    "rope.k": "RoPE",
    "hadamard.q": "Hadamard matrix",
    "hadamard.k": "Hadamard matrix",
    "kv_cache.k": "KV write",
    "kv_cache.v": "KV write",
    "attention": "attention",
    "activation": "activation",
    "attention_residual": "residual",
    "mlp_residual": "residual",
    "router.logits": "router, logits",
    "router.experts": "router, choice of experts",
    "router.weights": "router, weights",
    "experts": "experts",
    "shared_expert_gate": "gate of the shared expert",
    "shared_expert.sum": "experts, sum with the shared one",
    "lm_head": "head",
    "log_prob": "log-probability",
}
"""The kind of an operation, by the last part or parts of its site."""


@dataclass(frozen=True, slots=True)
class Place:
    """A token of a sequence."""

    prompt_id: str
    sample: int
    position: int
    """The token's position, from 0 at the start of the prompt."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference between the two sides."""

    difference: SiteDifference
    first_token: Place | None
    """The first token that differs or that rollout lacks; None if only training lacks rows."""
    max_abs_diff: float | None
    """The largest difference over the first tokens that differ. None if their values are equal (the
    sign of a zero, or a NaN) or did not differ again.
    """

    @property
    def kind(self) -> str:
        """The kind of the operation.  If rows have no partner, the pages are at fault, because the
        tokens before a row are known only by the pages that it reads.
        """
        difference = self.difference
        return "KV pages" if difference.lacks_rows else operation_kind(difference.site)

    @property
    def site(self) -> str:
        return "kv_cache" if self.difference.lacks_rows else self.difference.site

    def as_json(self) -> dict[str, Any]:
        difference, first = self.difference, self.first_token
        return {
            "site": self.site,
            "operation": self.kind,
            "sites_before": difference.sites_before,
            "formats": dict(difference.formats),
            "tokens_compared": difference.tokens_compared,
            "tokens_differing": difference.differing.numel(),
            "max_abs_diff": self.max_abs_diff,
            "first_token": None if first is None else asdict(first),
            "tokens_not_repeated": dict(difference.unstable),
            "tokens_alone": {side: keys.numel() for side, keys in difference.alone.items()},
        }


@dataclass(frozen=True, slots=True)
class Traced:
    """One scenario, observed: what was compared, and where the sides part in it, if they do."""

    scenario: str
    sites: int
    rows: int
    """Checksums compared, of both sides."""
    parting: Parting | None


@dataclass(frozen=True, slots=True)
class BisectResult:
    """The counts of ``isobit verify``, and the scenarios that were observed until the sides
    parted.
    """

    verified: VerifyResult
    traced: tuple[Traced, ...]

    @property
    def parting(self) -> Parting | None:
        return self.traced[-1].parting

    @property
    def exit_code(self) -> int:
        """The exit code of ``isobit verify``, and 1 where an intermediate result differs that no
        log-probability shows.
        """
        return 1 if self.parting is not None else self.verified.exit_code

    def as_json(self) -> dict[str, Any]:
        """The object of ``isobit verify --json``, with ``bisect`` beside its counts."""
        last = self.traced[-1]
        bisected = {
            "scenarios": [traced.scenario for traced in self.traced],
            "sites": last.sites,
            "checksums": sum(traced.rows for traced in self.traced),
            "first_difference": None if last.parting is None else last.parting.as_json(),
        }
        return {**self.verified.as_json(), "bisect": bisected}


def bisect(
    folder: Path,
    precision: PrecisionConfig,
    options: VerifyOptions | None = None,
    on_scenario: Callable[[ScenarioResult], None] | None = None,
    on_trace: Callable[[str], None] | None = None,
    device: Device = "cpu",
) -> BisectResult:
    """Verify a Hugging Face folder, or ``starter``, then observe the first scenario that differs;
    where none does, all of them that ``verify`` has not observed.

    ``on_trace`` is called with the name of each scenario about to be observed.  Raises as
    ``isobit.proof.verify.verify`` does.
    """
    return bisect_policy(
        policy_to_verify(folder, precision, device),
        options or VerifyOptions(),
        on_scenario,
        on_trace,
    )


def bisect_policy(
    policy: Policy,
    options: VerifyOptions,
    on_scenario: Callable[[ScenarioResult], None] | None = None,
    on_trace: Callable[[str], None] | None = None,
) -> BisectResult:
    """Do what ``bisect`` does for the published weights of a policy."""
    verified = verify_policy(policy, options, on_scenario)
    differing = [result.name for result in verified.scenarios if result.differs]
    names = differing[:1] or [result.name for result in verified.scenarios]
    seen = {result.name: result.operations for result in verified.scenarios}
    workload = random_workload(policy, options)
    scorer = Scorer(policy)
    traced: list[Traced] = []
    for scenario in scenarios_of(policy, workload):
        if scenario.name not in names:
            continue
        operations = seen[scenario.name]
        if on_trace is not None and (operations is None or operations.difference is not None):
            on_trace(scenario.name)
        traced.append(trace_scenario(scenario, workload, scorer, options.seed, operations))
        if traced[-1].parting is not None:
            break
    return BisectResult(verified, tuple(traced))


def operation_kind(site: str) -> str:
    """``layers.2.rope.q`` -> ``RoPE``."""
    site = site.removesuffix(f".{UNROUNDED}")
    parts = site.split(".")
    for name in (".".join(parts[-2:]), parts[-1]):
        if name in _KINDS:
            return _KINDS[name]
    return "norm" if site.endswith("norm") else "GEMM"


def trace_scenario(
    scenario: Scenario,
    workload: Workload,
    scorer: Scorer,
    seed: int,
    compared: Operations | None = None,
) -> Traced:
    """Observe one scenario on both sides, in every packing, unless its operations are already
    ``compared``.  If they differ, measure by how much.
    """
    if compared is None:
        compared = run_scenario(scenario, workload, scorer, seed, observes=True).operations
        assert compared is not None
    difference, parting = compared.difference, None
    if difference is not None:
        tokens = difference.differing[:TOKENS_MEASURED]
        extremes = [Extremes(difference.site, tokens) for _ in range(scenario.weights)]
        keeps = [(extreme, extreme) for extreme in extremes]
        samples, *_ = sample_and_score(scenario, workload, scorer, seed, keeps)
        apart = [extreme.max_abs_diff for extreme in extremes if extreme.max_abs_diff is not None]
        place = _first_place(difference, samples, workload)
        parting = Parting(difference, place, max(apart, default=None))
    return Traced(scenario.name, compared.sites, compared.rows, parting)


def _first_place(
    found: SiteDifference, samples: list[TokenSequence], workload: Workload
) -> Place | None:
    wanted = set(found.differing.tolist()).union(found.alone["training"].tolist())
    for index, sample in enumerate(samples):
        (batch,) = pack([sample], sample.length)
        for position, key in enumerate(keys_of_batch(batch).tolist()):
            if key in wanted:
                prompt, number = divmod(index, workload.samples)
                return Place(workload.prompts[prompt].id, number, position)
    return None


_HINTS = {
    "attention": (
        "its queries and what was written to the KV cache are equal: it is the arithmetic, or "
        "the pages that were read"
    ),
    "log-probability": (
        "the logits are equal: it is the log-softmax, the temperature, or how the number was "
        "recorded"
    ),
}


def describe_bisect(result: BisectResult) -> list[str]:
    """Lines that say where the sides differ and what is known about it, or that nothing differs."""
    if result.parting is not None:
        return _describe_parting(result.parting)
    if result.verified.differs:
        return [
            "the differences did not come again while every operation was observed: they do not "
            "repeat, and no site can be named"
        ]
    last = result.traced[-1]
    checksums = sum(traced.rows for traced in result.traced)
    return [f"nothing differs: {checksums:,} checksums of {last.sites} operations agree"]


def _describe_parting(parting: Parting) -> list[str]:
    difference, first = parting.difference, parting.first_token
    where = (
        ""
        if first is None
        else (
            f", the first at position {first.position} of {first.prompt_id}, sample {first.sample}"
        )
    )
    if difference.lacks_rows:
        ours, theirs = (difference.alone[side].numel() for side in ("rollout", "training"))
        return [
            f"rollout and training part at {parting.site} ({parting.kind}), seen at "
            f"{difference.site}",
            f"  rollout lacks {theirs:,} tokens that training has{where}",
            f"  rollout computed {ours:,} tokens behind others than those of any sample: the pages "
            "that it went on from hold another sequence's keys, or old ones",
        ]
    lines = [
        f"rollout and training part at {describe_site(difference.site)} ({parting.kind}); the "
        f"{difference.sites_before} operations before it are equal",
        f"  {difference.differing.numel():,} of {difference.tokens_compared:,} tokens differ there"
        f"{where}",
    ]
    if parting.max_abs_diff is not None:
        lines.append(f"  their values differ by {parting.max_abs_diff:.3g} at most")
    if len(set(difference.formats.values())) > 1:
        lines.append(
            f"  the flow has {difference.formats['rollout']} there in rollout and "
            f"{difference.formats['training']} in training"
        )
    lines += [
        f"  {side} computed {count:,} tokens more than once with other bits: its result there "
        "depends on more than the token"
        for side, count in difference.unstable.items()
        if count
    ]
    if parting.kind in _HINTS:
        lines.append(f"  {_HINTS[parting.kind]}")
    return lines
