"""Hugging Face folders in: ``config.json``, safetensors (one file or an index of shards),
tokenizer files.

Reading is strict, because silence here is the worst fault of the field: every tensor that the
decoder needs must be there, with its shape and finite values, and every tensor that is there must
be one that the decoder reads.  Nothing is unpickled.  ``isobit.models.saving`` writes them.

A folder holds a language model (``...ForCausalLM``) or a reward model
(``...ForSequenceClassification``); whoever asks for the one is refused the other.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from isobit.config.precision import PrecisionConfig
from isobit.errors import ModelError
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.policy import Policy
from isobit.models.shards import INDEX_FILE, WEIGHTS_FILE


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
    return ModelConfig.from_hf(_read_json(folder / "config.json"), str(folder / "config.json"))


def load_policy(
    folder: Path,
    precision: PrecisionConfig,
    device: torch.device | str = "cpu",
    trainable: bool = True,
    value_head: bool = False,
) -> Policy:
    """Read a Hugging Face folder into FP32 masters on a device and publish them in the given flow;
    with a ``value_head`` of zeros where asked for.

    Raises ModelError for a missing, damaged, misshaped, superfluous or non-finite tensor, by
    name and file.
    """
    config = replace(read_config(folder), value_head=value_head)
    return Policy(config, precision, read_masters(folder, config), device, trainable)


def read_masters(folder: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Each master by name, FP32, put together from the checkpoint's tensors; one at a time is in
    memory.  What no checkpoint has is zeros.

    Raises ModelError as ``load_policy`` does; what the headers show, before the first master.
    """
    head = build_decoder(config).head
    tied = head is not None and head.tied
    expected = checkpoint_shapes(config)
    files: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, shape in _read_shapes(file).items():
            if name == "lm_head.weight" and tied:
                continue  # some exporters write the tied matrix twice
            if name not in expected:
                raise ModelError(
                    f"{file}: holds {name}, which a {config.family} decoder does not read"
                )
            if shape != expected[name]:
                raise ModelError(
                    f"{file}: {name} has the shape {shape}, but config.json asks for "
                    f"{expected[name]}"
                )
            files[name] = file
    missing = [name for name in expected if name not in files]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    for name, master in build_decoder(config).masters().items():
        values = (torch.empty if master.parts else torch.zeros)(master.shape)
        for part, rows in master.of_checkpoint(values).items():
            rows.copy_(_read_tensor(files[part], part))
        yield name, values


def read_reward_masters(
    folder: Path, config: ModelConfig, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each master of a reward model, from a folder of either kind; ``config`` is
    ``reward_config``'s.

    A language model's lm_head is left out, and the score head [1, C] drawn from N(0, 1 / (C + 1)):
    hidden states behind the last norm have elements of about 1, so that first scores differ by
    about 1 (Huang et al., "The N+ implementation details of RLHF with PPO", arXiv 2403.17031).
    With zeros all scores would tie, and the decoder's first gradient would be zero.  Raises
    ModelError as ``read_masters`` does.
    """
    stored, wanted = read_any_config(folder), build_decoder(config).masters()
    for name, values in read_masters(folder, stored):
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


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the Hugging Face checkpoint and their shapes."""
    return {
        part: (rows, *master.shape[1:])
        for master in build_decoder(config).masters().values()
        for part, rows in master.parts.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; raises ModelError where there are none, or where one
    that the index names is missing.
    """
    if (folder / INDEX_FILE).is_file():
        shards = _read_json(folder / INDEX_FILE).get("weight_map", {})
        files = sorted({folder / shard for shard in shards.values()})
        absent = [file for file in files if not file.is_file()]
        if absent:
            raise ModelError(f"{folder / INDEX_FILE} names {absent[0].name}, which is not there")
        return files
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(
            f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there; pickled weights (.bin, "
            ".pt) are not read"
        )
    return [folder / WEIGHTS_FILE]


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """From the header."""
    with _opened(file) as tensors:
        names = tensors.keys()
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    with _opened(file) as tensors:
        tensor = tensors.get_tensor(name)
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{file}: {name} holds a NaN or an infinity")
    return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, expected an object")
    return content
