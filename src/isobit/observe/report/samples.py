"""The two views that only this report has: sample completions, token by token, and the precision
flow.

Of an evaluation set the first and the last answer to one problem stand together; of training the
page takes steps that are spread over the run.  Tokens are shaded by the log-probability that was
recorded when they were sampled.  The flow comes from the manifest: what each site computes in on
both sides, with equal layers folded into one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, TypeVar

from isobit.observe.report.chart import MINUS, number_text
from isobit.observe.report.source import RunRecord

_FORMATS = {"e4m3": "E4M3", "bf16": "BF16", "fp32": "FP32"}


@dataclass(frozen=True, slots=True)
class SiteView:
    """One site: its format in the rollout, in the training forward, and those of the gradients
    (empty where there are none).
    """

    name: str
    kind: str
    rollout: str
    training: str
    dgrad: str
    wgrad: str
    detail: str

    @property
    def differs(self) -> bool:
        """Whether rollout and training compute it in two formats."""
        return self.rollout != self.training


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive sites: a run of equal layers, or what stands before and after the layers (no
    title).
    """

    title: str
    sites: tuple[SiteView, ...]


@dataclass(frozen=True, slots=True)
class FlowView:
    """The flow as the page shows it."""

    preset: str
    verdict: str
    exact: bool
    stages: tuple[Stage, ...]


def view_flow(record: RunRecord) -> FlowView | None:
    """The flow in the manifest; None where there is none."""
    sites = [
        site
        for site in record.setting("precision", "rollout") or ()
        if isinstance(site, dict) and "name" in site
    ]
    if not sites:
        return None
    training = {
        site["name"]: site
        for site in record.setting("precision", "training") or ()
        if isinstance(site, dict) and "name" in site
    }
    exact = bool(record.setting("precision", "exact"))
    differing = record.setting("precision", "differing_sites") or []
    verdict = (
        "one function in rollout and training"
        if exact
        else f"{len(differing)} of {len(sites)} sites differ between the sides"
    )
    return FlowView(
        str(record.setting("precision", "preset")),
        verdict,
        exact,
        _stages(sites, training),
    )


def _stages(
    sites: Sequence[Mapping[str, Any]], training: Mapping[str, Mapping[str, Any]]
) -> tuple[Stage, ...]:
    """Sites in the order of the forward pass, each layer a stage, equal neighbours joined."""
    layers: list[tuple[int | None, tuple[SiteView, ...]]] = []
    for layer, members in groupby(sites, key=lambda site: _layer_of(str(site["name"]))):
        layers.append(
            (layer, tuple(_view(site, training.get(site["name"], {})) for site in members))
        )
    stages = []
    for (in_layer, views), same in groupby(layers, key=lambda item: (item[0] is not None, item[1])):
        numbers = [layer for layer, _ in same]
        span = (
            f"layer {numbers[0]}"
            if len(numbers) == 1
            else f"layers {numbers[0]} to {numbers[-1]}, each"
        )
        stages.append(Stage(span if in_layer else "", views))
    return tuple(stages)


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return (
        int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdecimal() else None
    )


def _view(site: Mapping[str, Any], training: Mapping[str, Any]) -> SiteView:
    name = str(site["name"])
    return SiteView(
        name=name if _layer_of(name) is None else name.split(".", 2)[2],
        kind=str(site.get("kind", "")),
        rollout=_format(site.get("forward")),
        training=_format(training.get("forward")),
        dgrad=_format(training.get("dgrad")),
        wgrad=_format(training.get("wgrad")),
        detail=_detail(site),
    )


def _format(name: Any) -> str:
    return "" if name is None else _FORMATS.get(str(name), str(name))


def _detail(site: Mapping[str, Any]) -> str:
    """How the scales lie, where there are any."""
    if site.get("forward") != "e4m3":
        return ""
    if site.get("kind") == "linear":
        return "1\u00d7128 by 128\u00d7128" + (
            ", FP32 scales" if site.get("scales") == "fp32" else ""
        )
    return "a scale a token and head"


T = TypeVar("T")

MOST_PROMPTS = 8
"""Prompts shown of each source."""
MOST_TOKENS = 6000
"""Tokens shown on the page; what does not fit is cut and counted."""
MOST_OTHERS = 60
"""Lines of the table of further completions, of each source."""
MOST_CHARACTERS = 4000
"""Of a prompt, or of a completion that was logged without its tokens."""
_TOKEN_CHARACTERS = 80
_SHORT = 160
"""Characters of a text in the table of further completions."""

SHADES = (-0.1, -0.5, -1.0, -2.0, -4.0)
"""Log-probabilities, in nats, below which a token gets the next darker shade."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token's text, its log-probability in words, and its shade: 0 for a sure one, up to
    ``len(SHADES)``.
    """

    text: str
    log_prob: str
    shade: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion."""

    step: int
    reward: str
    finish: str
    length: str
    text: str
    """Shown where there are no tokens."""
    tokens: tuple[Token, ...]
    left_out: int
    """Tokens at the end that are not shown."""
    verdict: str
    """``good`` from a reward of 1 on, ``bad`` from 0 down, else empty."""
    above: str
    """How far its reward is above the mean of its group's; empty where it is alone."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and its completions, by step."""

    prompt_id: str
    prompt: str
    answer: str
    """The dataset's own; empty where there is none."""
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Problems of the training data or of one evaluation set."""

    name: str
    problems: tuple[Problem, ...]
    shown: int
    logged: int
    others: tuple[tuple[str, str, str, str], ...]
    """Step, prompt, completion and reward of those that are not among the problems, cut short."""


def choose_samples(lines: Sequence[Mapping[str, Any]]) -> list[Source]:
    """The completions for the page from those of ``completions.jsonl``."""
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if isinstance(line.get("step"), int):
            by_source.setdefault(str(line.get("source", "")), []).append(line)
    budget = MOST_TOKENS // max(1, len(by_source))
    return [_source(name, logged, budget) for name, logged in by_source.items()]


def _source(name: str, logged: Sequence[Mapping[str, Any]], budget: int) -> Source:
    is_training = name == "train"
    chosen = _spread_groups(logged) if is_training else _first_and_last(logged)
    share = budget // max(1, len(chosen))
    problems: dict[str, list[Mapping[str, Any]]] = {}
    for line in chosen:
        problems.setdefault(str(line.get("prompt_id", "")), []).append(line)
    views = tuple(
        Problem(
            prompt_id,
            _cut(str(lines[0].get("prompt", ""))),
            _cut(str(lines[0].get("answer", ""))),
            tuple(_answer(line, share) for line in lines),
        )
        for prompt_id, lines in problems.items()
    )
    taken = {id(line) for line in chosen}
    others = _spread([line for line in logged if id(line) not in taken], MOST_OTHERS)
    return Source(
        "training" if is_training else name,
        views,
        len(chosen),
        len(logged),
        tuple(map(_in_short, others)),
    )


def _in_short(line: Mapping[str, Any]) -> tuple[str, str, str, str]:
    texts = (" ".join(str(line.get(name, "")).split()) for name in ("prompt", "completion"))
    prompt, completion = (
        text if len(text) <= _SHORT else f"{text[:_SHORT]}\N{HORIZONTAL ELLIPSIS}" for text in texts
    )
    return str(line["step"]), prompt, completion, _reward(line.get("reward"))


def _reward(reward: Any) -> str:
    return number_text(reward) if isinstance(reward, int | float) else "failed"


def _spread_groups(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All logged completions of prompts and steps that are evenly spread over the run."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((str(line["step"]), str(line.get("prompt_id"))), []).append(line)
    return [line for group in _spread(list(groups.values()), MOST_PROMPTS) for line in group]


def _spread(lines: Sequence[T], most: int) -> list[T]:
    """Evenly spread over the lines, the first and the last included."""
    if len(lines) <= most:
        return list(lines)
    return [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]


def _first_and_last(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first and the last completion of the first problems."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault(str(line.get("prompt_id", "")), []).append(line)
    return [
        line
        for found in list(by_prompt.values())[:MOST_PROMPTS]
        for line in (found if len(found) < 2 else (found[0], found[-1]))
    ]


def _answer(line: Mapping[str, Any], most_tokens: int) -> Answer:
    texts, log_probs = line.get("token_texts"), line.get("log_probs")
    pairs = (
        zip(texts, log_probs, strict=False)
        if isinstance(texts, list) and isinstance(log_probs, list)
        else ()
    )
    tokens = tuple(_tokens(pairs, most_tokens))
    reward, length = line.get("reward"), line.get("tokens")
    return Answer(
        step=line["step"],
        reward=_reward(reward),
        finish="cut by the length limit" if line.get("finish_reason") == "length" else "",
        length=f"{length} tokens" if isinstance(length, int) else "",
        text=_cut(str(line.get("completion", ""))),
        tokens=tokens,
        left_out=max(0, length - len(tokens)) if tokens and isinstance(length, int) else 0,
        verdict=_verdict(reward),
        above=_above(reward, line.get("group_rewards")),
    )


def _verdict(reward: Any) -> str:
    if not isinstance(reward, int | float):
        return "bad"
    return "good" if reward >= 1 else "bad" if reward <= 0 else ""


def _above(reward: Any, of_group: Any) -> str:
    if not isinstance(reward, int | float) or not isinstance(of_group, list):
        return ""
    valid = [one for one in of_group if isinstance(one, int | float)]
    if len(valid) < 2:
        return ""
    above = reward - fmean(valid)
    if above == 0:
        return "level with its group's mean"
    return f"{'+' if above > 0 else ''}{number_text(above)} to its group's mean"


def _tokens(pairs: Iterable[tuple[Any, Any]], most: int) -> Iterable[Token]:
    for index, (text, log_prob) in enumerate(pairs):
        if index == most:
            return
        is_number = isinstance(log_prob, int | float)
        shade = sum(log_prob < limit for limit in SHADES) if is_number else 0
        words = f"{log_prob:.4f} nats".replace("-", MINUS) if is_number else "not finite"
        yield Token(str(text)[:_TOKEN_CHARACTERS].replace("\n", "\u21b5\n"), words, shade)


def _cut(text: str) -> str:
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} [{more} more characters]"
