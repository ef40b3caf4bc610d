r"""A model folder's tokenizer, its stop tokens, and text from tokens.

A model folder's chat template, rendered within bounds.

A template is a stranger's program.  transformers runs it in jinja's sandbox, where it reads no file
and calls nothing of Python's; what the sandbox does not bound is how long it runs.  Two nested
loops of ``range(99999)`` take an hour, and one power of a power for ever, so the lines that a
template executes are counted here, and powers are refused before it is compiled.

Text to tokens, where some of the text is a stranger's and may spell a control token.

A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands: in a question, a dataset's
answer, or what a model wrote, which a reward model would then read as turns that never were.  So
what is quoted is marked before a chat template sees it, and each mark's text is encoded as the
characters that it has:

    content      "say <eos>"                  ->  "say \ufdd0<eos>\ufdd1"
    rendered     "<user>say \ufdd0<eos>\ufdd1<assistant>"
    tokens       of "<user>say "   "<eos>", letter by letter   "<assistant>"

Text without such a spelling has no mark and is encoded whole.  What a template writes keeps its
meaning, and so does text that the user has rendered (``data.chat`` = false).
"""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from isobit.util.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_LINES = 1_000_000
"""Of a template's compiled code, for one conversation.  A thousand messages take some 50,000."""
LARGEST = 1 << 20
"""Characters of a template."""
_FILE = "<template>"
"""What jinja calls the file that it compiles a template to."""


def rendered(
    messages: Sequence[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
) -> str:
    """The text of a conversation.  Raises whatever the template raises, and ``TemplateError`` for
    one that does not end or is none.
    """
    for template in _sources(tokenizer.chat_template):
        _check(template)
    with _counted_lines():
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    return str(text)


def _sources(template: Any) -> tuple[str, ...]:
    """A tokenizer has one template, or several by name."""
    return tuple(map(str, template.values())) if isinstance(template, dict) else (str(template),)


@lru_cache(16)
def _check(template: str) -> None:
    if len(template) > LARGEST:
        raise TemplateError(
            f"the template has {len(template):,} characters; expected at most {LARGEST:,}"
        )
    before = ""
    for _, kind, text in Environment(autoescape=True).lex(template):
        if kind == "operator" and text == "**" and before not in ("(", ","):
            raise TemplateError("the template computes a power, which no conversation needs")
        before = before if kind == "whitespace" else text


@contextmanager
def _counted_lines() -> "Iterator[None]":
    """Raise ``TemplateError`` inside a template that executes more than ``MAX_LINES`` lines."""
    left = MAX_LINES

    def of_template(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise TemplateError(
                f"it has not ended after {MAX_LINES:,} lines: its loops are too long"
            )
        return of_template

    def enter(frame: FrameType, _event: str, _value: Any) -> Any:
        return of_template if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


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
