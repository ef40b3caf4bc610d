"""The state of what the engine computes: prompts, prefilled once, and the samples that grow from
them.

Both are a list of tokens of which the first ``cached`` have their K and V in pages.  What is left,
``remaining``, says what to do next: nothing (a finished prompt), one token (a decoding sample),
several (a prompt, or a sample whose pages were taken away).  So prefill, decode and recomputation
are one operation, "put the next tokens through the model", with different counts.

A sample may have a token ``in_flight``: drawn by the device, which goes on from it, while the host
does not know it yet.

A sample's text grows with its tokens (``GrowingText``), and stop strings are found in it
(``StopWatch``), although a token may hold half a character and a stop string may span tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from isobit.data.encoding import byte_token_ids, special_token_ids
from isobit.data.tokenizer import is_of_tokenizer
from isobit.kernels.operands import DELTA_CHUNK
from isobit.memory.cache_size import PageAllocator, Parked
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, FinishReason
from isobit.rollout.requests import Handle, Request
from isobit.util.errors import DataError, IsobitError, RequestError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_INCOMPLETE = "\ufffd"
FIRST_RATE = 0.6
"""The rates at which a sample's tokens are foretold, and rightly, before it has any
(``rollout.drafts``).
"""


def decode(
    tokenizer: "PreTrainedTokenizerBase",
    token_ids: Sequence[int],
    special: bool | frozenset[int] = False,
) -> str:
    """The text of ``token_ids`` as users and rewards see it: spaces as they are, and special tokens
    if ``special``, or those that it names.

    Raises DataError where the tokenizer has no text for them.
    """
    if not isinstance(special, bool):
        hidden = special_token_ids(tokenizer) - special
        token_ids, special = [one for one in token_ids if one not in hidden], True
    try:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
    except BaseException as error:
        if not is_of_tokenizer(error):
            raise
        ids = shown(", ".join(map(str, token_ids)))
        raise DataError(
            f"the tokenizer cannot decode the tokens {ids}: {type(error).__name__}: {shown(error)}"
        ) from error
    assert isinstance(text, str)
    return text


def cut(text: str, stop_strings: Sequence[str]) -> tuple[str, str]:
    """``text`` before the first place where any of ``stop_strings`` begins, and the longest of
    those that begin there; all of it and nothing where none does.
    """
    found = [(place, stop) for stop in stop_strings if (place := text.find(stop)) >= 0]
    if not found:
        return text, ""
    first = min(place for place, _ in found)
    return text[:first], max((stop for place, stop in found if place == first), key=len)


class GrowingText:
    """The text of one answer, a token at a time.

    Decoding a token alone can be wrong (a leading space that depends on its neighbour, a piece of a
    UTF-8 character), and decoding the whole answer after each token is quadratic.  So a window of
    the last tokens is decoded, once without and once with the newest: what the second text has on
    top of the first is new.  While the new text ends in U+FFFD, a character is incomplete and the
    window waits for the rest of it.  A tokenizer with byte fallback decodes a whole run of byte
    tokens at once, all of it to U+FFFD where one is wrong: the window waits for the end of the run.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", special: bool | frozenset[int] = False
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._bytes = byte_token_ids(tokenizer)
        shown = special if isinstance(special, frozenset) else frozenset[int]()
        self._unseen = frozenset() if special is True else special_token_ids(tokenizer) - shown
        self._window: list[int] = []
        """Tokens decoded again for context, then those whose text is not complete yet."""
        self._settled = 0  # how many of them belong to the context

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Take the next token; the text behind what was complete before, and whether all of it is
        complete now.
        """
        self._window.append(token_id)
        settled = decode(self._tokenizer, self._window[: self._settled], self._special)
        new = decode(self._tokenizer, self._window, self._special)[len(settled) :]
        complete = bool(new) and not new.endswith(_INCOMPLETE) and not self._ends_in_a_byte()
        if complete:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
        return new, complete

    def _ends_in_a_byte(self) -> bool:
        """Whether the last token that is seen is a byte, whose text may change with the next."""
        if not self._bytes:
            return False
        seen = (one for one in reversed(self._window) if one not in self._unseen)
        return next(seen, -1) in self._bytes


class StopWatch:
    """Follows the text of one sample and says when a stop string is complete."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_strings: Sequence[str],
        special: bool | frozenset[int] = False,
    ) -> None:
        self._text = GrowingText(tokenizer, special)
        self._stop_strings = tuple(stop_strings)
        self._overlap = max(map(len, stop_strings)) - 1
        self._tail = ""
        """The last characters of the complete text: a stop string may have begun there."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; whether the text now holds a stop string."""
        new, complete = self._text.feed(token_id)
        candidate = self._tail + new.rstrip(_INCOMPLETE)
        if complete:
            self._tail = candidate[-self._overlap :] if self._overlap else ""
        return any(stop in candidate for stop in self._stop_strings)


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The result of a forward for T tokens, or for one, without the first dimension: final hidden
    states, and digests of their experts.
    """

    hidden: Tensor
    """[T, hidden]"""
    routings: Tensor | None = None
    """int64 [T] (``isobit.models.layers``); None for a model without experts."""

    def take(self, rows: Tensor) -> "States":
        """The tokens ``rows``, int64 [N]."""
        routings = self.routings
        return States(
            self.hidden.index_select(0, rows),
            None if routings is None else routings.index_select(0, rows),
        )

    def row(self, index: int) -> "States":
        """One token."""
        return States(self.hidden[index], None if self.routings is None else self.routings[index])

    def clone(self) -> "States":
        """A copy: a row would keep the whole forward alive."""
        routings = self.routings
        return States(self.hidden.clone(), None if routings is None else routings.clone())


_NO_PAGES = np.zeros(0, dtype=np.int64)


class CachedTokens:
    """Tokens and the pages that hold the K and V of the first ``cached`` of them.

    ``block_row`` mirrors ``pages``, where there are any, in the fixed-width form that a batch's
    block table is stacked from.  ``reserved``: the tokens that its pages have room for, once the
    scheduler has made sure that nobody else holds those which will be written.  ``adapter``: what
    they are computed with (``Request.adapter``).  ``is_sound``: finite logits have been computed
    from its K and V, so that no page of it holds a NaN.  ``draft``: guesses of the tokens behind
    its own, which the next forward computes as well (``isobit.rollout.drafts``); ``noted``: the
    tokens that guesses have learnt from; ``slot`` and ``salt``: of the context at their end, and of
    all its contexts (``isobit.rollout.contexts``).

    Of a model with delta rules, ``carry``: what the first ``cached`` tokens carry, that is of the
    chunk ``carry_chunk``, which is that of the last of them; -1 for none.  ``next_carry``: where a
    forward writes that of a later chunk.  It is of no chunk yet.
    """

    __slots__ = (
        "_max_pages",
        "adapter",
        "block_row",
        "cached",
        "carry",
        "carry_chunk",
        "draft",
        "is_sound",
        "next_carry",
        "noted",
        "pages",
        "reserved",
        "salt",
        "slot",
        "tokens",
    )

    def __init__(self, tokens: list[int], max_pages: int, adapter: str | None = None) -> None:
        self.tokens = tokens
        self.adapter = adapter
        self.cached = 0
        self.draft: Sequence[int] = ()
        self.noted, self.slot, self.salt = 0, -1, 0
        self.reserved = 0
        self.is_sound = False
        self.pages: list[int] = []
        self.carry = self.carry_chunk = self.next_carry = -1
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

    @property
    def begins_chunk(self) -> bool:
        """Whether its next token is of a further chunk than that of its carry."""
        return self.cached // DELTA_CHUNK != self.carry_chunk

    @property
    def lacks_carry(self) -> bool:
        """Whether it does so, and has nothing to write the carry of that to."""
        return self.next_carry < 0 and self.begins_chunk

    def carries(self, count: int) -> tuple[int, int]:
        """The carries that a forward of its next ``count`` tokens reads and writes."""
        is_within = (self.cached + count - 1) // DELTA_CHUNK == self.carry_chunk
        return self.carry if self.cached else -1, self.carry if is_within else self.next_carry

    def settle_carry(self, allocator: PageAllocator, keeps: bool = False) -> None:
        """Tokens have been put into the cache, which may have reached a further chunk: then the
        earlier carry is given back, or kept as the next one to be written, if nobody else holds it.
        """
        chunk = (self.cached - 1) // DELTA_CHUNK
        if self.next_carry >= 0 and chunk > self.carry_chunk:
            self.carry, self.next_carry, self.carry_chunk = self.next_carry, self.carry, chunk
            if not keeps:
                self.drop_next_carry(allocator)

    def drop_next_carry(self, allocator: PageAllocator) -> None:
        """Give back what nothing is written to."""
        if self.next_carry >= 0:
            allocator.carries.release(self.next_carry)
            self.next_carry = -1

    def drop_carries(self, allocator: PageAllocator) -> None:
        """Give all carries back."""
        self.drop_next_carry(allocator)
        if self.carry >= 0:
            allocator.carries.release(self.carry)
        self.carry = self.carry_chunk = -1

    def drop_pages(self, allocator: PageAllocator) -> None:
        """Give all pages back, and all carries; the tokens stay."""
        for page in self.pages:
            allocator.release(page, self.is_sound)
        self.drop_carries(allocator)
        self.pages, self.block_row = [], _NO_PAGES
        self.cached = self.reserved = 0
        self.draft = ()
        self.is_sound = False


class SharedPrompt(CachedTokens):
    """The prompt of one request.  It holds its pages for as long as samples wait to start from
    them: ``waiting`` counts those that are in the scheduler's line, and ``has_begun`` says whether
    any has started.

    ``last`` is the state of its last token: the first token of every sample is drawn from it.
    """

    __slots__ = ("has_begun", "last", "request", "waiting")

    def __init__(self, request: Request, max_pages: int) -> None:
        super().__init__(list(request.prompt.token_ids), max_pages, request.adapter)
        self.request = request
        self.waiting = 0
        self.has_begun = False
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
        "acceptance",
        "behind",
        "drawn",
        "failure",
        "finish_reason",
        "foretold",
        "given",
        "handle",
        "heat",
        "in_flight",
        "is_spoilt",
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
        super().__init__(list(prompt.tokens), max_pages, prompt.adapter)
        request, sampling = prompt.request, prompt.request.sampling
        self.prompt = prompt
        self.handle = Handle(request.prompt.id, request.visit, index)
        self.key = request.noise_key(seed, index)
        self.max_length = max_length
        self.heat = 0
        """Samples of a lower one start before it; 0 for those that have started before."""
        self.noted = len(prompt.tokens)
        self.foretold = FIRST_RATE
        """The rate at which a guess of its next token could be made."""
        self.acceptance = FIRST_RATE
        """The rate at which such guesses are right."""
        self.behind = 0.0
        """Steps by which guesses, its own and those of others, have put it behind; negative where
        it is ahead.
        """
        self.is_spoilt = False
        """Whether its K and V are to be computed again, without guesses from then on."""
        self.in_flight = 0
        self.on_device = False
        self.given: list[tuple[int, int]] = []
        """Spans of tokens that tools have said between turns."""
        self.drawn = 0
        """Tokens that were drawn for it, here and before, counted one by one."""
        self.log_probs: list[float] = []
        self.truncated_log_probs: list[float] = []
        self.routings: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.failure: IsobitError | None = None
        """Why nothing more can be drawn for it; then it has ended as aborted."""
        self.weights_versions: list[int] = []
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._stop_watch = (
            StopWatch(tokenizer, sampling.stop_strings, sampling.special_tokens)
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
        self.on_device = self.is_spoilt = False

    def park_pages(self, allocator: PageAllocator) -> None:
        """Give all pages back after a turn; they keep K and V for the next one while nobody else
        needs them.
        """
        self.settle_carry(allocator)  # the last tokens may have been guessed
        carry = self.carry, self.carry_chunk
        allocator.park(self.handle, self.tokens[: self.cached], self.pages, self.adapter, *carry)
        self.drop_pages(allocator)

    def resume(self, parked: Parked) -> None:
        """Hold the pages of the turn before again.  The last token is put through the model in any
        case: the next one is drawn from its state.
        """
        assert not self.pages, "a sample that runs does not start"
        for page in parked.pages:
            self.add_page(page)
        self.carry, self.carry_chunk = parked.carry, parked.carry_chunk
        self.cached = min(len(parked.tokens), len(self.tokens) - 1)

    def start(self, allocator: PageAllocator) -> None:
        """Hold the pages of the prompt as well, and its carry: its tokens need not be computed
        again.
        """
        assert self.prompt.is_ready, "a sample starts from a prompt in the cache"
        assert not self.pages, "a sample that runs does not start"
        for page in self.prompt.pages:
            allocator.share(page)
            self.add_page(page)
        if self.prompt.carry >= 0:
            allocator.carries.share(self.prompt.carry)
        self.carry, self.carry_chunk = self.prompt.carry, self.prompt.carry_chunk
        self.cached = self.prompt.cached

    def accept(
        self, token_id: int, log_prob: float, weights_version: int, routing: int | None = None
    ) -> None:
        """Append a drawn token and see whether it is the last one; ``routing`` is the digest of the
        experts at the row that it was drawn from.  A text that cannot be decoded fails the sample.
        """
        self.is_sound = self.prompt.is_sound = True
        self.tokens.append(token_id)
        self.drawn += 1
        self.log_probs.append(log_prob)
        self.weights_versions.append(weights_version)
        if routing is not None:
            self.routings.append(routing)
        try:
            if token_id in self._stop_token_ids or (
                self._stop_watch is not None and self._stop_watch.feed(token_id)
            ):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_length:
                self.finish_reason = "length"
        except DataError as error:
            self.fail(error)

    def spoil(self) -> None:
        """A guess may have left a NaN in its pages."""
        self.draft, self.acceptance, self.is_spoilt, self.is_sound = (), -inf, True, False

    def fail(self, error: IsobitError) -> None:
        """End the sample, and no other, with an error."""
        self.failure, self.finish_reason, self.is_sound = error, "aborted", False

    def take_up(self, half_done: Completion) -> None:
        """Go on from what was drawn before, by another engine or in earlier turns, and from what
        tools have said behind these; stop strings are looked for in the turn that is not done.
        Raises RequestError where it may have no further token.
        """
        begin, sequence = len(self.prompt.tokens), half_done.sequence
        if sequence.length >= self.max_length:
            raise RequestError(
                f"sample {self.handle.sample} of prompt {self.handle.prompt_id!r} has "
                f"{sequence.length} tokens with its prompt, and may have {self.max_length}: "
                "nothing can be drawn for it; go on with the max_new_tokens that it began with"
            )
        self.tokens.extend(sequence.token_ids[begin:].tolist())
        self.given = sequence.given_from(begin)
        self.drawn = sequence.response_length if sequence.drawn is None else sequence.drawn
        self.log_probs.extend(half_done.log_probs)
        self.weights_versions.extend(half_done.weights_versions)
        self.truncated_log_probs.extend(half_done.truncated_log_probs or ())
        self.routings.extend(half_done.routings or ())
        if self._stop_watch is not None:
            turn = self.given[-1][1] if self.given else begin
            for token_id in self.tokens[turn:]:
                self._stop_watch.feed(token_id)

    def completion(self, tokenizer: "PreTrainedTokenizerBase | None") -> Completion:
        """The record of the ended or aborted sample; its text is empty without a tokenizer."""
        assert self.finish_reason is not None, "the sample has not ended"
        sampling, token_ids = self.prompt.request.sampling, self.tokens[len(self.prompt.tokens) :]
        sequence = TokenSequence.of_answer(
            self.prompt.tokens,
            token_ids,
            self.log_probs,
            self.weights_versions,
            sampling.log_prob_temperature,
            self.given,
            self.drawn,
            # without a filter some may have been kept of other samples
            truncated_log_probs=self.truncated_log_probs if sampling.truncates else None,
            routings=self.routings or None,
        )
        stopped = token_ids and token_ids[-1] in self._stop_token_ids
        spoken = token_ids[:-1] if stopped else token_ids
        shown = decode(tokenizer, spoken, sampling.special_tokens) if tokenizer else ""
        text, stop = cut(shown, sampling.stop_strings)
        return Completion(sequence, text, self.finish_reason, stop_string=stop)
