"""Reads a run's directory for the report: whatever is there, and a list of what is missing or
damaged.  A run that was killed leaves a torn last line and no summary.

Sample completions are shown token by token, shaded by the log-probability that was recorded when
they were sampled.  The precision flow comes from the manifest: the format of each site on both
sides, with equal layers folded into one.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from isobit.config.precision import precision_name
from isobit.config.recipes import RunConfig, SftConfig
from isobit.observe.report.chart import MINUS, number_text
from isobit.records.rounding import are_level, settled
from isobit.store.directory import RunDirectory, is_held
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain
from isobit.util.strict_json import json_text


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has written so far."""

    root: Path
    manifest: Mapping[str, Any]
    """``run.json``; empty where it cannot be read."""
    figures: Mapping[int, Mapping[str, float | None]]
    """The figures of ``metrics.jsonl`` by step, ascending; None where one was not finite."""
    completions: tuple[Mapping[str, Any], ...]
    finished: bool
    """Whether the summary is there, which a run writes last."""
    ending: Mapping[str, Any]
    """``ending.json``: how a run that was stopped early ended; otherwise empty."""
    is_running: bool
    """Whether a process of this machine holds the run's lock."""
    problems: tuple[str, ...]
    """What is missing or damaged, one sentence each."""

    def setting(self, *path: str) -> Any:
        """The entry of the manifest at that path; None where there is none."""
        entry: Any = self.manifest
        for key in path:
            entry = entry.get(key) if isinstance(entry, dict) else None
        return entry

    @property
    def flow(self) -> str | None:
        """The preset with its options; None where the manifest has none."""
        table = self.setting("config", "precision")
        return precision_name(table) if isinstance(table, dict) and "preset" in table else None

    @property
    def names(self) -> list[str]:
        """Every figure that the run has written, in the order of its first appearance."""
        return list(dict.fromkeys(name for figures in self.figures.values() for name in figures))

    def values(self, metric: str) -> list[float]:
        """A figure of each step that has it, in the order of the steps."""
        rows = self.figures.values()
        return [value for row in rows if (value := row.get(metric)) is not None]

    def total(self, metric: str) -> float:
        """The sum of a figure over all steps."""
        return sum(self.values(metric))


def read_run(root: Path) -> RunRecord:
    """Read a run's directory.  Raises ConfigError for a path that is none."""
    directory = RunDirectory(root)
    if not directory.manifest.is_file() and not directory.metrics.is_file():
        what = (
            "holds neither run.json nor metrics.jsonl"
            if root.is_dir()
            else "is a file"
            if root.is_file()
            else "does not exist"
        )
        raise ConfigError(
            f"{str(root)!r} is no run: it {what}; name the directory that `isobit train` wrote "
            "(its `output`)"
        )
    problems: list[str] = []
    return RunRecord(
        root=root,
        manifest=read_object(directory.manifest, problems),
        figures=_figures(_read_lines(directory.metrics, problems)),
        completions=tuple(_read_lines(directory.completions, problems)),
        finished=directory.summary.is_file(),
        ending=read_object(root / "ending.json", []),
        is_running=is_held(root),
        problems=tuple(problems),
    )


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object of a JSON file; where there is none an empty one, and a sentence more among the
    problems.
    """
    try:
        content = json.loads(read_plain(path))
    except OSError:
        problems.append(f"{path.name} is missing: the page lacks what it holds")
        return {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        problems.append(f"{path.name} is damaged: the page lacks what it holds")
        return {}
    return content


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file; lines that are none are counted and left out."""
    try:
        text = read_plain(path, largest=None).decode("utf-8", "replace")
    except OSError:
        problems.append(f"{path.name} is missing: the page lacks what it holds")
        return []
    lines = text.removesuffix("\n").split("\n") if text else []  # a line may contain U+2028
    objects: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(content := json.loads(line), dict):
                objects.append(content)
    if len(objects) < len(lines):
        problems.append(
            f"{path.name}: {len(lines) - len(objects)} of {len(lines)} lines cannot be read and "
            "are left out"
        )
    return objects


def _figures(lines: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    steps: dict[int, dict[str, float | None]] = {}
    for line in lines:
        add_figures(steps, line)
    return dict(sorted(steps.items()))


def add_figures(steps: dict[int, dict[str, float | None]], line: Mapping[str, Any]) -> None:
    """Add the finite numbers and nulls of a line to those of its step, training and evaluation
    together; a later line replaces figures of an earlier one.
    """
    step = line.get("step")
    if isinstance(step, int):
        row = steps.setdefault(step, {})
        for name, value in line.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name != "step" and (value is None or (is_number and math.isfinite(value))):
                row[name] = value


_MOST_CHARACTERS = 400
"""Shown of a value."""

Row = tuple[str, str]
"""A dotted key and its value as JSON."""


def view_settings(config: Any) -> tuple[list[Row], list[Row]]:
    """The keys of a manifest's configuration that differ from the defaults, and all others.  The
    configuration may be another version's, whose defaults are not known: then none has changed.
    """
    rows = list(flatten(config)) if isinstance(config, dict) else []
    changed = dict(flatten(_without_defaults(config)))
    return (
        [row for row in rows if row[0] in changed],
        [row for row in rows if row[0] not in changed],
    )


def flatten(entry: Mapping[str, Any], above: str = "") -> Iterator[Row]:
    """Dotted names and values, one row per leaf."""
    for key, value in entry.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{path}.")
        elif value is not None or above:
            text = value if isinstance(value, str) else json_text(value)
            more = len(text) - _MOST_CHARACTERS
            yield path, text if more <= 0 else f"{text[:_MOST_CHARACTERS]} [{more} more characters]"


def _without_defaults(config: Any) -> dict[str, Any]:
    for schema in (RunConfig, SftConfig):
        try:
            made = schema.model_validate(config)
        except (ValueError, TypeError, RecursionError):  # ValidationError is a ValueError
            continue
        return made.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {}


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
    name: str
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
    return FlowView(record.flow or "", verdict, exact, tuple(stages))


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
    number = settled(reward, 0.0, 1.0) if isinstance(reward, int | float) else 0.0  # failed: bad
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
    mean = fmean(valid)
    above = reward - mean
    if are_level((reward, mean)):
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
