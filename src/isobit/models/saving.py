"""Hugging Face folders out: BF16 safetensors under the checkpoint's own names, ``config.json`` and
the tokenizer's files, which transformers and every engine load.

What a checkpoint does not have, a value head, no folder gets.
"""

import json
import shutil
from pathlib import Path

import torch

from isobit.models.policy import Policy
from isobit.models.shards import SHARD_BYTES, write_shards

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def save_policy(
    policy: Policy, folder: Path, tokenizer_from: Path | None = None, limit: int = SHARD_BYTES
) -> None:
    """Write the BF16 rounding of the masters that checkpoints have as a Hugging Face folder, with
    the tokenizer files of another folder if given; files of tensors have at most ``limit`` bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    masters: dict[str, torch.Tensor] = {}
    for name, described in policy.decoder.masters().items():
        masters |= described.of_checkpoint(policy.masters[name].detach())
    layout = {
        part: torch.empty(master.shape, dtype=torch.bfloat16, device="meta")
        for part, master in masters.items()
    }
    write_shards(folder, layout, lambda part: masters[part].bfloat16(), limit)
    (folder / "config.json").write_text(
        json.dumps(policy.config.to_hf(), indent=2) + "\n", encoding="utf-8"
    )
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files, the chat template and the generation config of another folder."""
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
