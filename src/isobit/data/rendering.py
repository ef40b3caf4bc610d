"""Rows are rendered as text, with the tokenizer's chat template where the prompt is messages."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.data.chat_template import check_variables, rendered
from isobit.data.encoding import quoted, quoted_values, unmarked
from isobit.data.sources import Row
from isobit.records.messages import (
    VARIABLES_COLUMN,
    Message,
    as_messages,
    other_forms,
    with_probed_arguments,
    with_read_arguments,
    written_arguments,
)
from isobit.util.errors import DataError
from isobit.util.strict_json import json_text


def render_row(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, continues: bool
) -> str:
    """The text of a row's prompt, perhaps marked (``isobit.data.encoding``). Where its last message
    is the assistant's, the model ``continues`` it, or answers in a turn of its own. Raises
    ``DataError`` as ``render_chat`` does.
    """
    messages = chat_messages(row, tokenizer, chat)
    if messages is None:
        text = str(row.prompt)
        return encodable(quoted(text, tokenizer) if chat.chat else text, row)
    if continues and messages[-1]["role"] == ASSISTANT:
        return _render_open(messages, row, tokenizer, chat)
    return render_chat(messages, row, tokenizer, chat, add_generation_prompt=True)


def is_templated(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> bool:
    return chat.chat and bool(tokenizer.chat_template)


def chat_messages(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig
) -> list[Message] | None:
    """The prompt as messages for the chat template, or None if its text is used as it is.

    Raises ``DataError`` for messages without a template, or with ``chat`` off.
    """
    if isinstance(row.prompt, str) and not is_templated(tokenizer, chat):
        return None
    if not chat.chat:
        raise DataError(
            f"{row.place}: the prompt is chat messages, but data.chat is false; set it to true"
        )
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.place}: the prompt is chat messages (a system message counts), but the "
            "tokenizer has no chat template; give text, or put a template into the model's folder "
            "(chat_template.jinja)"
        )
    return list(as_messages(row.prompt))


ASSISTANT = "assistant"
THOUGHTS = "reasoning_content", "reasoning", "thinking"
"""The keys of messages that transformers reads a thought from."""


def render_chat(
    messages: Sequence[Message],
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatConfig,
    add_generation_prompt: bool,
    continues: str | None = None,
) -> str:
    """The chat template's text of ``messages``, which are of ``row``; marked
    (``isobit.data.encoding``) where a message spells a control token. Raises ``DataError`` if the
    template refuses them, or reads no variable of such a name as the configuration or the row sets.
    """
    variables = {**chat.chat_template_kwargs, **row.variables}
    try:
        check_variables(variables, tokenizer)
    except ValueError as error:
        key = "data.chat_template_kwargs"
        place = f"{row.place}, column {VARIABLES_COLUMN!r}" if row.variables else key
        raise DataError(f"{place}: {error}") from None

    def text_of(turns: Sequence[Message]) -> str:
        return rendered(
            quoted_values(turns, tokenizer),
            tokenizer,
            add_generation_prompt,
            quoted_values(row.tools, tokenizer),
            quoted_values(variables, tokenizer),
            chat.date,
            continues,
        )

    try:
        text = text_of(messages)
        if _quotes_arguments(text, messages, text_of):
            text = text_of([with_read_arguments(message) for message in messages])
    except UnicodeEncodeError as error:
        raise _not_encodable(row, error) from error
    except Exception as error:  # templates raise through jinja2: unsupported roles, order of turns
        for other in other_forms(messages):
            with suppress(Exception):
                return text_of(other)
        raise DataError(
            f"{row.place}: the chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    return text


def _quotes_arguments(
    text: str, messages: Sequence[Message], text_of: Callable[[Sequence[Message]], str]
) -> bool:
    """Whether the template expects tables: it writes arguments of calls that are JSON text as a
    text in quotes. So it does with others in their place, which stand nowhere in ``text``, that of
    the messages; their own may stand anywhere, and ``{}`` is the same in quotes.
    """
    if not any(map(written_arguments, messages)):
        return False
    probe = json_text({sha256(text.encode(errors="surrogatepass")).hexdigest(): 1})
    with suppress(Exception):  # of a template that takes its own tools' arguments alone
        probed = text_of([with_probed_arguments(message, probe) for message in messages])
        return json_text(probe)[1:-1] in unmarked(probed)
    return False


def begun_of(message: Message) -> tuple[str, Any]:
    """The key of what the model goes on with in a last message of the assistant, and its value."""
    key = next((key for key in ("content", *THOUGHTS) if message.get(key)), "content")
    return key, message.get(key, "")


def _render_open(
    messages: Sequence[Message], row: Row, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig
) -> str:
    """A conversation whose last message the model goes on with: as transformers renders it
    (``continue_final_message``), but with the text as it stands behind the generation prompt where
    the template leaves thoughts out of that message, or writes thoughts of its own before them.
    """
    name, begun = begun_of(messages[-1])
    if messages[-1].get("tool_calls") or not isinstance(begun, str):
        raise DataError(
            f"{row.place}: the prompt ends in a message of the assistant that calls tools, which "
            "cannot be gone on with; end the prompt in the tools' results or in a question"
        )
    before, text = messages[:-1], quoted(begun, tokenizer)
    head = render_chat(before, row, tokenizer, chat, False) if before else ""
    ahead = render_chat(before, row, tokenizer, chat, True) if before else ""
    if not begun:
        return ahead
    tag = _TAG.match(begun)
    opens = tag[0].strip() if tag and name == "content" and ahead.startswith(head) else None
    try:
        rendering = render_chat(messages, row, tokenizer, chat, False, continues=name)
    except DataError:
        if opens is None:
            raise
    else:
        own = rendering[len(head) : -len(text)] if rendering.endswith(text) else ""
        if opens is None or opens not in own or not rendering.startswith(head):
            return rendering
    return head + ahead.removeprefix(head).partition(opens)[0] + text


_TAG = re.compile(r"\s*<[^<>\s]+>|\s*\[[A-Z_]+\]")
"""Matches the tag that opens a thought at the beginning of a message."""


def encodable(text: str, row: Row) -> str:
    """``text``, which is of ``row``. Raises ``DataError`` if no tokenizer can read it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _not_encodable(row, error) from error
    return text


def _not_encodable(row: Row, error: UnicodeEncodeError) -> DataError:
    return DataError(
        f"{row.place}: the text holds a lone surrogate at character {error.start}, and no "
        "tokenizer reads it; remove it from the row, or from the chat template"
    )
