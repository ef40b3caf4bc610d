r"""A model folder's tokenizer, its stop tokens and its chat template.

A chat template is an untrusted program. transformers runs it in jinja's sandbox, which does not
limit the time: two nested loops of ``range(99999)`` take an hour, and a power of a power never
ends. So the lines that a template executes are counted here, powers are refused, and what its
operations make is bounded (``isobit.data.template_limits``).

Text is untrusted too: a tokenizer reads ``<|im_end|>`` as the end of a turn wherever it occurs, in
a question, a dataset's answer, or a model's completion. So control tokens in such text are marked
before the chat template sees it, and each marked part is encoded as ordinary characters:

    content      "say <eos>"                  ->  "say \ufdd0<eos>\ufdd1"
    rendered     "<user>say \ufdd0<eos>\ufdd1<assistant>"
    tokens       of "<user>say "   "<eos>", as characters   "<assistant>"

Text without control tokens is encoded whole. What a template writes keeps its meaning, and so does
text that the user has rendered (``data.chat`` = false).
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from isobit.data.template_limits import Allowance, compiled, limited
from isobit.util.errors import ConfigError, ModelError
from isobit.util.plain_files import check_plain, read_plain

MAX_LINES = 1_000_000
"""Executed lines of a template for one conversation; a thousand messages take some 50,000."""
_LINES_AT_ONCE = 1000
LARGEST = 1 << 20
"""Characters of a template, and of a layout of the date ``LONGEST_LAYOUT``."""
LONGEST_LAYOUT = 1000
_FILE = "<template>"
"""The file name of jinja's compiled templates."""


CLOCK = "strftime_now"
"""The function by which chat templates read the clock."""
_NOW: ContextVar[datetime | None] = ContextVar("now", default=None)
"""What the clock of a template shows; None for the machine's."""


def rendered(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    date: datetime | None = None,
    continues: str | None = None,
) -> str:
    """The text of a conversation, as ``apply_chat_template`` of transformers gives it.

    ``continues`` names the field of the last message that the model is to go on with. Raises
    whatever the template raises, ``TemplateError`` for one that is invalid or does not end, and
    UnicodeEncodeError for half of a surrogate pair in the text, which no tokenizer reads.
    """
    for template in _templates(tokenizer):
        _check(template)
    listed: Any = None if tools is None else [dict(tool) for tool in tools]
    template = tokenizer.get_chat_template(None, listed)
    # transformers gives templates a clock that shows the time of the rendering
    compiled(template).globals[CLOCK] = _strftime_now
    before = _NOW.set(date)
    try:
        with limited([messages, tools, variables]) as allowance, _counted_lines(allowance):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=listed,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and continues is None,
                continue_final_message=continues or False,
                **variables,
            )
    finally:
        _NOW.reset(before)
    str(text).encode("utf-8")
    return str(text)


def _strftime_now(layout: str) -> str:
    if len(layout) > LONGEST_LAYOUT:
        raise TemplateError(f"the layout of the date has more than {LONGEST_LAYOUT} characters")
    return (_NOW.get() or datetime.now()).strftime(layout)


def _templates(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """One, or several that have names; none."""
    found: Any = tokenizer.chat_template
    if isinstance(found, dict):
        return tuple(map(str, found.values()))
    return (str(found),) if found else ()


@lru_cache(16)
def _names(template: str) -> frozenset[str]:
    return frozenset(
        text for _, kind, text in Environment(autoescape=True).lex(template) if kind == "name"
    )


def mentions(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether a chat template reads the variable ``name``."""
    try:
        return any(name in _names(template) for template in _templates(tokenizer))
    except TemplateError:  # of which rendering says more
        return True


def reads_key(tokenizer: PreTrainedTokenizerBase, key: str) -> bool:
    """Whether a chat template may read the key of messages: as an attribute or in quotes."""
    quoted = (f"'{key}'", f'"{key}"')
    written = any(one in template for template in _templates(tokenizer) for one in quoted)
    return written or mentions(tokenizer, key)


_TEMPLATES = ("tokenizer_config.json", "*chat_template*", "additional_chat_templates/*")


def reads_clock(folder: Path) -> bool:
    """Whether a chat template of a model folder may write the date. No tokenizer is loaded."""
    files = (path for pattern in _TEMPLATES for path in folder.glob(pattern) if path.is_file())
    return any(CLOCK.encode() in read_plain(path, LARGEST_TEXT) for path in files)


_TAKEN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents"
}


def check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ValueError`` for a variable that no chat template reads, or that is no variable."""
    for name in variables:
        if name in _TAKEN or name == "messages":
            raise ValueError(f"{name!r} is no variable of a template: rendering sets it itself")
        if not mentions(tokenizer, name):
            known = {name for one in _templates(tokenizer) for name in _names(one)}
            near = get_close_matches(name, sorted(known - _TAKEN), n=1)
            other = "leave it out, or name one that the folder's chat template reads"
            hint = f"; did you mean {near[0]!r}?" if near else f"; {other}"
            raise ValueError(f"the chat template reads no variable {name!r}{hint}")


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
def _counted_lines(allowance: Allowance) -> Iterator[None]:
    """Raise ``TemplateError`` inside a template that executes more than ``MAX_LINES`` lines, or for
    too long.
    """
    left = MAX_LINES

    def of_template(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left % _LINES_AT_ONCE == 0:
            allowance.check_time()
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
    return text if control is None else control.sub(lambda found: f"{BEGIN}{found[0]}{END}", text)


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
    return [_once(ids, tokenizer) for ids in found] if add_special_tokens else found


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
    found = token_ids([text[:longest] for text in texts], tokenizer, add_special_tokens)
    for place, text in enumerate(texts):
        if len(text) > longest and len(found[place]) <= most:  # the tokenizer leaves some out
            (found[place],) = token_ids([text], tokenizer, add_special_tokens)
    return found


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


LARGEST_TEXT = 1 << 28
"""Bytes of a file of a tokenizer; those of the largest vocabularies have some 40 MB."""
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
    found: Any = tokenizer.chat_template
    texts = found.values() if isinstance(found, dict) else [] if found is None else [found]
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(
                f"{folder / 'tokenizer_config.json'}: a chat_template is {type(text).__name__}; "
                'expected the text of a template, or a list of {"name": .., "template": ..} of '
                "texts"
            )


def _family(folder: Path) -> PreTrainedConfig | None:
    """What ``AutoTokenizer`` reads of ``config.json``, by whose family it chooses a class. None
    where it is to look itself.

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
            found = json.loads(read_plain(path))
            if not isinstance(found, dict):
                raise TypeError(f"but a {type(found).__name__}")
        except (OSError, ValueError, TypeError, RecursionError) as unread:
            raise ModelError(
                f"{path} holds no JSON object ({unread}), and the tokenizer's family stands there; "
                "put the model's own file back"
            ) from None
        names = ("model_type", "tokenizer_class")
        family = {name: found[name] for name in names if isinstance(found.get(name), str)}
        if isinstance(error, (ValueError, OSError)) or "model_type" not in family:
            return None  # a family that transformers does not know
        return AutoConfig.for_model(**family)


def is_of_tokenizer(error: BaseException) -> bool:
    """Whether a call of a tokenizer has failed, rather than been interrupted. The library raises
    many types, and a panic of its Rust part is not even an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int | None = None
) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's end of sequence and those of
    ``generation_config.json``, or, where it names none, of ``config.json``, ascending. Chat models
    often name an end of turn in only one of them.

    Raises ``ModelError`` if none names any, if a file is damaged, and for a token outside an
    embedding of ``vocab_size`` rows.
    """
    path = folder / "generation_config.json"
    named = named_stops(path)
    if not named:
        path = folder / "config.json"
        named = named_stops(path)
    own = tokenizer.eos_token_id
    stops = {*named, *([own] if isinstance(own, int) else [])}
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


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes first behind what an assistant says; None
    where there is none, or no such conversation.
    """
    said = "isobit-0"
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": said}]
    try:
        _, found, behind = rendered(turns, tokenizer, add_generation_prompt=False).rpartition(said)
    except Exception:  # templates raise through jinja2; a run that renders prompts names the fault
        return None
    ids = token_ids([behind], tokenizer)[0] if found else []
    unknown = tokenizer.unk_token_id
    ends = (one for one in ids if one in special_token_ids(tokenizer) and one != unknown)
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


def tokenizer_size(folder: Path) -> int | None:
    """The largest id of a folder's tokenizer, plus 1; None for a folder without a tokenizer.
    Raises ``ModelError`` as ``load_tokenizer`` does.
    """
    files = [folder / name for name in (*TOKENIZER_FILES, "added_tokens.json")]
    found = tuple(
        (path, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()
    )
    return _largest_id(folder, found) + 1 if found else None


@lru_cache(16)
def _largest_id(folder: Path, _files: tuple[tuple[Path, int, int], ...]) -> int:
    return max(load_tokenizer(folder).get_vocab().values(), default=-1)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: Path) -> None:
    """Raise ``ModelError`` if a token has no row in an embedding of ``vocab_size`` rows."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda pair: pair[1], default=("", -1))
    if largest >= vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {token!r} as token {largest}, but the embedding has "
            f"{vocab_size} rows (vocab_size in config.json): the tokenizer belongs to another model"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that batches are padded with; None if the tokenizer names none."""
    found = tokenizer.pad_token_id
    return found if isinstance(found, int) else None


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
