"""Digests of everything that a run reads beside its recipe.

Every checkpoint records them, and a resume compares them (``isobit.store.compatible``): with
another reward, other data or another tokenizer the rest of a run would silently be another run.

    data.train.content            prompts: ids, tokens, and columns that a reward may read; of
                                  fine-tuning also what is learnt
    data.eval.NAME.content        likewise
    model.config                  bytes of config.json, unless the model starts from scratch
    model.tokenizer               all files of the tokenizer
    model.tokens                  which rows of lm_head are in the distribution
    model.generation              generation_config.json
    reward.function.source        the user's own code (``isobit.util.user_source``); of the parts of
                                  a reward it is reward.parts.NAME.function.source
    reward.rubric                 the file that a judge's rubric is in
    environment.class.source      the class of an environment, likewise
    environment.documents         names and contents of what ``search`` finds
    algorithm.source.content      an objective of the user's own

Weights are not among them: a checkpoint holds the policy's, and digests of all others
(``isobit.store.training_run.Extra``).
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from isobit.config.environment import ENVIRONMENTS
from isobit.config.recipes import Recipe, RunConfig
from isobit.config.reward import WHOLE
from isobit.environments.document_index import documents_sha256
from isobit.rewards.graders import GRADERS
from isobit.rewards.graders.judge import rubric_file
from isobit.util.files import file_sha256
from isobit.util.user_source import source_sha256

_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
_ABSENT = "absent"


def digests(
    config: Recipe, folder: Path, from_scratch: bool, content: Mapping[str, str]
) -> dict[str, str]:
    """The digests of a training whose data has the digests ``content``, by set.  Raises OSError for
    a file that cannot be read.
    """
    files = {
        **({} if from_scratch else {"model.config": ("config.json",)}),
        "model.tokenizer": _TOKENIZER,
        "model.generation": ("generation_config.json",),
    }
    return {
        **{f"data.{name}.content": digest for name, digest in content.items()},
        **{name: _files_sha256(folder, patterns) for name, patterns in files.items()},
        **dict(_sources(config)),
    }


def _sources(config: Recipe) -> Iterator[tuple[str, str]]:
    parts = {} if config.reward is None else config.reward.named()
    for name, part in parts.items():
        key = "reward" if name == WHOLE else f"reward.parts.{name}"
        if part.function is not None and part.function not in GRADERS:
            yield f"{key}.function.source", source_sha256(part.function) or _ABSENT
        if part.function == "llm_judge" and (path := rubric_file(part.options.get("rubric", ""))):
            yield f"{key}.rubric", file_sha256(path) if path.is_file() else _ABSENT
    environment = config.environment if isinstance(config, RunConfig) else None
    is_file = environment is not None and environment.openenv is None
    if environment is not None and is_file and environment.place not in ENVIRONMENTS:
        yield f"environment.{environment.kind}.source", source_sha256(environment.place) or _ABSENT
    if environment is not None and environment.factory == "search":
        yield "environment.documents", documents_sha256(**environment.options)
    own = config.algorithm if isinstance(config, RunConfig) else None
    if own is not None and own.name == "custom":
        yield "algorithm.source.content", source_sha256(own.source) or _ABSENT


def _files_sha256(folder: Path, patterns: tuple[str, ...]) -> str:
    """The digest of the names and bytes of the files that match."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        return _ABSENT
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\n{file_sha256(path)}\n".encode())
    return digest.hexdigest()
