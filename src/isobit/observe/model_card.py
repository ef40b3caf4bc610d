"""The model card of an exported folder, ``README.md``: what the model is, what it was trained from
and on, how well it did before and after, whether its log-probabilities were exact, which formats it
works in, and the SHA-256 of every file.

The metrics are those of ``metrics.jsonl`` up to the exported step.  Names come from recipes, and go
into the page so that they can be neither markup nor a key of the front matter.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import isobit
from isobit.models.config import ModelConfig
from isobit.models.decoder import parameter_count
from isobit.models.hub import is_hub_name
from isobit.observe.report.page import visible
from isobit.observe.report.panels import evaluation_sets
from isobit.observe.report.source import RunRecord, entry_at
from isobit.precision.flow import PrecisionFlow, describe_flow

CARD_FILE = "README.md"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card is made of."""

    name: str
    """Of the folder."""
    source: str
    """What was exported: a path, or a model of the hub."""
    config: ModelConfig
    in_fp8: bool
    flow: PrecisionFlow | None
    """That the FP8 bytes are published in; None of BF16, and of bytes that were there."""
    not_whole: Sequence[str]
    """Matrices that are BF16 because no stock loader reads their last blocks."""
    digests: Mapping[str, str]
    """SHA-256 by file."""
    record: RunRecord | None
    """Of a run."""
    step: int | None
    """Of the run that the weights are of."""


def model_card(facts: CardFacts) -> str:
    sections = [
        "---\n" + "\n".join(_front_matter(facts)) + "\n---",
        f"# {_plain(facts.name)}",
        _opening(facts),
        *(_training(facts.record, facts.step) if facts.record else ()),
        *_formats(facts),
        *_loading(facts),
        *_files(facts),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: CardFacts) -> Iterator[str]:
    """YAML, whose strings are JSON's."""
    yield "library_name: transformers"
    yield f"pipeline_tag: {'text-classification' if facts.config.score_head else 'text-generation'}"
    base = facts.record.setting("config", "model") if facts.record else facts.source
    if isinstance(base, str) and is_hub_name(base):
        yield f"base_model: {json.dumps(base.partition('@')[0])}"
    tags = ["isobit"]
    if facts.record is not None:
        tags.append("reinforcement-learning" if _is_rl(facts.record) else "fine-tuned")
    yield "tags:"
    yield from (f"- {tag}" for tag in [*tags, *(["fp8"] if facts.in_fp8 else [])])


def _opening(facts: CardFacts) -> str:
    parameters = parameter_count(facts.config)
    kind = "reward model" if facts.config.score_head else "language model"
    what = f"A {facts.config.family} {kind} of {parameters:,} parameters, in "
    what += "FP8 (E4M3 in blocks of 128x128)" if facts.in_fp8 else "BF16"
    if facts.record is None:
        return f"{what}; written by Isobit {isobit.__version__} from {_place(facts.source)}."
    kind = "reinforcement learning" if _is_rl(facts.record) else "fine-tuning"
    steps = "step" if facts.step == 1 else "steps"
    when = f"after {facts.step} {steps}" if facts.step is not None else "at its end"
    return f"{what}: the model of a run of {kind} {when}, written by Isobit {isobit.__version__}."


def _training(record: RunRecord, step: int | None) -> list[str]:
    """How it was trained, and what came of it."""
    rows = {at: figures for at, figures in record.figures.items() if step is None or at <= step}
    return [
        "## Training",
        _table(("", ""), _settings(record)),
        *_evaluations(rows),
        *_exactness(rows),
    ]


def _settings(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What the recipe says of model, data and algorithm."""
    yield "start", _place(record.setting("config", "model"))
    if record.setting("config", "from_scratch") is not None:
        yield "weights", "random at the start; the model above gave its tokenizer"
    for title, path in (
        ("training data", ("data", "train")),
        ("evaluation data", ("data", "eval")),
    ):
        found = record.setting("config", *path)
        if found:
            yield title, ", ".join(_data_names(found))
    if _is_rl(record):
        yield "reward", _place(_reward(record.setting("config", "reward")))
        yield "algorithm", _code(record.setting("config", "algorithm", "name"))
    else:
        yield "objective", _code(record.setting("config", "objective"))
    names = ("learning_rate", "prompts_per_step", "samples_per_prompt")
    settings = [
        f"{name} {value}"
        for name in names
        if (value := record.setting("config", "training", name)) is not None
    ]
    yield "settings", _code(", ".join(settings))
    yield "precision", _code(record.setting("config", "precision", "preset"))
    device = record.setting("device", "model") or record.setting("machine", "processor")
    yield "machine", _code(device)


def _data_names(entry: Any) -> list[str]:
    """Where data come from, of one source or of several by name."""
    if not isinstance(entry, dict):
        return []
    if "type" in entry:
        name = next(
            (entry[key] for key in ("path", "name", "dataset", "task") if entry.get(key)),
            entry["type"],
        )
        return [_place(name)]
    return [f"{_plain(key)}: {''.join(_data_names(value))}" for key, value in entry.items()]


def _reward(entry: Any) -> str:
    parts = entry_at(entry, "parts") or {}
    own = entry_at(entry, "function") or entry_at(entry, "model")
    return ", ".join([*([str(own)] if own else []), *map(str, parts)])


def _evaluations(rows: Mapping[int, Mapping[str, float | None]]) -> list[str]:
    """Each evaluation set at the first and the last measurement."""
    names = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    lines = []
    for figure in ("accuracy", "loss"):
        for name in evaluation_sets(names, figure):
            key = f"eval/{name}/{figure}"
            measured = [at for at, figures in rows.items() if figures.get(key) is not None]
            if not measured:
                continue
            first, last = measured[0], measured[-1]
            after = _figure(rows[last], name, figure) if last > first else "\N{EN DASH}"
            before = _figure(rows[first], name, figure)
            lines.append((_plain(f"{name} {figure}"), before, after, str(last)))
    if not lines:
        return []
    header = ("evaluation", "first", "last", "measured after step")
    return [_table(header, lines)]


def _figure(row: Mapping[str, float | None], name: str, figure: str) -> str:
    value = row[f"eval/{name}/{figure}"]
    assert value is not None
    if figure == "loss" or not 0 <= value <= 1:
        return f"{value:.4f}"
    low, high = (row.get(f"eval/{name}/{side}") for side in ("low", "high"))
    interval = (
        f" (95%: {100 * low:.1f} to {100 * high:.1f})"
        if low is not None and high is not None
        else ""
    )
    return f"{100 * value:.1f}%{interval}"


def _exactness(rows: Mapping[int, Mapping[str, float | None]]) -> list[str]:
    """How many log-probabilities were compared, and how many differed."""

    def total(metric: str) -> float:
        return sum(row.get(metric) or 0.0 for row in rows.values())

    compared = total("log_prob_diff/tokens_compared")
    if not compared:
        return []
    differing = total("log_prob_diff/tokens_differing")
    return [
        f"Of {compared:,.0f} log-probabilities recorded while sampling, {differing:,.0f} differed "
        "from those of the training forward, compared bit for bit."
    ]


def _formats(facts: CardFacts) -> list[str]:
    if not facts.in_fp8 and not facts.not_whole:
        return []
    parts = ["## Formats"]
    if facts.in_fp8:
        use = "scores" if facts.config.score_head else "samples"
        parts.append(
            "A matrix `X.weight` is E4M3 with a scale for each block of 128x128 in "
            f"`X.weight_scale_inv`, which multiplies: the bytes that Isobit {use} with."
        )
    if facts.not_whole:
        parts.append(
            f"{len(facts.not_whole)} matrices have sizes that are no multiples of 128, or are "
            "fused with one that has. Stock loaders refuse those in FP8, so they are written in "
            "BF16, as the numbers that their FP8 bytes stand for."
        )
    if facts.flow is not None:
        parts += ["The precision flow:", "```\n" + "\n".join(describe_flow(facts.flow)) + "\n```"]
    return parts


def _loading(facts: CardFacts) -> list[str]:
    kind = "SequenceClassification" if facts.config.score_head else "CausalLM"
    return [
        "## Loading",
        "```python\n"
        f"from transformers import AutoModelFor{kind}, AutoTokenizer\n\n"
        f'model = AutoModelFor{kind}.from_pretrained("FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        "```",
    ]


def _files(facts: CardFacts) -> list[str]:
    rows = [(_code(name), _code(digest)) for name, digest in sorted(facts.digests.items())]
    return ["## Files", _table(("file", "SHA-256"), rows)]


def _is_rl(record: RunRecord) -> bool:
    return record.setting("config", "algorithm") is not None


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _code(value: Any) -> str:
    """A name as code, on one line and within its cell."""
    return f"`{_one_line(value).replace('`', chr(0x27))}`"


def _place(value: Any) -> str:
    """Where something is, as code; of an absolute path the last part, as the others are nobody
    else's business.
    """
    text = str(value)
    return _code(text.rstrip("/").rpartition("/")[2] if text.startswith("/") else text)


def _plain(value: Any) -> str:
    """A name as text: what Markdown or HTML would read as markup is escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", _one_line(value))


def _one_line(value: Any) -> str:
    return visible(" ".join(str(value).split())).replace("|", "\N{BROKEN BAR}")
