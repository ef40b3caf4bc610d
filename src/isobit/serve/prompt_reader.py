"""The prompts of requests as texts and token ids, checked against the model's context."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.data.continuation import messages_of
from isobit.data.encoding import most_characters, token_ids
from isobit.data.harmony import writes_harmony
from isobit.data.prompts import Noticed, prompts_of_rows
from isobit.data.rendering import ASSISTANT, THOUGHTS, begun_of, encodable
from isobit.data.sources import Row, row_of
from isobit.models.folder import SamplingModel
from isobit.rollout.sequence import decode
from isobit.serve.errors import ApiError
from isobit.serve.protocol import ChatRequest, CompletionRequest
from isobit.serve.token_texts import ScoredPrompt
from isobit.util.errors import DataError


class PromptReader:
    """Reads the prompts of requests for a model.

    Args:
        model: what is served.
        reader: a tokenizer of the same folder that nobody else uses: encoding changes its state.
        chat: how conversations are written.
    """

    def __init__(
        self, model: SamplingModel, reader: PreTrainedTokenizerBase, chat: ChatConfig
    ) -> None:
        self._model = model
        self._reader = reader
        self._chat = chat
        self._has_channels = writes_harmony(reader)

    def texts(self, asked: CompletionRequest) -> list[ScoredPrompt]:
        """The prompts of a completion request, read in the tokenizer's thread. Raises DataError."""
        return [self._text(one, asked.add_special_tokens) for one in asked.prompt]

    def _text(self, prompt: str | list[int], add_special_tokens: bool) -> ScoredPrompt:
        if not isinstance(prompt, str):
            self._check_count(len(prompt), "tokens")
            self.check_ids(prompt, "prompt")
            return ScoredPrompt(decode(self._model.tokenizer, prompt, special=True), tuple(prompt))
        self._check_characters(prompt)
        encodable(prompt, Row(prompt, {}, "prompt"))
        (ids,) = token_ids([prompt], self._reader, add_special_tokens)
        return ScoredPrompt(prompt, tuple(ids))

    def rendered(self, asked: ChatRequest) -> ScoredPrompt:
        """The prompt of a chat, read in the tokenizer's thread. Raises DataError, RequestError."""
        tools, noticed = asked.shown_tools, Noticed()
        self._check_count(len(asked.messages), "messages")
        self._check_count(len(tools or ()), "tools")
        messages = [*map(self._accepted, asked.messages)]
        row = row_of(messages, {}, "messages", tools=tools, variables=asked.chat_template_kwargs)
        (prompt,) = prompts_of_rows(
            "messages",
            [row],
            self._reader,
            self._chat,
            context_tokens=self._model.context,
            noticed=noticed,
            continues=asked.continue_final_message,
        )
        if noticed.unread_tools or noticed.unread_calls:
            raise DataError(
                "tools: the chat template of this model does not write them, so that the model "
                "would not see them; leave them out, or serve another model"
            )
        last = messages_of(prompt)[-1]
        is_open = asked.continue_final_message and last["role"] == ASSISTANT
        return ScoredPrompt(
            prompt.text, prompt.token_ids, begun=begun_of(last)[1] if is_open else ""
        )

    def _accepted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message that a client sends back, without its thinking where gpt-oss's template
        refuses that: beside content and calls of tools.
        """
        if self._has_channels and message.get("content") and message.get("tool_calls"):
            return {key: one for key, one in message.items() if key not in THOUGHTS}
        return message

    def check_ids(self, ids: Sequence[int], name: str) -> None:
        known = self._model.policy.config.vocab_size
        if max(ids, default=0) >= known:
            raise ApiError(
                400,
                f"{name}: token {max(ids)} is none of the model's, which are 0 to {known - 1}",
                name,
            )

    def _check_count(self, count: int, name: str) -> None:
        """Refuse more items than the context holds, each of which has a token or more: other
        requests would wait while they are read.
        """
        if count > self._model.context:
            raise self.too_long(f"{count:,} {name}")

    def _check_characters(self, text: str) -> None:
        """Refuse a text that cannot fit, which would take seconds and gigabytes to encode."""
        most = most_characters(self._model.context, self._reader)
        if len(text) > most:
            raise self.too_long(f"{len(text):,} characters")

    def too_long(self, what: str) -> ApiError:
        return ApiError(
            400,
            f"the model's context holds {self._model.context} tokens, and the request has {what}: "
            "shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )
