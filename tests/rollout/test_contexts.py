"""The table of contexts, beside one that keeps every context in a dictionary."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.rollout.contexts import CONTEXTS, MOST_VOTES, SLOTS, ContextTable
from isobit.rollout.sequence import CachedTokens
from tests.suites import examples


class Reference:
    """Tokens and votes by prompt and context; the longer one alone learns what it foretold."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def contexts(self, name: str, before: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        padded = (*[-1] * 6, *before)
        return [(name, tuple(padded[-size:])) for size in CONTEXTS]

    def learn(self, name: str, before: Sequence[int], token: int) -> int | None:
        """What was foretold."""
        foretold: int | None = None
        for context in self.contexts(name, before):
            had, votes = self.known.get(context, (token, 0))
            if votes and foretold is None:
                foretold = had
            if had == token:
                self.known[context] = token, min(votes + 1, MOST_VOTES)
            else:
                self.known[context] = (had, votes - 1) if votes > 1 else (token, 1)
            if votes and had == token and len(context[1]) == CONTEXTS[0]:
                break
        return foretold

    def guess(self, name: str, before: Sequence[int]) -> int | None:
        found = [self.known[one] for one in self.contexts(name, before) if one in self.known]
        return found[0][0] if found else None


def sequence_of(table: ContextTable, tokens: list[int], name: str) -> CachedTokens:
    sequence = CachedTokens(tokens, max_pages=1)
    table.begin(sequence, name)
    return sequence


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([3, 5, 40]))
def test_samples_that_grow_beside_each_other_are_noted_and_guessed_as_by_a_dictionary(
    seed: int, vocab: int
) -> None:
    chance, table, reference = random.Random(seed), ContextTable(), Reference()
    names = [chance.choice("ab") for _ in range(6)]
    samples = [sequence_of(table, [], name) for name in names]
    for _ in range(60):
        number = chance.randrange(6)
        sample, name = samples[number], names[number]
        before, new = list(sample.tokens), [chance.randrange(vocab) for _ in range(4)]
        sample.tokens += new
        foretold = list[int | None]()
        for place in range(len(before), len(before) + 4):
            foretold.append(reference.learn(name, sample.tokens[:place], sample.tokens[place]))
        right = sum(one == token for one, token in zip(foretold, new, strict=True))
        assert table.learn([sample]) == [(4, 4 - foretold.count(None), right)]
        assert sample.noted == len(sample.tokens)
        made = table.guesses(sample, 1)
        assert made == [one for one in [reference.guess(name, sample.tokens)] if one is not None]


def test_a_chain_of_guesses_goes_on_by_majority_and_where_it_breaks_by_two_tokens() -> None:
    table = ContextTable()
    table.learn([sequence_of(table, [*range(1, 20), n, 30 + n], "p") for n in (50, 51, 51)])
    end = sequence_of(table, list(range(1, 16)), "p")
    table.learn([end])
    assert table.guesses(end, 9) == [16, 17, 18, 19, 51, 81]
    table.learn([sequence_of(table, [51, 81, 7], "p")])
    assert table.guesses(end, 7) == [16, 17, 18, 19, 51, 81, 7]
    other = sequence_of(table, [9, 9, 9, 9, 9, 9, 12, 13], "p")
    table.learn([other])
    assert table.guesses(other, 3) == [14, 15, 16]
    assert table.guesses(sequence_of(table, list(range(1, 16)), "q"), 3) == []


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_what_is_noted_together_is_found_as_if_it_had_been_noted_one_by_one(
    num_sequences: int,
) -> None:
    """Sequences of distinct tokens, of which some are known before, from the middle on too."""
    chance = random.Random(0)
    tokens = [chance.sample(range(1000), 80) for _ in range(num_sequences)]
    tables = ContextTable(), ContextTable()
    seen: list[object] = []
    for table, is_together in zip(tables, (True, False), strict=True):
        sequences = [sequence_of(table, its[:3], f"p{n}") for n, its in enumerate(tokens)]
        table.learn(sequences)
        for length in (4, 30, 80):
            for sequence, its in zip(sequences, tokens, strict=True):
                sequence.tokens[:] = its[:length]
            how = table.learn_together if is_together else table.learn
            seen.append(how(sequences))
        changed = [[*its[:40], 1001, *its[41:]] for its in tokens]
        again = [sequence_of(table, its, f"p{n}") for n, its in enumerate(changed)]
        seen.append(table.learn_together(again) if is_together else table.learn(again))
    assert seen[:4] == seen[4:]
    assert seen[3] == [(80, 78, 77)] * num_sequences, "one was wrong, and two after it unknown"
    assert tables[0].entries == tables[1].entries


def test_a_taken_slot_is_given_to_the_newest() -> None:
    """A table of few slots still foretells what came last, and never grows."""
    table, chance = ContextTable(64), random.Random(1)
    for number in range(200):
        table.learn([sequence_of(table, chance.choices(range(5000), k=20), f"{number}")])
    assert len(table.entries) == 64
    last = list(range(1, 9))
    table.learn([sequence_of(table, [*last, 77], "last")])
    end = sequence_of(table, last, "last")
    end.noted = 8
    table.begin(end, "last")
    assert table.guesses(end, 1) == [77]


def test_token_ids_and_slots_fit_into_an_entry() -> None:
    table = ContextTable()
    largest = (1 << 24) - 2
    table.learn([sequence_of(table, [largest] * 9, "p")])
    end = sequence_of(table, [largest] * 7, "p")
    table.learn_together([end])
    assert table.guesses(end, 3) == [largest] * 3
    assert len(table.entries) == SLOTS
