"""The reference model of a recipe: whether there is one, what it takes, and how it is made.

What a checkpoint holds of the reference model: a frozen model that may follow the policy.

    refresh_if_due   every ``refresh_every`` steps it takes the policy's weights as they are then
                     (the reset of ProRL, arXiv 2505.24864)

Once it has, a checkpoint holds its tensors.  Until then they are a function of a folder, and the
checkpoint holds their digest, which a resumed run has to find again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from isobit.config.recipes import RunConfig
from isobit.kernels.backend import support
from isobit.memory.activations import FrozenModel
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.folder import DescribedModel, describe_model, model_folder
from isobit.models.frozen import FrozenPolicy, without_value_head
from isobit.models.policy import Policy
from isobit.precision.flow import build_flow
from isobit.util.errors import CheckpointError, ConfigError


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


_NAME = "reference model"


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
    shape = without_value_head(policy.config)
    if folder != policy.folder:
        shape = _described(config, describe_model(folder), policy, longest)
    flow = build_flow(config.precision, decoder_shape(shape))
    return FrozenModel(_NAME, shape, flow, "reference", config.reference.offload)


def load_reference(config: RunConfig, policy: Policy) -> Reference | None:
    """The reference model of a policy that has just been loaded, on its device; None where there
    is none.  Raises ModelError as ``load_policy`` does.
    """
    folder = reference_folder(config)
    if folder is None:
        return None
    if folder == model_folder(config.model):
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
    shape = without_value_head(policy)
    flow = build_flow(config.precision, decoder_shape(shape))
    # published bytes are as many on every device but in fp32, which is the CPU's alone
    return FrozenModel(_NAME, shape, flow, "reference").checkpoint_bytes(support("cpu").sizes)


def _described(
    config: RunConfig, model: DescribedModel, policy: DescribedModel, longest: int
) -> ModelConfig:
    """The shape of another model than the policy's own, which has to fit."""
    name, shape, wanted = config.reference.model, model.config, without_value_head(policy.config)
    if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"reference.model is {name!r}, whose tokenizer has other tokens than the policy's: it "
            "cannot score what the policy writes; name a model with the same tokenizer"
        )
    if shape.max_positions < longest:
        raise ConfigError(
            f"reference.model is {name!r}, whose context is {shape.max_positions:,} tokens, but "
            f"sequences have up to {longest:,}; lower rollout.max_new_tokens, or name another model"
        )
    if config.reference.refresh_every and shape != wanted:
        raise ConfigError(
            f"reference.refresh_every is {config.reference.refresh_every}, but reference.model is "
            f"{name!r}, which has not the policy's shape and cannot take its weights; leave "
            "refresh_every out, or name a model of the same shape"
        )
    return shape
