"""What ``isobit flows`` has found of the flows of a model, and which one it recommends.

Beside it stands what is known by size: ``flows_by_size.json`` has the differences to ``bf16`` that
models of several sizes had after the same training, as ``python -m experiments.proof sizes``
writes them from its rows.  Without that file nothing is said of sizes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from isobit.config.precision import PrecisionConfig
from isobit.observe.console import WIDTH, columns, stacked
from isobit.observe.evaluation import EvalResult
from isobit.observe.intervals import Z_95, Interval
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import EIGHT_BITS
from isobit.util.terminal import counted, gib

THRESHOLD = 0.01
"""The loss of accuracy against ``bf16`` that a recommended flow must exclude, by default."""
RMS_BOUND = 0.15
"""The largest rms of a flow that is recommended without a reward, in nats.  On SmolLM2-135M
E4M3 has 0.3 and ends below ``bf16`` (docs/proof.md); INT8 has 0.1.
"""
FEWEST_TOKENS = 1000
"""The tokens from which an rms decides: it is then known to about 5%."""
CREST = 12.0
BY_SIZE = Path(__file__).with_name("flows_by_size.json")
_EQUAL = 1.05
"""Flows whose bytes differ by less than this factor are equally cheap."""


@dataclass(frozen=True, slots=True)
class Crest:
    """What stands out in the inputs of a linear in INT8."""

    site: str
    share: float
    """The share of the tokens whose crest is above ``CREST``."""
    largest: float


def describe_crests(crests: Sequence[Crest], tokens: int) -> str:
    """One line: the linears with crests above the bound, the highest first, and the key that keeps
    them in BF16.
    """
    high = sorted((one for one in crests if one.share), key=lambda one: -one.largest)
    if not high:
        most = max((one.largest for one in crests), default=0.0)
        return (
            f"INT8: in {tokens:,} tokens no crest in front of {len(crests)} linears is above "
            f"{CREST:g} (largest {most:.1f})"
        )
    shown = [f"{one.site} ({one.share:.1%} of tokens, up to {one.largest:.1f})" for one in high]
    more = f" and {len(high) - 4} more" if len(high) > 4 else ""
    parts = [one.site.split(".") for one in crests if one.share]
    names = json.dumps([f"{layers}.{layer}.{name}" for layers, layer, *_, name in parts])
    return (
        f"INT8: in {tokens:,} tokens crests in front of {len(high)} of {len(crests)} linears are "
        f"above {CREST:g}, where INT8 rounds more coarsely than FP8: {', '.join(shown[:4])}{more}; "
        f"they stay in INT8 unless precision.modules_bf16 = {names}"
    )


@dataclass(frozen=True, slots=True)
class Closeness:
    """A flow's distributions beside those of ``bf16``, as the module says."""

    perplexity: float
    kl: float
    rms: float
    changed: float


@dataclass(frozen=True, slots=True)
class FlowFigures:
    """What was found of one flow; None where it was not measured."""

    precision: PrecisionConfig
    flow: PrecisionFlow
    weight_bytes: int
    """Published, of both sides."""
    kv_bytes: int
    """Bytes of the KV cache for a token."""
    problem: str | None = None
    """Why the device does not compute it."""
    closeness: Closeness | None = None
    generated_per_s: float | None = None
    """Tokens, while all answers are generated."""
    scored_per_s: float | None = None
    result: EvalResult | None = None
    scores: tuple[float | None, ...] = ()
    """The mean reward of each problem; None where all failed."""
    difference: float | None = None
    """Mean of the paired differences to the scores of ``bf16``."""
    interval: Interval | None = None
    """95%, of ``difference`` (``paired_interval``)."""
    crests: tuple[Crest, ...] = ()
    crest_tokens: int = 0
    estimate: Mapping[str, float] = field(default_factory=dict)
    """The estimate of ``isobit.memory.speed`` for a GPU; empty where none was asked for."""

    @property
    def name(self) -> str:
        return self.precision.name

    @property
    def in_eight_bits(self) -> bool:
        return any(site.forward in EIGHT_BITS for site in self.flow.rollout.sites)

    def as_json(self) -> dict[str, Any]:
        crests = [asdict(one) for one in self.crests]
        return {
            "name": self.name,
            "precision": self.precision.model_dump(mode="json"),
            "exact": self.flow.exact,
            "problem": self.problem,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes,
            "closeness": None if self.closeness is None else asdict(self.closeness),
            "generated_tokens_per_s": self.generated_per_s,
            "scored_tokens_per_s": self.scored_per_s,
            "evaluation": None if self.result is None else self.result.figures(),
            "difference": self.difference,
            "interval": self.interval,
            "crests": {"tokens": self.crest_tokens, "linears": crests} if crests else None,
            "estimate": dict(self.estimate) or None,
        }


def flow_toml(precision: PrecisionConfig) -> str:
    """The line of a recipe that chooses the flow."""
    name = precision.name
    return f"precision = {json.dumps(name) if name == precision.preset else name}"


def differences_of(ours: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """The differences on the problems that both have a score of."""
    pairs = zip(ours, base, strict=True)
    return [a - b for a, b in pairs if a is not None and b is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All flows, ``bf16`` first."""

    model: str
    flows: Sequence[FlowFigures]
    problems: int = 0
    tokens: int = 0
    """Tokens that every flow has scored."""
    context: int = 0
    """Tokens of a KV cache that count beside the weights: the model's context."""
    threshold: float = THRESHOLD
    estimated_for: str = ""
    """What the estimates of a GPU's speed take a step to be."""
    layer_parameters: int = 0
    """Parameters of the matrices in the model's layers, which are what is in 8 bits."""
    by_size: Mapping[str, Any] = field(default_factory=dict)
    """What ``read_by_size`` returned."""
    card: str = ""
    card_note: str = ""
    """What the figures of a card rest on that nobody has run."""
    """The GPU of the estimates and of the bytes; empty for this machine's device."""

    @property
    def base(self) -> FlowFigures:
        return self.flows[0]

    def as_json(self) -> dict[str, Any]:
        choice = recommend(self)
        return {
            "model": self.model,
            "problems": self.problems,
            "tokens": self.tokens,
            "gpu": self.card or None,
            "estimated_for": self.estimated_for or None,
            "threshold": self.threshold,
            "layer_parameters": self.layer_parameters,
            "by_size": dict(self.by_size) or None,
            "flows": [one.as_json() for one in self.flows],
            "recommended": None
            if choice is None
            else {
                "flow": choice.flow.name,
                "precision": choice.flow.precision.model_dump(mode="json"),
                "decided": choice.decided,
                "reason": choice.sentence,
            },
        }

    def bytes_of(self, one: FlowFigures) -> int:
        """Bytes of the weights and of a KV cache of one context."""
        return one.weight_bytes + self.context * one.kv_bytes


@dataclass(frozen=True, slots=True)
class Recommendation:
    flow: FlowFigures
    decided: bool
    """Whether the evidence says so; else it is ``bf16`` because nothing cheaper is shown."""
    sentence: str


def recommend(found: Comparison) -> Recommendation | None:
    """The cheapest flow that is shown to be as good as ``bf16``, with the reason; None where
    nothing was measured.

    It is in 8 bits, exact, and smaller or faster than ``bf16``.  With rewards, the interval of its
    difference lies above minus ``threshold``; without, its rms is at most ``RMS_BOUND`` and half of
    the largest of the 8-bit flows, over at least ``FEWEST_TOKENS`` tokens.  Of flows that are
    equally cheap by their bytes it is the one with the smallest rms.
    """
    base = found.base
    options = {
        one.name: one.closeness.rms
        for one in found.flows[1:]
        if one.closeness is not None and one.in_eight_bits
    }
    if base.closeness is None:
        return None
    fit = [one for one in found.flows if one.name in options and _may_replace(found, one)]
    limit = f"{100 * found.threshold:g} point{'' if found.threshold == 0.01 else 's'}"
    if base.result is not None:
        shown = [one for one in fit if one.interval and one.interval[0] >= -found.threshold]
        reasons = {one.name: f"no loss beyond {limit} ({_points(one)})" for one in shown}
    else:
        bound = min(RMS_BOUND, max(options.values(), default=0.0) / 2)
        enough = found.tokens >= FEWEST_TOKENS
        shown = [one for one in fit if enough and options[one.name] <= bound]
        reasons = {
            one.name: f"log-probabilities within {options[one.name]:.3f} nats rms of bf16's, at "
            f"most {bound:.3f}, by which no accuracy was measured"
            for one in shown
        }
    if shown:
        smallest = min(map(found.bytes_of, shown))
        cheap = [one for one in shown if found.bytes_of(one) <= _EQUAL * smallest]
        best = min(cheap, key=lambda one: options[one.name])
        return Recommendation(best, True, _sentence(found, best, reasons[best.name]))
    decided, reason = _why_none(found, fit, limit)
    return Recommendation(base, decided, f"recommended: {flow_toml(base.precision)}: {reason}")


def _may_replace(found: Comparison, one: FlowFigures) -> bool:
    faster = (one.generated_per_s or 0.0) > (found.base.generated_per_s or 0.0)
    return one.flow.exact and (faster or found.bytes_of(one) < found.bytes_of(found.base))


def _points(one: FlowFigures) -> str:
    assert one.difference is not None
    assert one.interval is not None
    low, high = (f"{100 * bound:+.1f}" for bound in one.interval)
    return f"{100 * one.difference:+.1f} points, 95% interval {low} to {high}"


def _sentence(found: Comparison, best: FlowFigures, reason: str) -> str:
    size = found.bytes_of(best) / found.bytes_of(found.base)
    speed = (best.generated_per_s or 0.0) / (found.base.generated_per_s or 1.0)
    return (
        f"recommended: {flow_toml(best.precision)}: {reason}, in {size:.0%} of the bytes of bf16; "
        f"generation took {speed:.2f}x its rate here"
    )


def _why_none(found: Comparison, fit: Sequence[FlowFigures], limit: str) -> tuple[bool, str]:
    """Whether it is decided that no flow of ``fit`` is as good as ``bf16``, and why."""
    if not fit:
        return True, "no exact 8-bit flow here is smaller or faster"
    if found.base.result is None:
        if found.tokens < FEWEST_TOKENS:
            return False, (
                f"{found.tokens:,} tokens do not decide without a reward; {FEWEST_TOKENS:,} would"
            )
        return False, (
            "no 8-bit flow is shown to be close enough without a reward; --reward decides by "
            "accuracy"
        )
    undecided = [one for one in fit if one.interval is None or one.interval[1] >= -found.threshold]
    if not undecided:
        return True, f"every 8-bit flow loses more than {limit}"
    best = min(undecided, key=lambda one: math.inf if one.closeness is None else one.closeness.rms)
    if best.difference is None:
        return False, f"{counted(found.problems, 'problems')} cannot decide it; give more"
    needed = problems_needed(differences_of(best.scores, found.base.scores), found.threshold)
    more = "no number would" if needed is None else f"about {needed:,} would"
    return False, (
        f"{found.problems} problems do not decide whether {best.name} loses more than {limit} "
        f"({_points(best)}); {more}"
    )


def problems_needed(differences: Sequence[float], threshold: float) -> int | None:
    """About how many problems, if they are like these, would make ``paired_interval`` lie above or
    below minus ``threshold``, to two digits; None where their mean lies on it.
    """
    margin = abs(fmean(differences) + threshold)
    if not margin:
        return None
    needed = max(1.0, Z_95**2 * (1 / margin - 1), (Z_95 * pstdev(differences) / margin) ** 2)
    digit = 10.0 ** max(0, math.floor(math.log10(needed)) - 1)
    return int(math.ceil(needed / digit) * digit)


def read_by_size() -> Mapping[str, Any]:
    """``flows_by_size.json``: the task, steps, cards and days of its measurement, and of each size
    its flows; empty where there is none.
    """
    return json.loads(BY_SIZE.read_text(encoding="utf-8")) if BY_SIZE.is_file() else {}


# What is printed.

_Cells = Mapping[str, str]


def describe_comparison(found: Comparison, width: int = WIDTH) -> list[str]:
    """The figures as tables in ``width`` columns, crests in front of INT8's linears, and the
    recommendation.
    """
    lines = [f"isobit flows {found.model}: {_what(found)}"]
    if found.base.closeness is not None:
        lines += ["", *_table([_accuracy_cells(found, one) for one in found.flows], width)]
    lines += ["", *_table([_cost_cells(found, one) for one in found.flows], width)]
    lines += [f"{one.name} was not measured: {one.problem}" for one in found.flows if one.problem]
    if found.card:
        lines.append(f"{found.card}{found.card_note}: estimated, for {found.estimated_for}")
    lines += _size_lines(found, width)
    crests = [describe_crests(one.crests, one.crest_tokens) for one in found.flows if one.crests]
    choice = recommend(found)
    return [*lines, *([""] if choice else []), *crests, *([choice.sentence] if choice else [])]


def _size_lines(found: Comparison, width: int) -> list[str]:
    """What is known by size, on what it was measured, and where this model stands."""
    known = found.by_size
    if not known:
        return []
    sizes = [one["layer_parameters"] for one in known["sizes"]]
    where = "inside this range"
    if found.layer_parameters > max(sizes):
        where = "larger than all of these"
    elif found.layer_parameters < min(sizes):
        where = "smaller than all of these"
    steps = " or ".join(map(str, known["steps"]))
    when = " to ".join(dict.fromkeys(known["days"]))
    measured = {"bf16"}.union(*(one["flows"] for one in known["sizes"]))
    others = [one.name for one in found.flows if one.name not in measured]
    return [
        "",
        f"by size, the difference to bf16 before and after {steps} steps of GRPO, points (seeds):",
        *_by_flow(known["sizes"], width),
        f"measured on {known['task']} ({', '.join(known['cards'])}, {when}); other tasks differ",
        *([f"not measured there: {', '.join(others)}"] if others else []),
        f"this model has {_millions(found.layer_parameters)} parameters in its layers, {where}",
    ]


def _by_flow(sizes: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """A table whose rows stand below the name of their flow."""
    header = ("in layers", "before", "after")
    tables: dict[str, list[tuple[str, ...]]] = {}
    for one in sorted(sizes, key=lambda one: one["layer_parameters"]):
        place = f"  {_millions(one['layer_parameters'])} ({one['name']})"
        for name, flow in one["flows"].items():
            cells = [_difference(flow, stage) if stage in flow else "-" for stage in header[1:]]
            tables.setdefault(name, []).append((place, *cells))
    rows = [row for table in tables.values() for row in table]
    lines = columns([header, *rows])
    if max(map(len, lines)) > width:
        return [
            line
            for name, table in tables.items()
            for line in (name, *stacked([header, *table], width))
        ]
    shown, left = lines[:1], iter(lines[1:])
    for name, table in tables.items():
        shown += [name, *(next(left) for _ in table)]
    return shown


def _difference(flow: Mapping[str, Any], stage: str) -> str:
    mean, low, high = (f"{100 * flow[stage][name]:+.1f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" + f" ({flow['seeds']})" * (stage == "after")


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,}"


def _what(found: Comparison) -> str:
    if found.base.closeness is None:
        return f"memory and speed on one {found.card}"
    prompts, tokens = counted(found.problems, "prompts"), counted(found.tokens, "tokens")
    return f"{prompts}, {tokens} of answers scored in each flow"


def _accuracy_cells(found: Comparison, one: FlowFigures) -> _Cells:
    close, is_base = one.closeness, one is found.base
    if close is None:
        return {"": one.name}
    cells = {"": one.name, "perplexity": f"{close.perplexity:.4g}"}
    names = {"KL": f"{close.kl:.2g}", "rms": f"{close.rms:.3f}", "changed": f"{close.changed:.2%}"}
    cells |= {name: "-" if is_base else text for name, text in names.items()}
    if one.result is not None:
        kind = "accuracy" if found.base.result and found.base.result.is_accuracy else "reward"
        low, high = one.interval or (0.0, 0.0)
        cells[kind] = f"{100 * one.result.accuracy:.1f}"
        cells["minus bf16"] = (
            "-"
            if one.difference is None
            else f"{100 * one.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        )
    return cells


def _cost_cells(found: Comparison, one: FlowFigures) -> _Cells:
    cells = {"": one.name, "weights": gib(one.weight_bytes), "KV a token": f"{one.kv_bytes:,} B"}
    base = found.base
    for name, ours, theirs in (
        ("generation", one.generated_per_s, base.generated_per_s),
        ("scoring", one.scored_per_s, base.scored_per_s),
    ):
        if theirs:
            share = "-" if ours is None else f"{ours / theirs:.2f}x"
            cells[name] = f"{theirs:,.0f}/s" if one is base else share
    if found.card:
        names = {"generated": "generated_tokens_per_s", "trained": "trained_tokens_per_s"}
        cells |= {
            f"{found.card} {name}": f"{one.estimate[key]:,.0f}/s" if one.estimate else "-"
            for name, key in names.items()
        }
    return cells


def _table(rows: Sequence[_Cells], width: int) -> list[str]:
    """Columns by name."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return stacked([names, *([row.get(name, "-") for name in names] for row in rows)], width)
