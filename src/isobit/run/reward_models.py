"""A reward model as a part of a run's reward: the prompt and each completion become a conversation
of the reward model's own tokenizer and chat template (``isobit.data.conversations``), which gets a
score.

The completion is its text, without the token that ended it: the reward model's template ends the
turn in its own way.  The prompt is as the dataset has it, rendered by that template; messages for
which the reward model has none are the text that the policy read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.config.precision import PrecisionConfig
from isobit.data.conversations import conversation_ids, row_of
from isobit.models.reward_model import RewardModel, load_reward_model
from isobit.records.text import Completion, Prompt

TOKENS_PER_BATCH = 16384
"""Of a forward; no score depends on it."""


@dataclass(frozen=True, slots=True)
class ModelReward:
    """Grades completions by a reward model."""

    model: RewardModel
    tokens_per_batch: int = TOKENS_PER_BATCH

    def __call__(self, samples: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        """The score of each completion.  NaN for a conversation longer than the reward model's
        context, as where the model's own output is not finite: grading excludes both, and counts
        them.

        Raises DataError where the reward model's chat template refuses the messages, ModelError
        where its tokenizer is another model's.
        """
        tokenizer = self.model.tokenizer
        ids = [
            conversation_ids(row_of(prompt, tokenizer), completion.text, tokenizer)
            for prompt, completion in samples
        ]
        fits = [index for index, tokens in enumerate(ids) if len(tokens) <= self.model.context]
        scores = [math.nan] * len(ids)
        found = self.model.score([ids[index] for index in fits], self.tokens_per_batch)
        for index, score in zip(fits, found, strict=True):
            scores[index] = score
        return scores


def load_model_reward(
    folder: Path, precision: PrecisionConfig, device: torch.device | str = "cpu"
) -> ModelReward:
    """The reward of a ``...ForSequenceClassification`` folder, in the given flow.  Raises as
    ``load_reward_model`` does.
    """
    return ModelReward(load_reward_model(folder, precision, device))
