"""Text to tokens, where some of the text is a stranger's and may spell a control token.

A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands: in a question, a dataset's
answer, or what a model wrote, which a reward model would then read as turns that never were.  So
what is quoted is marked before a chat template sees it, and each mark's text is encoded as the
characters that it has:

    content      "say <eos>"                  ->  "say \\ufdd0<eos>\\ufdd1"
    rendered     "<user>say \\ufdd0<eos>\\ufdd1<assistant>"
    tokens       of "<user>say "   "<eos>", letter by letter   "<assistant>"

Text without such a spelling has no mark and is encoded whole.  What a template writes keeps its
meaning, and so does text that the user has rendered (``data.chat`` = false).
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what is quoted: Unicode promises that these never are characters."""
_MARKED = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}")
_CACHED = 16
_AT_ONCE = 256
"""Texts that a tokenizer is given at once: it encodes them on all cores, and keeps what it knows of
each token until all are done.
"""
_ANY_TEXT = "a"


class _Spelling(NamedTuple):
    """What a tokenizer knows of its own texts."""

    control: re.Pattern[str] | None
    """Any of its control tokens; None where it has none."""
    longest: int
    """Characters of its longest token."""


def quoted(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """``text`` with marks around what the tokenizer would take for a control token."""
    control = _spelling(tokenizer).control
    return text if control is None else control.sub(lambda found: f"{BEGIN}{found[0]}{END}", text)


def quoted_answer(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """``quoted``, of an answer: the token that ends a sequence may be spelt out at its end, and is
    left out, as it stands there anyhow.
    """
    return quoted(text.removesuffix(str(tokenizer.eos_token)), tokenizer)


def unmarked(text: str) -> str:
    """``text`` as a reader sees it."""
    return text.replace(BEGIN, "").replace(END, "") if is_marked(text) else text


def is_marked(text: str) -> bool:
    """Whether any of it is quoted."""
    return BEGIN in text or END in text


def token_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False
) -> list[list[int]]:
    """The tokens of each text, which may be marked; with those that a tokenizer puts around a text
    by itself, if they are asked for.
    """
    found: list[list[int]] = [[] for _ in texts]
    plain = [place for place, text in enumerate(texts) if not is_marked(text)]
    for begin in range(0, len(plain), _AT_ONCE):
        places = plain[begin : begin + _AT_ONCE]
        some = tokenizer(
            [texts[place] for place in places],
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        for place, ids in zip(places, some, strict=True):
            found[place] = ids
    for place in set(range(len(texts))) - set(plain):
        found[place] = _marked_ids(texts[place], tokenizer, add_special_tokens)
    return found


def _marked_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> list[int]:
    ids: list[int] = []
    for place, part in enumerate(_MARKED.split(text)):  # what is quoted is every second one
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


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind a text, found on a text."""
    bare = tokenizer(_ANY_TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer(_ANY_TEXT)["input_ids"]
    begin = next(n for n in range(len(whole) + 1) if whole[n : n + len(bare)] == bare)
    return whole[:begin], whole[begin + len(bare) :]


def most_characters(tokens: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """No text of more characters fits so many tokens: what is longer need not be tokenised, which
    takes seconds and gigabytes where somebody's file has a line of megabytes.
    """
    return tokens * _spelling(tokenizer).longest


@lru_cache(_CACHED)
def _spelling(tokenizer: PreTrainedTokenizerBase) -> _Spelling:
    special = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    texts = sorted({*tokenizer.all_special_tokens, *special} - {""}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
    return _Spelling(pattern, max(map(len, tokenizer.get_vocab()), default=1))
