"""The recipes of ``isobit train`` and ``isobit sft``, the settings of the other commands, and their
keys: as dotted paths for help and errors, as a JSON schema (draft 7, for editors of TOML), and as
the page of all keys (``isobit schema --markdown``).

A key is the path through the tables of a TOML file: ``training.steps``. ``NAME`` is a free name
(``data.eval.NAME.task``), ``[]`` a list of tables (``corrections[]``). Where a table's ``type`` or
``name`` chooses between models, the keys of all are listed; pydantic's path to an error holds the
choice as an extra part, which ``locate`` leaves out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, NaiveDatetime, model_validator
from pydantic.fields import FieldInfo

from isobit.config.algorithm import (
    AlgorithmConfig,
    Correction,
    GrpoConfig,
    ReferenceConfig,
    ReplayConfig,
    RunTeacher,
    SftTeacher,
)
from isobit.config.base import MAX_COUNT, MAX_THREADS, Device, HomeName, HomePath, Seed, Strict
from isobit.config.data import (
    DEFAULT_FUNCTION,
    ChatConfig,
    DataConfig,
    EnvironmentConfig,
    OneExampleSource,
    RewardConfig,
    SftDataConfig,
)
from isobit.config.tables import (
    AsyncConfig,
    CheckConfig,
    CheckpointConfig,
    ClusterConfig,
    EngineConfig,
    EvaluationConfig,
    LoraConfig,
    ModelShape,
    OptimisationConfig,
    PrecisionConfig,
    Preset,
    RolloutConfig,
    RunRolloutConfig,
    TrackingConfig,
    TrainingConfig,
)
from isobit.util.errors import ConfigError


class ServeConfig(Strict):
    """The settings of ``isobit serve``."""

    data: ChatConfig = ChatConfig()
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    rollout: RolloutConfig = RolloutConfig()
    cluster: EngineConfig = EngineConfig()


class GenerationConfig(ServeConfig):
    """The settings of ``isobit rollout``."""

    environment: EnvironmentConfig | None = None
    """Tools that the model calls."""


class VerifyConfig(Strict):
    """The settings of ``isobit verify``, which chooses its own rollouts."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    cluster: EngineConfig = EngineConfig()


class ExportConfig(Strict):
    precision: PrecisionConfig | None = None
    """By default the run's own."""


class InspectConfig(Strict):
    """The settings of ``isobit inspect``; those of rollout and training count with ``--gpu``."""

    precision: PrecisionConfig = PrecisionConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()


class ScoringConfig(ChatConfig):
    """The settings of ``isobit eval --reward-model``."""

    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    data: OneExampleSource
    tokens_per_batch: int = Field(default=16384, gt=0, le=MAX_COUNT)
    """Tokens of one forward; scores do not depend on it."""


class RunConfig(Strict):
    model: HomeName = "starter"
    """A Hugging Face folder, a name of the hub (``org/name`` or ``org/name@revision``), or
    ``starter`` for the small model shipped with Isobit.
    """
    output: HomePath
    """The run's directory; it must be new or empty, or with ``--resume`` the run to continue."""
    lora: LoraConfig | None = None
    """Train adapters of low rank instead of the weights."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where one is there that computes the model."""
    seed: Seed = 0
    """Seed of all random choices of the run."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice. Gradients repeat bit for bit at a fixed number."""
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    """Tools that the model calls."""
    rollout: RunRolloutConfig = RunRolloutConfig()
    algorithm: AlgorithmConfig = GrpoConfig()
    corrections: tuple[Correction, ...] = ()
    """Weights, which are multiplied, for tokens that another policy sampled than the trained one.
    """
    reference: ReferenceConfig = ReferenceConfig()
    teacher: RunTeacher | None = None
    """Distil from it."""
    replay: ReplayConfig = ReplayConfig()
    training: TrainingConfig = TrainingConfig()
    asynchrony: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    evaluation: EvaluationConfig = EvaluationConfig()
    check: CheckConfig = CheckConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _corrected_by_default(cls, values: Any) -> Any:
        """What vLLM samples is corrected unless the recipe says otherwise."""
        if not isinstance(values, Mapping) or "corrections" in values:
            return values
        rollout = values.get("rollout")
        engine = rollout.get("engine") if isinstance(rollout, Mapping) else None
        if isinstance(rollout, RunRolloutConfig):
            engine = rollout.engine
        return {**values, "corrections": [{"type": "tis"}]} if engine == "vllm" else values

    @model_validator(mode="before")
    @classmethod
    def _ungraded_by_default(cls, values: Any) -> Any:
        """Where a teacher alone teaches, nothing grades unless the recipe or a task does."""
        if not isinstance(values, Mapping) or "reward" in values:
            return values
        teacher = values.get("teacher")
        only = teacher.get("only") if isinstance(teacher, Mapping) else getattr(teacher, "only", 0)
        is_graded = not only or _has_task(values.get("data"))
        return values if is_graded else {**values, "reward": {"function": "none"}}


def _has_task(data: Any) -> bool:
    """Whether a source of data is a reasoning-gym task, which has its own scorer."""
    if isinstance(data, BaseModel):
        data = data.model_dump()
    if not isinstance(data, Mapping):
        return False
    return data.get("type") == DEFAULT_FUNCTION or any(map(_has_task, data.values()))


Objective = Literal["supervised", "preference", "distil"]


class SftConfig(Strict):
    objective: Objective = "supervised"
    """``supervised`` trains on completions; ``preference`` trains a reward model on pairs;
    ``distil`` learns a teacher's distribution of each completion token.
    """
    model: HomeName = "starter"
    """A Hugging Face folder, a name of the hub (``org/name`` or ``org/name@revision``), or
    ``starter`` for the small model shipped with Isobit. For the objective ``preference`` it may be
    a reward model; a language model gets a score head in place of lm_head.
    """
    from_scratch: ModelShape | None = None
    """Start from random weights of this shape; only the tokenizer is taken from ``model``."""
    output: HomePath
    """The run's directory; it must be new or empty, or with ``--resume`` the run to continue."""
    lora: LoraConfig | None = None
    """Train adapters of low rank instead of the weights."""
    teacher: SftTeacher | None = None
    """For the objective ``distil``; by default the run's ``model`` in BF16."""
    precision: PrecisionConfig = PrecisionConfig()
    device: Device = "auto"
    """``auto`` takes a Hopper GPU where one is there that computes the model."""
    seed: Seed = 0
    """Seed of all random choices of the run."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """CPU threads; by default torch's choice. Gradients repeat bit for bit at a fixed number."""
    data: SftDataConfig
    training: OptimisationConfig = OptimisationConfig()
    """A step trains on ``prompts_per_step`` prompts with their completions."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the held-out sets are evaluated, and how completions for a reward are sampled."""
    reward: RewardConfig | None = None
    """With a reward, an evaluation also completes the held-out prompts and grades them."""
    rollout: RolloutConfig = RolloutConfig()
    """How they are completed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()


Recipe = RunConfig | SftConfig


def check_lora(config: Recipe) -> None:
    """Refuse what adapters do not go with, by the key."""
    if config.lora is None:
        return
    if config.precision.wgrad is not None:
        raise ConfigError(
            f"precision.wgrad is {config.precision.wgrad!r}, but with [lora] no matrix of the "
            "model has a gradient, and WGrad of adapters is in BF16; leave it out"
        )
    if isinstance(config, SftConfig):
        if config.objective == "preference":
            raise ConfigError(
                'lora is set, and objective is "preference": a reward model has a score head that '
                "adapters' files do not hold; leave [lora] out"
            )
        return
    calibrated = getattr(config.algorithm, "calibrate_every", 0)
    for key, value, reason in (
        ("rollout.engine", config.rollout.engine, "adapters are published to the native engine"),
        ("reference.refresh_every", config.reference.refresh_every, "the reference is the base"),
        ("reference.offload", config.reference.offload, "the reference is the policy's own base"),
        ("algorithm.calibrate_every", calibrated, "a BF16 shadow is made of masters"),
    ):
        if value and value != "native":
            raise ConfigError(
                f"{key} is {value!r} and lora is set, but {reason}; leave one of them out"
            )


# Keys, schema and page.

TAGS = ("type", "name")
"""Keys that choose between tables."""


@dataclass(frozen=True, slots=True)
class Key:
    path: str
    kind: str
    """What it takes: ``int``, ``fp8 | bf16``, ..."""
    default: str
    """Empty for a key that is required or off."""
    description: str
    users: tuple[str, ...] = ()
    """The tables of a choice that have it, if not all do."""


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table by their names in TOML (``async``), in the order of the schema."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


@cache
def all_keys(model: type[BaseModel], prefix: str = "") -> tuple[Key, ...]:
    return tuple(
        key
        for name, field in fields_by_key(model).items()
        for key in _keys_of(field.annotation, field, f"{prefix}{name}")
    )


def _keys_of(annotation: Any, field: FieldInfo, path: str) -> Iterator[Key]:
    annotation = _plain(annotation)
    models = _models(annotation)
    if models:
        yield from _merge({tag_of(model): all_keys(model, f"{path}.") for model in models})
    elif get_origin(annotation) is dict and _models(_plain(get_args(annotation)[1])):
        yield from _keys_of(get_args(annotation)[1], field, f"{path}.NAME")
    elif get_origin(annotation) is tuple and _models(_plain(get_args(annotation)[0])):
        yield from _keys_of(get_args(annotation)[0], field, f"{path}[]")
    else:
        description = " ".join((field.description or "").split()).replace("``", "")
        yield Key(path, _kind_text(annotation), _default_text(field), description)


def tag_of(model: type[BaseModel]) -> str:
    """The value of ``type`` or ``name`` that chooses this model; empty if nothing chooses it."""
    for name in TAGS:
        field = model.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is Literal:
            return str(field.default)
    return ""


def _merge(members: Mapping[str, Sequence[Key]]) -> Iterator[Key]:
    """One key for each path from the keys of each member of a choice, the tags first. It takes what
    any of them takes, and names the defaults that differ and the members that have it if not all
    do. Keys of a table inside one member say nothing of that.
    """
    table = min((key.path.rpartition(".")[0] for keys in members.values() for key in keys), key=len)
    by_path: dict[str, dict[str, Key]] = {}
    for tag, keys in members.items():
        for key in keys:
            by_path.setdefault(key.path, {})[tag] = key
    for path in sorted(by_path, key=lambda path: path.rpartition(".")[2] not in TAGS):
        found = by_path[path]
        first = next(iter(found.values()))
        if path.rpartition(".")[0] != table:
            yield first
            continue
        kinds = dict.fromkeys(kind for key in found.values() for kind in key.kind.split(" | "))
        yield replace(
            first,
            kind=" | ".join(kinds),
            default="" if path.rpartition(".")[2] in TAGS else _defaults(found),
            description=f"{first.description} {_users(list(found), list(members))}".strip(),
            users=tuple(found) if len(found) < len(members) else first.users,
        )


def _defaults(found: Mapping[str, Key]) -> str:
    """``0.2; dapo: 0.28``: the most common default, then those that differ."""
    tags: dict[str, list[str]] = {}
    for tag, key in found.items():
        tags.setdefault(key.default, []).append(tag)
    (usual, _), *others = sorted(tags.items(), key=lambda item: -len(item[1]))
    return "; ".join([usual, *(f"{', '.join(names)}: {value}" for value, names in others)])


def _users(found: Sequence[str], members: Sequence[str]) -> str:
    missing = [tag for tag in members if tag not in found]
    if not missing:
        return ""
    return f"({', '.join(found)})" if len(missing) >= len(found) else f"(not {', '.join(missing)})"


def choices(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The values that ``type`` or ``name`` may have in the table at a pydantic error's location."""
    annotation: Any = model
    for part in location:
        models = _models(_plain(annotation))
        annotation = _below(_plain(annotation), models, part)
    return [tag_of(candidate) for candidate in _models(_plain(annotation))]


def locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, list[str]]:
    """The dotted path of a pydantic error's location, and the valid keys of its table."""
    annotation: Any = model
    parts: list[str] = []
    siblings: list[str] = []
    for part in location:
        models = _models(_plain(annotation))
        tagged = [
            candidate for candidate in models if len(models) > 1 and tag_of(candidate) == part
        ]
        if tagged:
            annotation = tagged[0]
            continue
        parts.append(str(part))
        siblings = sorted(fields_by_key(models[0])) if len(models) == 1 else []
        annotation = _below(_plain(annotation), models, part)
    return ".".join(parts), siblings


def _below(annotation: Any, models: list[type[BaseModel]], part: str | int) -> Any:
    if len(models) == 1:
        field = fields_by_key(models[0]).get(str(part))
        return field.annotation if field else None
    if get_origin(annotation) is tuple and _models(_plain(get_args(annotation)[0])):
        return get_args(annotation)[0]
    return get_args(annotation)[-1] if get_origin(annotation) is dict else None


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    found = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(_plain(one) for one in found)


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def _kind_text(annotation: Any) -> str:
    """What a key takes: ``int``, ``fp8 | bf16``, ``list of str``, ``table``."""
    members = [member for member in _members(annotation) if member is not type(None)]
    if len(members) > 1:
        return " | ".join(_kind_text(member) for member in members)
    kind, arguments = members[0], get_args(members[0])
    if get_origin(kind) is Literal:
        return " | ".join(map(str, arguments))
    if get_origin(kind) is tuple:
        return f"list of {_kind_text(arguments[0])}"
    if kind is NaiveDatetime:
        return "date"
    if get_origin(kind) is dict:
        return "table"
    return getattr(kind, "__name__", str(kind)).lower()


def _default_text(field: FieldInfo) -> str:
    if field.is_required() or field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return str(list(field.default)) if isinstance(field.default, tuple) else str(field.default)


RECIPES: dict[str, type[RunConfig] | type[SftConfig]] = {"train": RunConfig, "sft": SftConfig}
"""The commands that take a recipe, and its model."""


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs")
    preset = {"type": "string", "enum": list(get_args(Preset)), "description": "A preset alone."}
    precision = schema["properties"]["precision"]
    precision["anyOf"] = [preset, {"$ref": precision.pop("$ref")}]
    if "algorithm" in schema["properties"]:
        algorithm = schema["properties"]["algorithm"]
        algorithm.pop("discriminator")
        algorithm["anyOf"] = [
            {"type": "string", "description": "An algorithm's name alone, or FILE.py:CLASS."},
            {"oneOf": algorithm.pop("oneOf")},
        ]
    for definition in schema["definitions"].values():
        for tag in TAGS:  # required, except for the default
            value = definition.get("properties", {}).get(tag, {}).get("const")
            if value not in (None, GrpoConfig().name):  # of a table that gives none
                definition["required"] = sorted({*definition.get("required", []), tag})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_plain_text(schema)}


def _plain_text(part: Any) -> Any:
    """Descriptions without markup and line ends, at any depth."""
    if isinstance(part, dict):
        return {
            key: " ".join(value.replace("``", "`").split())
            if key == "description" and isinstance(value, str)
            else _plain_text(value)
            for key, value in part.items()
        }
    return [_plain_text(item) for item in part] if isinstance(part, list) else part


_HEAD = """# Configuration

A recipe is a TOML file. `isobit train RECIPE.toml --training.steps 5` overrides any key of it;
`--print-config` prints what comes out, and `--dry-run` what the run would use and take. An unknown
key is an error that suggests the right one. `precision = "fp8"` is short for the table with that
preset, and `algorithm = "dapo"` for the one with that name ([algorithms](algorithms.md)). Where not
all kinds of a table have a key or a default, those are named. Relative paths are relative to the
directory in which the command runs. NAME is yours to choose.

An editor with Even Better TOML or taplo completes and checks a recipe whose first line names the
schema:

```toml
#:schema ../docs/run.schema.json
```

The path is relative to the recipe; `isobit schema > run.schema.json` writes the schema anywhere.
"""
_TITLES = {"train": "isobit train (run.schema.json)", "sft": "isobit sft (sft.schema.json)"}


def configuration_page() -> str:
    """The page of all keys in Markdown; a table equal to an earlier one refers to it."""
    titles: dict[str, str] = {}
    page = _HEAD
    for command, model in RECIPES.items():
        page += f"\n## {_TITLES[command]}\n"
        for table, keys in groupby(_in_order(model), key=lambda key: key.path.rpartition(".")[0]):
            title = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
            rows = "\n".join(map(_row, keys))
            first = titles.setdefault(rows, f"`{title}` of `isobit {command}`")
            page += f"\n### {title}\n" if table else ""
            if first == f"`{title}` of `isobit {command}`":
                page += f"\n| key | takes | default | |\n|---|---|---|---|\n{rows}\n"
            else:
                page += f"\nThe keys of {first}, above.\n"
    return page


def _in_order(model: type[BaseModel]) -> list[Key]:
    """As TOML needs them: keys outside tables first, and a table before those inside it."""
    places = {name: place for place, name in enumerate(fields_by_key(model))}

    def order(key: Key) -> tuple[bool, int, int]:
        parts = key.path.replace("[]", "").split(".")
        return len(parts) > 1, places[parts[0]] if len(parts) > 1 else 0, len(parts)

    return sorted(all_keys(model), key=order)


def _row(key: Key) -> str:
    kind, text = (part.replace("|", "or") for part in (key.kind, key.description))
    default = key.default and f"`{key.default}`"
    return f"| `{key.path.rpartition('.')[2]}` | {kind} | {default} | {text} |"
