"""Rows as examples of supervised fine-tuning, as pairs of preferences, and as the conversations
that a reward model reads.

An example is a prompt, as rollout would see it, and the tokens of its completion. The completion is
tokenised separately, so that the prompt has the same tokens as in rollout, and ends in a token that
ends a completion there. With a chat template it is the text that the template writes after its
generation prompt, without the white space after the end of the turn, since nothing is sampled
there. A conversation gives one example for each turn of the assistant.

A reward model reads prompt and answer as one text:

    with a chat template      the template's text of the prompt's messages and the answer as the
                              assistant's turn, without a generation prompt
    without                   the prompt's text, the answer's text, and the tokenizer's end of
                              sequence, if it has one

White space at the end is included, as in the training of other reward models. An answer never
contains control tokens, whatever its text spells (``isobit.data.encoding``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from isobit.config.base import MAX_COUNT
from isobit.config.data import (
    AnswerColumns,
    ChatConfig,
    ExampleSource,
    MixtureExamples,
    SftDataConfig,
)
from isobit.data.encoding import decode, is_marked, quoted_answer, token_ids_up_to
from isobit.data.prompts import Noticed, TooLong, all_unlearnt, prompts_of_rows
from isobit.data.rendering import ASSISTANT, chat_messages, encodable, is_templated, render_chat
from isobit.data.sources import Row, iter_rows, mixed
from isobit.records.messages import (
    Message,
    as_messages,
    is_parts,
    message_of,
    message_text,
    without_beginning,
    written_messages,
)
from isobit.records.text import Prompt
from isobit.util.errors import DataError

Answer: TypeAlias = str | Message
"""Text, or a message of the assistant that says more than text, such as calls of tools."""
_CHAT = ChatConfig()


def conversation_ids(
    answers: Sequence[tuple[Row, Answer]],
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatConfig = _CHAT,
    read_tokens: int = MAX_COUNT,
) -> list[tuple[int, ...]]:
    """The tokens of each row's prompt and an answer to it; text prompts are rendered with the chat
    template too, unless ``chat`` is off. Of far more than ``read_tokens`` only the first are read.

    Raises ``DataError`` for messages without a template, messages that the template refuses, text
    that no tokenizer can read, and a conversation without tokens.
    """
    templated = is_templated(tokenizer, chat)
    texts = [_message_text(row, answer, tokenizer, chat) for row, answer in answers]
    ids_of = token_ids_up_to(read_tokens, texts, tokenizer, add_special_tokens=not templated)
    end = tokenizer.eos_token_id
    if not templated and isinstance(end, int):
        ids_of = [ids if ids[-1:] == [end] else [*ids, end] for ids in ids_of]
    for (row, _), ids in zip(answers, ids_of, strict=True):
        if not ids:
            raise DataError(f"{row.place}: prompt and answer together have no token")
    return [tuple(ids) for ids in ids_of]


def _message_text(
    row: Row, answer: Answer, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig
) -> str:
    messages = chat_messages(row, tokenizer, chat)
    if messages is None:
        # the prompt may be another template's text (row_of), with its control tokens
        text = quoted_answer(_only_text(answer, row), tokenizer)
        return encodable(f"{row.prompt}{text}", row)
    turns = [*messages, _turn(answer)]
    return render_chat(turns, row, tokenizer, chat, add_generation_prompt=False)


def _turn(answer: Answer) -> Message:
    return {"role": ASSISTANT, "content": answer} if isinstance(answer, str) else answer


def _only_text(answer: Answer, row: Row) -> str:
    if isinstance(answer, str):
        return answer
    more = ", ".join(sorted(set(answer) - {"role", "content"}))
    raise DataError(
        f"{row.place}: the answer has {more}, which only a chat template can write; the tokenizer "
        "has none, or data.chat is false"
    )


def whole_answer(row: Row, answer: str) -> tuple[Row, str]:
    """A run's prompt and completion for a reward model: where the prompt ends in the beginning of
    the answer, that is part of the answer.
    """
    if isinstance(row.prompt, str):
        return row, answer
    question, begun = without_beginning(row.prompt)
    return replace(row, prompt=tuple(question)), begun + answer


def row_of(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Row:
    """A run's prompt for another tokenizer than the policy's: the dataset's prompt, or the policy's
    text if that is messages and the tokenizer has no template.
    """
    content = prompt.content
    if content is not None and not isinstance(content, str):
        messages = tuple(dict(message) for message in content)
        content = messages if tokenizer.chat_template else None
    text = prompt.text if content is None else content
    return Row(text, prompt.row, f"prompt {prompt.id}")


Turn: TypeAlias = tuple[Row, Answer]
"""A prompt, and the assistant's answer."""
Answered: TypeAlias = tuple[Row, Answer, Answer]
"""A prompt with the better and the worse answer."""
_MARKS = ("weight", "loss", "trainable", "train", "training", "loss_mask", "step_loss_mask")
"""Keys of messages that say whether they are learnt, by 0 and 1, or false and true: OpenAI's,
LLaMA-Factory's and others', the two of axolotl, verl's, slime's.
"""
_VALUES = {"0": False, "1": True, "false": False, "true": True}


def _marks(message: Message) -> dict[str, bool]:
    """The keys that say whether a message is learnt; other values, such as fractions, say
    something else.
    """
    shown = {key: str(message[key]).lower().removesuffix(".0") for key in _MARKS if key in message}
    return {key: _VALUES[value] for key, value in shown.items() if value in _VALUES}


def _without_marks(message: Message) -> Message:
    marks = _marks(message)
    return {key: value for key, value in message.items() if key not in marks} if marks else message


_Read: TypeAlias = tuple[Row, list[Answer], bool]
"""A row, its answers, and whether they are learnt."""


def _read_marks(row: Row, answers: Sequence[Answer], noticed: Noticed) -> _Read:
    """A row and answers to it without the keys of ``_MARKS``, and whether they are learnt."""
    if not isinstance(row.prompt, str):
        for message in row.prompt:
            marks = _marks(message)
            if message["role"] != ASSISTANT and marks and all(marks.values()):
                noticed.wanted.add(message["role"])
        row = replace(row, prompt=tuple(map(_without_marks, row.prompt)))
    is_learnt = all(
        all(_marks(answer).values()) for answer in answers if not isinstance(answer, str)
    )
    noticed.unlearnt += not is_learnt
    plain = [
        answer if isinstance(answer, str) else _answer(_without_marks(answer)) for answer in answers
    ]
    blank = sum(isinstance(answer, str) and not answer.strip() for answer in plain)
    noticed.unanswered += blank if is_learnt else 0
    return row, plain, is_learnt


def _prompts_of(
    name: str,
    read: Sequence[_Read],
    tokenizer: PreTrainedTokenizerBase,
    config: SftDataConfig,
    most_tokens: int,
    noticed: Noticed,
    first: int,
) -> list[Prompt]:
    """The prompts in front of the answers, of which tokens beyond ``most_tokens`` are not needed;
    notes the keys of the answers.
    """
    answers = (answer for _, answers, _ in read for answer in answers)
    noticed.note_keys([one for one in answers if not isinstance(one, str)], tokenizer)
    return prompts_of_rows(
        name,
        [row for row, *_ in read],
        tokenizer,
        config,
        noticed=noticed,
        continues=False,
        first=first,
        read_tokens=most_tokens,
    )


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt and the tokens of its completion, including the one that ends it."""

    prompt: Prompt
    completion_ids: tuple[int, ...]

    @property
    def learnt(self) -> tuple[int, ...]:
        """The tokens to train on, for the digest of the data."""
        return self.completion_ids

    @property
    def tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.completion_ids)


def build_examples(
    name: str,
    source: ExampleSource | Sequence[Turn],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    config: SftDataConfig,
    context_tokens: int,
    noticed: Noticed | None = None,
    first: int = 0,
) -> list[Example]:
    """The examples of ``source``, with ids ``name/0``, ``name/1``, ... in the order of its rows and
    of their turns, or, of a part of its turns, from ``first`` on.

    Raises ``DataError`` as ``load_rows`` does, for a completion that is missing or not text, for a
    conversation without a turn of the assistant, and, unless they are dropped, for an example
    that is longer than ``config.max_tokens`` or the model's context.
    """
    noticed = noticed or Noticed(TooLong(config.too_long))
    turns = source if isinstance(source, Sequence) else iter_turns(source)
    read = [_read_marks(row, [answer], noticed) for row, answer in turns]
    most = min(config.max_tokens, context_tokens)
    prompts = _prompts_of(name, read, tokenizer, config, most, noticed, first)
    texts = [
        _completion_text(prompt, row, completion, tokenizer, config)
        for prompt, (row, (completion,), _) in zip(prompts, read, strict=True)
    ]
    examples = []
    ids_of = token_ids_up_to(most, texts, tokenizer)
    for prompt, (row, _, is_learnt), tokens in zip(prompts, read, ids_of, strict=True):
        if not is_learnt:
            continue
        ids = _ended(tokens, tokenizer, stop_token_ids)
        example = Example(prompt, ids)
        problem = length_problem(example.tokens, config, context_tokens)
        if problem is None or noticed.too_long.keeps(
            f"example {prompt.id} ({row.place}) has {example.tokens} tokens, {len(ids)} of them in "
            f"its completion, {problem} it (data.too_long = 'drop' drops all of them)"
        ):
            examples.append(example)
    _check_left(name, examples, noticed)
    return examples


def _check_left(name: str, kept: Sequence[Any], noticed: Noticed) -> None:
    """Raise ``DataError`` if nothing is left of a set that was not built in parts."""
    noticed.too_long.check_left(name, kept)
    if not kept and noticed.unlearnt and not noticed.too_long.in_parts:
        raise all_unlearnt(name)


def iter_turns(source: ExampleSource) -> Iterator[Turn]:
    """The rows with their answers that examples are built of, one at a time in memory."""
    if isinstance(source, MixtureExamples):
        yield from mixed(source, iter_turns)
        return
    if source.messages is None:
        for row in iter_rows(source):
            advice = "name it in the key `completion`, or whole conversations in the key `messages`"
            yield row, answer_of(row, source.completion, advice)
        return
    for row in iter_rows(source.model_copy(update={"prompt": source.messages})):
        yield from _assistant_turns(row, source.messages)


def _assistant_turns(row: Row, column: str) -> Iterator[tuple[Row, Answer]]:
    if isinstance(row.prompt, str):
        raise DataError(f"{row.place}, column {column!r}: expected a list of messages, found text")
    places = [index for index, message in enumerate(row.prompt) if message["role"] == ASSISTANT]
    if not places:
        raise DataError(f"{row.place}, column {column!r}: no message has the role {ASSISTANT!r}")
    if places[0] == 0:
        raise DataError(
            f"{row.place}, column {column!r}: the first message is the assistant's, not a prompt"
        )
    for index in places:
        yield replace(row, prompt=row.prompt[:index]), _answer(row.prompt[index])


def _answer(message: Message) -> Answer:
    plain = message.keys() <= {"role", "content"}
    return str(message.get("content", "")) if plain else message


def answer_of(row: Row, column: str, advice: str) -> Answer:
    """The answer to the prompt of ``row``: text, one message of the assistant, or the last message
    of a conversation that starts with the prompt.

    Raises ``DataError`` for a missing column, with ``advice``, and for other content.
    """
    if column not in row.columns:
        raise DataError(
            f"{row.place}: no column {column!r} with the text to be learnt; the columns are "
            f"{', '.join(map(repr, row.columns)) or 'none'} beside the prompt: {advice}"
        )
    value = row.columns[column]
    place = f"{row.place}, column {column!r}"
    if isinstance(value, str):
        value = written_messages(value)
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and isinstance(value[-1], Mapping)
        and value[-1].get("role") == ASSISTANT
        and (message := message_of(value[-1], place)).keys() > {"role"}
        and (len(value) == 1 or _is_prompt(value[:-1], row))
    ):
        return _answer(message)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: expected text or one message of the assistant, found {type(value).__name__}"
        )
    return value


def _is_prompt(messages: Sequence[Any], row: Row) -> bool:
    """Whether the messages are those of the prompt, apart from system messages, which the source
    may have added. A text prompt is one message of the user.
    """
    if not all(isinstance(message, Mapping) for message in messages):
        return False
    stated = [
        (one.get("role"), message_text(content, row.place) if is_parts(content) else content)
        for one in messages
        for content in [one.get("content")]
    ]
    expected = [(one["role"], one.get("content")) for one in as_messages(row.prompt)]
    return [one for one in stated if one[0] != "system"] == [
        one for one in expected if one[0] != "system"
    ]


def _completion_text(
    prompt: Prompt,
    row: Row,
    completion: Answer,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatConfig,
) -> str:
    """The completion's text after the prompt, perhaps marked."""
    messages = chat_messages(row, tokenizer, chat)
    if messages is not None:
        turns = [*messages, _turn(completion)]
        rendered = render_chat(turns, row, tokenizer, chat, add_generation_prompt=False)
        ahead = prompt.text
        if is_marked(rendered):
            ahead = render_chat(messages, row, tokenizer, chat, add_generation_prompt=True)
        if not rendered.startswith(ahead):
            raise DataError(
                f"{row.place}: the chat template does not put the assistant's turn behind its own "
                "generation prompt; render the text yourself and set data.chat to false"
            )
        return rendered.removeprefix(ahead)
    text = _only_text(completion, row)
    return encodable(quoted_answer(text, tokenizer) if chat.chat else text, row)


def _ended(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """The tokens of a completion up to its last stop token, which is added if there is none."""
    ends = [index for index, token in enumerate(ids) if token in stop_token_ids]
    if ends and not decode(tokenizer, ids[ends[-1] + 1 :]).strip():
        return tuple(ids[: ends[-1] + 1])
    end = tokenizer.eos_token_id
    return (*ids, end if isinstance(end, int) else stop_token_ids[0])


def length_problem(tokens: int, config: SftDataConfig, context_tokens: int) -> str | None:
    """The end of an error about something with too many tokens; None if it is not too long."""
    limit, name = min(
        (config.max_tokens, "data.max_tokens"), (context_tokens, "the model's context")
    )
    return f"more than {name} = {limit}: shorten or drop" if tokens > limit else None


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, and the tokens of the whole conversation with either answer."""

    prompt: Prompt
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def learnt(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens to train on, for the digest of the data."""
        return self.chosen_ids, self.rejected_ids

    @property
    def tokens(self) -> int:
        """Tokens of both conversations, which are always scored together."""
        return len(self.chosen_ids) + len(self.rejected_ids)


def build_pairs(
    name: str,
    source: ExampleSource | Sequence[Answered],
    tokenizer: PreTrainedTokenizerBase,
    config: SftDataConfig,
    context_tokens: int,
    noticed: Noticed | None = None,
    first: int = 0,
) -> list[Pair]:
    """The pairs of ``source``, with ids ``name/0``, ``name/1``, ... in the order of its rows, or,
    of a part of its rows, from ``first`` on.

    Raises ``DataError`` as ``load_rows`` does, for an answer that is missing or not text, for equal
    answers, and, unless they are dropped, for a conversation that is longer than
    ``config.max_tokens`` or the model's context.
    """
    noticed = noticed or Noticed(TooLong(config.too_long))
    answered = source if isinstance(source, Sequence) else iter_answered(source)
    read = [_read_marks(row, both, noticed) for row, *both in answered]
    most = min(config.max_tokens, context_tokens)
    prompts = _prompts_of(name, read, tokenizer, config, most, noticed, first)
    answers = [(row, answer) for row, both, _ in read for answer in both]
    ids = conversation_ids(answers, tokenizer, config, most)
    pairs = []
    for prompt, (row, _, is_learnt), chosen, rejected in zip(
        prompts, read, ids[::2], ids[1::2], strict=True
    ):
        if not is_learnt:
            continue
        longest = max(len(chosen), len(rejected))
        problem = length_problem(longest, config, context_tokens)
        if problem is None or noticed.too_long.keeps(
            f"{row.place}: prompt and answer have {longest} tokens, {problem} the row "
            "(data.too_long = 'drop' drops all of them)"
        ):
            pairs.append(Pair(prompt, chosen, rejected))
    _check_left(name, pairs, noticed)
    return pairs


def iter_answered(source: ExampleSource) -> Iterator[Answered]:
    """The rows with two answers that pairs are built of, one at a time in memory."""
    if isinstance(source, MixtureExamples):
        yield from mixed(source, iter_answered)
        return
    for row in iter_rows(source):
        yield (row, *_answers(row, source))


def _answers(row: Row, source: AnswerColumns) -> tuple[Answer, Answer]:
    advice = "a pair has a prompt and two answers: name their columns in `chosen` and `rejected`"
    chosen, rejected = (answer_of(row, key, advice) for key in (source.chosen, source.rejected))
    if chosen == rejected:
        raise DataError(
            f"{row.place}: {source.chosen!r} and {source.rejected!r} are the same; drop the row"
        )
    return chosen, rejected
