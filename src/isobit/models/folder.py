"""Hugging Face folders in: ``config.json``, and the policy of its weights
(``isobit.models.checkpoint``).  Nothing is unpickled.  ``isobit.models.saving`` writes them.

A folder holds a language model (``...ForCausalLM``) or a reward model
(``...ForSequenceClassification``); whoever asks for the one is refused the other.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from isobit.config.precision import PrecisionConfig, named_precision
from isobit.errors import ModelError
from isobit.models.checkpoint import Checkpoint
from isobit.models.checkpoint_files import read_json
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.fp8_checkpoint import MasterValues, read_fp8_format
from isobit.models.policy import Policy
from isobit.parallel.slots import ONE_SLOT, Slots
from isobit.parallel.world import ALONE, World


def read_config(folder: Path) -> ModelConfig:
    """A language model's configuration; raises ModelError for a folder or a file that cannot be
    used, and for a reward model.
    """
    config = read_any_config(folder)
    if config.score_head:
        raise ModelError(
            f"{folder} is a reward model: it gives scores and has no lm_head to draw tokens with. "
            "Name a ...ForCausalLM folder here; a reward model is for [reward] model, for `isobit "
            'eval --reward-model`, and for `isobit sft` with objective = "preference"'
        )
    return config


def read_reward_config(folder: Path) -> ModelConfig:
    """A reward model's configuration; raises ModelError for a folder or a file that cannot be used,
    and for a language model.
    """
    config = read_any_config(folder)
    if not config.score_head:
        raise ModelError(
            f"{folder} is a language model: it has no score.weight to give scores with. Name a "
            "...ForSequenceClassification folder, or make one of it: `isobit sft` with objective = "
            '"preference" learns a score from pairs of answers'
        )
    return config


def read_any_config(folder: Path) -> ModelConfig:
    """The configuration of a model of either kind; raises ModelError for a folder or a file that
    cannot be used.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; expected a Hugging Face model folder with config.json and "
            "safetensors"
        )
    path = folder / "config.json"
    config = read_json(path)
    read_fp8_format(config, str(path))
    config.pop("quantization_config", None)  # how the weights are stored, not what they compute
    return ModelConfig.from_hf(config, str(path))


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
    with a ``value_head`` of zeros where asked for.

    Raises ModelError for a missing, damaged, misshaped, superfluous or non-finite tensor, by
    name and file.
    """
    config = replace(read_config(folder), value_head=value_head)
    masters = read_masters(folder, config, device)
    return Policy(config, named_precision(precision), masters, device, trainable, world, slots)


def read_masters(
    folder: Path, config: ModelConfig, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, MasterValues]]:
    """``Checkpoint.masters`` of a folder: the files are open and their headers checked when this
    returns.
    """
    return Checkpoint.open(folder, config).masters(device)


def read_reward_masters(
    folder: Path, config: ModelConfig, seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, MasterValues]]:
    """Each master of a reward model, from a folder of either kind; ``config`` is
    ``reward_config``'s.

    A language model's lm_head is left out, and the score head [1, C] drawn from N(0, 1 / (C + 1)):
    hidden states behind the last norm have elements of about 1, so that first scores differ by
    about 1 (Huang et al., "The N+ implementation details of RLHF with PPO", arXiv 2403.17031).
    With zeros all scores would tie, and the decoder's first gradient would be zero.  Raises
    ModelError as ``read_masters`` does.
    """
    stored, wanted = read_any_config(folder), build_decoder(config).masters()
    for name, values in read_masters(folder, stored, device):
        if name in wanted:
            yield name, values
    if not stored.score_head:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((1, config.hidden_size), generator=generator)
        yield "score.weight", drawn / math.sqrt(config.hidden_size + 1)


def reward_config(folder: Path, pad_token_id: int | None) -> ModelConfig:
    """The configuration of the reward model that a folder holds, or that its language model
    becomes; ``pad_token_id`` is then the tokenizer's.  Raises ModelError as ``read_any_config``
    does.
    """
    stored = read_any_config(folder)
    if stored.score_head:
        return stored
    return replace(stored, score_head=True, pad_token_id=pad_token_id)
