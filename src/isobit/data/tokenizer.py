"""A model folder's tokenizer, its stop tokens, and text from tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from isobit.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face model folder, read from disk only, without remote code.

    Raises ``ModelError`` for a folder that is missing, holds no tokenizer, or holds one that
    cannot be loaded.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; expected a Hugging Face model folder with a tokenizer"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        # a model_max_length that is no number, for one, shows only where a text is read
        tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])
        return tokenizer
    except BaseException as error:
        # the library raises many types, and a panic of its Rust half is not even an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int | None = None
) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's end of sequence and those of
    ``generation_config.json``, ascending.

    Chat models often name an end of turn in only one of the two places, so both count.  Raises
    ``ModelError`` where neither names any, since no completion would ever stop, where the file is
    damaged, and for a token that has no row in an embedding of ``vocab_size``: it is never drawn.
    """
    stops: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        stops.add(tokenizer.eos_token_id)
    path = folder / "generation_config.json"
    if path.is_file():
        stops.update(_generation_stops(path))
    beyond = [token for token in stops if token < 0 or (vocab_size or token + 1) <= token]
    if beyond:
        raise ModelError(
            f"{path}: eos_token_id {str(beyond[0])[:40]} is no token of the model, whose embedding "
            f"has {vocab_size or 'so many'} rows (vocab_size in config.json); correct it there"
        )
    if not stops:
        raise ModelError(
            f"{folder} names no end-of-sequence token, in neither its tokenizer nor "
            "generation_config.json; set eos_token_id there"
        )
    return tuple(sorted(stops))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: Path) -> None:
    """Raise ``ModelError`` where a token has no row in an embedding of so many."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda pair: pair[1], default=("", -1))
    if largest >= vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {token!r} as token {largest}, but the embedding has "
            f"{vocab_size} rows (vocab_size in config.json): the tokenizer belongs to another model"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that batches are padded with; None where the tokenizer names none."""
    found = tokenizer.pad_token_id
    return found if isinstance(found, int) else None


def _generation_stops(path: Path) -> list[int]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {str(error)[:200]}") from error
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(
            f"{path}: eos_token_id must be a token id or a list of them, found {repr(value)[:200]}"
        )
    return ids


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of ``token_ids`` without special tokens, exactly as the tokens spell it.

    Byte-level tokens may cut a character in two, most often where the length limit ends a
    completion: bytes that form no character become U+FFFD.
    """
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str), "one sequence decodes to one text"
    return text
