"""One sequence from sampling to the loss: tokens, and beside each of them all that is known of it.

    token_ids          prompt | answer            | what a tool said | answer ...
    loss_mask          False  | True              | False            | True
    log_probs          0      | as recorded       | 0                | as recorded
    weights_versions   GIVEN  | 7 7 7 8 8         | GIVEN            | 8 8
    routings           0      | as recorded       | 0                | as recorded

Every column has an entry for every token, so that masking tokens, moving a half-done sample to
newer weights, another turn, or an advantage for each token changes entries, never the container.
Sampling fills the columns above, the judgement of a step the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Self, TypeVar

T = TypeVar("T")

GIVEN = -1
"""The weights version of a token that no policy drew: of a prompt, a tool, a data set."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """L tokens and L entries of each column.

    The *response* is the tokens in the loss mask.  The first token is never among them: nothing
    predicts it.  Entries of a column of numbers at other tokens mean nothing and are 0.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """Whether a token is learnt from."""
    log_probs: tuple[float, ...]
    """FP32 log-softmax(logits / temperature) over the full vocabulary, recorded at the draw."""
    weights_versions: tuple[int, ...]
    """Of the weights each token was drawn from, or ``GIVEN``."""
    advantages: tuple[float, ...]
    """Zeros until the sequence has been judged."""
    temperature: float = 1.0
    """Of the log-probabilities: above 0, and 1 where decoding was greedy."""
    truncated_log_probs: tuple[float, ...] | None = None
    """Under the truncated distribution; None without top-k, top-p or min-p."""
    routings: tuple[int, ...] | None = None
    """Digests of the experts at the row that each token was drawn from, recorded at the draw
    (``isobit.models.routes``); None where a model without experts drew.
    """
    old_log_probs: tuple[float, ...] | None = None
    """By the trainer's forward before it learnt from the sequence; None where the recorded ones are
    those of the same function.
    """
    old_routings: tuple[int, ...] | None = None
    """Digests of that forward's experts; None as for ``old_log_probs``, or without experts."""
    reference_log_probs: tuple[float, ...] | None = None
    """By the reference model; None without one."""
    values: tuple[float, ...] | None = None
    """By the value head, of the state before each token, before it learnt from the sequence."""
    returns: tuple[float, ...] | None = None
    """What the value head is to learn."""
    importance: tuple[float, ...] | None = None
    """The weights of the corrections; None is 1 everywhere."""
    fresh: bool = True
    """Whether the weights that drew it are those that a step begins to learn from it with; of what
    is replayed, or was sampled ahead, they are not.
    """

    def __post_init__(self) -> None:
        optional = (
            self.truncated_log_probs,
            self.routings,
            self.old_log_probs,
            self.old_routings,
            self.reference_log_probs,
            self.values,
            self.returns,
            self.importance,
        )
        columns = (
            self.loss_mask,
            self.log_probs,
            self.weights_versions,
            self.advantages,
            *(column for column in optional if column is not None),
        )
        assert all(len(column) == len(self.token_ids) for column in columns), "one entry a token"
        assert not any(self.loss_mask[:1]), "no row would predict the first token"

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
        return cls(
            token_ids=(*prompt_ids, *answer_ids),
            loss_mask=(False,) * given + (True,) * len(answer_ids),
            log_probs=(0.0,) * given + tuple(log_probs or (0.0,) * len(answer_ids)),
            weights_versions=(GIVEN,) * given
            + tuple(weights_versions or (GIVEN,) * len(answer_ids)),
            advantages=(0.0,) * (given + len(answer_ids)),
            temperature=temperature,
            truncated_log_probs=None
            if truncated_log_probs is None
            else (0.0,) * given + tuple(truncated_log_probs),
            routings=None if routings is None else (0,) * given + tuple(routings),
        )

    @property
    def length(self) -> int:
        """All its tokens, L."""
        return len(self.token_ids)

    @property
    def ratio_log_probs(self) -> tuple[float, ...]:
        """What the loss's ratio is taken to: the old log-probabilities, or the recorded ones, which
        stand in for them.
        """
        return self.log_probs if self.old_log_probs is None else self.old_log_probs

    @property
    def response_ids(self) -> tuple[int, ...]:
        """The tokens in the loss mask."""
        return self.of_response(self.token_ids)

    def of_response(self, column: Iterable[T]) -> tuple[T, ...]:
        """The entries of ``column``, which has one for each token, that belong to the response."""
        return tuple(compress(column, self.loss_mask))

    def spread(self, values: Iterable[float]) -> tuple[float, ...]:
        """A column from one value for each token of the response, in their order; 0 elsewhere."""
        return self._spread(values, 0.0)

    def spread_integers(self, values: Iterable[int]) -> tuple[int, ...]:
        """``spread`` of whole numbers."""
        return self._spread(values, 0)

    def with_advantages(self, advantages: float | Sequence[float]) -> Self:
        """The sequence with the same advantage at every token of its response, or with one each."""
        if isinstance(advantages, Sequence):
            return replace(self, advantages=self.spread(advantages))
        same = tuple([advantages if learnt else 0.0 for learnt in self.loss_mask])
        return replace(self, advantages=same)

    def _spread(self, values: Iterable[T], elsewhere: T) -> tuple[T, ...]:
        given = tuple(values)
        assert len(given) == sum(self.loss_mask), "one value a token of the response"
        following = iter(given)
        return tuple([next(following) if learnt else elsewhere for learnt in self.loss_mask])
