"""The state of what the engine computes: prompts, prefilled once, and the samples that grow from
them.

Both are a list of tokens of which the first ``cached`` have their K and V in pages.  What is left,
``remaining``, says what to do next: nothing (a finished prompt), one token (a decoding sample),
several (a prompt, or a sample whose pages were taken away).  So prefill, decode and recomputation
are one operation, "put the next tokens through the model", with different counts.

A sample may have a token ``in_flight``: drawn by the device, which goes on from it, while the host
does not know it yet.
"""

from typing import TYPE_CHECKING

import numpy as np

from isobit.kernels.noise import sample_key
from isobit.records.text import Completion, FinishReason
from isobit.rollout.native.pages import PageAllocator
from isobit.rollout.native.states import States
from isobit.rollout.native.stops import StopWatch, cut, decode
from isobit.rollout.request import Handle, Request
from isobit.rollout.sample_state import SampleState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NO_PAGES = np.zeros(0, dtype=np.int64)


class CachedTokens:
    """Tokens and the pages that hold the K and V of the first ``cached`` of them.

    ``block_row`` mirrors ``pages``, where there are any, in the fixed-width form that a batch's
    block table is stacked from.  ``reserved``: the tokens that its pages have room for, once the
    scheduler has made sure that nobody else holds those which will be written.
    """

    __slots__ = ("_max_pages", "block_row", "cached", "pages", "reserved", "tokens")

    def __init__(self, tokens: list[int], max_pages: int) -> None:
        self.tokens = tokens
        self.cached = 0
        self.reserved = 0
        self.pages: list[int] = []
        self.block_row = _NO_PAGES
        self._max_pages = max_pages

    @property
    def length(self) -> int:
        """All its tokens."""
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens to put through the model: those that are not in the cache yet."""
        return len(self.tokens) - self.cached

    def add_page(self, page: int) -> None:
        """Hold one more page, behind the others."""
        if not self.pages:  # thousands may wait without any
            self.block_row = np.zeros(self._max_pages, dtype=np.int64)
        self.block_row[len(self.pages)] = page
        self.pages.append(page)

    def replace_page(self, index: int, page: int) -> None:
        """Hold ``page`` in the place of page number ``index``."""
        self.block_row[index] = page
        self.pages[index] = page

    def drop_pages(self, allocator: PageAllocator) -> None:
        """Give all pages back; the tokens stay."""
        for page in self.pages:
            allocator.release(page)
        self.pages, self.block_row = [], _NO_PAGES
        self.cached = self.reserved = 0


class SharedPrompt(CachedTokens):
    """The prompt of one request.  It holds its pages for as long as samples wait to start from
    them: ``waiting`` counts those that are in the scheduler's line.

    ``last`` is the state of its last token: the first token of every sample is drawn from it.
    """

    __slots__ = ("last", "request", "waiting")

    def __init__(self, request: Request, max_pages: int) -> None:
        super().__init__(list(request.prompt.token_ids), max_pages)
        self.request = request
        self.waiting = 0
        self.last: States | None = None

    @property
    def is_ready(self) -> bool:
        """Whether samples can start."""
        return self.last is not None

    def drop_pages(self, allocator: PageAllocator) -> None:
        """Give all pages back; no sample can start until the prompt has been prefilled again."""
        super().drop_pages(allocator)
        self.last = None


class Sample(CachedTokens):
    """One sample of a request: the prompt's tokens, then its own.

    ``in_flight``: tokens drawn by the device that the host does not know yet.  ``on_device``: the
    device has drawn the last token and kept it.  Both stay as they are in an engine that waits for
    every token.
    """

    __slots__ = (
        "_stop_token_ids",
        "_stop_watch",
        "finish_reason",
        "handle",
        "in_flight",
        "key",
        "log_probs",
        "max_length",
        "on_device",
        "prompt",
        "routings",
        "truncated_log_probs",
        "weights_versions",
    )

    def __init__(
        self,
        prompt: SharedPrompt,
        index: int,
        seed: int,
        max_length: int,
        max_pages: int,
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> None:
        super().__init__(list(prompt.tokens), max_pages)
        request, sampling = prompt.request, prompt.request.sampling
        self.prompt = prompt
        self.handle = Handle(request.prompt.id, request.visit, index)
        self.key = sample_key(seed, request.prompt.id, request.visit, index)
        self.max_length = max_length
        self.in_flight = 0
        self.on_device = False
        self.log_probs: list[float] = []
        self.truncated_log_probs: list[float] = []
        self.routings: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.weights_versions: list[int] = []
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._stop_watch = (
            StopWatch(tokenizer, sampling.stop_strings)
            if tokenizer and sampling.stop_strings
            else None
        )

    @property
    def length(self) -> int:
        """All its tokens, known or in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens to put through the model: those that are not in the cache yet, but never the last
        that it may have.
        """
        length = len(self.tokens) + self.in_flight
        return length - self.cached if length < self.max_length else 0

    @property
    def will_write(self) -> bool:
        """Whether any more K and V are needed: those of the last token that it may have are not."""
        return self.cached < self.max_length - 1

    def drop_pages(self, allocator: PageAllocator) -> None:
        """Give all pages back; the tokens stay, with the host."""
        super().drop_pages(allocator)
        self.on_device = False

    def start(self, allocator: PageAllocator) -> None:
        """Hold the pages of the prompt as well: its tokens need not be computed again."""
        assert self.prompt.is_ready, "a sample starts from a prompt in the cache"
        assert not self.pages, "a sample that runs does not start"
        for page in self.prompt.pages:
            allocator.share(page)
            self.add_page(page)
        self.cached = self.prompt.cached

    def accept(
        self, token_id: int, log_prob: float, weights_version: int, routing: int | None = None
    ) -> None:
        """Append a drawn token and see whether it is the last one; ``routing`` is the digest of the
        experts at the row that it was drawn from.
        """
        self.tokens.append(token_id)
        self.log_probs.append(log_prob)
        self.weights_versions.append(weights_version)
        if routing is not None:
            self.routings.append(routing)
        if token_id in self._stop_token_ids or (
            self._stop_watch is not None and self._stop_watch.feed(token_id)
        ):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish_reason = "length"

    def take_up(self, state: SampleState) -> None:
        """Go on from what another engine has drawn; stop strings are looked for behind it."""
        self.tokens.extend(state.token_ids)
        self.log_probs.extend(state.log_probs)
        self.weights_versions.extend(state.weights_versions)
        self.truncated_log_probs.extend(state.truncated_log_probs)
        self.routings.extend(state.routings)
        if self._stop_watch is not None:
            for token_id in state.token_ids:
                self._stop_watch.feed(token_id)

    def state(self) -> SampleState:
        """What the host knows of it."""
        truncates = self.prompt.request.sampling.truncates  # else some may have been kept of others
        return SampleState(
            self.prompt.request,
            self.handle.sample,
            tuple(self.tokens[len(self.prompt.tokens) :]),
            tuple(self.log_probs),
            tuple(self.weights_versions),
            tuple(self.truncated_log_probs) if truncates else (),
            tuple(self.routings),
        )

    def completion(self, tokenizer: "PreTrainedTokenizerBase | None") -> Completion:
        """The record of the ended sample; its text is empty without a tokenizer."""
        assert self.finish_reason is not None, "the sample has not ended"
        token_ids = self.tokens[len(self.prompt.tokens) :]
        stopped = token_ids and token_ids[-1] in self._stop_token_ids
        spoken = token_ids[:-1] if stopped else token_ids
        stops = self.prompt.request.sampling.stop_strings
        text = cut(decode(tokenizer, spoken), stops) if tokenizer else ""
        return self.state().completion(text, self.finish_reason)
