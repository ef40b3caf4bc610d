"""The model card of a run's model and of an exported folder, ``README.md``.

Its metrics are those of ``metrics.jsonl`` up to the exported step.  Names come from recipes, and
are escaped so that they can be neither markup nor a key of the front matter.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import isobit
from isobit.config.reward import WHOLE
from isobit.models.adapter_folder import LOCAL, base_name
from isobit.models.adapters import adapter_masters
from isobit.models.config import Lora, ModelConfig
from isobit.models.decoder import parameter_count
from isobit.models.folder import base_folder
from isobit.models.hub import is_hub_name
from isobit.observe.report.templates import visible
from isobit.observe.run_record import RunRecord
from isobit.precision.flow import PrecisionFlow, describe_flow
from isobit.util.files import file_sha256
from isobit.util.plain_files import read_plain

CARD_FILE = "README.md"
TRANSFORMERS_INT8 = """\
import json
from compressed_tensors.transform import TransformConfig, apply_transform_config

stored = json.load(open("FOLDER/config.json"))["quantization_config"]["transform_config"]
apply_transform_config(model, TransformConfig.model_validate(stored))
"""


@dataclass(frozen=True, slots=True)
class Merge:
    """Adapters that were added to the matrices of their base."""

    lora: Lora
    rounding: float
    """The rms of what rounding changes over that of what the adapters change."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    name: str
    """The name of the folder."""
    source: str
    """What was exported: a path, or a model of the hub."""
    config: ModelConfig
    in_8_bits: Literal["fp8", "int8"] | None
    """The format of matrices in 8 bits; None where there are none."""
    flow: PrecisionFlow | None
    """The flow that those are published in; None for BF16, and for bytes that were stored."""
    not_whole: Sequence[str]
    """Matrices that are BF16 because no stock loader reads their last blocks."""
    digests: Mapping[str, str]
    """SHA-256 by file."""
    record: RunRecord | None
    """The run, where one was exported."""
    step: int | None
    """The step of the run whose weights were exported."""
    start: Path | None = None
    """The folder of the model that this one was made from, whose licence is taken over."""
    sampled_in: str | None = None
    """The preset that the run sampled in, where the 8 bits are of another flow."""
    merge: Merge | None = None
    """The adapters that the tensors have been given, if they are a base's."""


def model_card(facts: CardFacts) -> str:
    record = facts.record
    if record is not None and facts.step is not None:
        record = replace(record, figures=record.figures.between(-math.inf, facts.step))
        facts = replace(facts, record=record)
    sections = [f"---\n{_front_matter(facts)}\n---", f"# {_plain(facts.name)}", _opening(facts)]
    if record is not None:
        sections += ["## Training", _table(("", ""), _settings(record)), *_about_figures(facts)]
        sections += [*_evaluations(record), *_exactness(record)]
    sections += _formats(facts)
    sections += ["## Loading", f"```python\n{_loading(facts)}```"]
    files = [(_code(name), _code(digest)) for name, digest in sorted(facts.digests.items())]
    sections += ["## Files", _table(("file", "SHA-256"), files)]
    return "\n\n".join(sections) + "\n"


def _loading(facts: CardFacts) -> str:
    kind = "SequenceClassification" if facts.config.score_head else "CausalLM"
    line = f"from transformers import AutoModelFor{kind}, AutoTokenizer\n\n"
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
    if facts.config.lora is None:
        return f'{line}model = AutoModelFor{kind}.from_pretrained("FOLDER")\n{tokenizer}'
    base = json.dumps(_base_model(facts) or "BASE")
    return (
        f"from peft import PeftModel\n{line}"
        f"base = AutoModelFor{kind}.from_pretrained({base})\n"
        f'model = PeftModel.from_pretrained(base, "FOLDER")\n{tokenizer}'
    )


def write_card(
    folder: Path, name: str, config: ModelConfig, record: RunRecord, step: int, start: Path
) -> None:
    """The card of a run's model in BF16, or of its adapters, beside its files; ``start`` is the
    folder that the run began from.  Its bytes do not depend on the run's directory or machine, like
    the model's.
    """
    start = start if config.lora is None else base_folder(start)
    digests = {file.name: file_sha256(file) for file in folder.iterdir() if file.is_file()}
    facts = CardFacts(name, name, config, None, None, (), digests, record, step, start)
    (folder / CARD_FILE).write_text(model_card(facts), encoding="utf-8")


def _front_matter(facts: CardFacts) -> str:
    """What the hub reads, as YAML."""
    record, older = facts.record, _older_card(facts.start)
    tags = ["isobit"] if facts.config.lora is None else ["isobit", "lora", "transformers"]
    if record is not None:
        tags.append("reinforcement-learning" if _is_rl(record) else "fine-tuned")
    data = ModelCardData(
        library_name="transformers" if facts.config.lora is None else "peft",
        pipeline_tag="text-classification" if facts.config.score_head else "text-generation",
        base_model=_base_model(facts) or (None if facts.config.lora else older.base_model),
        license=older.license,
        license_name=older.get("license_name"),
        license_link=older.get("license_link"),
        datasets=_hub_datasets(record.setting("config", "data", "train")) if record else None,
        tags=[*tags, *([facts.in_8_bits] if facts.in_8_bits else [])],
        model_name=_one_line(facts.name),
        eval_results=_results(record) if record and not _is_another_function(facts) else None,
    )
    return data.to_yaml().strip()


def _base_model(facts: CardFacts) -> str | None:
    """The name of the hub of what this model was made from, or of what adapters change."""
    if facts.config.lora is not None:
        name = base_name(facts.start)[0] if facts.start else ""
        return name if "/" in name and not name.startswith(LOCAL) else None
    base = facts.record.setting("config", "model") if facts.record else facts.source
    return base.partition("@")[0] if isinstance(base, str) and is_hub_name(base) else None


def _older_card(folder: Path | None) -> ModelCardData:
    """What the card of the model says that this one was made from; nothing where it has none."""
    try:
        text = read_plain(folder / CARD_FILE).decode("utf-8") if folder else ""
        found = ModelCard(text).data
    except Exception:  # no card, or one that is not YAML: then nothing is known
        found = None
    return found if isinstance(found, ModelCardData) else ModelCardData()


def _hub_datasets(entry: Any) -> list[str] | None:
    """The datasets of the hub among the sources of data."""
    if not isinstance(entry, dict):
        return None
    if "type" in entry:
        name = entry.get("dataset")
        return [name] if entry["type"] == "hub" and isinstance(name, str) else None
    return [name for value in entry.values() for name in _hub_datasets(value) or []] or None


def _results(record: RunRecord) -> list[EvalResult] | None:
    """Each evaluation set at its last measurement."""
    found = []
    for figure in ("accuracy", "loss"):
        for name in record.evaluation_sets(figure):
            values = record.values(f"eval/{name}/{figure}")
            if not values:
                continue
            metric = figure if figure == "loss" or record.is_accuracy(name) else "mean_reward"
            sources = record.setting("config", "data", "eval", name)
            hub = _hub_datasets(sources) or [_one_line(name)]
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=hub[0],
                    dataset_name=_one_line(name),
                    metric_type=metric,
                    metric_value=values[-1],
                )
            )
    return found or None


def _adapters(lora: Lora) -> str:
    scale = f"alpha {lora.alpha:g}{', rsLoRA' if lora.rslora else ''}"
    return f"LoRA adapters of rank {lora.rank} ({scale}; {', '.join(lora.targets)})"


def _what(facts: CardFacts) -> str:
    lora = facts.config.lora
    if lora is not None:
        masters = adapter_masters(facts.config).values()
        numbers = sum(prod(master.shape) for master in masters)
        base = "another one" if facts.start is None else _place(base_name(facts.start)[0])
        return (
            f"{_adapters(lora)}, {numbers:,} parameters in FP32, for the {facts.config.family} "
            f"language model {base}"
        )
    parameters = parameter_count(facts.config)
    kind = "reward model" if facts.config.score_head else "language model"
    what = f"A {facts.config.family} {kind} of {parameters:,} parameters, in "
    return (
        what
        + {
            "fp8": "FP8 (E4M3 in blocks of 128x128)",
            "int8": "INT8 (behind a Hadamard matrix, a scale for each row)",
            None: "BF16",
        }[facts.in_8_bits]
    )


def _opening(facts: CardFacts) -> str:
    what, merged = _what(facts), ""
    if (merge := facts.merge) is not None:
        what += f", with {_adapters(merge.lora)} merged into it"
        merged = (
            " A matrix with adapters is the sum of the base's and theirs, rounded once: another "
            "function than the one that was trained, with the adapters beside their base. "
            f"Rounding moved them by {100 * merge.rounding:.1f}% (rms) of what the adapters change."
        )
    if facts.record is None:
        return (
            f"{what}; written by Isobit {isobit.__version__} from {_place(facts.source)}.{merged}"
        )
    kind = "reinforcement learning" if _is_rl(facts.record) else "fine-tuning"
    steps = "step" if facts.step == 1 else "steps"
    when = f"after {facts.step} {steps}" if facts.step is not None else "at its end"
    return (
        f"{what}: the model of a run of {kind} {when}, written by Isobit {isobit.__version__}."
        f"{merged}"
    )


_FLOWS = {
    "int8": ": linears, KV cache and attention in INT8, in rollout and training",
    "int8-linear": ": linears in INT8, in rollout and training",
    "int8-rollout": ": rollout in INT8, training in BF16",
}


def _settings(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Model, data and algorithm, as the recipe names them."""
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
        yield "reward", ", ".join(_rewards(record))
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
    yield "precision", f"{_code(record.flow)}{_FLOWS.get(record.flow or '', '')}"


def _rewards(record: RunRecord) -> Iterator[str]:
    """What was graded by: each part with its weight, or the only reward there is."""
    reward = record.setting("config", "reward") or {}
    parts: Mapping[str, Any] = reward.get("parts") or {WHOLE: reward}
    for name, part in parts.items():
        place = _place(part.get("model") or part.get("function"))
        weight = part.get("weight", 1.0)
        if name == WHOLE and len(parts) == 1:
            yield place if weight == 1 else f"{place}, weight {weight:g}"
        else:
            yield f"{_plain(name)} ({place}), weight {weight:g}"


def _data_names(entry: Any) -> list[str]:
    """The origin of one source of data, or of several by name."""
    if not isinstance(entry, dict):
        return []
    if "type" in entry:
        name = next(
            (entry[key] for key in ("path", "name", "dataset", "task") if entry.get(key)),
            entry["type"],
        )
        return list(map(_place, name if isinstance(name, list | tuple) else [name]))
    return [f"{_plain(key)}: {', '.join(_data_names(value))}" for key, value in entry.items()]


def _about_figures(facts: CardFacts) -> Iterator[str]:
    """What the figures of the run are of, where it is not the folder's weights."""
    if facts.record is not None and _is_another_function(facts):
        beside = "" if facts.merge is None else "with the adapters beside their base, "
        yield (
            "These figures are not of the weights in this folder: they are of the run's policy, "
            f"{beside}in the flow {_code(facts.record.flow)}."
        )


def _is_another_function(facts: CardFacts) -> bool:
    return facts.merge is not None or facts.sampled_in is not None


def _evaluations(record: RunRecord) -> list[str]:
    """Each evaluation set at the first and the last measurement."""
    lines = []
    for figure in ("accuracy", "loss"):
        for name in record.evaluation_sets(figure):
            key = f"eval/{name}/{figure}"
            measured = record.steps_of(key)
            if not measured:
                continue
            first, last = measured[0], measured[-1]
            before, after = (_figure(record, at, name, figure) for at in (first, last))
            after = after if last > first else "\N{EN DASH}"
            label = figure if figure == "loss" or record.is_accuracy(name) else "mean reward"
            lines.append((_plain(f"{name} {label}"), before, after, str(last)))
    header = ("evaluation", "first", "last", "measured after step")
    return [_table(header, lines)] if lines else []


def _figure(record: RunRecord, step: int, name: str, figure: str) -> str:
    row = record.figures[step]
    value = row[f"eval/{name}/{figure}"]
    assert value is not None
    if figure == "loss" or not record.is_accuracy(name):
        return f"{value:.4f}"
    low, high = (row.get(f"eval/{name}/{side}") for side in ("low", "high"))
    if low is None or high is None:
        return f"{100 * value:.1f}%"
    return f"{100 * value:.1f}% (95%: {100 * low:.1f} to {100 * high:.1f})"


def _exactness(record: RunRecord) -> Iterator[str]:
    if compared := record.total("log_prob_diff/tokens_compared"):
        differing = record.total("log_prob_diff/tokens_differing")
        yield (
            f"Of {compared:,.0f} log-probabilities recorded while sampling, {differing:,.0f} "
            "differed from those of the training forward, compared bit for bit."
        )


def _formats(facts: CardFacts) -> Iterator[str]:
    if facts.in_8_bits or facts.not_whole:
        yield "## Formats"
    if facts.in_8_bits:
        use = "scores" if facts.config.score_head else "samples"
        bytes_of = f"the bytes that Isobit {use} with"
        if facts.merge is not None:
            bytes_of = "quantised anew, from the merged matrices"
        elif facts.sampled_in is not None:
            bytes_of = f"quantised anew, since the run sampled in the flow {facts.sampled_in}"
        yield (
            "A matrix `X.weight` is E4M3 with a scale for each block of 128x128 in "
            f"`X.weight_scale_inv`, which multiplies: {bytes_of}."
            if facts.in_8_bits == "fp8"
            else "A matrix `X.weight` is INT8 behind blocks of a Hadamard matrix, with a scale for "
            f"each row in `X.weight_scale`: {bytes_of}. The layout is that of compressed-tensors. "
            "vLLM multiplies the inputs by the same matrix (`transform_config` in `config.json`), "
            "on one GPU. transformers leaves that out, and its output is then wrong, unless the "
            "loaded model is given it:"
        )
    if facts.in_8_bits == "int8":
        yield f"```python\n{TRANSFORMERS_INT8}\n```"
    if facts.not_whole:
        yield (
            f"{len(facts.not_whole)} matrices have sizes that are no multiples of 128, or are "
            "fused with one that has. Stock loaders refuse those in FP8, so they are written in "
            "BF16, as the numbers that their FP8 bytes stand for."
        )
    if facts.flow is not None and (facts.in_8_bits or facts.not_whole):
        yield "The precision flow:"
        yield "```\n" + "\n".join(describe_flow(facts.flow)) + "\n```"


def _is_rl(record: RunRecord) -> bool:
    return record.setting("config", "algorithm") is not None


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _code(value: Any) -> str:
    """A name as code that stays on one line and within its cell."""
    return f"`{_one_line(value).replace('`', chr(0x27))}`"


def _place(value: Any) -> str:
    """A path or name as code; only the last part of a path that leads away from the current
    directory, as the rest is private.
    """
    text = str(value)
    is_elsewhere = text.startswith(("/", "~")) or ".." in text.split("/")
    return _code(text.rstrip("/").rpartition("/")[2] if is_elsewhere else text)


def _plain(value: Any) -> str:
    """A name as text, in which Markdown and HTML are escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", _one_line(value))


def _one_line(value: Any) -> str:
    return visible(" ".join(str(value).split())).replace("|", "\N{BROKEN BAR}")
