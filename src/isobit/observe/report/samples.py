"""Sample completions, token by token, and the precision flow, as the report shows them.

Tokens are shaded by the log-probability that was recorded when they were sampled.  The flow comes
from the manifest: the format of each site on both sides, with equal layers folded into one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, TypeVar

from isobit.observe.report.chart import MINUS, number_text
from isobit.observe.report.source import RunRecord

T = TypeVar("T")
Line = Mapping[str, Any]
"""A line of ``completions.jsonl``."""

_FORMATS = {"e4m3": "E4M3", "int8": "INT8", "bf16": "BF16", "fp32": "FP32"}


@dataclass(frozen=True, slots=True)
class SiteView:
    """One site: its formats in the rollout, in the training forward and of its gradients, which are
    empty where it has none.
    """

    name: str
    rollout: str
    training: str
    dgrad: str
    wgrad: str
    detail: str
    """What its scales span; empty where it has none."""

    @property
    def differs(self) -> bool:
        """Whether rollout and training compute it in two formats."""
        return self.rollout != self.training


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive sites: a run of equal layers, or those outside the layers, without a title."""

    title: str
    sites: tuple[SiteView, ...]


@dataclass(frozen=True, slots=True)
class FlowView:
    preset: str
    verdict: str
    exact: bool
    stages: tuple[Stage, ...]


def view_flow(record: RunRecord) -> FlowView | None:
    """The flow in the manifest; None where there is none."""
    rollout, training = (
        {str(site["name"]): site for site in sites if isinstance(site, dict) and "name" in site}
        if isinstance(sites := record.setting("precision", side), list)
        else {}
        for side in ("rollout", "training")
    )
    if not rollout:
        return None
    exact = bool(record.setting("precision", "exact"))
    differing = record.setting("precision", "differing_sites") or []
    verdict = (
        "one function in rollout and training"
        if exact
        else f"{len(differing)} of {len(rollout)} sites differ between the sides"
    )
    layers = [
        (layer, tuple(_view(rollout[name], training.get(name, {})) for name in names))
        for layer, names in groupby(rollout, key=lambda name: _split(name)[0])
    ]
    stages = []
    for (in_layers, views), same in groupby(layers, lambda one: (one[0] is not None, one[1])):
        numbers = [layer for layer, _ in same]
        several = f"layers {numbers[0]} to {numbers[-1]}, each"
        title = several if len(numbers) > 1 else f"layer {numbers[0]}"
        stages.append(Stage(title if in_layers else "", views))
    return FlowView(str(record.setting("precision", "preset")), verdict, exact, tuple(stages))


def _split(name: str) -> tuple[int | None, str]:
    """``layers.3.qkv_proj`` -> 3 and ``qkv_proj``; any other name -> None and itself."""
    parts = name.split(".", 2)
    in_layer = len(parts) > 2 and parts[0] == "layers" and parts[1].isdecimal()
    return (int(parts[1]), parts[2]) if in_layer else (None, name)


def _view(site: Mapping[str, Any], training: Mapping[str, Any]) -> SiteView:
    rollout, forward, dgrad, wgrad = (
        "" if name is None else _FORMATS.get(str(name), str(name))
        for name in (site.get("forward"), *map(training.get, ("forward", "dgrad", "wgrad")))
    )
    scales = ", FP32 scales" if site.get("scales") == "fp32" else ""
    of_linears = {"E4M3": f"1\u00d7128 by 128\u00d7128{scales}", "INT8": "Hadamard, a scale a row"}
    detail = of_linears.get(rollout, "")
    if detail and site.get("kind") != "linear":
        detail = "a scale a tensor" if site.get("per_tensor") else "a scale a token and head"
    return SiteView(_split(str(site["name"]))[1], rollout, forward, dgrad, wgrad, detail)


MOST_PROMPTS = 8
"""Prompts shown of each source."""
MOST_TOKENS = 6000
"""Tokens shown on the page; what does not fit is cut and counted."""
MOST_OTHERS = 60
"""Rows of each source's table of further completions."""
MOST_CHARACTERS = 4000
"""Shown of a prompt, or of a completion that was logged without its tokens."""
_TOKEN_CHARACTERS = 80
_SHORT = 160
"""Characters of a text in the table of further completions."""

SHADES = (-0.1, -0.5, -1.0, -2.0, -4.0)
"""Log-probabilities, in nats, below which a token gets the next darker shade."""


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    log_prob: str
    """In words."""
    shade: int
    """0 to ``len(SHADES)``; the less likely, the higher."""


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
    """``good`` for rewards of 1 or more, ``bad`` for 0 or less and for none, else empty."""
    above: str
    """Its reward against the mean of its group; empty where it is alone."""


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


def choose_samples(lines: Sequence[Line]) -> list[Source]:
    """The completions for the page, of all that were logged: of training, whole groups that are
    spread over the run; of an evaluation set, the first and the last answer to its first problems.
    """
    by_source = _grouped([line for line in lines if isinstance(line.get("step"), int)], "source")
    budget = MOST_TOKENS // max(1, len(by_source))
    return [_source(name, logged, budget) for name, logged in by_source.items()]


def _grouped(lines: Sequence[Line], *keys: str) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault("\n".join(str(line.get(key, "")) for key in keys), []).append(line)
    return found


def _source(name: str, logged: Sequence[Line], budget: int) -> Source:
    if name == "train":
        groups = _spread(list(_grouped(logged, "step", "prompt_id").values()), MOST_PROMPTS)
    else:
        problems = list(_grouped(logged, "prompt_id").values())[:MOST_PROMPTS]
        groups = [lines if len(lines) < 2 else [lines[0], lines[-1]] for lines in problems]
    chosen = [line for group in groups for line in group]
    share = budget // max(1, len(chosen))
    taken = {id(line) for line in chosen}
    others = _spread([line for line in logged if id(line) not in taken], MOST_OTHERS)
    return Source(
        "training" if name == "train" else name,
        tuple(
            Problem(
                prompt_id,
                _cut(lines[0].get("prompt", "")),
                _cut(lines[0].get("answer", "")),
                tuple(_answer(line, share) for line in lines),
            )
            for prompt_id, lines in _grouped(chosen, "prompt_id").items()
        ),
        len(chosen),
        len(logged),
        tuple(
            (str(one["step"]), _short(one, "prompt"), _short(one, "completion"), _reward(one))
            for one in others
        ),
    )


def _spread(lines: Sequence[T], most: int) -> list[T]:
    """Evenly spread over the lines, the first and the last included."""
    if len(lines) <= most:
        return list(lines)
    return [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]


def _short(line: Line, name: str) -> str:
    text = " ".join(str(line.get(name, "")).split())
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}\N{HORIZONTAL ELLIPSIS}"


def _reward(line: Line) -> str:
    reward = line.get("reward")
    return number_text(reward) if isinstance(reward, int | float) else "failed"


def _answer(line: Line, most_tokens: int) -> Answer:
    texts, log_probs = line.get("token_texts"), line.get("log_probs")
    tokens = ()
    if isinstance(texts, list) and isinstance(log_probs, list):
        tokens = tuple(map(_token, texts[:most_tokens], log_probs))
    reward, length = line.get("reward"), line.get("tokens")
    number = reward if isinstance(reward, int | float) else 0.0  # a failed reward is bad
    return Answer(
        step=line["step"],
        reward=_reward(line),
        finish="cut by the length limit" if line.get("finish_reason") == "length" else "",
        length=f"{length} tokens" if isinstance(length, int) else "",
        text=_cut(line.get("completion", "")),
        tokens=tokens,
        left_out=max(0, length - len(tokens)) if tokens and isinstance(length, int) else 0,
        verdict="good" if number >= 1 else "bad" if number <= 0 else "",
        above=_above(reward, line.get("group_rewards")),
    )


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


def _token(text: Any, log_prob: Any) -> Token:
    is_number = isinstance(log_prob, int | float)
    shade = sum(log_prob < limit for limit in SHADES) if is_number else 0
    words = f"{log_prob:.4f} nats".replace("-", MINUS) if is_number else "not finite"
    return Token(str(text)[:_TOKEN_CHARACTERS].replace("\n", "\u21b5\n"), words, shade)


def _cut(value: Any) -> str:
    text = str(value)
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} [{more} more characters]"
