"""One sequence from sampling to the loss: tokens, and all that is known of each.

    token_ids          prompt | answer            | what a tool said | answer ...
    loss_mask          False  | True              | False            | True
    log_probs          0      | as recorded       | 0                | as recorded
    weights_versions   GIVEN  | 7 7 7 8 8         | GIVEN            | 8 8
    advantages         0      | as judged         | 0                | as judged

Every column has an entry for every token, so that masking tokens, moving an unfinished sample to
newer weights, another turn, or an advantage for each token changes entries, never the container.

``COLUMNS`` declares the columns once.  Whatever sends, stores, digests or packs sequences reads
that table, so a new column is a row and a field here (and a field of ``PackedBatch`` if a loss
reads it), the code that writes it, and the code that reads it.

Columns are read-only arrays: 17 bytes a token as it was
sampled, where tuples would take some 90, and a step with millions of tokens takes and joins them
without looking at each.  Nothing here imports torch; rewards and data import this file.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers: TypeAlias = NDArray[np.float32]
"""FP32: log-probabilities and all else that a loss reads."""
Integers: TypeAlias = NDArray[np.int32]
"""Token ids, and versions of weights."""
Digests: TypeAlias = NDArray[np.int64]
Entry = TypeVar("Entry", bound=np.generic)

GIVEN = -1
"""The weights version of a token that no policy drew: of a prompt, a tool, a data set."""


@dataclass(frozen=True, slots=True)
class Column:
    """A row of ``COLUMNS``: one column of a ``TokenSequence`` beside its tokens and loss mask."""

    name: str
    """The field of ``TokenSequence``."""
    dtype: type[np.generic]
    writer: Literal["rollout", "environment", "judge"]
    """``rollout`` records it as it draws, an entry for each token drawn; ``environment`` gives it
    to an episode; ``judge`` adds it before a step learns from the sequence
    (``isobit.training.advantage_estimator``).
    """
    sent: bool
    """Whether it goes to other ranks, and into the checkpoint of a batch that waits for its step
    (``isobit.records.wire``).
    """
    replayed: bool
    """Whether the replay buffer and its checkpoint keep it.  What is recorded and not replayed may
    be missing from some sequences of a batch, which is packed as the fill then.
    """
    packed: str | None
    """The field of ``PackedBatch`` with the entries of the responses; None where no loss reads
    them.
    """
    fill: int = 0
    """The entry of tokens outside the response."""
    optional: bool = True
    """Whether a sequence may be without it: None."""
    stand_in: str | None = None
    """The column that is packed instead where a sequence is without this one."""


# fmt: off
COLUMNS = (
    #      name                   dtype       writer     sent   replayed packed
    Column("log_probs",           np.float32, "rollout", True,  True,  "recorded_log_probs",
           optional=False),
    Column("weights_versions",    np.int32,   "rollout", True,  True,  None,
           fill=GIVEN, optional=False),
    Column("truncated_log_probs", np.float32, "rollout", True,  False, None),
    Column("routings",            np.int64,   "rollout", True,  False, "recorded_routings"),
    Column("turn_rewards",        np.float64, "environment", True, True, None),
    Column("advantages",          np.float32, "judge",   False, False, "advantages",
           optional=False),
    Column("old_log_probs",       np.float32, "judge",   False, False, "old_log_probs",
           stand_in="log_probs"),
    Column("old_routings",        np.int64,   "judge",   False, False, None),
    Column("reference_log_probs", np.float32, "judge",   False, False, "reference_log_probs"),
    Column("teacher_log_probs",   np.float32, "judge",   False, False, None),
    Column("kl_penalties",        np.float32, "judge",   False, False, None),
    Column("values",              np.float32, "judge",   False, False, "values"),
    Column("returns",             np.float32, "judge",   False, False, "returns"),
    Column("importance",          np.float32, "judge",   False, False, "importance"),
)
# fmt: on
"""The columns; the fields of ``TokenSequence`` say what each means."""
COLUMN = {column.name: column for column in COLUMNS}
"""The rows of ``COLUMNS`` by name."""
RECORDED = tuple(column.name for column in COLUMNS if column.writer == "rollout")
"""The columns that sampling fills."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """L tokens and L entries of each column.

    The *response* is the tokens in the loss mask.  The first token is never among them: nothing
    predicts it.  Entries of a column at other tokens mean nothing and are the column's fill.
    """

    token_ids: Integers
    loss_mask: NDArray[np.bool_]
    """Whether a token is learnt from."""
    log_probs: Numbers
    """log-softmax(logits / temperature) over the full vocabulary, recorded at the draw."""
    weights_versions: Integers
    """The version of the weights that each token was drawn from, or ``GIVEN``."""
    advantages: Numbers
    """Zeros until the sequence has been judged."""
    temperature: float = 1.0
    """The temperature of the log-probabilities: above 0, and 1 where decoding was greedy."""
    truncated_log_probs: Numbers | None = None
    """Log-probabilities under the truncated distribution; None without top-k, top-p or min-p."""
    routings: Digests | None = None
    """Digests of the experts at the row that each token was drawn from, recorded at the draw
    (``isobit.models.layers``); None where a model without experts drew.
    """
    turn_rewards: NDArray[np.float64] | None = None
    """The environment's reward of each turn, at the turn's last token: NaN where the environment
    failed, and 0 at all other tokens; None where it rewards no turns.
    """
    old_log_probs: Numbers | None = None
    """Log-probabilities of the trainer's forward before it learnt from the sequence; None where the
    recorded ones are those of the same function.
    """
    old_routings: Digests | None = None
    """Digests of that forward's experts; None as for ``old_log_probs``, or without experts."""
    reference_log_probs: Numbers | None = None
    """Log-probabilities of the reference model; None without one."""
    teacher_log_probs: Numbers | None = None
    """Log-probabilities that a teacher gives the sampled tokens; None without one."""
    kl_penalties: Numbers | None = None
    """The KL coefficient times the estimated divergence from the reference, taken from the reward
    token by token; None where no penalty is in the reward.
    """
    values: Numbers | None = None
    """The value head's values of the state before each token, before it learnt from the sequence.
    """
    returns: Numbers | None = None
    """The targets of the value head."""
    importance: Numbers | None = None
    """The weights of the corrections; None is 1 everywhere."""
    fresh: bool = True
    """Whether a step begins to learn from the sequence with the weights that drew it; False for
    what is replayed, or was sampled ahead.
    """
    drawn: int | None = None
    """The number of tokens drawn for it, as its engine counted them, whatever the mask says
    (``isobit.training.token_count``); None where none was counted.
    """

    def __post_init__(self) -> None:
        for name, dtype, column in self._arrays():
            assert column.shape == self.token_ids.shape, "one entry a token"
            assert column.dtype == dtype, f"{name} has entries of {dtype.__name__}"
            column.flags.writeable = False
        assert not self.loss_mask[:1].any(), "no row would predict the first token"

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        if not isinstance(other, TokenSequence):
            return NotImplemented
        ours = {name: array.tobytes() for name, _, array in self._arrays()}
        theirs = {name: array.tobytes() for name, _, array in other._arrays()}
        same = (self.temperature, self.fresh) == (other.temperature, other.fresh)
        return same and ours == theirs

    def __hash__(self) -> int:
        return hash((self.token_ids.tobytes(), self.log_probs.tobytes()))

    @classmethod
    def of_answer(
        cls,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        weights_versions: Sequence[int] | None = None,
        temperature: float = 1.0,
        given: Sequence[tuple[int, int]] = (),
        drawn: int | None = None,
        **more: Sequence[float] | None,
    ) -> Self:
        """A prompt and one answer to learn from, with an entry for each token of the answer in the
        columns that are given; ``more`` are optional ones by name.  Without ``weights_versions``
        the answer comes from a data set.  Tokens of the whole sequence from ``given[i][0]`` up to
        ``given[i][1]`` are no part of the answer: tools have said them.
        """
        mask = np.arange(len(prompt_ids) + len(answer_ids)) >= len(prompt_ids)
        for begin, end in given:
            mask[begin:end] = False
        entries: dict[str, Any] = {
            "log_probs": log_probs or 0.0,
            "weights_versions": weights_versions or GIVEN,
            "advantages": 0.0,
            **more,
        }
        return cls(
            np.array((*prompt_ids, *answer_ids), np.int32),
            mask,
            temperature=temperature,
            drawn=drawn,
            **_spread_all(entries, mask),
        )

    @property
    def length(self) -> int:
        """All its tokens, L."""
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """The tokens in the loss mask."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def ratio_log_probs(self) -> Numbers:
        """The log-probabilities that the loss's ratio is taken to: the old ones, or the recorded
        ones, which stand in for them.
        """
        return self.log_probs if self.old_log_probs is None else self.old_log_probs

    @property
    def num_bytes(self) -> int:
        """Bytes of its tokens, its mask and its columns."""
        return sum(array.nbytes for *_, array in self._arrays())

    def of_response(self, column: NDArray[Entry]) -> NDArray[Entry]:
        """The entries of ``column``, which has one for each token, that belong to the response; a
        copy.
        """
        return column[self.loss_mask]

    @property
    def turn_lengths(self) -> list[int]:
        """The tokens of each turn: of each run of tokens in the loss mask."""
        edges = np.flatnonzero(np.diff(self.loss_mask, prepend=False, append=False))
        return np.diff(edges)[::2].tolist()

    @property
    def turn_ends(self) -> NDArray[np.int64]:
        """The place of each turn's last token among all response tokens; none where none was
        drawn.
        """
        return np.cumsum(self.turn_lengths, dtype=np.int64) - 1

    @property
    def rewards_of_turns(self) -> tuple[float | None, ...] | None:
        """``turn_rewards`` as one number for each turn: None where the environment failed, and 0
        for the last turn, which calls no tool.
        """
        if self.turn_rewards is None:
            return None
        rewards = self.of_response(self.turn_rewards)[self.turn_ends].tolist()
        return tuple(None if math.isnan(reward) else reward for reward in rewards)

    def with_turn_rewards(self, rewards: Sequence[float | None]) -> Self:
        """The sequence with ``turn_rewards`` of its first turns, of which None has failed; the
        others have 0.
        """
        entries = np.zeros(self.response_length)
        numbers = [math.nan if reward is None else reward for reward in rewards]
        entries[self.turn_ends[: len(rewards)]] = numbers
        return self.with_columns(turn_rewards=entries)

    def given_from(self, first: int) -> list[tuple[int, int]]:
        """Begin and end of each run of tokens outside of the loss mask, from ``first`` on."""
        outside = ~self.loss_mask[first:]
        edges = np.flatnonzero(np.diff(outside, prepend=False, append=False)) + first
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def first(self, count: int) -> Self:
        """The first so many tokens."""
        columns = {column.name: getattr(self, column.name) for column in COLUMNS}
        return replace(
            self,
            token_ids=self.token_ids[:count],
            loss_mask=self.loss_mask[:count],
            **{name: None if one is None else one[:count] for name, one in columns.items()},
        )

    def with_given(self, token_ids: Sequence[int]) -> Self:
        """The sequence followed by tokens that no policy drew."""
        count, columns = len(token_ids), dict[str, Any]()
        for column in COLUMNS:
            array = getattr(self, column.name)
            if array is not None:
                columns[column.name] = np.append(array, np.full(count, column.fill, column.dtype))
        return replace(
            self,
            token_ids=np.append(self.token_ids, np.asarray(token_ids, np.int32)),
            loss_mask=np.append(self.loss_mask, np.zeros(count, np.bool_)),
            **columns,
        )

    def with_columns(self, **entries: ArrayLike | None) -> Self:
        """The sequence with these columns, by name: from one entry for all tokens of the response,
        or one for each in their order; None takes a column away.
        """
        return replace(self, **_spread_all(entries, self.loss_mask))

    def spread(self, values: ArrayLike) -> Numbers:
        """An FP32 column as ``with_columns`` makes it."""
        return _spread(values, np.float32, 0, self.loss_mask)

    def _arrays(self) -> Iterable[tuple[str, type[np.generic], np.ndarray]]:
        """Name, dtype and entries of all that the sequence has."""
        yield "token_ids", np.int32, self.token_ids
        yield "loss_mask", np.bool_, self.loss_mask
        for column in COLUMNS:
            array = getattr(self, column.name)
            if array is not None:
                yield column.name, column.dtype, array


def _spread_all(entries: Mapping[str, Any], mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Whole columns from entries of the response, by name."""
    return {
        name: None
        if values is None
        else _spread(values, COLUMN[name].dtype, COLUMN[name].fill, mask)
        for name, values in entries.items()
    }


def _spread(
    values: ArrayLike, dtype: type[Entry], fill: int, mask: NDArray[np.bool_]
) -> NDArray[Entry]:
    entries, column = np.asarray(values, dtype), np.full(len(mask), fill, dtype)
    count = int(np.count_nonzero(mask))
    assert entries.shape in ((), (count,)), "one entry a token of the response, or one for all"
    column[mask] = entries
    return column
