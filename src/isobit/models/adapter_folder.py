"""Reading and writing of PEFT's folders of adapters of low rank.

    adapter_config.json           ``LoraConfig``: r, lora_alpha, target_modules, use_rslora, ..
    adapter_model.safetensors     base_model.model.MODULE.lora_A.weight    [r, K]
                                  base_model.model.MODULE.lora_B.weight    [N, r]

Linears of a shared expert are named by their weights (``target_parameters``): by modules' names
alone PEFT takes those of Qwen3-Next for the routed experts. Both are read.

An adapter that is read is y = W x + scale B A x on the published W, with one rank and one scale.
The tensors say which linears have one: ``target_modules`` may be a regular expression, which is not
evaluated, and keys that choose modules or layers change nothing once the tensors are there.

Every other key of the file must be one that is known not to change what an adapter computes, or
have a value that leaves it plain.  A list of keys that are refused would pass those of the next
version of PEFT.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from isobit.config.lora import ALL_LINEAR, KNOWN_TARGETS, LORA_TARGETS
from isobit.models.config import Lora
from isobit.models.larger_model import is_larger
from isobit.models.safetensors import TensorFile, parse_json, write_tensors
from isobit.starter import starter_folder
from isobit.util.errors import ModelError, shown
from isobit.util.plain_files import read_plain
from isobit.util.strict_json import json_text

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_READ = {
    "base_model_name_or_path",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "revision",
    "target_modules",
    "target_parameters",
    "use_rslora",
}
_IGNORED = {
    # how its training began or went on
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "runtime_config",
    # who wrote it, and for what
    "auto_mapping",
    "megatron_core",
    "peft_version",
    "task_type",
    "unsloth_fixed",
    # which linears have an adapter, as the tensors say
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    # of methods that are refused where they are used
    "qalora_group_size",
}
"""Keys that change nothing of what a finished adapter computes."""
_CHOOSING = ("exclude_modules", "layers_to_transform")
_PLAIN: dict[str, Any] = {"bias": "none"}
"""Values that leave an adapter plain LoRA, beside None, false, and what is empty."""
_SAME_BASE = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}
"""Values of ``init_lora_weights``, as text, whose start leaves the model as it is."""
_FORMATS = ("F32", "BF16", "F16", "F64")
LARGEST = 65504.0
"""The largest number of an adapter and the largest alpha: what FP16 can hold. Trained numbers are
below 100; sums over thousands of products of larger ones come near the largest number of FP32.
"""
_ALONE, _WITHIN_LARGER = "base_model.model.model.", "base_model.model.model.language_model."
"""The beginnings of names, in the second case where the base is a larger model."""
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_SHARED = re.compile(
    r"(?P<module>(?P<path>.+\.)?shared_expert\.(?P<target>gate_proj|up_proj|down_proj))\.weight"
)
"""A shared expert's weight among ``target_parameters``."""
_LITERAL = re.compile(r"\^?[\w.\\]+\$?")
"""A pattern of modules without repetition: the time of its search is bounded."""

_LONGEST_PATTERN = 1000


def check_numbers(values: torch.Tensor, source: str) -> None:
    """Raise ModelError for a number of an adapter that is not finite, or above ``LARGEST``."""
    least, most = (float(one) for one in torch.aminmax(values)) if values.numel() else (0.0, 0.0)
    if not (least >= -LARGEST and most <= LARGEST):  # also where one is not a number
        raise ModelError(
            f"{source} holds numbers from {least:g} to {most:g}; expected finite ones of at most "
            f"{LARGEST:,.0f}, as training leaves them"
        )


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of a folder, of which each A has its B."""

    path: Path
    file: TensorFile
    modules: tuple[str, ...]
    """The modules that have an adapter."""

    @classmethod
    def open(cls, folder: Path) -> "AdapterTensors":
        """Raises ModelError for a file that is missing or damaged, for a tensor that is no A or B
        of numbers, and for one without the other.
        """
        path = folder / WEIGHTS_FILE
        if not path.exists():
            raise ModelError(
                f"{folder} has {CONFIG_FILE} but no {WEIGHTS_FILE}; expected a folder that `isobit "
                "train` or PEFT's save_pretrained has written"
            )
        file = TensorFile(path)
        found: dict[str, str] = {}
        for name, stored in file.stored.items():
            match = _NAME.fullmatch(name)
            if match is None or len(stored.shape) != 2:
                raise ModelError(
                    f"{path}: {shown(name)} is no A or B of a linear; only plain LoRA is read, "
                    "whose tensors are base_model.model.MODULE.lora_A.weight and .lora_B.weight"
                )
            if stored.format not in _FORMATS:
                raise ModelError(
                    f"{path}: {shown(name)} is {stored.format}; the numbers of an adapter are one "
                    f"of {', '.join(_FORMATS)}"
                )
            found[match["module"]] = found.get(match["module"], "") + match["which"]
        for module, which in found.items():
            if len(which) < 2:
                missing = "B" if which == "A" else "A"
                raise ModelError(
                    f"{path}: {shown(module)} has a lora_{which}, but no lora_{missing}"
                )
        if not found:
            raise ModelError(f"{path} holds no tensor; expected A and B of some linears")
        return cls(path, file, tuple(found))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes under the names that tensors have for a decoder in a folder of its own."""
        stored = self.file.shapes().items()
        return {name.replace(_WITHIN_LARGER, _ALONE, 1): shape for name, shape in stored}

    @property
    def ranks(self) -> set[int]:
        return {shape[0] for name, shape in self.shapes.items() if name.endswith(".lora_A.weight")}

    def values(self, name: str) -> torch.Tensor:
        """FP32. Raises ModelError for a number that is not finite, or larger than ``LARGEST``."""
        if name not in self.file.stored:
            name = name.replace(_ALONE, _WITHIN_LARGER, 1)
        numbers = self.file[name].float()
        check_numbers(numbers, f"{self.path}: {shown(name)}")
        return numbers


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The content of ``adapter_config.json`` and of the names of the tensors."""

    base: str  # the model that it changes: a folder or a name of the hub
    lora: Lora
    is_whole: bool
    """Whether each target has an adapter in every layer."""


def read_adapter_config(folder: Path) -> AdapterFolder:
    """Raises ModelError for what is not plain LoRA on a decoder's linears."""
    path = folder / CONFIG_FILE
    try:
        config = parse_json(read_plain(path), str(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is not LORA, the only kind of adapter that is read")
    tensors = AdapterTensors.open(folder)
    rank, alpha = _rank_and_alpha(path, config)
    _check_keys(path, config)
    _check_start(path, config.get("init_lora_weights", True))
    _check_patterns(path, config, tensors)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{path}: base_model_name_or_path is {_value(base)}; write the folder or the hub's "
            "name of the model there that the adapter was trained on"
        )
    if isinstance(revision := config.get("revision"), str) and not Path(base).exists():
        base = f"{base}@{revision}"
    targets, is_whole = _targets(path, config, tensors)
    lora = Lora(rank, alpha, targets, config.get("use_rslora") is True)
    return AdapterFolder(base, lora, is_whole)


def _value(value: object) -> str:
    return shown(repr(value))


def _rank_and_alpha(path: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{path}: r is {_value(rank)}; expected a whole number from 1 on")
    if (type(alpha) is not int and type(alpha) is not float) or not 0 < alpha <= LARGEST:
        raise ModelError(
            f"{path}: lora_alpha is {_value(alpha)}; expected a number above 0, of at most "
            f"{LARGEST:,.0f}"
        )
    return rank, float(alpha)


def _check_keys(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a key that is neither read nor known to change nothing, unless its value
    is the plain one.
    """
    for key, value in config.items():
        if key in _READ or key in _IGNORED or key in ("rank_pattern", "alpha_pattern"):
            continue
        if value and value != _PLAIN.get(key):
            raise ModelError(
                f"{path}: {shown(key)} is {_value(value)}, which may change what an adapter "
                "computes; only plain LoRA is read. If it changes nothing, take the key out"
            )
    if not isinstance(config.get("use_rslora", False), bool | None):
        raise ModelError(
            f"{path}: use_rslora is {_value(config['use_rslora'])}; expected true or false"
        )


def _check_start(path: Path, start: object) -> None:
    """Raise ModelError for a start that has moved a part of the model into the adapter: what is
    left of the model is in no file, and the tensors do not show it.
    """
    if str(start).lower() not in _SAME_BASE:
        raise ModelError(
            f"{path}: init_lora_weights is {_value(start)}, a start that changes the model's own "
            "matrices, or is not known not to: on the model as published the adapter computes "
            "something else. PEFT turns it into plain LoRA where it was trained, with "
            "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=THE_START)"
        )


def _check_patterns(path: Path, config: Mapping[str, Any], tensors: AdapterTensors) -> None:
    """Raise ModelError where modules have other ranks or alphas than the file's own."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise ModelError(f"{path}: rank_pattern and alpha_pattern are objects of numbers")
    others = sorted(tensors.ranks - {config["r"]})
    if others:
        by = f", which rank_pattern says ({_value(ranks)})" if ranks else ""
        raise ModelError(
            f"{path}: r is {config['r']}, and adapters in {tensors.path} have the rank {others[0]}"
            f"{by}: they do not belong together, or are not plain LoRA, which has one rank"
        )
    for pattern, alpha in alphas.items():
        if alpha != config["lora_alpha"] and _may_match(pattern, tensors.modules):
            raise ModelError(
                f"{path}: alpha_pattern is {_value(alphas)}, which gives modules another alpha "
                f"than {config['lora_alpha']}; only plain LoRA is read, which has one"
            )


def _may_match(pattern: str, modules: tuple[str, ...]) -> bool:
    """Whether PEFT may find a module by a pattern; True for an expression that is not evaluated."""
    if len(pattern) > _LONGEST_PATTERN or not _LITERAL.fullmatch(pattern):
        return True
    try:
        matcher = re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return True
    return any(matcher.match(module) for module in modules)


def _targets(
    path: Path, config: Mapping[str, Any], tensors: AdapterTensors
) -> tuple[tuple[str, ...], bool]:
    """The targets, and whether all layers have them."""
    named, chosen = config.get("target_modules"), any(config.get(key) for key in _CHOOSING)
    shared = _of_shared_expert(path, config.get("target_parameters") or [], tensors)
    if shared and isinstance(named, list | None):
        named = [*(named or []), *shared]
    having = {module.rpartition(".")[2] for module in tensors.modules}
    if strange := sorted(having - set(KNOWN_TARGETS)):
        raise ModelError(
            f"{tensors.path} has an adapter of {shown(strange[0])}; they are read of "
            f"{', '.join(KNOWN_TARGETS)}"
        )
    if named == ALL_LINEAR or (_are_texts(named) and set(named) <= set(KNOWN_TARGETS)):
        having = having if chosen else set(KNOWN_TARGETS if named == ALL_LINEAR else named)
        return tuple(name for name in KNOWN_TARGETS if name in having), not chosen
    if _are_texts(named):
        _check_named(path, named, tensors, chosen)
    elif not isinstance(named, str):
        raise ModelError(
            f"{path}: target_modules is {_value(named)}; expected names such as "
            f"{', '.join(KNOWN_TARGETS)}, or a regular expression"
        )
    return tuple(name for name in KNOWN_TARGETS if name in having), False


def _of_shared_expert(path: Path, parameters: object, tensors: AdapterTensors) -> list[str]:
    """The targets that are named by their weights, or modules where a layer is named too or no
    shared expert has tensors. Raises ModelError for any other weight.
    """
    names = parameters if isinstance(parameters, list) else [parameters]
    found = [_SHARED.fullmatch(name) if isinstance(name, str) else None for name in names]
    matches = [match for match in found if match is not None]
    if len(matches) < len(names):
        raise ModelError(
            f"{path}: target_parameters is {_value(parameters)}; adapters are read of linears, "
            "and of weights only where these are of a shared expert's gate_proj, up_proj and "
            "down_proj"
        )
    ends = {".".join(module.split(".")[-2:]) for module in tensors.modules}
    return [
        match["target"]
        if match["path"] in (None, "mlp.") and f"shared_expert.{match['target']}" in ends
        else match["module"]
        for match in matches
    ]


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _check_named(path: Path, named: list[str], tensors: AdapterTensors, chosen: bool) -> None:
    """Raise ModelError where a list of modules and the tensors do not fit together."""
    ends = tuple(f".{name}" for name in named)
    for module in tensors.modules:
        if not f".{module}".endswith(ends):
            raise ModelError(
                f"{tensors.path} has an adapter of {shown(module)}, which target_modules of {path} "
                "does not name: they do not belong together"
            )
    for name in () if chosen else {*LORA_TARGETS, "embed_tokens", "lm_head"}.intersection(named):
        if not any(f".{module}".endswith(f".{name}") for module in tensors.modules):
            raise ModelError(
                f"{path}: target_modules names {name}, and {tensors.path} has no adapter of it: "
                "they do not belong together"
            )


LOCAL = "./"
"""The prefix of a base that is a folder, so that its name is never taken for one of the hub."""


def base_name(base: Path) -> tuple[str, str | None]:
    """A model folder's name in files that may be published, and its revision: the name of the hub,
    ``starter``, or ``./`` and its path from the current directory, or its last part where it lies
    elsewhere. So no path outside the current directory is published.
    """
    parts = base.parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]
    whole, here = base.resolve(), Path.cwd()
    if whole == starter_folder().resolve():
        return "starter", None
    is_below = whole.is_relative_to(here) and whole != here
    return LOCAL + (whole.relative_to(here).as_posix() if is_below else whole.name), None


def adapter_config(lora: Lora, base: Path) -> dict[str, Any]:
    """An ``adapter_config.json`` that PEFT and vLLM load; ``base`` may be in the hub's cache."""
    name, revision = base_name(base)
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def write_adapters(
    folder: Path, lora: Lora, base: Path, tensors: Mapping[str, torch.Tensor]
) -> None:
    """PEFT's folder, of ``peft_tensors``, for adapters of the model folder ``base``; in a larger
    model those of the decoder, whose modules a vision tower has by the same names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = adapter_config(lora, base)
    modules = {".".join(name.split(".")[-4:-2]) for name in tensors}
    shared = [name for name in lora.targets if f"shared_expert.{name}" in modules]
    others = [name for name in lora.targets if name not in shared]
    if shared:
        config["target_modules"] = others
        config["target_parameters"] = [f"shared_expert.{name}.weight" for name in shared]
    described = base / "config.json"
    if described.is_file() and is_larger(parse_json(read_plain(described), str(described))):
        tensors = {name.replace(_ALONE, _WITHIN_LARGER, 1): one for name, one in tensors.items()}
        if others:
            config["target_modules"] = rf".*language_model\..*\.({'|'.join(others)})"
    text = json_text(config, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    write_tensors(folder / WEIGHTS_FILE, tensors, tensors.__getitem__, {"format": "pt"})
