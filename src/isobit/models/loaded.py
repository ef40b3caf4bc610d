"""A model as every command needs it: the policy from its folder, the tokenizer, and the tokens that
end a completion.

``describe_model`` reads everything but the weights: enough to plan a run for which there may not be
the memory.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig, named_precision
from isobit.config.rollout import RolloutConfig
from isobit.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids
from isobit.errors import ModelError
from isobit.files import disk_errors, new_folder
from isobit.models.config import ModelConfig
from isobit.models.device import choose_device
from isobit.models.folder import load_policy, read_config, read_masters
from isobit.models.hub import hub_folder, is_hub_name
from isobit.models.policy import Policy
from isobit.models.policy_share import PolicyShare, SampledPolicy
from isobit.models.saving import policy_contents, write_folder
from isobit.parallel.world import ALONE, World
from isobit.parallel.writing import write_together
from isobit.records.text import SamplingParams
from isobit.starter import starter_folder


@dataclass(frozen=True, slots=True)
class SamplingModel:
    """A Hugging Face folder in memory, or this process's share of its weights."""

    folder: Path
    policy: SampledPolicy
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens that a sequence can hold."""
        return self.policy.config.max_positions

    def sampling(self, rollout: RolloutConfig) -> SamplingParams:
        """How ``rollout`` draws tokens from this model."""
        return _sampling(rollout, self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class LoadedModel(SamplingModel):
    """A Hugging Face folder in memory."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A Hugging Face folder without its weights."""

    folder: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    def sampling(self, rollout: RolloutConfig) -> SamplingParams:
        """How ``rollout`` draws tokens from this model."""
        return _sampling(rollout, self.stop_token_ids)


def write_model(model: LoadedModel, target: Path) -> None:
    """The policy with its tokenizer as the Hugging Face folder ``target``; an older one there is
    replaced as a whole.  All ranks together; rank 0 writes.  Raises StorageError on all where it
    cannot.
    """
    policy = model.policy

    def write() -> None:
        with policy_contents(policy) as contents:
            if policy.world.rank != 0:
                return
            with disk_errors(target.parent, "the trained model"), new_folder(target) as partial:
                write_folder(partial, policy.config, contents, tokenizer_from=model.folder)

    write_together(policy.world, write)


def model_folder(name: str | Path) -> Path:
    """Of a path, of ``starter``, the shipped model, or of a model of the hub (``org/name``,
    ``org/name@revision``), which is fetched where it is not cached.

    Raises ModelError for a name of the hub that cannot be had; whether a path is a folder is not
    looked at.
    """
    if str(name) == "starter":
        return starter_folder()
    if not str(name).strip():
        raise ModelError(
            "the model's name is empty; name a folder, a model of the hub (org/name) or starter"
        )
    return hub_folder(str(name)) if is_hub_name(str(name)) else Path(name)


def load_model(
    name: str | Path,
    precision: PrecisionConfig | str,
    device: torch.device | str = "cpu",
    trainable: bool = True,
    value_head: bool = False,
) -> LoadedModel:
    """Read a model folder, or ``starter``, and publish its weights in the given flow, or that of a
    preset's name, on a device; with a ``value_head`` of zeros where asked for.

    Raises ModelError for a folder that cannot be used, ConfigError for precision options that
    the model does not have.
    """
    folder = model_folder(name)
    precision = named_precision(precision)
    policy = load_policy(folder, precision, device, trainable, value_head)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, policy.config.vocab_size, folder)
    return LoadedModel(
        folder, policy, tokenizer, stop_token_ids(tokenizer, folder, policy.config.vocab_size)
    )


def load_sampling_model(
    name: str | Path, precision: PrecisionConfig, wanted: Device, world: World = ALONE
) -> SamplingModel:
    """``load_model`` for what samples and does not train: without masters, on the device that is
    wanted; of several ranks each has its share.

    Raises ConfigError as ``isobit.models.device.choose_device`` does, too, and for a model that
    cannot be cut.
    """
    folder = model_folder(name)
    config = read_config(folder)
    device = world.own_device(choose_device(wanted, config, precision))
    if world.size == 1:
        return load_model(folder, precision, device, trainable=False)
    masters = read_masters(folder, config, device)
    policy = PolicyShare(config, precision, masters, world, device)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    return SamplingModel(
        folder, policy, tokenizer, stop_token_ids(tokenizer, folder, policy.config.vocab_size)
    )


def describe_model(name: str | Path) -> DescribedModel:
    """Read the configuration and the tokenizer of a model folder, or ``starter``.  Raises
    ModelError for one that cannot be used.
    """
    folder = model_folder(name)
    config, tokenizer = read_config(folder), load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    return DescribedModel(
        folder, config, tokenizer, stop_token_ids(tokenizer, folder, config.vocab_size)
    )


def _sampling(rollout: RolloutConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop_token_ids=stop_token_ids,
        stop_strings=rollout.stop_strings,
    )
