"""One sequence from sampling to the loss: tokens, and beside each of them all that is known of it.

    token_ids          prompt | answer            | what a tool said | answer ...
    loss_mask          False  | True              | False            | True
    log_probs          0      | as recorded       | 0                | as recorded
    weights_versions   GIVEN  | 7 7 7 8 8         | GIVEN            | 8 8
    routings           0      | as recorded       | 0                | as recorded

Every column has an entry for every token, so that masking tokens, moving a half-done sample to
newer weights, another turn, or an advantage for each token changes entries, never the container.
Sampling fills the columns above, the judgement of a step the others.

Columns are arrays that nobody writes to, made read-only here: 17 bytes a token as it was sampled,
where tuples would have some 90, and a step with millions of tokens takes and joins them without
looking at each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias, TypeVar

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


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """L tokens and L entries of each column.

    The *response* is the tokens in the loss mask.  The first token is never among them: nothing
    predicts it.  Entries of a column of numbers at other tokens mean nothing and are 0.
    """

    token_ids: Integers
    loss_mask: NDArray[np.bool_]
    """Whether a token is learnt from."""
    log_probs: Numbers
    """log-softmax(logits / temperature) over the full vocabulary, recorded at the draw."""
    weights_versions: Integers
    """Of the weights each token was drawn from, or ``GIVEN``."""
    advantages: Numbers
    """Zeros until the sequence has been judged."""
    temperature: float = 1.0
    """Of the log-probabilities: above 0, and 1 where decoding was greedy."""
    truncated_log_probs: Numbers | None = None
    """Under the truncated distribution; None without top-k, top-p or min-p."""
    routings: Digests | None = None
    """Digests of the experts at the row that each token was drawn from, recorded at the draw
    (``isobit.models.layers``); None where a model without experts drew.
    """
    old_log_probs: Numbers | None = None
    """By the trainer's forward before it learnt from the sequence; None where the recorded ones are
    those of the same function.
    """
    old_routings: Digests | None = None
    """Digests of that forward's experts; None as for ``old_log_probs``, or without experts."""
    reference_log_probs: Numbers | None = None
    """By the reference model; None without one."""
    values: Numbers | None = None
    """By the value head, of the state before each token, before it learnt from the sequence."""
    returns: Numbers | None = None
    """What the value head is to learn."""
    importance: Numbers | None = None
    """The weights of the corrections; None is 1 everywhere."""
    fresh: bool = True
    """Whether the weights that drew it are those that a step begins to learn from it with; of what
    is replayed, or was sampled ahead, they are not.
    """

    def __post_init__(self) -> None:
        for name, column in self._columns():
            assert column.shape == self.token_ids.shape, "one entry a token"
            assert column.dtype == _TYPES[name], f"{name} has entries of {_TYPES[name].__name__}"
            column.flags.writeable = False
        assert not self.loss_mask[:1].any(), "no row would predict the first token"

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        if not isinstance(other, TokenSequence):
            return NotImplemented
        ours, theirs = dict(self._columns()), dict(other._columns())
        same = (self.temperature, self.fresh) == (other.temperature, other.fresh)
        return (
            same
            and ours.keys() == theirs.keys()
            and all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
        )

    def __hash__(self) -> int:
        """Of what is equal the same."""
        return hash((self.token_ids.tobytes(), self.log_probs.tobytes()))

    @classmethod
    def of_answer(
        cls,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        log_probs: Sequence[float] | None = None,
        weights_versions: Sequence[int] | None = None,
        temperature: float = 1.0,
        truncated_log_probs: Sequence[float] | None = None,
        routings: Sequence[int] | None = None,
    ) -> Self:
        """A prompt and one answer to learn from, with an entry for each token of the answer in what
        is given of it; without ``weights_versions`` the answer comes from a data set.
        """
        given = len(prompt_ids)
        length = given + len(answer_ids)

        def column(values: Sequence[float], dtype: type[Entry], elsewhere: int) -> NDArray[Entry]:
            assert len(values) == len(answer_ids), "one entry a token"
            made = np.full(length, elsewhere, dtype)
            made[given:] = values
            return made

        def numbers(values: Sequence[float] | None) -> Numbers | None:
            return None if values is None else column(values, np.float32, 0)

        mask = np.zeros(length, np.bool_)
        mask[given:] = True
        return cls(
            token_ids=np.array((*prompt_ids, *answer_ids), np.int32),
            loss_mask=mask,
            log_probs=column(log_probs or [0.0] * len(answer_ids), np.float32, 0),
            weights_versions=column(weights_versions or [GIVEN] * len(answer_ids), np.int32, GIVEN),
            advantages=np.zeros(length, np.float32),
            temperature=temperature,
            truncated_log_probs=numbers(truncated_log_probs),
            routings=None if routings is None else column(routings, np.int64, 0),
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
        """What the loss's ratio is taken to: the old log-probabilities, or the recorded ones, which
        stand in for them.
        """
        return self.log_probs if self.old_log_probs is None else self.old_log_probs

    @property
    def num_bytes(self) -> int:
        """Of its columns."""
        return sum(column.nbytes for _, column in self._columns())

    def of_response(self, column: NDArray[Entry]) -> NDArray[Entry]:
        """The entries of ``column``, which has one for each token, that belong to the response; a
        copy.
        """
        return column[self.loss_mask]

    def spread(self, values: ArrayLike) -> Numbers:
        """A column from one value for each token of the response, in their order; 0 elsewhere."""
        return self._spread(values, np.float32)

    def spread_digests(self, values: ArrayLike) -> Digests:
        """``spread`` of digests."""
        return self._spread(values, np.int64)

    def with_advantages(self, advantages: float | Sequence[float]) -> Self:
        """The sequence with the same advantage at every token of its response, or with one each."""
        if isinstance(advantages, Sequence):
            return replace(self, advantages=self.spread(advantages))
        same = np.where(self.loss_mask, np.float32(advantages), np.float32(0.0))
        return replace(self, advantages=same)

    def _spread(self, values: ArrayLike, dtype: type[Entry]) -> NDArray[Entry]:
        given, column = np.asarray(values, dtype), np.zeros(self.length, dtype)
        assert given.shape == (self.response_length,), "one value a token of the response"
        column[self.loss_mask] = given
        return column

    def _columns(self) -> Iterable[tuple[str, np.ndarray]]:
        """Those that it has, by name."""
        found = ((name, getattr(self, name)) for name in _TYPES)
        return [(name, column) for name, column in found if column is not None]


_TYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "log_probs": np.float32,
    "weights_versions": np.int32,
    "advantages": np.float32,
    "truncated_log_probs": np.float32,
    "routings": np.int64,
    "old_log_probs": np.float32,
    "old_routings": np.int64,
    "reference_log_probs": np.float32,
    "values": np.float32,
    "returns": np.float32,
    "importance": np.float32,
}
"""Of each column."""
