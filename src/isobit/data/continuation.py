"""The continuation of a conversation, in tokens, after a turn that called tools.

What the model drew stays as it was drawn, up to the token that ended its turn; behind it stand the
tokens of what the template writes for the results, up to the point where the model draws again.
That is the conversation which the template would render only if it continues what it has rendered
before.  So the ``Continuation`` of a tokenizer renders a short conversation with and without the
next turn, once, and refuses a template that rewrites the past, such as one that removes thoughts of
earlier turns.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.environment import ToolFormat
from isobit.data.chat_template import reads_of_messages, rendered
from isobit.data.encoding import quoted, quoted_values, token_ids, unmarked
from isobit.data.prompts import prompts_of_rows
from isobit.data.sources import row_of
from isobit.data.tool_calls import parameters_of
from isobit.records.messages import VARIABLES_COLUMN, Message, Messages, as_messages
from isobit.records.text import Prompt
from isobit.util.errors import ConfigError, DataError


def messages_of(prompt: Prompt) -> Messages:
    """A prompt as the dataset has it, as messages."""
    content = prompt.text if prompt.content is None else prompt.content
    return as_messages(content if isinstance(content, str) else tuple(content))


Speaker = Literal["tool", "user"]
_SAID = "isobit"
_CALL_ID = "isobit000"
"""Templates of Mistral want nine characters."""
_THOUGHTS = "reasoning_content", "thinking"
"""Keys of messages that templates read a thought from, the latter gpt-oss's."""


class Continuation:
    """Continues a turn that called tools: gives the tokens that the chat template appends to it.

    Raises ConfigError for a template that cannot be continued.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatConfig,
        form: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        stop_token_ids: Sequence[int],
        answered_by: Collection[Speaker] = ("tool",),
    ) -> None:
        """``answered_by``: who will speak behind turns; another is checked when it first does."""
        self._tokenizer = tokenizer
        self._chat = chat
        self._form = form
        self._tools = tools
        self._known = [*parameters_of(tools)]
        self._name: str = self._known[0] if len(self._known) == 1 else _SAID
        self._stops = {token: str(tokenizer.decode([token])) for token in stop_token_ids}
        self._is_templated = chat.chat and bool(tokenizer.chat_template)
        self._checked = set[Speaker]()
        if self._is_templated:
            for speaker in answered_by:
                self._check(speaker)

    def token_ids(
        self,
        results: Sequence[str],
        ended: int | None,
        spoken: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> list[int]:
        """The tokens behind a turn that ended with the stop token ``ended`` (None: by a stop
        string), up to where the model draws again.  ``results`` are texts of tools, in the order
        of the calls, and ``spoken`` those of the user behind them; control tokens that they spell
        are ordinary characters.  ``names`` are those that the model called, for templates that
        write the name ahead of a result: the first, or a placeholder if it is no tool's; without
        names the only tool's.

        Raises ConfigError where the user has spoken first, in a template that cannot continue that.
        """
        if self._is_templated:
            if (speaker := "tool" if results else "user") not in self._checked:
                self._check(speaker)
            called = next(filter(None, names), self._name)
            name = called if called in self._known else _SAID
            users: list[Message] = [{"role": "user", "content": one} for one in spoken]
            said = [*self._results(results, name), *users]
            _, stop, text = self._next_turn([self._answers(speaker, name)[0]], said)
        else:
            stop = self._stops[ended] if ended in self._stops else next(iter(self._stops.values()))
            spelling = "".join([*(f"[{result}]" for result in results), *spoken])
            text = quoted(spelling, self._tokenizer)
        ids = self._behind(stop, text)
        return ids if ended in self._stops else [*token_ids([stop], self._tokenizer)[0], *ids]

    def opened(self, prompt: Prompt, opening: str | Sequence[Message]) -> Prompt:
        """A prompt with text of its environment behind its last message, as TRL puts it there, or
        with messages in its place.

        Raises ``DataError`` where that message is not the user's, or cannot be rendered.
        """
        place = f"prompt {prompt.id}"
        content = prompt.text if prompt.content is None else prompt.content
        opened: str | list[Message]
        if not isinstance(opening, str):
            opened = list(opening)
        elif isinstance(content, str):
            opened = content + opening
        else:
            *before, last = messages_of(prompt)
            said = last["content"]
            if last["role"] != "user" or not isinstance(said, str):
                raise DataError(
                    f"{place}: the environment has text for the end of the prompt, whose last "
                    f"message is of {last['role']!r}; end it in text of the user"
                )
            opened = [*before, {**last, "content": said + opening}]
        variables, tools = prompt.row.get(VARIABLES_COLUMN), self._tools or None
        row = row_of(opened, prompt.row, place, tools=tools, variables=variables)
        (continued,) = prompts_of_rows(prompt.id, [row], self._tokenizer, self._chat)
        return replace(continued, id=prompt.id, content=prompt.content)

    def _behind(self, stop: str, text: str) -> list[int]:
        """The tokens of ``text`` behind a stop token, which may decide about its first one."""
        first, both = token_ids([stop, stop + text], self._tokenizer)
        if both[: len(first)] != first:
            raise ConfigError(
                f"the tokenizer reads {stop!r} as other tokens where text follows it, so that a "
                "conversation cannot be continued in tokens"
            )
        return both[len(first) :]

    def _answers(self, speaker: Speaker, name: str) -> list[Message]:
        """A turn that ``speaker`` answers, perhaps with a call of the tool ``name``, and with a
        thought if the template knows thoughts: in each of the places that it reads them from.
        """
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._form == "plain" or speaker == "user":
            message["content"] = _SAID
        else:
            function = {"name": name, "arguments": {}}
            call = {"type": "function", "id": _CALL_ID, "function": function}
            message["tool_calls"] = [call]
        keys = [one for one in _THOUGHTS if reads_of_messages(self._tokenizer, one)]
        found: list[Message] = [message | dict.fromkeys(keys, _SAID)] if keys else []
        if self._thinks:
            content = f"<think>\n{_SAID}\n</think>\n\n{message['content']}"
            found.append(message | {"content": content})
        return found or [message]

    @property
    def _thinks(self) -> bool:
        template: Any = self._tokenizer.chat_template
        return "</think>" in (
            "\n".join(template.values()) if isinstance(template, dict) else str(template)
        )

    def _results(self, results: Sequence[str], name: str) -> list[Message]:
        if self._form == "plain" and results:
            return [{"role": "user", "content": "".join(f"[{result}]" for result in results)}]
        named = {"role": "tool", "name": name, "tool_call_id": _CALL_ID}
        return [{**named, "content": result} for result in results]

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return rendered(
                quoted_values(messages, self._tokenizer),
                self._tokenizer,
                add_generation_prompt,
                quoted_values(self._tools, self._tokenizer) if self._form != "plain" else None,
                quoted_values(self._chat.chat_template_kwargs, self._tokenizer),
                self._chat.date,
            )
        except Exception as error:  # templates raise through jinja2
            raise ConfigError(
                "the chat template refuses a conversation with calls of tools: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _next_turn(
        self, answers: Sequence[Message], said: Sequence[Message]
    ) -> tuple[str, str, str]:
        """The text up to the token that ends the last of ``answers``, that token, and the text
        behind it where messages and the next turn follow; the same messages follow earlier answers.
        """
        messages: list[Message] = [{"role": "user", "content": _SAID}]
        for answer in answers[:-1]:
            messages += [answer, *said]
        ahead = self._text(messages, add_generation_prompt=True)
        messages.append(answers[-1])
        spoken = self._text(messages, add_generation_prompt=False)
        both = self._text([*messages, *said], add_generation_prompt=True)
        if not spoken.startswith(ahead):
            raise _rewrites("an answer behind the generation prompt", ahead, spoken)
        ends = {spoken.rfind(stop, len(ahead)): stop for stop in self._stops.values()}
        place = max(ends)
        if place < 0:
            named = ", ".join(map(repr, self._stops.values()))
            raise ConfigError(
                f"the chat template ends an answer with none of {named}, which end a completion; "
                "name its token in rollout.stop_tokens"
            )
        end = place + len(ends[place])
        if not both.startswith(spoken[:end]):
            what = "tools' results" if said[0]["role"] == "tool" else "user's words"
            raise _rewrites(f"an answer, once the {what} follow,", spoken[:end], both)
        return both[:end], ends[place], both[end:]

    def _check(self, speaker: Speaker) -> None:
        """Refuse a template that does not continue what it has rendered, turn by turn."""
        spoken: list[Message] = [{"role": "user", "content": "1"}]
        said = self._results(["1", "2"], self._name) if speaker == "tool" else spoken
        for answer in self._answers(speaker, self._name):
            self._check_answer(answer, said)
        self._checked.add(speaker)

    def _check_answer(self, answer: Message, said: Sequence[Message]) -> None:
        before, stop, behind = self._next_turn([answer], said)
        _, _, later = self._next_turn([answer, answer], said)
        if later != behind:
            raise _rewrites("a second turn", behind, later)
        whole, begun = token_ids([before + behind, before], self._tokenizer)
        if whole != begun + self._behind(stop, behind):
            raise ConfigError(
                "the tokenizer reads a conversation as other tokens once a turn follows: "
                f"{unmarked(behind)!r:.80} is not tokenised alone as it is in the whole; such a "
                "conversation cannot be continued in tokens"
            )


def _rewrites(what: str, before: str, after: str) -> ConfigError:
    """What a template writes otherwise, from the first character that differs."""
    before, after = unmarked(before), unmarked(after)
    pairs = enumerate(zip(before, after, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, place - 20)
    return ConfigError(
        f"the chat template cannot be continued: it writes {what} otherwise than before "
        f"({before[start : place + 30]!r} became {after[start : place + 30]!r}), so that an "
        "episode would not be one sequence of tokens; give the model's folder a chat template "
        "that leaves earlier turns as they are, or take another model"
    )
