"""The tokens that end a completion: a folder's, the chat template's end of turn, and a recipe's."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from isobit.data.chat_template import rendered
from isobit.data.encoding import special_token_ids, token_ids
from isobit.data.harmony import writes_harmony
from isobit.util.errors import ConfigError, ModelError
from isobit.util.plain_files import read_plain

HARMONY_ENDS = "<|return|>", "<|call|>"
"""The tokens that end an answer and a call of a tool of gpt-oss."""


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int | None = None
) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's end of sequence and those of
    ``generation_config.json``, or, where it names none, of ``config.json``, ascending. Chat models
    often name an end of turn in only one of them. With gpt-oss's chat template also
    ``HARMONY_ENDS``.

    Raises ``ModelError`` if none names any, if a file is damaged, and for a token outside an
    embedding of ``vocab_size`` rows.
    """
    path = folder / "generation_config.json"
    named = named_stops(path)
    if not named:
        path = folder / "config.json"
        named = named_stops(path)
    own = tokenizer.eos_token_id
    stops = {*named, *([own] if isinstance(own, int) else []), *_ends_of_harmony(tokenizer)}
    beyond = [token for token in stops if token < 0 or (vocab_size or token + 1) <= token]
    if beyond:
        raise ModelError(
            f"{path}: eos_token_id {str(beyond[0])[:40]} is no token of the model, whose embedding "
            f"has {vocab_size or 'so many'} rows (vocab_size in config.json); correct it there"
        )
    if not stops:
        raise ModelError(
            f"{folder} names no end-of-sequence token, in neither its tokenizer nor "
            "generation_config.json nor config.json; set eos_token_id there"
        )
    return tuple(sorted(stops))


def _ends_of_harmony(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    known = tokenizer.get_vocab() if writes_harmony(tokenizer) else {}
    return [known[one] for one in HARMONY_ENDS if one in known]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes first behind what an assistant says; None
    where there is none, or no such conversation.
    """
    said = "isobit-0"
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": said}]
    try:
        _, separator, behind = rendered(turns, tokenizer, add_generation_prompt=False).rpartition(
            said
        )
    except Exception:  # templates raise through jinja2; a run that renders prompts names the fault
        return None
    ids = token_ids([behind], tokenizer)[0] if separator else []
    unknown = tokenizer.unk_token_id
    ends = (token for token in ids if token in special_token_ids(tokenizer) and token != unknown)
    return next(ends, None)


def describe_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, chat: bool, stops: Sequence[int]
) -> list[str]:
    """A line if the chat template ends the assistant's turn with a token that ends no
    completion.
    """
    end = end_of_turn(tokenizer) if chat and tokenizer.chat_template else None
    if end is None or end in stops:
        return []
    named = tokenizer.convert_ids_to_tokens([end])[0]
    known = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(list(stops))))
    return [
        f"warning: the chat template ends the assistant's turn with {named!r} (token {end}), which "
        f"ends no completion: they end with {known}. Make it one with rollout.stop_tokens = "
        f"{json.dumps([named], ensure_ascii=False)}, and for other engines with eos_token_id in "
        "generation_config.json"
    ]


def further_stops(tokenizer: PreTrainedTokenizerBase, named: Sequence[str]) -> tuple[int, ...]:
    """The ids of ``rollout.stop_tokens``. Raises ``ConfigError`` for what is no token."""
    known = tokenizer.get_vocab()
    for text in named:
        if text not in known:
            raise ConfigError(
                f"rollout.stop_tokens names {text!r}, which is no token of the tokenizer; name one "
                "as the tokenizer spells it, or give a text of several tokens to "
                "rollout.stop_strings"
            )
    return tuple(sorted({known[text] for text in named}))


def named_stops(path: Path) -> list[int]:
    """The ``eos_token_id`` of a JSON file; none where there is no file. Raises ``ModelError``."""
    try:
        config = json.loads(read_plain(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {str(error)[:200]}") from error
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(
            f"{path}: eos_token_id must be a token id or a list of them, found {repr(value)[:200]}"
        )
    return ids
