"""Log-probabilities of tokens that are given: those of a prompt, and the likeliest alternatives to
tokens that were drawn.

Sequences take turns by their owners: who asks for few tokens does not wait until all of another's
are scored.

The tokens go through the rollout side of the policy as a prompt does, in pieces, over a cache of
their own.  A row of a forward does not depend on the others, so every number has the bits that the
engine would record, or has recorded, for the same token behind the same tokens:

    log p(token t | tokens before)  =  log-softmax(logits / temperature) at t
"""

from array import array
from bisect import insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import torch

from isobit.memory.cache_size import (
    LEAST_CARRIES,
    CacheSize,
    PageAllocator,
    out_of_memory_named,
    pages_for,
)
from isobit.models.policy import Policy
from isobit.rollout.draws import finite_rows
from isobit.rollout.runner import PolicyRunner, build_batch
from isobit.rollout.scheduler import by_adapter
from isobit.rollout.sequence import CachedTokens
from isobit.util.errors import IsobitError, NonFiniteError, RequestError

_LOGITS_AT_ONCE = 1 << 24
_AT_ONCE = 8  # sequences of a model with delta rules
MOST_ALTERNATIVES = 20

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of which those from position ``first`` (at least 1) on are scored."""

    token_ids: tuple[int, ...]
    first: int
    temperature: float
    alternatives: int = 0
    """The number of likeliest tokens to return for each position."""
    adapter: str | None = None
    """One of ``Policy.adapters``; None for the policy as it is."""


@dataclass(frozen=True, slots=True)
class Ranked(Sequence[tuple[int, float]]):
    """The likeliest tokens at one position, each with its log-probability, from the likeliest on.
    A list of pairs would take six times the memory.
    """

    tokens: "array[int]"
    log_probs: "array[float]"
    """FP32."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> "Ranked":
        tokens, log_probs = array("i"), array("f")
        for token, log_prob in pairs:
            tokens.append(token)
            log_probs.append(log_prob)
        return cls(tokens, log_probs)

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, at: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, at: slice) -> "Ranked": ...
    def __getitem__(self, at: int | slice) -> "tuple[int, float] | Ranked":
        if isinstance(at, slice):
            return Ranked(self.tokens[at], self.log_probs[at])
        return self.tokens[at], self.log_probs[at]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.tokens, self.log_probs, strict=True)


@dataclass(slots=True)
class Scored:
    """One entry of each list for each scored token."""

    log_probs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """1 is the likeliest; tokens that are equally likely share a rank."""
    alternatives: list[Ranked] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _GivenTokens(Generic[Key]):
    key: Key
    scoring: Scoring
    sequence: CachedTokens
    """All tokens but the last, which predicts nothing that is asked."""
    owner: Hashable
    turn: int
    """Its place in the line, in tokens."""
    scored: Scored = field(default_factory=Scored)


def _turn_of(given: _GivenTokens[Any]) -> int:
    return given.turn


class TokenScorer(Generic[Key]):
    """Scores sequences one forward at a time; ``key`` says whose a result is.

    Args:
        policy: its rollout side is read.
        tokens_per_forward: the most tokens of one forward.
    """

    def __init__(self, policy: Policy, tokens_per_forward: int) -> None:
        page_tokens = policy.backend.sizes.page_tokens
        longest = max(policy.config.max_positions, tokens_per_forward)
        num_pages = pages_for(longest, page_tokens)
        carries = 0 if policy.config.delta is None else LEAST_CARRIES * _AT_ONCE
        self._policy, self._tokens = policy, tokens_per_forward
        with out_of_memory_named(policy.backend.memory):
            self._runner = PolicyRunner(policy, CacheSize(num_pages, carries))
        self._version = self._runner.version
        self._allocator = PageAllocator(num_pages, page_tokens, carries)
        self._num_pages = num_pages
        self._waiting: list[_GivenTokens[Key]] = []
        """By their turns."""
        self._active: list[_GivenTokens[Key]] = []
        self._turn = 0
        """Tokens that each owner has had, where a new owner begins."""
        self._next_turns = dict[Hashable, int]()
        """Of owners who have something in line."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def keys(self) -> list[Key]:
        """The keys of everything that has not been scored."""
        return [given.key for given in (*self._active, *self._waiting)]

    def add(self, key: Key, scoring: Scoring, owner: Hashable = None) -> None:
        """Put a sequence in line, behind those of its owner and as many tokens of each other one.

        Raises:
            RequestError: for no scored token, more tokens than the context holds, and tokens
                outside of the distribution.
        """
        shape, ids = self._policy.config, scoring.token_ids
        if not 1 <= scoring.first < len(ids):
            raise RequestError(f"of {len(ids)} tokens none is left to score from {scoring.first}")
        if len(ids) > shape.max_positions:
            raise RequestError(
                f"{len(ids)} tokens are to be scored; the model's context holds "
                f"{shape.max_positions}: shorten the prompt"
            )
        wrong = next((token for token in ids if not 0 <= token < shape.num_drawn), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} is to be scored; the distribution holds 0 to {shape.num_drawn - 1}"
            )
        sequence = CachedTokens(list(ids[:-1]), self._num_pages, scoring.adapter)
        turn = max(self._turn, self._next_turns.get(owner, 0))
        self._next_turns[owner] = turn + len(ids)
        insort(self._waiting, _GivenTokens(key, scoring, sequence, owner, turn), key=_turn_of)

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget sequences that have not been scored."""
        leaving = set(keys)
        self._waiting = [given for given in self._waiting if given.key not in leaving]
        self._let_go([one for one in self._active if one.key in leaving])

    @torch.no_grad()
    def step(self) -> list[tuple[Key, Scored]]:
        """One forward; what is scored to its end.

        An error leaves everything as it was before the call.  One that belongs to sequences alone
        names their keys (``IsobitError.samples``): without them the next step goes on.

        Raises:
            NonFiniteError: if the logits of a sequence hold a NaN or an infinity.
            OutOfMemoryError: if the device has not the memory.
        """
        if self._version != self._runner.version:
            self._begin_again()
        self._admit()
        budget, plan = self._tokens, list[tuple[_GivenTokens[Key], int]]()
        for given in self._active:
            count = min(budget, given.sequence.remaining)
            if count:
                plan.append((given, count))
            budget -= count
        if not plan:
            return []
        parts = by_adapter(plan, lambda one: one[0].scoring.adapter)
        with out_of_memory_named(self._policy.backend.memory):
            found = [pair for part in parts for pair in self._forward(part)]
        for given, (log_prob, rank, alternatives) in found:
            given.scored.log_probs.append(log_prob)
            given.scored.ranks.append(rank)
            given.scored.alternatives.append(alternatives)
        for given, count in plan:
            given.sequence.cached += count
            given.sequence.settle_carry(self._allocator, keeps=True)
        done = [given for given, _ in plan if not given.sequence.remaining]
        for given in done:
            given.sequence.is_sound = True
        self._let_go(done)
        return [(given.key, given.scored) for given in done]

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0].sequence
            pages = self._allocator.pages_for(sequence.length)
            if pages > self._allocator.num_free or not self._take_carries(sequence):
                break
            for _ in range(pages):
                sequence.add_page(self._allocator.allocate())
            self._active.append(given := self._waiting.pop(0))
            share = sequence.length // len(self._next_turns)
            self._turn = max(self._turn, given.turn) + share
        if pages := self._allocator.take_pages_to_clear():
            self._runner.clear_pages(pages)

    def _take_carries(self, sequence: CachedTokens) -> bool:
        """The carries that a sequence goes on with, one that is read and one that is written, if
        they are there; of a model without delta rules there are none to take.
        """
        pool = self._allocator.carries
        if pool.count:
            if pool.num_free < LEAST_CARRIES:
                return False
            sequence.carry, sequence.next_carry = (
                self._allocator.allocate_carry() for _ in range(LEAST_CARRIES)
            )
        return True

    def _begin_again(self) -> None:
        """Start over with newly published weights, under which the K and V so far are worthless."""
        self._version = self._runner.version
        for given in self._active:
            given.sequence.cached, given.scored = 0, Scored()
            given.sequence.drop_carries(self._allocator)
            self._take_carries(given.sequence)

    def _let_go(self, leaving: Iterable[_GivenTokens[Key]]) -> None:
        for given in leaving:
            self._active.remove(given)
            given.sequence.drop_pages(self._allocator)
        owners = {one.owner for one in (*self._active, *self._waiting)}
        self._next_turns = {owner: self._next_turns[owner] for owner in owners}

    def _forward(
        self, plan: list[tuple[_GivenTokens[Key], int]]
    ) -> "list[tuple[_GivenTokens[Key], _Row]]":
        """Sequences of one adapter -> what is found at each of their scored positions."""
        batch = build_batch(
            [(given.sequence, count) for given, count in plan], self._runner.page_tokens
        )
        hidden = self._runner.forward(batch).hidden
        owners, rows, targets = list[_GivenTokens[Key]](), list[int](), list[int]()
        row = 0
        for given, count in plan:
            begin = given.sequence.cached
            for position in range(begin, begin + count):
                if position + 1 >= given.scoring.first:
                    owners.append(given)
                    rows.append(row + position - begin)
                    targets.append(given.scoring.token_ids[position + 1])
            row += count
        found = list[_Row]()
        at_once = max(1, _LOGITS_AT_ONCE // self._policy.config.vocab_size)
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            found += self._rows(hidden, owners[some], rows[some], targets[some])
        return list(zip(owners, found, strict=True))

    def _rows(
        self,
        hidden: torch.Tensor,
        owners: list[_GivenTokens[Key]],
        rows: list[int],
        targets: list[int],
    ) -> "list[_Row]":
        to_device = self._policy.backend.to_device
        temperatures = torch.tensor(
            [given.scoring.temperature for given in owners], dtype=torch.float32
        )
        some = hidden.index_select(0, to_device(torch.tensor(rows)))
        logits = self._runner.logits(some)
        _check_finite(logits, to_device(temperatures), owners)
        log_probs = self._policy.backend.log_softmax(logits, to_device(temperatures))
        chosen = log_probs.gather(1, to_device(torch.tensor(targets))[:, None])
        ranks = (log_probs > chosen).sum(1) + 1
        most = min(max(given.scoring.alternatives for given in owners), log_probs.shape[1])
        values, tokens = log_probs.topk(most, dim=1)
        return [
            (
                log_prob,
                rank,
                Ranked.of(
                    sorted(zip(tokens, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[
                        : given.scoring.alternatives
                    ]
                ),
            )
            for given, log_prob, rank, tokens, values in zip(
                owners,
                chosen[:, 0].tolist(),
                ranks.tolist(),
                tokens.tolist(),
                values.tolist(),
                strict=True,
            )
        ]


def _check_finite(
    logits: torch.Tensor, temperatures: torch.Tensor, owners: Sequence[_GivenTokens[Key]]
) -> None:
    """Raises NonFiniteError, which names the sequences whose logits FP32 [N, V] are not finite."""
    finite = finite_rows(logits, temperatures).tolist()
    failed: dict[Key, IsobitError] = {}
    for given, is_finite in zip(owners, finite, strict=True):
        if not is_finite and given.key not in failed:
            adapter = given.scoring.adapter
            by = "" if adapter is None else f" with the adapter {adapter!r}"
            failed[given.key] = NonFiniteError(f"logits of a prompt{by} are NaN or infinite")
    if failed:
        first = next(iter(failed.values()))
        first.samples = failed
        raise first


_Row = tuple[float, int, Ranked]
