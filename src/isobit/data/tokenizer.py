"""Loading a model folder's tokenizer, and what is known of its vocabulary."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from isobit.util.errors import ModelError
from isobit.util.plain_files import check_plain, read_plain

LARGEST_TEXT = 1 << 28
"""Bytes of a file of a tokenizer; those of the largest vocabularies have some 40 MB."""
_OF_IMAGES = "<image_soft_token>"
"""What Gemma 3's tokenizer has for images; its model of text alone has no row for it."""
_READ_BY_TRANSFORMERS = (".json", ".jsonl", ".jinja", ".model", ".txt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def _check_files(folder: Path) -> None:
    """Raise ``ModelError`` for a pipe, a device or a file without an end, which the library would
    open and read for ever.
    """
    for path in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        if path.suffix in _READ_BY_TRANSFORMERS and path.exists() and not path.is_dir():
            try:
                check_plain(path, LARGEST_TEXT)
            except OSError as error:
                raise ModelError(f"{path} {error.strerror}; expected a tokenizer's file") from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face model folder, read from disk only, without remote code.

    Raises ``ModelError`` for a folder that is missing, holds no tokenizer, or holds one that cannot
    be loaded.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; expected a Hugging Face model folder with a tokenizer"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    _check_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), config=_family(folder), local_files_only=True, trust_remote_code=False
        )
        # some faults show only when a text is read, such as a model_max_length that is no number
        tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])
    except BaseException as error:
        if isinstance(error, ModelError) or not is_of_tokenizer(error):
            raise
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    _check_template(tokenizer, folder)
    return tokenizer


def _check_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ``ModelError`` for a chat template that is neither text nor texts by their names."""
    templates: Any = tokenizer.chat_template
    texts = (
        templates.values()
        if isinstance(templates, dict)
        else []
        if templates is None
        else [templates]
    )
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: a chat_template is {type(text).__name__}; "
                'expected the text of a template, or a list of {"name": .., "template": ..} of '
                "texts"
            )


def _family(folder: Path) -> PreTrainedConfig | None:
    """The configuration by whose family ``AutoTokenizer`` chooses a class. None where it is to look
    itself.

    transformers also refuses sizes of models there, some of which are computed here, and which say
    nothing on a tokenizer: then the family alone is given. Raises ModelError for a file that cannot
    be read.
    """
    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        path = folder / "config.json"
        if not path.is_file():
            return None
        try:
            config = json.loads(read_plain(path))
            if not isinstance(config, dict):
                raise TypeError(f"but a {type(config).__name__}")
        except (OSError, ValueError, TypeError, RecursionError) as unread:
            raise ModelError(
                f"{path} holds no JSON object ({unread}), and the tokenizer's family stands there; "
                "put the model's own file back"
            ) from None
        names = ("model_type", "tokenizer_class")
        family = {name: config[name] for name in names if isinstance(config.get(name), str)}
        if isinstance(error, (ValueError, OSError)) or "model_type" not in family:
            return None  # a family that transformers does not know
        return AutoConfig.for_model(**family)


def is_of_tokenizer(error: BaseException) -> bool:
    """Whether a call of a tokenizer has failed, rather than been interrupted. The library raises
    many types, and a panic of its Rust part is not even an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def tokenizer_size(folder: Path) -> int | None:
    """The largest id of a folder's tokenizer, plus 1; None for a folder without a tokenizer.
    Raises ``ModelError`` as ``load_tokenizer`` does.
    """
    files = [folder / name for name in (*TOKENIZER_FILES, "added_tokens.json")]
    stamps = tuple(
        (path, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()
    )
    return _largest_id(folder, stamps) + 1 if stamps else None


@lru_cache(16)
def _largest_id(folder: Path, _files: tuple[tuple[Path, int, int], ...]) -> int:
    return max(load_tokenizer(folder).get_vocab().values(), default=-1)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: Path) -> None:
    """Raise ``ModelError`` if a token of text has no row in an embedding of ``vocab_size`` rows."""
    vocabulary = ((token, n) for token, n in tokenizer.get_vocab().items() if token != _OF_IMAGES)
    token, largest = max(vocabulary, key=lambda pair: pair[1], default=("", -1))
    if largest >= vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {token!r} as token {largest}, but the embedding has "
            f"{vocab_size} rows (vocab_size in config.json): the tokenizer belongs to another model"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that batches are padded with; None if the tokenizer names none."""
    token = tokenizer.pad_token_id
    return token if isinstance(token, int) else None
