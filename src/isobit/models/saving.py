"""Hugging Face folders out: safetensors under the checkpoint's own names, ``config.json`` and the
tokenizer's files, which transformers and every engine load.

What a checkpoint does not have, a value head, no folder gets.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from isobit.data.tokenizer import TOKENIZER_FILES, load_tokenizer, stop_token_ids
from isobit.models.config import ModelConfig
from isobit.models.contents import Contents, bf16_contents
from isobit.models.policy import Policy
from isobit.models.shards import SHARD_BYTES, write_order, write_shards
from isobit.precision.quant_tensor import QuantTensor

GENERATION_FILE = "generation_config.json"
TEXT_FILES = (
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION_FILE,
)
"""Files that describe text rather than weights: they are taken over as they are."""
TEMPLATES = "additional_chat_templates"
"""A folder of chat templates beside the first one."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class PolicyTensors:
    """The tensors of a policy's masters, by the checkpoint's names (``Tensors``).

    Of several ranks each owns some rows of a master: it is gathered when the first of its tensors
    is asked for, which all ranks do in one order, and held until the last one was.
    """

    def __init__(self, policy: Policy) -> None:
        """Of a trainable policy."""
        self._policy, self._described = policy, policy.decoder.masters()
        self._masters = {
            part: name for name, described in self._described.items() for part in described.parts
        }
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._gathered: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        """FP32."""
        master = self._masters[name]
        if name not in self._held.get(master, ()):
            self._held[master] = self._described[master].of_checkpoint(self._gather(master))
        tensor = self._held[master].pop(name)
        if not self._held[master]:
            del self._held[master]
        return tensor

    def gather_rest(self, names: Sequence[str]) -> None:
        """Take part in gathering what other ranks ask for in this order and this one has not."""
        for master in dict.fromkeys(self._masters[name] for name in names):
            if master not in self._gathered:
                self._gather(master)

    def _gather(self, master: str) -> torch.Tensor:
        self._gathered.add(master)
        self._policy.world.pulse.beat()
        whole = self._policy.whole_master(master)
        if self._policy.world.size == 1:
            return whole
        return whole.cpu()  # the device has no room planned for what is held

    @property
    def in_e4m3(self) -> frozenset[str]:
        """None: masters are FP32."""
        return frozenset()

    def quantised(self, name: str) -> QuantTensor | None:
        """None."""
        return None


@contextmanager
def policy_contents(policy: Policy, limit: int = SHARD_BYTES) -> Iterator[Contents]:
    """The BF16 rounding of the masters that checkpoints have, for rank 0 to write in this block, in
    files of at most ``limit`` bytes.  All ranks together: whatever happens in the block, nobody is
    left waiting for a master.
    """
    tensors = PolicyTensors(policy)
    contents = bf16_contents(policy.config, tensors)
    order = write_order(contents.layout, limit)
    try:
        yield contents
    except Exception:
        tensors.gather_rest(order)
        raise
    tensors.gather_rest(order)


def save_policy(
    policy: Policy, folder: Path, tokenizer_from: Path | None = None, limit: int = SHARD_BYTES
) -> None:
    """Write the BF16 rounding of the masters that checkpoints have as a Hugging Face folder, with
    the tokenizer files of another folder if given; files of tensors have at most ``limit`` bytes.
    All ranks together; rank 0 writes.
    """
    with policy_contents(policy, limit) as contents:
        if policy.world.rank == 0:
            write_folder(folder, policy.config, contents, tokenizer_from, limit)


def write_folder(
    folder: Path,
    config: ModelConfig,
    contents: Contents,
    tokenizer_from: Path | None = None,
    limit: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write a model folder, one tensor at a time; -> the SHA-256 of each file of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    described = config.to_hf()
    if tokenizer_from is not None:
        described = _token_ids(tokenizer_from) | described
        _copy_tokenizer(tokenizer_from, folder)
    if contents.quantization is not None:
        described["quantization_config"] = contents.quantization
    _write_json(folder / "config.json", described)
    return write_shards(folder, contents.layout, contents.value, limit)


def _token_ids(source: Path) -> dict[str, Any]:
    """The special tokens that another folder's config.json names."""
    path = source / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: found[key] for key in _TOKEN_IDS if found.get(key) is not None}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Also makes the generation config of a folder that has none: without one, other engines would
    not know every token that ends a completion.
    """
    for file in TEXT_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
    has_tokenizer = any((source / file).is_file() for file in TOKENIZER_FILES)
    if has_tokenizer and not (source / GENERATION_FILE).is_file():
        stops = stop_token_ids(load_tokenizer(source), source)
        ids = _token_ids(source) | {"eos_token_id": list(stops)}
        _write_json(folder / GENERATION_FILE, ids)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
