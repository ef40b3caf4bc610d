"""The table ``teacher``: a frozen model to distil from."""

from typing import Literal

from pydantic import Field

from isobit.config.algorithm import KlDirection
from isobit.config.base import MAX_FACTOR, HomeName, Strict
from isobit.config.model_shape import MAX_VOCAB_SIZE


class FrozenTeacher(Strict):
    """A frozen model that is learnt from (docs/distillation.md)."""

    model: HomeName | None = None
    """A folder or name of the hub with the policy's tokenizer; by default the run's own ``model``,
    as it is before the run.
    """
    precision: Literal["bf16", "fp8", "int8", "fp32"] = "bf16"
    """The flow that it computes in."""
    top_k: int = Field(default=0, ge=0, le=MAX_VOCAB_SIZE)
    """How many of the teacher's likeliest tokens a divergence over the vocabulary counts one by
    one, all others together as one; 0 is the whole vocabulary.
    """


class SftTeacher(FrozenTeacher):
    """The teacher of `isobit sft` with the objective ``distil``."""

    kl: KlDirection = "forward"
    """The divergence of each completion token: forward is KL(teacher, policy), as in
    quantisation-aware distillation (arXiv 2601.20088); reverse is KL(policy, teacher).
    """


class RunTeacher(FrozenTeacher):
    """On-policy distillation: the teacher of `isobit train`, on what the policy samples."""

    kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """sampled: log p(policy) - log p(teacher) of each sampled token is subtracted from its
    advantage. reverse is KL(policy, teacher) over the vocabulary as a term of the loss (arXiv
    2306.08543), forward KL(teacher, policy) (arXiv 2306.13649).
    """
    coefficient: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Weight of the teacher beside the rewards."""
    only: bool = False
    """Learn from the teacher alone: rewards are graded and logged, and have no part in advantages.
    """
