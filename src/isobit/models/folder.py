"""Load Hugging Face folders: configuration, policy and tokenizer, on the device that is chosen
here. ``isobit.models.checkpoint`` reads the weights, and ``isobit.models.saving`` writes folders.
Nothing is unpickled.

A folder holds a language model (``...ForCausalLM``) or a reward model
(``...ForSequenceClassification``), and readers of one kind refuse the other.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig, named_precision
from isobit.config.rollout import RolloutConfig
from isobit.data.harmony import writes_harmony
from isobit.data.stop_tokens import further_stops, stop_token_ids
from isobit.data.tokenizer import check_vocabulary, load_tokenizer, tokenizer_size
from isobit.kernels import backend
from isobit.models.adapter_folder import (
    CONFIG_FILE,
    LOCAL,
    is_adapter_folder,
    read_adapter_config,
    write_adapters,
)
from isobit.models.adapters import (
    adapter_masters,
    add_adapter,
    drawn_adapters,
    folded_columns,
    peft_tensors,
    read_adapters,
)
from isobit.models.checkpoint import FolderCheckpoint, read_json
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, decoder_shape
from isobit.models.function import SampledPolicy
from isobit.models.hub import hub_folder, is_hub_name
from isobit.models.master_values import MasterValues
from isobit.models.policy import Policy
from isobit.models.policy_share import PolicyShare
from isobit.models.quantised_checkpoint import read_quantisation
from isobit.models.saving import (
    copy_tokenizer,
    policy_contents,
    write_folder,
)
from isobit.parallel.gradient_sum import ONE_SLOT, Slots
from isobit.parallel.world import ALONE, World, write_on_all
from isobit.records.text import SamplingParams
from isobit.starter import starter_folder
from isobit.util.disk_space import disk_errors
from isobit.util.errors import ModelError, shown
from isobit.util.files import new_folder
from isobit.util.plain_files import read_plain
from isobit.util.terminal import say


def choose_device(wanted: Device, config: ModelConfig, precision: PrecisionConfig) -> torch.device:
    """``auto`` is the first device of the machine that can compute this model in this flow; for one
    that is passed over, a line says why. Raises ConfigError if the named device cannot.
    """
    choice = backend.choose_device(wanted, model_needs(config, precision.preset))
    for problem in choice.passed_over:
        say(f"isobit: computing on {choice.device}, because {problem}")
    return choice.device


def model_needs(config: ModelConfig, preset: str) -> backend.ModelNeeds:
    """The requirements of a model in a flow on a back end."""
    every = (site.linear for site in decoder_shape(config).sites)
    quantised = (linear for linear in every if linear is not None and not linear.is_plain)
    linears = {(linear.rows, linear.in_features): linear for linear in quantised}
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    return backend.ModelNeeds(*sizes, preset, tuple(linears.values()))


def read_config(folder: Path) -> ModelConfig:
    """A language model's configuration. Raises ModelError, also for a reward model."""
    config = read_any_config(folder)
    if config.score_head:
        raise ModelError(
            f"{folder} is a reward model: it gives scores and has no lm_head to draw tokens with. "
            "Name a ...ForCausalLM folder here; a reward model is for [reward] model, for `isobit "
            'eval --reward-model`, and for `isobit sft` with objective = "preference"'
        )
    return config


def read_reward_config(folder: Path) -> ModelConfig:
    """A reward model's configuration. Raises ModelError, also for a language model."""
    config = read_any_config(folder)
    if not config.score_head:
        raise ModelError(
            f"{folder} is a language model: it has no score.weight to give scores with. Name a "
            "...ForSequenceClassification folder, or make one of it: `isobit sft` with objective = "
            '"preference" learns a score from pairs of answers'
        )
    return config


def base_folder(folder: Path, weights: bool = True) -> Path:
    """The folder of the model that an adapter's folder changes, or else the folder itself. Raises
    ModelError as ``model_folder`` and ``read_adapter_config`` do.
    """
    if not is_adapter_folder(folder):
        return folder
    name = read_adapter_config(folder).base
    base = _local_base(folder, name) if name.startswith(LOCAL) else model_folder(name, weights)
    if is_adapter_folder(base):
        raise ModelError(f"{folder} is an adapter of {base}, which is an adapter itself")
    return base


def _local_base(folder: Path, name: str) -> Path:
    """The model folder that an adapter's folder calls ``./NAME``: what the run beside it began
    from, that path from here, or a folder beside the adapter. Raises ModelError.
    """
    path = Path(name)
    recorded, beside = _base_of_run(folder), folder.resolve().parent / path.name
    for place in (path if recorded is None else recorded, path, beside):
        is_named = place.resolve().name == path.name
        if is_named and (place / "config.json").is_file() and not is_adapter_folder(place):
            return place
    raise ModelError(
        f"{folder / CONFIG_FILE}: base_model_name_or_path is {shown(name)}, and there is no such "
        f"model folder here or beside {folder}; write the folder or the hub's name of the model "
        "there that the adapter was trained on"
    )


_RUNS = 16
"""The most runs in a chain in which each began from the adapters of another."""


def _base_of_run(folder: Path) -> Path | None:
    """The base of the model that the run began from whose directory a folder lies in."""
    for _ in range(_RUNS):
        try:
            manifest = json.loads(read_plain(folder.resolve().parent / "run.json"))
            start = Path(manifest["config"]["model"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if not is_adapter_folder(start):
            return start
        name = read_adapter_config(start).base
        if not name.startswith(LOCAL):
            return Path(name)
        folder = start
    return None


def read_any_config(folder: Path) -> ModelConfig:
    """The configuration of a model of either kind, with the adapters of an adapter's folder. Raises
    ModelError.
    """
    if is_adapter_folder(folder):
        base = read_any_config(base_folder(folder, weights=False))
        return replace(base, lora=read_adapter_config(folder).lora.within(base))
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; expected a Hugging Face model folder with config.json and "
            "safetensors"
        )
    path = folder / "config.json"
    config = read_json(path)
    read_quantisation(config, str(path))
    config.pop("quantization_config", None)  # how the weights are stored, not what they compute
    return ModelConfig.from_hf(config, str(path)).with_tokenizer(tokenizer_size(folder))


def load_policy(
    folder: Path,
    precision: PrecisionConfig | str,
    device: torch.device | str = "cpu",
    trainable: bool = True,
    value_head: bool = False,
    world: World = ALONE,
    slots: Slots = ONE_SLOT,
) -> Policy:
    """Read a Hugging Face folder into FP32 masters on a device and publish them in the given flow;
    ``value_head`` adds a value head of zeros. Raises ModelError for a missing, damaged, misshaped,
    superfluous or non-finite tensor, by name and file.
    """
    config = replace(read_config(folder), value_head=value_head)
    masters = read_masters(folder, config, device)
    return Policy(config, named_precision(precision), masters, device, trainable, world, slots)


def read_masters(
    folder: Path, config: ModelConfig, device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[tuple[str, MasterValues]]:
    """``FolderCheckpoint.masters`` of a folder. Files are open and headers checked when this
    returns. Adapters are those of the folder, or drawn by ``seed``.
    """
    masters = FolderCheckpoint.open(base_folder(folder), config).masters(device)
    if config.lora is None:
        return masters
    if is_adapter_folder(folder):
        return read_adapters(masters, config, folder)
    return drawn_adapters(masters, config, seed)


def read_reward_masters(
    folder: Path, config: ModelConfig, seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, MasterValues]]:
    """Each master of a reward model, from a folder of either kind; ``config`` is
    ``reward_config``'s.

    A language model's lm_head is left out, and the score head [1, C] drawn from N(0, 1 / (C + 1)):
    hidden states after the last norm have elements of about 1, so first scores differ by about 1
    (Huang et al., "The N+ implementation details of RLHF with PPO", arXiv 2403.17031). With zeros
    all scores would tie, and the decoder's first gradient would be zero. Raises ModelError as
    ``read_masters`` does.
    """
    stored, wanted = read_any_config(folder), build_decoder(config).masters()
    for name, values in read_masters(folder, stored, device):
        if name in wanted:
            yield name, values
    if not stored.score_head:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((1, config.hidden_size), generator=generator, dtype=torch.float32)
        yield "score.weight", drawn / math.sqrt(config.hidden_size + 1)


def reward_config(folder: Path, pad_token_id: int | None) -> ModelConfig:
    """The configuration of a folder's reward model, or of the one made from its language model,
    with the tokenizer's ``pad_token_id``. Raises ModelError as ``read_any_config`` does.
    """
    stored = read_any_config(folder)
    if stored.score_head:
        return stored
    stored = replace(stored, score_head=True, pad_token_id=pad_token_id)
    return stored.with_tokenizer(None)


@dataclass(frozen=True, slots=True)
class SamplingModel:
    """A loaded Hugging Face folder, or this process's share of its weights."""

    folder: Path
    policy: SampledPolicy
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens that a sequence can hold."""
        return self.policy.config.max_positions

    def sampling(self, rollout: RolloutConfig) -> SamplingParams:
        return _sampling(self, rollout)


@dataclass(frozen=True, slots=True)
class LoadedModel(SamplingModel):
    """A loaded Hugging Face folder, with the whole policy."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A Hugging Face folder without its weights, to plan a run that might not fit the memory."""

    folder: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    def sampling(self, rollout: RolloutConfig) -> SamplingParams:
        return _sampling(self, rollout)


def write_model(
    model: LoadedModel, target: Path, finish: Callable[[Path], None] = lambda folder: None
) -> None:
    """Write the policy and its tokenizer as the Hugging Face folder ``target``, or with LoRA its
    adapters as PEFT's folder, replacing an older one as a whole; ``finish`` may add files before
    that. All ranks call it; rank 0 writes. Raises StorageError on all if it cannot.
    """
    policy = model.policy
    if policy.config.lora is not None:
        _write_adapters(model, target, finish)
        return

    def write() -> None:
        with policy_contents(policy) as contents:
            if policy.world.rank != 0:
                return
            with disk_errors(target.parent, "the trained model"), new_folder(target) as partial:
                write_folder(partial, policy.config, contents, tokenizer_from=model.folder)
                finish(partial)

    write_on_all(policy.world, write)


def _write_adapters(model: LoadedModel, target: Path, finish: Callable[[Path], None]) -> None:
    policy, base = model.policy, base_folder(model.folder)
    lora = policy.config.lora
    assert lora is not None, "a policy with adapters"
    whole = {name: policy.whole_master(name).cpu() for name in adapter_masters(policy.config)}
    stored = FolderCheckpoint.open(base, policy.config)
    folded = folded_columns(policy.config, policy.flow, stored.tensor)
    tensors = peft_tensors(policy.config, whole, folded)

    def write() -> None:
        if policy.world.rank != 0:
            return
        with disk_errors(target.parent, "the adapters"), new_folder(target) as partial:
            write_adapters(partial, lora, base, tensors)
            copy_tokenizer(base, partial)
            finish(partial)

    write_on_all(policy.world, write)


def model_folder(name: str | Path, weights: bool = True) -> Path:
    """The folder of a path, of ``starter``, the shipped model, or of a model of the hub
    (``org/name``, ``org/name@revision``), which is fetched if it is not cached; without ``weights``
    only its config and tokenizer are. Raises ModelError for a hub model that cannot be fetched; a
    path is not checked.
    """
    if str(name) == "starter":
        return starter_folder()
    if not str(name).strip():
        raise ModelError(
            "the model's name is empty; name a folder, a model of the hub (org/name) or starter"
        )
    return hub_folder(str(name), weights) if is_hub_name(str(name)) else Path(name)


def load_model(
    name: str | Path,
    precision: PrecisionConfig | str,
    device: torch.device | str = "cpu",
    trainable: bool = True,
    value_head: bool = False,
) -> LoadedModel:
    """Read a model folder (see ``model_folder``) and publish its weights on a device in the given
    flow or preset; ``value_head`` adds a value head of zeros.

    Raises ModelError for a folder that cannot be used, ConfigError for precision options that do
    not fit the model.
    """
    folder = model_folder(name)
    policy = load_policy(folder, precision, device, trainable, value_head)
    return LoadedModel(folder, policy, *_tokenizer(folder, policy.config))


def load_sampling_model(
    name: str | Path, precision: PrecisionConfig, wanted: Device, world: World = ALONE
) -> SamplingModel:
    """``load_model`` without masters, for sampling only, on the wanted device; each of several
    ranks loads its share. A folder holds no calibrated scales of Q, K and V, so that they are a
    token's; a line says so. Also raises ConfigError as ``choose_device`` does, and for a model that
    cannot be cut.
    """
    folder = model_folder(name)
    if precision.kv_scales == "per_tensor":
        say(
            'isobit: precision.kv_scales is "per_tensor", which `isobit train` calibrates and a '
            "model folder does not hold: Q, K and V have a scale a token and head here"
        )
        own = {"kv_scales": "per_token", "kv_calibration": "trainer"}
        precision = precision.model_copy(update=own)
    config = read_config(folder)
    device = world.own_device(choose_device(wanted, config, precision))
    if world.size == 1:
        return load_model(folder, precision, device, trainable=False)
    masters = read_masters(folder, config, device)
    policy = PolicyShare(config, precision, masters, world, device)
    return SamplingModel(folder, policy, *_tokenizer(folder, config))


def load_adapters(
    model: LoadedModel, precision: PrecisionConfig, folders: Mapping[str, Path]
) -> None:
    """Let a model that samples also sample with the adapters of PEFT's folders, by their names
    (``add_adapter``). Raises ModelError for a model that has adapters itself, a folder that is not
    PEFT's, and adapters of another model.
    """
    if model.policy.config.lora is not None:
        raise ModelError(
            f"{model.folder} is an adapter's folder itself; name the model that it changes, and "
            "this folder beside the other adapters"
        )
    for name, folder in folders.items():
        if not is_adapter_folder(folder):
            raise ModelError(
                f"{folder} has no adapter_config.json; expected a folder that `isobit train` with "
                "[lora] or PEFT's save_pretrained has written"
            )
        base = base_folder(folder, weights=False)
        if base.resolve() != model.folder.resolve():
            raise ModelError(
                f"{folder} is an adapter of {base}, and the model is {model.folder}; if they are "
                "one model, write that into base_model_name_or_path of adapter_config.json"
            )
        add_adapter(model.policy, precision, name, folder, model.folder)


def describe_model(name: str | Path) -> DescribedModel:
    """Read the configuration and tokenizer of a model folder. Raises ModelError."""
    folder = model_folder(name)
    config = read_config(folder)
    return DescribedModel(folder, config, *_tokenizer(folder, config))


def _tokenizer(
    folder: Path, config: ModelConfig
) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """A folder's tokenizer, of an adapter's that of its base, and the tokens that end a
    completion.
    """
    folder = base_folder(folder, weights=False)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    return tokenizer, stop_token_ids(tokenizer, folder, config.vocab_size)


def _sampling(model: SamplingModel | DescribedModel, rollout: RolloutConfig) -> SamplingParams:
    """Raises ConfigError for a stop token that the tokenizer does not have."""
    further = further_stops(model.tokenizer, rollout.stop_tokens)
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop_token_ids=tuple(sorted({*model.stop_token_ids, *further})),
        stop_strings=rollout.stop_strings,
        special_tokens=(
            writes_harmony(model.tokenizer)
            if rollout.special_tokens == "auto"
            else rollout.special_tokens == "show"
        ),
    )
