"""``isobit eval --reward-model``: the scores that a reward model gives to the answers of a file,
one answer a row, or a pair of which one is preferred.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.config.commands import ScoringConfig
from isobit.config.data import ChatConfig, OneExampleSource
from isobit.data.examples import Answer, answer_of, conversation_ids
from isobit.data.sources import Row, load_rows
from isobit.kernels.backend import use_back_end
from isobit.models.folder import choose_device, model_folder, read_reward_config
from isobit.models.frozen import RewardModel, load_reward_model
from isobit.run.resolved import with_date
from isobit.util.errors import DataError, NonFiniteError

ROWS_AT_ONCE = 64
"""Scored before the next are tokenised, and handed on."""
_ADVICE = (
    "name it in data.completion, or the columns of two answers in data.chosen and data.rejected"
)


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """The score of a row's answer, or of its two answers where it is a pair."""

    row: int
    """Number of the row in the file, from 0."""
    score: float | None = None
    chosen: float | None = None
    rejected: float | None = None


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """A summary of the scores of a file."""

    rows: int
    mean: float
    """The mean of all scores."""
    lowest: float
    highest: float
    accuracy: float | None
    """The share of pairs whose chosen answer has the higher score; None without pairs."""
    margin: float | None
    """The mean of chosen - rejected; None without pairs."""


def score_rows(folder: Path, config: ScoringConfig) -> Iterator[ScoredRow]:
    """Score the rows of a file as they come, in their order; all are pairs where the first row has
    both of their columns.

    Raises ModelError for the folder, DataError for a row that cannot be used or is longer than the
    model's context, NonFiniteError for a score that is not finite.
    """
    rows = load_rows(config.data)
    folder = model_folder(folder)
    config = with_date(config, [folder])
    use_back_end(config.back_end)
    device = choose_device(config.device, read_reward_config(folder), config.precision)
    model = load_reward_model(folder, config.precision, device)
    columns = _columns(rows[0], config.data)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        answers = [(row, answer_of(row, column, _ADVICE)) for row in some for column in columns]
        ids = _fitting_ids(answers, model, config)
        scores = iter(model.score(ids, config.tokens_per_batch))
        for index, row in enumerate(some, start=first):
            yield ScoredRow(
                index, **{name: _finite(next(scores), row) for name in columns.values()}
            )


def summarise(scored: Sequence[ScoredRow]) -> ScoringResult:
    """The mean and the range of scores, and of pairs how they are ranked."""
    pairs = [
        (one.chosen, one.rejected)
        for one in scored
        if one.chosen is not None and one.rejected is not None
    ]
    scores = [one.score for one in scored if one.score is not None] + [*sum(pairs, ())]
    return ScoringResult(
        rows=len(scored),
        mean=math.fsum(scores) / len(scores),
        lowest=min(scores),
        highest=max(scores),
        accuracy=sum(a > b for a, b in pairs) / len(pairs) if pairs else None,
        margin=math.fsum(a - b for a, b in pairs) / len(pairs) if pairs else None,
    )


def describe_scores(result: ScoringResult) -> str:
    """A summary as one line."""
    scores = (
        f"mean score {result.mean:.4f}, from {result.lowest:.4f} to {result.highest:.4f}, on "
        f"{result.rows} {'rows' if result.accuracy is None else 'pairs'}"
    )
    if result.accuracy is None or result.margin is None:
        return scores
    return f"{100 * result.accuracy:.1f}% ranked right, margin {result.margin:.4f}, {scores}"


def _columns(first: Row, source: OneExampleSource) -> dict[str, str]:
    """The columns of answers, with the name that the score of each has."""
    if source.chosen in first.columns and source.rejected in first.columns:
        return {source.chosen: "chosen", source.rejected: "rejected"}
    return {source.completion: "score"}


def _fitting_ids(
    answers: Sequence[tuple[Row, Answer]], model: RewardModel, chat: ChatConfig
) -> list[tuple[int, ...]]:
    found = conversation_ids(answers, model.tokenizer, chat)
    for (row, _), ids in zip(answers, found, strict=True):
        if len(ids) > model.context:
            raise DataError(
                f"{row.place}: prompt and answer have {len(ids)} tokens, more than the reward "
                f"model's context = {model.context}: shorten or drop the row"
            )
    return found


def _finite(score: float, row: Row) -> float:
    if not math.isfinite(score):
        raise NonFiniteError(f"{row.place}: the reward model's score is {score}")
    return score
