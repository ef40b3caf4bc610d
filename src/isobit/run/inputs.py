"""What a run reads beside its recipe, as digests by name.  Every checkpoint records them, and a
resume compares (``isobit.store.checkpoint.compatible``): with another reward, other data or another
tokenizer the rest of a run would be another run, in silence.

    data.train.content            prompts: ids, tokens, and columns that a reward may read; of
                                  fine-tuning what is learnt, too
    data.eval.NAME.content        likewise
    model.config                  bytes of config.json, but of a model from scratch
    model.tokenizer               of all files of the tokenizer
    model.generation              of generation_config.json
    reward.function.source        of code of the user's own (``isobit.user_source``), of parts
                                  reward.parts.NAME.function.source
    algorithm.source.content      of an objective of the user's own

Weights are not among them: a checkpoint holds the policy's, and digests of all others that still
are those of their folders (``isobit.store.training_run.Extra``).
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from isobit.config.recipe import Recipe
from isobit.config.reward import WHOLE
from isobit.config.run import RunConfig
from isobit.files import file_sha256
from isobit.rewards.graders import GRADERS
from isobit.run.outline import Outline
from isobit.user_source import source_sha256

_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
_ABSENT = "absent"


def digests(outline: Outline, content: Mapping[str, str]) -> dict[str, str]:
    """Of a training whose data has the digests ``content``, by set.  Raises OSError for a file that
    cannot be read.
    """
    folder = outline.model.folder
    config = {} if outline.source.from_scratch else {"model.config": ("config.json",)}
    files = {
        **config,
        "model.tokenizer": _TOKENIZER,
        "model.generation": ("generation_config.json",),
    }
    return {
        **{f"data.{name}.content": digest for name, digest in content.items()},
        **{name: _files_sha256(folder, patterns) for name, patterns in files.items()},
        **dict(_sources(outline.config)),
    }


def _sources(config: Recipe) -> Iterator[tuple[str, str]]:
    parts = {} if config.reward is None else config.reward.named()
    for name, part in parts.items():
        if part.function is not None and part.function not in GRADERS:
            key = "reward" if name == WHOLE else f"reward.parts.{name}"
            yield f"{key}.function.source", source_sha256(part.function) or _ABSENT
    own = config.algorithm if isinstance(config, RunConfig) else None
    if own is not None and own.name == "custom":
        yield "algorithm.source.content", source_sha256(own.source) or _ABSENT


def _files_sha256(folder: Path, patterns: tuple[str, ...]) -> str:
    """Of the names and bytes of the files that match."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        return _ABSENT
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\n{file_sha256(path)}\n".encode())
    return digest.hexdigest()
