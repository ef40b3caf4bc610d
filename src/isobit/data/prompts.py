"""Rows become prompts: rendered through the chat template, tokenised, and checked for length."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from isobit.config.data import DataConfig, DataSource
from isobit.data.sources import Row, load_rows
from isobit.errors import DataError
from isobit.records.text import Prompt


def build_prompts(
    name: str,
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    context_tokens: int | None = None,
) -> list[Prompt]:
    """The prompts of ``source``, with ids ``name/0``, ``name/1``, ... in the order of its rows.

    ``context_tokens`` is the model's context, of which a prompt must leave at least one token for
    the answer.  Raises ``DataError`` as ``load_rows`` does, and for a prompt that cannot be
    rendered, that is empty, or that is too long.
    """
    return prompts_of_rows(
        name, load_rows(source), tokenizer, config.chat, config.max_prompt_tokens, context_tokens
    )


def prompts_of_rows(
    name: str,
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    max_prompt_tokens: int | None = None,
    context_tokens: int | None = None,
) -> list[Prompt]:
    """``build_prompts`` for rows at hand; a limit of None is none.  Raises ``DataError`` as it
    does.
    """
    prompts = []
    for index, row in enumerate(rows):
        text, special_tokens = _render(row, tokenizer, chat)
        token_ids = tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        prompt = Prompt(f"{name}/{index}", text, tuple(token_ids), row.columns, row.prompt)
        _check_length(prompt, row, max_prompt_tokens, context_tokens)
        prompts.append(prompt)
    return prompts


def drop_evaluated(
    train: Sequence[Prompt], evaluated: Iterable[Sequence[Prompt]]
) -> tuple[list[Prompt], int]:
    """The prompts of ``train`` whose text stands in none of the evaluation sets, and how many were
    dropped.

    Raises ``DataError`` when none is left.
    """
    held_out = {prompt.text for prompts in evaluated for prompt in prompts}
    kept = [prompt for prompt in train if prompt.text not in held_out]
    if not kept:
        raise DataError(
            f"all {len(train)} training prompts also stand in an evaluation set; train and "
            "evaluate on different rows"
        )
    return kept, len(train) - len(kept)


def _render(row: Row, tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[str, bool]:
    """The text of the prompt, and whether the tokenizer shall add its special tokens (a chat
    template writes its own).
    """
    messages = chat_messages(row, tokenizer, chat)
    if messages is None:
        return encodable(str(row.prompt), row), True
    return render_chat(messages, row, tokenizer, add_generation_prompt=True), False


def chat_messages(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> list[dict[str, str]] | None:
    """The prompt as the messages that the chat template renders, or None where it is text that
    stands as it is.

    Raises ``DataError`` for messages that cannot go through a template: there is none, or ``chat``
    is false.
    """
    if isinstance(row.prompt, str) and not (chat and tokenizer.chat_template):
        return None
    if not chat:
        raise DataError(
            f"{row.place}: the prompt is chat messages, but data.chat is false; set it to true or "
            "give text"
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
    """The text that the chat template makes of ``messages``, which are of ``row``.  Raises
    ``DataError`` where it refuses them.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise through jinja2: unsupported roles, order of turns
        raise DataError(
            f"{row.place}: the chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    return encodable(str(text), row)


def encodable(text: str, row: Row) -> str:
    """``text``, which is of ``row``.  Raises ``DataError`` where no tokenizer could read it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.place}: the prompt holds a lone surrogate at character {error.start}, which no "
            "tokenizer can read"
        ) from error
    return text


def _check_length(
    prompt: Prompt, row: Row, max_prompt_tokens: int | None, context_tokens: int | None
) -> None:
    tokens = len(prompt.token_ids)
    if tokens == 0:
        raise DataError(f"prompt {prompt.id} ({row.place}) is empty")
    if max_prompt_tokens is not None and tokens > max_prompt_tokens:
        raise DataError(
            f"prompt {prompt.id} ({row.place}) has {tokens} tokens, more than "
            f"data.max_prompt_tokens = {max_prompt_tokens}"
        )
    if context_tokens is not None and tokens >= context_tokens:
        raise DataError(
            f"prompt {prompt.id} ({row.place}) has {tokens} tokens and leaves no room in the "
            f"model's context of {context_tokens}"
        )
