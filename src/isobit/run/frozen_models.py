"""The models of a run that are not trained: its reference model, its teacher and its reward models.

What a checkpoint holds of the reference model, which may follow the policy:

    refresh_if_due   every ``refresh_every`` steps it takes the policy's weights as they are then
                     (the reset of ProRL, arXiv 2505.24864)

Once it has, a checkpoint holds its tensors.  Until then they are a function of a folder, and the
checkpoint holds their digest, which a resumed run has to find again.

A teacher never changes, and its checkpoints hold its digest alone.

Reward models are parts of a run's reward: the prompt and each completion become a conversation
of the reward model's own tokenizer and chat template (``isobit.data.examples``), which gets a
score.

The completion is its text, without the token that ended it: the reward model's template ends the
turn in its own way.  The prompt is as the dataset has it, rendered by that template; messages for
which the reward model has none are the text that the policy read.

On a device with memory of its own the engine gives back its cache before a reward model scores, and
makes it again when it is next asked.  A run goes on with the reward models that it began with: a
checkpoint holds their digests.

``isobit eval --reward-model``: the scores that a reward model gives to the answers of a file,
one answer a row or a pair of which one is preferred.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isobit.config.commands import ScoringConfig
from isobit.config.data import ChatConfig, OneExampleSource
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import Recipe, RunConfig, SftConfig
from isobit.config.reward import RewardConfig
from isobit.config.teacher import RunTeacher, SftTeacher
from isobit.data.examples import Answer, answer_of, conversation_ids, row_of, whole_answer
from isobit.data.sources import Row, load_rows
from isobit.kernels.backend import support
from isobit.memory.activations import FrozenModel
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.folder import (
    DescribedModel,
    base_folder,
    choose_device,
    describe_model,
    model_folder,
    read_reward_config,
)
from isobit.models.frozen import FrozenPolicy, RewardModel, frozen_config, load_reward_model
from isobit.models.policy import Policy
from isobit.models.scorer import Teacher
from isobit.precision.flow import build_flow
from isobit.records.text import Completion, Prompt
from isobit.rewards.grading import ModelScores
from isobit.run.data import with_date
from isobit.util.errors import CheckpointError, ConfigError, DataError, NonFiniteError

NAME = "reward models"
REFERENCE = "reference model"
TOKENS_PER_BATCH = 16384
"""Of a forward; no score depends on it."""


class Reference:
    """The reference model of one policy (``isobit.store.manifest.Extra``)."""

    def __init__(
        self, frozen: FrozenPolicy, policy: Policy, folder: str, refresh_every: int = 0
    ) -> None:
        """``folder`` is where its weights come from; 0 steps is never."""
        self.frozen = frozen
        self.refreshes = 0
        """How often it has taken the policy's weights."""
        self._policy, self._folder, self._every = policy, folder, refresh_every

    def refresh_if_due(self, step: int) -> bool:
        """After ``step`` steps, before anything of the step is recorded: take the policy's weights,
        if it is time; -> whether it was.
        """
        if not self._every or step % self._every:
            return False
        self.frozen.take(self._policy)
        self.refreshes += 1
        return True

    def state(self) -> dict[str, Any]:
        """How often it was refreshed, and before the first time the digest of its weights."""
        if self.refreshes:
            return {"refreshes": self.refreshes}
        back_end = self.frozen.backend.name
        return {"refreshes": 0, "back_end": back_end, "sha256": self.frozen.digest()}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Its weights, once they are not those of the folder."""
        return self.frozen.tensors() if self.refreshes else {}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Be what it was.  Raises CheckpointError where the folder no longer holds the weights that
        the run began with, and for tensors of another model.
        """
        if state["refreshes"]:
            self.frozen.restore(tensors)
        elif state["back_end"] == self.frozen.backend.name:  # others publish other bytes of BF16
            self._check(state["sha256"])
        self.refreshes = state["refreshes"]

    def _check(self, recorded: str) -> None:
        found = self.frozen.digest()
        if found != recorded:
            raise CheckpointError(
                f"the weights in {self._folder} are not those that this run was held to: published "
                f"they have the SHA-256 {found}, and {recorded} was recorded; put the folder's old "
                "files back, or start a new run (--output PATH)"
            )


def reference_folder(config: RunConfig, weights: bool = True) -> Path | None:
    """Where its weights are; None where there is no reference model."""
    if config.algorithm.kl_coefficient == 0:
        return None
    return model_folder(config.reference.model or config.model, weights)


def describe_reference(
    config: RunConfig, policy: DescribedModel, longest: int, weights: bool = True
) -> FrozenModel | None:
    """The reference model as a plan of the memory knows it, for a policy that learns from sequences
    of up to ``longest`` tokens; None where there is none. Without ``weights`` those of a model of
    the hub are not fetched.

    Raises ModelError for its folder, ConfigError for a model that the policy cannot be held to.
    """
    folder = reference_folder(config, weights)
    if folder is None:
        return None
    shape, own = frozen_config(policy.config), base_folder(policy.folder, weights)
    if base_folder(folder, weights) != own:
        shape = _described_reference(config, describe_model(folder), policy, longest)
    flow, offload = build_flow(config.precision, decoder_shape(shape)), config.reference.offload
    shared = policy.config.lora is not None and base_folder(folder, weights) == own
    return FrozenModel(REFERENCE, shape, flow, "reference", offload, shared=shared)


def load_reference(config: RunConfig, policy: Policy) -> Reference | None:
    """The reference model of a policy that has just been loaded, on its device; None where there
    is none.  Raises ModelError as ``load_policy`` does.
    """
    folder = reference_folder(config)
    if folder is None:
        return None
    if base_folder(folder) == base_folder(model_folder(config.model)):
        frozen = FrozenPolicy.of(policy)
    else:
        frozen = FrozenPolicy.load(folder, config.precision, policy.device)
    if config.reference.offload:
        frozen.offload()
    return Reference(frozen, policy, str(folder), config.reference.refresh_every)


def checkpoint_bytes(config: RunConfig, policy: ModelConfig) -> int:
    """What it takes of a checkpoint at most: nothing where it is never refreshed."""
    if config.algorithm.kl_coefficient == 0 or not config.reference.refresh_every:
        return 0
    shape = frozen_config(policy)
    flow = build_flow(config.precision, decoder_shape(shape))
    # published bytes are as many on every device but in fp32, which is the CPU's alone
    return FrozenModel(REFERENCE, shape, flow, "reference").checkpoint_bytes(support("cpu").sizes)


def _described_reference(
    config: RunConfig, model: DescribedModel, policy: DescribedModel, longest: int
) -> ModelConfig:
    """The shape of another model than the policy's own, which has to fit."""
    name, shape, wanted = config.reference.model, model.config, frozen_config(policy.config)
    _check_tokens("reference.model", str(name), model, policy, longest)
    if config.reference.refresh_every and shape != wanted:
        raise ConfigError(
            f"reference.refresh_every is {config.reference.refresh_every}, but reference.model is "
            f"{name!r}, which has not the policy's shape and cannot take its weights; leave "
            "refresh_every out, or name a model of the same shape"
        )
    return shape


def _check_tokens(
    key: str, name: str, model: DescribedModel, policy: DescribedModel, longest: int
) -> None:
    """Refuse a model that cannot score sequences of a policy of up to ``longest`` tokens."""
    context = model.config.max_positions
    if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"{key} is {name!r}, whose tokenizer has other tokens than the policy's: it "
            "cannot score what the policy writes; name a model with the same tokenizer"
        )
    if context < longest:
        raise ConfigError(
            f"{key} is {name!r}, whose context is {context:,} tokens, but sequences have up to "
            f"{longest:,}; make them shorter (rollout.max_new_tokens, data.max_tokens), or name "
            "another model"
        )


class TaughtBy(Reference):
    """The teacher of a policy, and the divergence from it over the vocabulary; None where the
    sampled tokens alone are scored.
    """

    def __init__(
        self, frozen: FrozenPolicy, policy: Policy, folder: str, config: SftTeacher | RunTeacher
    ) -> None:
        super().__init__(frozen, policy, folder)
        kl = config.kl
        self.divergence = None if kl == "sampled" else Teacher(frozen, kl, config.top_k)


def teacher_table(config: Recipe) -> SftTeacher | RunTeacher | None:
    """What a recipe says of its teacher; None where it has none."""
    if isinstance(config, SftConfig):
        return (config.teacher or SftTeacher()) if config.objective == "distil" else None
    return config.teacher


def describe_teacher(
    config: Recipe, policy: DescribedModel, longest: int, weights: bool = True
) -> tuple[FrozenModel, ...]:
    """The teacher, if there is one, as ``describe_reference`` describes and refuses models."""
    if (table := teacher_table(config)) is None:
        return ()
    name = table.model or config.model
    model = describe_model(model_folder(name, weights))
    if model.config.lora is not None:
        raise ConfigError(
            f"teacher.model is {name!r}, the folder of adapters, which a teacher does not read; "
            "merge it (isobit export RUN --to FOLDER --merge), and name that folder"
        )
    _check_tokens("teacher.model", name, model, policy, longest)
    flow = build_flow(PrecisionConfig(preset=table.precision), decoder_shape(model.config))
    teaches = table.kl != "sampled"
    return (FrozenModel("teacher", model.config, flow, "teacher", teaches=teaches),)


def load_teacher(config: Recipe, policy: Policy) -> TaughtBy | None:
    """On the policy's device; None without one.  Raises ModelError as ``load_policy`` does."""
    if (table := teacher_table(config)) is None:
        return None
    folder = model_folder(table.model or config.model)
    frozen = FrozenPolicy.load(folder, PrecisionConfig(preset=table.precision), policy.device)
    return TaughtBy(frozen, policy, str(folder), table)


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
        found = self.model.score([ids[index] for index in fits], self.tokens_per_batch)
        for index, score in zip(fits, found, strict=True):
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


def plan_reward_models(
    reward: RewardConfig | None, weights: bool = True
) -> tuple[FrozenModel, ...]:
    """The reward models of a recipe as a plan of the memory knows them; without ``weights`` those
    of the hub are not fetched.  Raises ModelError for a folder that holds none.
    """
    return tuple(
        FrozenModel(
            NAME, shape, build_flow(precision, decoder_shape(shape)), "reward", reward.offload
        )
        for _, folder, precision in _models(reward, weights)
        if reward is not None and (shape := read_reward_config(folder))
    )


class ModelRewards:
    """All reward models of a recipe on their device (``isobit.store.manifest.Extra``)."""

    def __init__(
        self, reward: RewardConfig | None, device: torch.device, date: datetime | None = None
    ) -> None:
        """Load them; ``date`` is the run's.  Raises ModelError for a folder that holds none."""
        self._folders = {name: folder for name, folder, _ in _models(reward)}
        self._models = {
            name: load_model_reward(folder, precision, device, date)
            for name, folder, precision in _models(reward)
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
        """None: they are those of the folders."""
        return {}

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises CheckpointError where a folder no longer holds the weights that the run began
        with.
        """
        for name, found in self.state().items():
            recorded = state[name]
            if recorded["back_end"] == found["back_end"] and recorded != found:
                raise CheckpointError(
                    f"the weights in {self._folders[name]} are not those that this run was graded "
                    f"by: published they have the SHA-256 {found['sha256']}, and "
                    f"{recorded['sha256']} was recorded; put the folder's old files back, or start "
                    "a new run (--output PATH)"
                )


def _models(
    reward: RewardConfig | None, weights: bool = True
) -> list[tuple[str, Path, PrecisionConfig]]:
    """Name, folder and flow of each part that is a model."""
    parts = {} if reward is None else reward.named()
    return [
        (name, model_folder(part.model, weights), PrecisionConfig(preset=part.model_precision))
        for name, part in parts.items()
        if part.model is not None
    ]


ROWS_AT_ONCE = 64
"""Scored before the next are tokenised, and handed on."""
_ADVICE = (
    "name it in data.completion, or the columns of two answers in data.chosen and data.rejected"
)


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """What a row's answer got; or its two answers, where it is a pair."""

    row: int
    """From 0, in the order of the file."""
    score: float | None = None
    chosen: float | None = None
    rejected: float | None = None


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """The scores of a file in short."""

    rows: int
    mean: float
    """Of all scores."""
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


def describe(result: ScoringResult) -> str:
    """One line."""
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
