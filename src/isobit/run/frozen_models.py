"""The models of a run that score tokens and are not trained: its reference model and its teacher.

What a checkpoint holds of the reference model, which may follow the policy:

    refresh_if_due   every ``refresh_every`` steps it takes the policy's weights as they are then
                     (the reset of ProRL, arXiv 2505.24864)

Once it has, a checkpoint holds its tensors.  Until then they are a function of a folder, and the
checkpoint holds their digest, which a resumed run has to find again.

A teacher never changes, and its checkpoints hold its digest alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import Recipe, RunConfig, SftConfig
from isobit.config.teacher import RunTeacher, SftTeacher
from isobit.kernels.backend import support
from isobit.memory.activations import FrozenModel
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.folder import DescribedModel, base_folder, describe_model, model_folder
from isobit.models.frozen import FrozenPolicy, frozen_config
from isobit.models.policy import Policy
from isobit.models.teacher import Teacher
from isobit.precision.flow import build_flow
from isobit.util.errors import CheckpointError, ConfigError

REFERENCE = "reference model"


class Reference:
    """The reference model of one policy (``isobit.store.training_run.Extra``)."""

    def __init__(
        self, frozen: FrozenPolicy, policy: Policy, folder: str, refresh_every: int = 0
    ) -> None:
        """``folder`` is where its weights come from; 0 steps is never."""
        self.frozen = frozen
        self.refreshes = 0
        """How often it has taken the policy's weights."""
        self._policy = policy
        self._folder = folder
        self._every = refresh_every

    def refresh_if_due(self, step: int) -> bool:
        """Take the policy's weights if it is time after ``step`` steps, before anything of the last
        one is recorded.  Returns whether it was.
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
        digest = self.frozen.digest()
        if digest != recorded:
            raise CheckpointError(
                f"the weights in {self._folder} are not those that this run was held to: published "
                f"they have the SHA-256 {digest}, and {recorded} was recorded; put the folder's "
                "old files back, or start a new run (--output PATH)"
            )


def reference_folder(config: RunConfig, policy: Path, weights: bool = True) -> Path | None:
    """The folder of the reference model's weights, by default that of the ``policy``; None where
    there is no reference model.
    """
    if config.algorithm.kl_coefficient == 0:
        return None
    return policy if (name := config.reference.model) is None else model_folder(name, weights)


def describe_reference(
    config: RunConfig, policy: DescribedModel, longest: int, weights: bool = True
) -> FrozenModel | None:
    """The reference model as a plan of the memory knows it, for a policy that learns from sequences
    of up to ``longest`` tokens; None where there is none. Without ``weights`` those of a model of
    the hub are not fetched.

    Raises ModelError for its folder, ConfigError for a model that the policy cannot be held to.
    """
    folder = reference_folder(config, policy.folder, weights)
    if folder is None:
        return None
    shape, own = frozen_config(policy.config), base_folder(policy.folder, weights)
    if base_folder(folder, weights) != own:
        shape = _described_reference(config, describe_model(folder), policy, longest)
    flow, offload = build_flow(config.precision, decoder_shape(shape)), config.reference.offload
    shared = policy.config.lora is not None and base_folder(folder, weights) == own
    return FrozenModel(REFERENCE, shape, flow, "reference", offload, shared=shared)


def load_reference(config: RunConfig, policy: Policy, policy_folder: Path) -> Reference | None:
    """The reference model of a policy that has just been loaded from its folder, on its device;
    None where there is none.  Raises ModelError as ``load_policy`` does.
    """
    folder = reference_folder(config, policy_folder)
    if folder is None:
        return None
    if base_folder(folder) == base_folder(policy_folder):
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
    name = config.reference.model
    shape = model.config
    wanted = frozen_config(policy.config)
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


class TeacherModel(Reference):
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
    model = describe_model(_teacher_folder(table, policy.folder, weights))
    if model.config.lora is not None:
        raise ConfigError(
            f"teacher.model is {name!r}, the folder of adapters, which a teacher does not read; "
            "merge it (isobit export RUN --to FOLDER --merge), and name that folder"
        )
    _check_tokens("teacher.model", name, model, policy, longest)
    flow = build_flow(PrecisionConfig(preset=table.precision), decoder_shape(model.config))
    teaches = table.kl != "sampled"
    return (FrozenModel("teacher", model.config, flow, "teacher", teaches=teaches),)


def _teacher_folder(table: SftTeacher | RunTeacher, policy: Path, weights: bool = True) -> Path:
    return policy if table.model is None else model_folder(table.model, weights)


def load_teacher(config: Recipe, policy: Policy, policy_folder: Path) -> TeacherModel | None:
    """The teacher of a policy that has just been loaded from its folder, on its device; None
    without one.  Raises ModelError as ``load_policy`` does.
    """
    if (table := teacher_table(config)) is None:
        return None
    folder = _teacher_folder(table, policy_folder)
    frozen = FrozenPolicy.load(folder, PrecisionConfig(preset=table.precision), policy.device)
    return TeacherModel(frozen, policy, str(folder), table)
