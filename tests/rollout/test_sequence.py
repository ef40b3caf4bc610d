"""The allocator under random use: nothing leaks, nothing is handed out twice.

Stop strings in growing text, with tokens that are bytes, pieces of words, and words that bring
their own space.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isobit.memory.cache_size import PageAllocator
from isobit.records.text import Completion
from isobit.rollout.engine import generate
from isobit.rollout.sequence import StopWatch, cut, decode
from tests.rollout.history_model import VOCAB, make_engine, request
from tests.suites import examples


class AllocatorUse(RuleBasedStateMachine):
    """Holders allocate, share and release at random; a dictionary counts along."""

    @initialize(num_pages=st.integers(1, 12), num_carries=st.integers(0, 4))
    def make(self, num_pages: int, num_carries: int) -> None:
        self.allocator = PageAllocator(num_pages, 64, num_carries)
        self.expected = dict.fromkeys(range(num_pages), 0)
        self.carried = dict.fromkeys(range(num_carries), 0)
        self.parked: dict[int, list[int]] = {}
        self.parked_carries: dict[int, int] = {}
        self.names = 0

    def held(self) -> list[int]:
        return [page for page, holders in self.expected.items() if holders > 0]

    @precondition(lambda self: self.allocator.num_free > 0)
    @rule()
    def allocate(self) -> None:
        unused = self.allocator.num_unused
        page = self.allocator.allocate()
        assert self.expected[page] == 0
        self.expected[page] = 1
        self.drop_gone(unused)
        assert not any(page in pages for pages in self.parked.values())

    @precondition(lambda self: self.allocator.carries.num_free > 0)
    @rule()
    def allocate_carry(self) -> None:
        unused = self.allocator.carries.num_unused
        carry = self.allocator.allocate_carry()
        assert self.carried[carry] == 0
        self.carried[carry] = 1
        self.drop_gone(unused)
        assert carry not in self.parked_carries.values()

    def drop_gone(self, unused: int) -> None:
        gone = [name for name in self.parked if self.allocator.parked(name) is None]
        assert gone == list(self.parked)[: len(gone)], "those that were parked first"
        assert bool(gone) <= (unused == 0)
        for name in gone:
            del self.parked[name], self.parked_carries[name]

    @precondition(lambda self: any(self.carried.values()))
    @rule(data=st.data(), shares=st.booleans())
    def share_or_release_carry(self, data: st.DataObject, shares: bool) -> None:
        held = [carry for carry, holders in self.carried.items() if holders]
        carry = data.draw(st.sampled_from(held))
        pool = self.allocator.carries
        (pool.share if shares else pool.release)(carry)
        self.carried[carry] += 1 if shares else -1

    @precondition(lambda self: bool(self.held()))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held()), min_size=1, unique=True))
        held = [carry for carry, holders in self.carried.items() if holders]
        carry = data.draw(st.sampled_from([-1, *held]))
        self.names += 1
        self.allocator.park(self.names, [0] * 64 * len(pages), pages, None, carry, 5)
        self.parked[self.names], self.parked_carries[self.names] = pages, carry

    @precondition(lambda self: bool(self.parked))
    @rule(data=st.data())
    def take_parked(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.parked)))
        parked = self.allocator.parked(name)
        assert parked is not None
        idle = sum(self.expected[page] == 0 for page in self.parked[name])
        assert self.allocator.num_idle(parked) == idle
        carry = self.parked_carries.pop(name)
        assert self.allocator.is_carry_idle(parked) == (carry >= 0 and not self.carried[carry])
        taken = self.allocator.take_parked(name)
        assert (taken.pages, taken.carry, taken.carry_chunk) == (self.parked[name], carry, 5)
        if carry >= 0:
            self.carried[carry] += 1
        for page in self.parked.pop(name):
            self.expected[page] += 1

    @precondition(lambda self: bool(self.parked))
    @rule(data=st.data())
    def keep_or_drop_parked(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.parked)))
        pages, carry = self.parked.pop(name), self.parked_carries.pop(name)
        if data.draw(st.booleans()):
            self.allocator.keep_parked(name)
            self.parked[name], self.parked_carries[name] = pages, carry
        else:
            self.allocator.drop_parked([name, "nobody"])

    @precondition(lambda self: bool(self.held()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held()))
        self.allocator.share(page)
        self.expected[page] += 1

    @precondition(lambda self: bool(self.held()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held()))
        self.allocator.release(page)
        self.expected[page] -= 1

    @invariant()
    def counts_agree(self) -> None:
        assert {page: self.allocator.holders(page) for page in self.expected} == self.expected
        free = len(self.expected) - len(self.held())
        kept = {page for pages in self.parked.values() for page in pages} - set(self.held())
        assert self.allocator.num_free == free
        assert self.allocator.num_unused == free - len(kept)
        pool = self.allocator.carries
        assert {carry: pool.holders(carry) for carry in self.carried} == self.carried
        free = {carry for carry, holders in self.carried.items() if not holders}
        assert pool.num_free == len(free)
        assert pool.num_unused == len(free - set(self.parked_carries.values()))


AllocatorUse.TestCase.settings = settings(max_examples=examples(50), deadline=None)
TestAllocatorUse = AllocatorUse.TestCase


def test_a_page_cannot_be_released_or_shared_when_nobody_holds_it():
    allocator = PageAllocator(2, 64)
    page = allocator.allocate()
    allocator.release(page)
    with pytest.raises(AssertionError, match="released but not held"):
        allocator.release(page)
    with pytest.raises(AssertionError, match="shared but not held"):
        allocator.share(page)


def test_the_last_freed_page_is_used_first():
    allocator = PageAllocator(5, 64)
    first, second = allocator.allocate(), allocator.allocate()
    allocator.release(first)
    assert (first, second, allocator.allocate()) == (0, 1, 0)


def test_pages_are_counted_up():
    assert [PageAllocator(1, 64).pages_for(n) for n in (0, 1, 63, 64, 65, 128)] == [
        0,
        1,
        1,
        1,
        2,
        2,
    ]
    assert [PageAllocator(1, 128).pages_for(n) for n in (0, 1, 64, 127, 128, 129)] == [
        0,
        1,
        1,
        1,
        1,
        2,
    ]


WORDS = ["<eos>", "▁the", "▁end", "s", "▁", "en", "d", "▁of", "▁it", "."]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Token id = place in the byte alphabet: every character beyond ASCII takes several tokens."""
    tokenizer = Tokenizer(
        models.BPE({character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Words as sentencepiece writes them: the first one of a text loses its space."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>")
    )
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's and Gemma's decoder: tokens with ``▁`` for a space, and a token a byte."""
    words = ["▁", "▁a", "▁b", "a", "b", "é", "▁é", "日", "🙂", "<", "0x0A>", "\ufffd"]
    names = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


BYTES, WORD_PIECES, FALLBACK = byte_tokenizer(), word_tokenizer(), fallback_tokenizer()
FALLBACK_SIZE = len(FALLBACK)


def first_stop(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: list[int],
    stops: list[str],
    special: bool = False,
) -> int | None:
    """After how many tokens the whole text holds a stop string."""
    texts = (
        decode(tokenizer, token_ids[:count], special) for count in range(1, len(token_ids) + 1)
    )
    return next(
        (count for count, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None
    )


def watched_stop(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stops: list[str]
) -> int | None:
    watch = StopWatch(tokenizer, stops)
    return next(
        (count for count, token_id in enumerate(token_ids, 1) if watch.feed(token_id)), None
    )


characters = st.text("ab\n é界🙂", max_size=25)
some_stops = st.lists(st.text("ab\n é界🙂", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=characters, stops=some_stops)
def test_bytes_stop_exactly_when_the_whole_text_holds_a_stop_string(text: str, stops: list[str]):
    token_ids = BYTES.encode(text)
    assert watched_stop(BYTES, token_ids, stops) == first_stop(BYTES, token_ids, stops)


@given(
    token_ids=st.lists(st.integers(1, len(WORDS) - 1), max_size=25),
    stops=st.lists(st.sampled_from(["end", " end", "s.", "s en", "the end of it"])),
)
def test_words_stop_exactly_when_the_whole_text_holds_a_stop_string(
    token_ids: list[int], stops: list[str]
):
    stops = stops or ["ends"]
    assert watched_stop(WORD_PIECES, token_ids, stops) == first_stop(WORD_PIECES, token_ids, stops)


def test_a_stop_string_is_seen_although_its_last_token_begins_another_character():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "Ã": 2, "bÃ": 3, "©": 4}, [("b", "Ã")]))
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert watched_stop(wrapped, [0, 3, 4], ["ab"]) == 2


def test_text_is_cut_before_the_earliest_stop_string():
    assert cut("one two three", ["three", "two"]) == ("one ", "two")
    assert cut("one </answer>", ["</", "</answer>", "</a"]) == ("one ", "</answer>")
    assert cut("one two", ["four"]) == ("one two", "")
    assert cut("one two", []) == ("one two", "")


def one_sample(stop_strings: tuple[str, ...], **sampling: Any) -> Completion:
    """One sample of the history model, whose eleven tokens are "!" to "+" in ASCII."""
    engine, _ = make_engine(tokenizer=BYTES)
    return generate(
        engine, [request(3, 8, max_new_tokens=60, stop_strings=stop_strings, **sampling)]
    )[0][0]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_engine_stops_at_a_stop_string_and_keeps_the_tokens_that_completed_it(length: int):
    free = one_sample(())
    assert free.text == decode(BYTES, free.token_ids) and len(free.text) == 60 and VOCAB == 11
    place = next(
        place
        for place in range(20, 58)
        if free.text.find(free.text[place : place + length]) == place or length > 1
    )
    stop = free.text[place : place + length]
    stopped = one_sample((stop, "never"))
    end = free.text.index(stop)
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[:end]
    assert stopped.stop_string == stop and stopped.whole_text == free.text[: end + length]
    assert free.stop_string == ""
    assert stopped.token_ids == free.token_ids[: end + length]
    assert stopped.log_probs == free.log_probs[: end + length]


def test_a_stop_token_is_in_the_ids_but_not_in_the_text():
    stopped = one_sample((), stop_token_ids=(5,))
    assert stopped.token_ids[-1] == 5
    assert stopped.text == decode(BYTES, stopped.token_ids[:-1])
    assert len(stopped.text) == len(stopped.token_ids) - 1
