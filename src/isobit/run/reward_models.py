"""Reward models: parts of a run's reward that are models.

The prompt and each completion become a conversation of the reward model's own tokenizer and chat
template (``isobit.data.examples``), which gets a score.  The completion is its text, without the
token that ended it: the reward model's template ends the turn in its own way.  The prompt is as the
dataset has it, rendered by that template; messages for which the reward model has none are the text
that the policy read.

On a device with memory of its own the engine gives back its cache before a reward model scores, and
makes it again when it is next asked.  A run goes on with the reward models that it began with: a
checkpoint holds their digests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isobit.config.data import ChatConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.reward import RewardConfig
from isobit.data.examples import conversation_ids, row_of, whole_answer
from isobit.memory.activations import FrozenModel
from isobit.models.decoder import decoder_shape
from isobit.models.folder import model_folder, read_reward_config
from isobit.models.frozen import RewardModel, load_reward_model
from isobit.precision.flow import build_flow
from isobit.records.text import Completion, Prompt
from isobit.rewards.grading import ModelScores
from isobit.util.errors import CheckpointError

NAME = "reward models"
TOKENS_PER_BATCH = 16384
"""Tokens of a forward; no score depends on it."""


@dataclass(frozen=True, slots=True)
class ModelReward:
    """Grades completions by a reward model."""

    model: RewardModel
    tokens_per_batch: int = TOKENS_PER_BATCH
    chat: ChatConfig = field(default_factory=ChatConfig)

    def __call__(self, samples: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        """The score of each completion.  NaN for a conversation longer than the reward model's
        context, as where the model's own output is not finite: grading excludes both, and counts
        them.

        Raises DataError where the reward model's chat template refuses the messages, ModelError
        where its tokenizer is another model's.
        """
        tokenizer = self.model.tokenizer
        answers = [
            whole_answer(row_of(prompt, tokenizer), completion.text)
            for prompt, completion in samples
        ]
        ids = conversation_ids(answers, tokenizer, self.chat)
        fits = [index for index, tokens in enumerate(ids) if len(tokens) <= self.model.context]
        scores = [math.nan] * len(ids)
        fitting = self.model.score([ids[index] for index in fits], self.tokens_per_batch)
        for index, score in zip(fits, fitting, strict=True):
            scores[index] = score
        return scores


def load_model_reward(
    folder: Path,
    precision: PrecisionConfig,
    device: torch.device | str = "cpu",
    date: datetime | None = None,
) -> ModelReward:
    """The reward of a ``...ForSequenceClassification`` folder, in the given flow; ``date`` is for a
    chat template that reads the clock.  Raises as ``load_reward_model`` does.
    """
    return ModelReward(load_reward_model(folder, precision, device), chat=ChatConfig(date=date))


def reward_model_folders(reward: RewardConfig | None, weights: bool = True) -> dict[str, Path]:
    """The folder of each part of a reward that is a model, by the part's name; without ``weights``
    those of the hub are not fetched.
    """
    parts = {} if reward is None else reward.named()
    return {
        name: model_folder(part.model, weights)
        for name, part in parts.items()
        if part.model is not None
    }


def plan_reward_models(
    reward: RewardConfig | None, folders: Mapping[str, Path]
) -> tuple[FrozenModel, ...]:
    """The reward models in ``reward_model_folders`` as a plan of the memory knows them.  Raises
    ModelError for a folder that holds none.
    """
    return tuple(
        FrozenModel(
            NAME, shape, build_flow(precision, decoder_shape(shape)), "reward", reward.offload
        )
        for folder, precision in _models(reward, folders).values()
        if reward is not None and (shape := read_reward_config(folder))
    )


class ModelRewards:
    """All reward models of a recipe on their device (``isobit.store.training_run.Extra``)."""

    def __init__(
        self,
        reward: RewardConfig | None,
        folders: Mapping[str, Path],
        device: torch.device,
        date: datetime | None = None,
    ) -> None:
        """Load the models in ``reward_model_folders``; ``date`` is the run's.  Raises ModelError
        for a folder that holds none.
        """
        self._folders = folders
        self._models = {
            name: load_model_reward(folder, precision, device, date)
            for name, (folder, precision) in _models(reward, folders).items()
        }
        if reward is not None and reward.offload:
            for model in self._models.values():
                model.model.policy.offload()

    def __len__(self) -> int:
        return len(self._models)

    def scores(self, make_room: Callable[[], None]) -> ModelScores:
        """What scores the parts that are models; ``make_room`` is called before one does."""

        def scored(model: ModelReward, samples: Sequence[tuple[Prompt, Completion]]) -> list[float]:
            make_room()
            with model.model.policy.on_device():
                return model(samples)

        return {name: partial(scored, model) for name, model in self._models.items()}

    def state(self) -> dict[str, Any]:
        """The digest of each one's weights, as its back end publishes them."""
        return {
            name: {"back_end": frozen.backend.name, "sha256": frozen.digest()}
            for name, model in self._models.items()
            if (frozen := model.model.policy)
        }

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """No tensors: they are those of the folders."""
        return {}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the digests.  Raises CheckpointError where a folder no longer holds the weights
        that the run began with.
        """
        for name, now in self.state().items():
            recorded = state[name]
            if recorded["back_end"] == now["back_end"] and recorded != now:
                raise CheckpointError(
                    f"the weights in {self._folders[name]} are not those that this run was graded "
                    f"by: published they have the SHA-256 {now['sha256']}, and "
                    f"{recorded['sha256']} was recorded; put the folder's old files back, or start "
                    "a new run (--output PATH)"
                )


def _models(
    reward: RewardConfig | None, folders: Mapping[str, Path]
) -> dict[str, tuple[Path, PrecisionConfig]]:
    """The folder and the flow of each part that is a model, by its name."""
    parts = reward.named() if reward is not None and folders else {}
    return {
        name: (folder, PrecisionConfig.model_validate(parts[name].model_precision))
        for name, folder in folders.items()
    }
