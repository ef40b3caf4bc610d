"""The reference model of a run: what a KL penalty holds the policy to.

Without a folder of its own it is the policy as the run began, byte for byte; until the first update
the policy's own log-probabilities stand in for it (``isobit.training.judge``).
"""

from dataclasses import replace

from isobit.config.run import RunConfig
from isobit.errors import ModelError
from isobit.memory.frozen import FrozenModel
from isobit.models.config import ModelConfig
from isobit.models.frozen import FrozenPolicy
from isobit.models.loaded import DescribedModel, LoadedModel, describe_model, model_folder
from isobit.precision.flow import build_flow

NAME = "reference model"


def plan_reference(
    config: RunConfig, policy: DescribedModel, longest: int
) -> tuple[FrozenModel, ...]:
    """What a plan of the memory knows of it, for sequences of at most ``longest`` tokens; nothing
    for a run without one.

    Raises ModelError for a folder that cannot be one, naming what does not fit.
    """
    if config.algorithm.kl_coefficient == 0:
        return ()
    shape = replace(policy.config, value_head=False)
    if config.reference.model is not None:
        shape = _described(config.reference.model, policy, longest)
    flow = build_flow(config.precision, shape.shape)
    return (FrozenModel(NAME, shape, flow, "reference", config.reference.offload),)


def _described(named: str, policy: DescribedModel, longest: int) -> ModelConfig:
    reference = describe_model(named)
    if reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"reference.model is {named!r}, whose tokenizer is not the policy's: it cannot score "
            "the policy's tokens; name a model of the same tokenizer, or leave it out"
        )
    if reference.config.max_positions < longest:
        raise ModelError(
            f"reference.model is {named!r}, whose context is {reference.config.max_positions:,} "
            f"tokens, and sequences of this run have up to {longest:,}: lower "
            "rollout.max_new_tokens, or name a model with a longer context"
        )
    return reference.config


def load_reference(config: RunConfig, model: LoadedModel) -> FrozenPolicy | None:
    """The frozen weights, beside a policy that has not learnt yet; None for a run without one."""
    if config.algorithm.kl_coefficient == 0:
        return None
    policy, named = model.policy, config.reference.model
    if named is None:
        reference = FrozenPolicy.of(policy)
    else:
        reference = FrozenPolicy.load(model_folder(named), config.precision, policy.device)
    if config.reference.offload:
        reference.offload()
    return reference
