"""Rows become prompts: rendered with the chat template, tokenised, and refused, dropped or cut if
they are too long. Digests of prompts, which detect changed data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config import data as tables
from isobit.config.base import MAX_COUNT
from isobit.config.data import DataConfig, DataSource
from isobit.data.sources import Row, load_rows
from isobit.data.tokenizer import most_characters, quoted, rendered, token_ids, unmarked
from isobit.records.text import Prompt
from isobit.util.errors import DataError


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
    """What becomes of items that are too long, and how many there were."""

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


def describe_too_long(sets: Mapping[str, TooLong]) -> str:
    """How many were too long in each set, for the end of a line about data; empty if none was."""
    found = [f"{name}: {one.describe()}" for name, one in sets.items() if one.describe()]
    return "".join(f"; {text}" for text in found)


def build_prompts(
    name: str,
    source: DataSource | Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    context_tokens: int | None = None,
    too_long: TooLong | None = None,
    first: int = 0,
) -> list[Prompt]:
    """The prompts of ``source``, with ids ``name/0``, ``name/1``, ... by the number of their row,
    or, of a part of its rows, from ``first`` on.

    ``context_tokens`` is the model's context, of which a prompt must leave at least one token for
    the answer; ``too_long`` counts. Raises ``DataError`` as ``load_rows`` does, and for a prompt
    that cannot be rendered, is empty, or, depending on the rule, is too long.
    """
    return prompts_of_rows(
        name,
        source if isinstance(source, Sequence) else load_rows(source),
        tokenizer,
        config.chat,
        config.max_prompt_tokens,
        context_tokens,
        too_long or TooLong(config.too_long),
        first=first,
    )


def prompts_of_rows(
    name: str,
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    max_prompt_tokens: int | None = None,
    context_tokens: int | None = None,
    too_long: TooLong | None = None,
    first: int = 0,
) -> list[Prompt]:
    """``build_prompts`` for given rows; None is no limit. Raises ``DataError`` as it does."""
    too_long = too_long or TooLong()
    limit, what = _limit(max_prompt_tokens, context_tokens)
    most = most_characters(limit, tokenizer)
    texts: list[tuple[int, Row, str]] = []
    for index, row in enumerate(rows, first):
        text = _render(row, tokenizer, chat)
        if len(text) > most:  # avoids tokenising it
            if too_long.rule == "cut":
                text = text[:_KEPT_AHEAD] + text[-2 * most :]
            elif not too_long.keeps(
                _problem(_place(name, index, row), f"{len(text):,} characters", what)
            ):
                continue
        texts.append((index, row, text))
    # a chat template writes the special tokens itself
    all_ids = token_ids(
        [text for _, _, text in texts], tokenizer, not is_templated(tokenizer, chat)
    )
    prompts = []
    for (index, row, text), ids in zip(texts, all_ids, strict=True):
        place = _place(name, index, row)
        prompt = Prompt(f"{name}/{index}", unmarked(text), tuple(ids), row.columns, row.prompt)
        if not ids:
            raise DataError(f"{place} is empty")
        if len(ids) > limit:
            if not too_long.keeps(_problem(place, f"{len(ids)} tokens", what)):
                continue
            prompt = _cut(prompt, limit, tokenizer)
        prompts.append(prompt)
    too_long.check_left(name, prompts)
    return prompts


def drop_evaluated(
    train: Sequence[Prompt], evaluated: Iterable[Sequence[Prompt]]
) -> tuple[list[Prompt], int]:
    """The prompts of ``train`` whose text is in no evaluation set, and the number dropped. Raises
    ``DataError`` if none is left.
    """
    held_out = {prompt.text for prompts in evaluated for prompt in prompts}
    kept = [prompt for prompt in train if prompt.text not in held_out]
    check_any_left("train", kept, len(train) - len(kept))
    return kept, len(train) - len(kept)


def check_any_left(name: str, kept: Sized, dropped: int, too_long: TooLong | None = None) -> None:
    """Raise ``DataError`` if nothing is left of a training set of which so many prompts were
    dropped because they are evaluated, and others perhaps because they are too long.
    """
    if len(kept):
        return
    if dropped:
        raise DataError(
            f"all {dropped} training prompts also stand in an evaluation set; use other rows"
        )
    if too_long is not None:
        replace(too_long, in_parts=False).check_left(name, kept)


def _render(row: Row, tokenizer: PreTrainedTokenizerBase, chat: bool) -> str:
    messages = chat_messages(row, tokenizer, chat)
    if messages is None:
        text = str(row.prompt)
        return encodable(quoted(text, tokenizer) if chat else text, row)
    return render_chat(messages, row, tokenizer, add_generation_prompt=True)


def _place(name: str, index: int, row: Row) -> str:
    return f"prompt {name}/{index} ({row.place})"


def is_templated(tokenizer: PreTrainedTokenizerBase, chat: bool) -> bool:
    return chat and bool(tokenizer.chat_template)


def chat_messages(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> list[dict[str, str]] | None:
    """The prompt as messages for the chat template, or None if its text is used as it is.

    Raises ``DataError`` for messages without a template, or with ``chat`` false.
    """
    if isinstance(row.prompt, str) and not is_templated(tokenizer, chat):
        return None
    if not chat:
        raise DataError(
            f"{row.place}: the prompt is chat messages, but data.chat is false; set it to true"
        )
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.place}: the prompt is chat messages (a system message counts), but the "
            "tokenizer has no chat template; give text"
        )
    return (
        [{"role": "user", "content": row.prompt}]
        if isinstance(row.prompt, str)
        else list(row.prompt)
    )


def render_chat(
    messages: Sequence[dict[str, str]],
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
) -> str:
    """The chat template's text of ``messages``, which are of ``row``; marked
    (``isobit.data.tokenizer``) where a message spells a control token. Raises ``DataError`` if the
    template refuses them.
    """
    said = [one | {"content": quoted(one["content"], tokenizer)} for one in messages]
    try:
        text = rendered(said, tokenizer, add_generation_prompt)
    except Exception as error:  # templates raise through jinja2: unsupported roles, order of turns
        raise DataError(
            f"{row.place}: the chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    return encodable(text, row)


def encodable(text: str, row: Row) -> str:
    """``text``, which is of ``row``. Raises ``DataError`` if no tokenizer can read it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.place}: the prompt holds a lone surrogate at character {error.start}; remove it"
        ) from error
    return text


def _limit(max_prompt_tokens: int | None, context_tokens: int | None) -> tuple[int, str]:
    """The most tokens of a prompt, and the end of an error about one that has more."""
    limits = []
    if max_prompt_tokens is not None:
        limits.append(
            (max_prompt_tokens, f", more than data.max_prompt_tokens = {max_prompt_tokens}")
        )
    if context_tokens is not None:
        room = f" and leaves no room in the model's context of {context_tokens}"
        limits.append((context_tokens - 1, room))
    return min(limits, default=(MAX_COUNT, ""))


def _problem(place: str, size: str, what: str) -> str:
    return f"{place} has {size}{what}; data.too_long = 'drop' or 'cut' drops or cuts such prompts"


def _cut(prompt: Prompt, limit: int, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The end of a prompt, where a chat template begins the answer, after the token that begins
    every sequence, if there is one.
    """
    first = prompt.token_ids[:1] if prompt.token_ids[0] == tokenizer.bos_token_id else ()
    first = first if limit > 1 else ()
    ids = first + prompt.token_ids[len(prompt.token_ids) - limit + len(first) :]
    text = tokenizer.decode(list(ids[len(first) :]), clean_up_tokenization_spaces=False)
    return replace(prompt, token_ids=ids, text=str(text))
