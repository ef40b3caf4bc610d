"""Rows become pairs of preferences: a prompt with the answer that was chosen and the one that was
rejected, each as a conversation that a reward model reads (``isobit.data.conversations``).
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from isobit.config.examples import ExampleSource, SftDataConfig
from isobit.data.conversations import conversation_ids
from isobit.data.examples import answer_of, length_problem
from isobit.data.prompts import TooLong, prompts_of_rows
from isobit.data.sources import Row, load_rows
from isobit.errors import DataError
from isobit.records.text import Prompt

_ADVICE = "a pair has a prompt and two answers: name their columns in `chosen` and `rejected`"


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, and the tokens of the whole conversation with either answer."""

    prompt: Prompt
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def learnt(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is learnt."""
        return self.chosen_ids, self.rejected_ids

    @property
    def tokens(self) -> int:
        """Of both conversations, which are always scored together."""
        return len(self.chosen_ids) + len(self.rejected_ids)


def build_pairs(
    name: str,
    source: ExampleSource,
    tokenizer: PreTrainedTokenizerBase,
    config: SftDataConfig,
    context_tokens: int,
    too_long: TooLong | None = None,
) -> list[Pair]:
    """The pairs of ``source``, with ids ``name/0``, ``name/1``, ... in the order of its rows.

    Raises ``DataError`` as ``load_rows`` does, and for an answer that is missing or no text, for
    two answers that are the same, and, as ``too_long`` says, for a conversation that is longer than
    ``config.max_tokens`` or the model's context.
    """
    too_long = too_long or TooLong(config.too_long)
    rows = load_rows(source)
    prompts = prompts_of_rows(name, rows, tokenizer, config.chat)
    answers = [(row, answer) for row in rows for answer in _answers(row, source)]
    ids = conversation_ids(answers, tokenizer, config.chat)
    pairs = []
    for prompt, row, chosen, rejected in zip(prompts, rows, ids[::2], ids[1::2], strict=True):
        longest = max(len(chosen), len(rejected))
        problem = length_problem(longest, config, context_tokens)
        if problem is None or too_long.keeps(
            f"{row.place}: prompt and answer have {longest} tokens, {problem} the row "
            "(data.too_long = 'drop' drops all of them)"
        ):
            pairs.append(Pair(prompt, chosen, rejected))
    too_long.check_left(name, pairs)
    return pairs


def _answers(row: Row, source: ExampleSource) -> tuple[str, str]:
    """The one that was chosen, then the other."""
    chosen, rejected = (answer_of(row, key, _ADVICE) for key in (source.chosen, source.rejected))
    if chosen == rejected:
        raise DataError(
            f"{row.place}: {source.chosen!r} and {source.rejected!r} are the same, so neither can "
            "be preferred; leave the row out"
        )
    return chosen, rejected
