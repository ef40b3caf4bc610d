"""Rows become prompts: rendered with the chat template, tokenised, and refused, dropped or cut if
they are too long. Digests of prompts, which detect changed data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config import data as tables
from isobit.config.base import MAX_COUNT
from isobit.config.data import ChatConfig, DataConfig, DataSource
from isobit.data.chat_template import mentions, reads_key
from isobit.data.encoding import most_characters, token_ids_up_to, unmarked, written_twice
from isobit.data.rendering import is_templated, render_row
from isobit.data.sources import Row, load_rows
from isobit.records.messages import Message, calls_of, written_arguments
from isobit.records.text import Prompt
from isobit.util.errors import DataError
from isobit.util.terminal import counted


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Digest of all prompts in order: ids, tokens, and the columns that a reward may read."""
    digest = sha256()
    for prompt in prompts:
        content = [prompt.id, prompt.token_ids, dict(prompt.row)]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def learnt_sha256(prompts: Sequence[Prompt], learnt: Iterable[Any]) -> str:
    """Digest of prompts with what is trained on after each: of their digest and the list, as
    JSON.
    """
    digest = sha256(f"[{json.dumps(prompts_sha256(prompts))}, [".encode())
    for place, one in enumerate(learnt):
        digest.update(f"{', ' if place else ''}{json.dumps(one)}".encode())
    digest.update(b"]]")
    return digest.hexdigest()


_KEPT_AHEAD = 64
"""Characters kept at the beginning of a cut text, where a template begins the sequence."""


@dataclass(slots=True)
class TooLong:
    """The rule for items that are too long, and how many there were."""

    rule: tables.TooLong = "refuse"
    dropped: int = 0
    cut: int = 0
    in_parts: bool = False
    """Whether a set is built part by part, some of which may be left without any."""

    def keeps(self, problem: str) -> bool:
        """Whether an item with a ``problem`` is kept, shortened. Raises ``DataError`` with the
        problem if the rule is to refuse; counts otherwise.
        """
        match self.rule:
            case "drop":
                self.dropped += 1
                return False
            case "cut":
                self.cut += 1
                return True
            case _:
                raise DataError(problem)

    def check_left(self, name: str, kept: Sized) -> None:
        """Raise ``DataError`` if nothing is left of the set ``name``."""
        if self.dropped and not self.in_parts and not len(kept):
            raise DataError(
                f"all {self.dropped} rows of {name} are too long; raise the limit, or keep them"
            )

    def describe(self) -> str:
        """``3 too long: dropped``; empty if there were none."""
        count, what = (self.cut, "cut") if self.cut else (self.dropped, "dropped")
        return f"{count} too long: {what}" if count else ""


@dataclass(slots=True)
class Noticed:
    """What is counted of a set's rows: those that are too long, and oddities that their author may
    not have meant, which ``lines`` reports.
    """

    too_long: TooLong = field(default_factory=TooLong)
    rows: int = 0
    empty: int = 0
    """Rows whose prompt is text without a character."""
    unanswered: int = 0
    """Answers to be learnt that are such text."""
    rendered: int = 0
    """Rows that spell control tokens which the chat template writes itself."""
    tokens: set[str] = field(default_factory=set)
    """The control tokens that they spell."""
    quoted_arguments: int = 0
    """Rows with arguments of tools in JSON text, where the template expects a table."""
    unread_tools: int = 0
    """Rows with tools, of which the chat template says nothing."""
    unread_calls: int = 0
    """Rows with calls of tools that the chat template does not write."""
    unread_keys: set[str] = field(default_factory=set)
    """Keys of messages that are not read."""
    unlearnt: int = 0
    """Answers that the data marks as not to be learnt (``isobit.data.examples``)."""
    wanted: set[str] = field(default_factory=set)
    """Roles, other than the assistant's, of messages that the data marks as to be learnt."""

    def lines(self, name: str) -> list[str]:
        """A line about the set ``name`` for each kind of oddity."""
        lines: list[str] = []
        if self.empty:
            lines.append(f"{name}: {self.empty} of {self.rows} prompts are empty")
        if self.unanswered:
            lines.append(
                f"{name} has {counted(self.unanswered, 'answers')} without text, from which the "
                "model learns to end at once; drop them if that is not meant"
            )
        if self.rendered:
            lines.append(
                f"{name}: {self.rendered} of {self.rows} prompts spell control tokens that the "
                f"chat template writes itself ({', '.join(sorted(self.tokens))}), and were encoded "
                "as ordinary characters; if the prompts are rendered already, set data.chat = false"
            )
        if self.quoted_arguments:
            lines.append(
                f"{name}: {self.quoted_arguments} of {self.rows} prompts have calls of tools whose "
                "arguments are JSON text, which the chat template does not write as it stands: "
                "they were read as JSON"
            )
        if self.unread_tools:
            lines.append(
                f"{name}: {self.unread_tools} of {self.rows} rows have tools, but no chat "
                "template of the tokenizer says anything of tools: the model does not see them"
            )
        if self.unread_calls:
            lines.append(
                f"{name}: {self.unread_calls} of {self.rows} prompts have calls of tools that the "
                "tokenizer's chat template does not write: the model does not see them"
            )
        if self.unread_keys:
            lines.append(
                f"{name}: messages have keys that neither Isobit nor the chat template reads: "
                f"{', '.join(map(repr, sorted(self.unread_keys)))}"
            )
        if self.unlearnt:
            lines.append(
                f"{name}: {counted(self.unlearnt, 'answers')} marked as not to be learnt: left out"
            )
        if self.wanted:
            roles = ", ".join(map(repr, sorted(self.wanted)))
            lines.append(
                f"{name}: messages of {roles} are marked as to be learnt, but only answers of the "
                "assistant are"
            )
        return lines

    def note_keys(self, messages: Iterable[Message], tokenizer: PreTrainedTokenizerBase) -> None:
        """Note keys of rendered messages that neither Isobit nor the chat template reads."""
        said = (key for one in messages for key, value in one.items() if value not in _NOTHING)
        for key in set(said) - _READ - self.unread_keys:
            if not reads_key(tokenizer, key):
                self.unread_keys.add(key)


def too_long_of(sets: Mapping[str, Noticed]) -> dict[str, str]:
    """What became of the rows that are too long, for each set that has some."""
    texts = {name: seen.too_long.describe() for name, seen in sets.items()}
    return {name: text for name, text in texts.items() if text}


def describe_too_long(sets: Mapping[str, Noticed]) -> str:
    """The number of too long rows in each set, for the end of a line about data; empty if none."""
    return "".join(f"; {name}: {text}" for name, text in too_long_of(sets).items())


_READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "function_call"})
"""Keys of messages that every chat knows, or that a line of their own is for."""
_NOTHING = ("", [], {})
"""Values of a key that say nothing."""


def build_prompts(
    name: str,
    source: DataSource | Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    context_tokens: int | None = None,
    new_tokens: int = 1,
    noticed: Noticed | None = None,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Prompt]:
    """The prompts of ``source``, with ids ``name/0``, ``name/1``, ... by the number of their row,
    or, of a part of its rows, from ``first`` on.

    ``context_tokens`` is the model's context, of which a prompt must leave ``new_tokens`` for the
    completion; ``noticed`` counts. ``tools`` are schemas of an environment, for the chat
    template, in place of a row's own. Raises ``DataError`` as ``load_rows`` does, and for a prompt
    that cannot be rendered, is empty, or, depending on the rule, is too long.
    """
    return prompts_of_rows(
        name,
        source if isinstance(source, Sequence) else load_rows(source),
        tokenizer,
        config,
        config.max_prompt_tokens,
        context_tokens,
        new_tokens,
        noticed or Noticed(TooLong(config.too_long)),
        first=first,
        tools=tools,
    )


def prompts_of_rows(
    name: str,
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatConfig,
    max_prompt_tokens: int | None = None,
    context_tokens: int | None = None,
    new_tokens: int = 1,
    noticed: Noticed | None = None,
    continues: bool = True,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
    read_tokens: int = MAX_COUNT,
) -> list[Prompt]:
    """``build_prompts`` for given rows; None is no limit. Where a prompt's last message is the
    assistant's, the model ``continues`` it, or answers in a turn of its own. Of a prompt with far
    more than ``read_tokens`` only the first ones are read, for a caller that then leaves it out.
    Raises ``DataError`` as ``build_prompts`` does.
    """
    noticed = noticed or Noticed()
    too_long = noticed.too_long
    if chat.chat_template_kwargs and not is_templated(tokenizer, chat):
        why = "the tokenizer has no chat template" if chat.chat else "data.chat is false"
        raise DataError(f"data.chat_template_kwargs is set, but {why}; leave it out")
    most_tokens = _Limit(max_prompt_tokens, context_tokens, new_tokens)
    limit = most_tokens.tokens(too_long.rule)
    most = most_characters(min(most_tokens.whole, MAX_COUNT), tokenizer)
    texts: list[tuple[int, Row, str]] = []
    for index, source_row in enumerate(rows, first):
        row = replace(source_row, tools=tools) if tools else source_row
        text = render_row(row, tokenizer, chat, continues)
        _notice(text, row, tokenizer, chat, noticed)
        if len(text) > most:  # avoids tokenising it
            if too_long.rule == "cut":
                text = text[:_KEPT_AHEAD] + text[-2 * most :]
            elif not too_long.keeps(most_tokens.problem(_place(name, index, row), len(text), True)):
                continue
        texts.append((index, row, text))
    # a chat template writes the special tokens itself
    is_bare = not is_templated(tokenizer, chat)
    all_ids = token_ids_up_to(read_tokens, [text for *_, text in texts], tokenizer, is_bare)
    prompts = []
    for (index, row, text), ids in zip(texts, all_ids, strict=True):
        place = _place(name, index, row)
        prompt = Prompt(f"{name}/{index}", unmarked(text), tuple(ids), row.columns, row.prompt)
        if not ids:
            raise DataError(f"{place} is empty")
        if len(ids) > limit:
            if not too_long.keeps(most_tokens.problem(place, len(ids))):
                continue
            prompt = _cut(prompt, limit, tokenizer)
        prompts.append(prompt)
    too_long.check_left(name, prompts)
    return prompts


def _notice(
    text: str, row: Row, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, noticed: Noticed
) -> None:
    noticed.rows += 1
    noticed.empty += isinstance(row.prompt, str) and not row.prompt.strip()
    if chat.chat and row.tools is not None:
        noticed.unread_tools += not mentions(tokenizer, "tools")
    if is_templated(tokenizer, chat):
        twice = written_twice(text)
        noticed.rendered += bool(twice)
        noticed.tokens.update(twice)
        if not isinstance(row.prompt, str):
            arguments = [one for message in row.prompt for one in written_arguments(message)]
            noticed.quoted_arguments += any(
                argument not in unmarked(text) for argument in arguments
            )
            names = [str(call.get("name")) for one in row.prompt for call in calls_of(one)]
            noticed.unread_calls += any(name not in unmarked(text) for name in names)
            noticed.note_keys(row.prompt, tokenizer)


def check_any_left(name: str, kept: Sized, dropped: int, too_long: TooLong) -> None:
    """Raise ``DataError`` if nothing is left of a training set of which so many prompts were
    dropped because they are evaluated, and others perhaps because they are too long.
    """
    if len(kept):
        return
    if dropped:
        raise DataError(
            f"all {dropped} training prompts also stand in an evaluation set; use other rows"
        )
    replace(too_long, in_parts=False).check_left(name, kept)
    raise all_unlearnt(name)


def all_unlearnt(name: str) -> DataError:
    return DataError(
        f"all answers of {name} are marked as not to be learnt; drop the set, or the marks "
        "(docs/conversations.md)"
    )


def _place(name: str, index: int, row: Row) -> str:
    return f"prompt {name}/{index} ({row.place})"


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most tokens of a prompt; None is no limit."""

    prompt: int | None
    """``data.max_prompt_tokens``."""
    context: int | None
    new: int
    """Tokens of the context that are kept for the completion."""

    @property
    def whole(self) -> int:
        """The limit with no room left for a completion."""
        limits = (self.prompt, self.context)
        return min((limit for limit in limits if limit is not None), default=MAX_COUNT)

    def tokens(self, rule: tables.TooLong) -> int:
        """Raises ``DataError`` where a context without room makes all prompts too long, and the
        rule is to drop or cut them.
        """
        if self.context is None:
            return self.whole
        if self.context <= self.new and rule != "refuse":
            raise DataError(
                f"max_new_tokens = {self.new} leaves no room for a prompt in the model's context "
                f"of {self.context}: lower max_new_tokens"
            )
        return min(self.whole, self.context - self.new)

    def problem(self, place: str, size: int, characters: bool = False) -> str:
        """The error about a prompt of so many tokens, or characters, which is too many."""
        problem = f"{place} has {size:,} {'characters' if characters else 'tokens'}"
        rule = "; data.too_long = 'drop' or 'cut' drops or cuts such prompts"
        if self.prompt is not None and (size > self.prompt and self.prompt == self.whole):
            return f"{problem}, more than data.max_prompt_tokens = {self.prompt}{rule}"
        if characters or self.context is None or size >= self.context:
            return f"{problem} and leaves no room in the model's context of {self.context}{rule}"
        return (
            f"{problem}; with max_new_tokens = {self.new} that is {size + self.new}, more than the "
            f"model's context of {self.context}: lower max_new_tokens to {self.context - size} or "
            f"shorten the prompt{rule}"
        )


def _cut(prompt: Prompt, limit: int, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The end of a prompt, where a chat template begins the answer, after the token that begins
    every sequence, if there is one.
    """
    first = prompt.token_ids[:1] if prompt.token_ids[0] == tokenizer.bos_token_id else ()
    first = first if limit > 1 else ()
    ids = first + prompt.token_ids[len(prompt.token_ids) - limit + len(first) :]
    text = tokenizer.decode(list(ids[len(first) :]), clean_up_tokenization_spaces=False)
    return replace(prompt, token_ids=ids, text=str(text))
