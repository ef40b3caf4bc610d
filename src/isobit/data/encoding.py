r"""Text becomes tokens, and tokens text.

Text is untrusted: a tokenizer reads ``<|im_end|>`` as the end of a turn wherever it occurs, in a
question, a dataset's answer, or a model's completion. So control tokens in such text are marked
before the chat template sees it, and each marked part is encoded as ordinary characters:

    content      "say <eos>"                  ->  "say \ufdd0<eos>\ufdd1"
    rendered     "<user>say \ufdd0<eos>\ufdd1<assistant>"
    tokens       of "<user>say "   "<eos>", as characters   "<assistant>"

Text without control tokens is encoded whole. What a template writes keeps its meaning, and so does
text that the user has rendered (``data.chat`` = false).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around quoted text, which Unicode guarantees to be no characters."""
_MARKED = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_AT_ONCE = 256
"""Texts that a tokenizer gets at once: it encodes them on all cores, but keeps what it knows of
each token until all are done.
"""


class _Spelling(NamedTuple):
    control: re.Pattern[str] | None
    """Matches any control token; None if there is none."""
    longest: int
    """Characters of its longest token."""


def quoted(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """``text`` with marks around what the tokenizer would take for a control token."""
    control = _spelling(tokenizer).control
    return text if control is None else control.sub(lambda token: f"{BEGIN}{token[0]}{END}", text)


def quoted_values(value: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A message, or anything in one, with ``quoted`` text."""
    if isinstance(value, str):
        return quoted(value, tokenizer)
    if isinstance(value, Mapping):
        return {
            quoted_values(name, tokenizer): quoted_values(one, tokenizer)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [quoted_values(one, tokenizer) for one in value]
    return value


def written_twice(text: str) -> list[str]:
    """The control tokens in a marked text that stand in quoted text and outside of it."""
    parts = _MARKED.split(text)
    outside = "".join(parts[::2])
    return sorted({part for part in parts[1::2] if part in outside})


def quoted_answer(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """``quoted`` for an answer, without a spelt-out end of sequence, which is added anyway."""
    return quoted(text.removesuffix(str(tokenizer.eos_token)), tokenizer)


def unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "") if is_marked(text) else text


def is_marked(text: str) -> bool:
    return BEGIN in text or END in text


def token_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False
) -> list[list[int]]:
    """The tokens of each text, which may be marked; with the tokenizer's special tokens around it
    if ``add_special_tokens``, except those that the text itself begins or ends with.
    """
    ids_of: list[list[int]] = [[] for _ in texts]
    plain = [place for place, text in enumerate(texts) if not is_marked(text)]
    for begin in range(0, len(plain), _AT_ONCE):
        places = plain[begin : begin + _AT_ONCE]
        encoded = tokenizer(
            [texts[place] for place in places],
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        for place, ids in zip(places, encoded, strict=True):
            ids_of[place] = ids
    for place in set(range(len(texts))) - set(plain):
        ids_of[place] = _marked_ids(texts[place], tokenizer, add_special_tokens)
    return [_once(ids, tokenizer) for ids in ids_of] if add_special_tokens else ids_of


def token_ids_up_to(
    most: int,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    add_special_tokens: bool = False,
) -> list[list[int]]:
    """``token_ids``, but of a text with far more than ``most`` tokens only its first ones, which
    are more than ``most`` too: it is refused or dropped in any case.
    """
    longest = most_characters(most + 1, tokenizer)
    ids_of = token_ids([text[:longest] for text in texts], tokenizer, add_special_tokens)
    for place, text in enumerate(texts):
        if len(text) > longest and len(ids_of[place]) <= most:  # the tokenizer leaves some out
            (ids_of[place],) = token_ids([text], tokenizer, add_special_tokens)
    return ids_of


def _once(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """``ids`` without the special tokens that were added to a text that already has them, as text
    that a chat template has rendered.
    """
    before, behind = _around(tokenizer)
    if (size := len(before)) and ids[:size] == ids[size : 2 * size] == before:
        ids = ids[size:]
    if (size := len(behind)) and ids[-size:] == ids[-2 * size : -size] == behind:
        ids = ids[:-size]
    return ids


def _marked_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[int]:
    ids: list[int] = []
    for place, part in enumerate(_MARKED.split(text)):  # the odd parts are quoted
        ids += tokenizer(
            unmarked(part),
            add_special_tokens=False,
            split_special_tokens=place % 2 == 1,
            verbose=False,
        )["input_ids"]
    if not add_special_tokens:
        return ids
    before, behind = _around(tokenizer)
    return [*before, *ids, *behind]


@lru_cache(16)
def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    begin = next(n for n in range(len(whole) + 1) if whole[n : n + len(bare)] == bare)
    return whole[:begin], whole[begin + len(bare) :]


def most_characters(tokens: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most characters that so many tokens can have. A longer text need not be tokenised, which
    could take seconds and gigabytes.
    """
    return tokens * _spelling(tokenizer).longest


@lru_cache(16)
def _spelling(tokenizer: PreTrainedTokenizerBase) -> _Spelling:
    special = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    texts = sorted({*tokenizer.all_special_tokens, *special} - {""}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
    return _Spelling(pattern, max(map(len, tokenizer.get_vocab()), default=1))


@lru_cache(16)
def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that ``decode`` hides."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({token for token, one in added if one.special} | {*tokenizer.all_special_ids})


@lru_cache(16)
def byte_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens of a tokenizer with byte fallback that stand for one byte, as ``<0x0A>``."""
    known = tokenizer.get_vocab().items()
    return frozenset(token for text, token in known if _BYTE.fullmatch(text))


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of ``token_ids`` without special tokens, exactly as the tokens spell it. Incomplete
    characters, which the length limit can leave at the end, become U+FFFD.
    """
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str), "one sequence decodes to one text"
    return text
