"""The table ``training``: steps, batches and the optimiser.

Two numbers set the batch: prompts a step (``prompts_per_step``) and tokens a micro-batch
(``tokens_per_microbatch``).
"""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_BATCH, MAX_COUNT, MAX_FACTOR, MAX_PROCESSES, MAX_STEPS

Recompute = Literal["none", "mlp", "full"]
OldLogProbs = Literal["auto", "recorded", "recomputed"]
Moments = Literal["fp32", "bf16", "fp8"]
"""Formats of AdamW's moments, from the largest to the smallest."""


class OptimisationConfig(Strict):
    """Steps, batches and the optimiser: what every kind of training has."""

    steps: int = Field(default=20, gt=0, le=MAX_STEPS)
    prompts_per_step: int = Field(default=16, gt=0, le=MAX_BATCH)
    tokens_per_microbatch: int = Field(default=4096, gt=0, le=MAX_COUNT)
    slots: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """Sums in which an update's gradient is added up: micro-batch i goes to sum i mod ``slots``,
    and then the sums are added in their order.  On several hosts set it to their number, or a
    multiple: each computes sums of its own, and gradients cross the network once for each of them
    rather than once a micro-batch.  The bits of a run depend on it, and not on hosts or processes.
    More than one take 4 more bytes a parameter, shared out among the processes of a host.
    """
    learning_rate: float = Field(default=1e-6, gt=0, le=MAX_FACTOR)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate behind the warmup: it stays, falls along a line, or as half a cosine;
    the last two would reach 0 right after the last update.
    """
    warmup_updates: int = Field(default=0, ge=0, le=MAX_COUNT)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    moments: Moments = "fp32"
    """Format of AdamW's moments: 8, 4 or 2 bytes a parameter for the two, for a policy that fills
    the memory.  The smaller ones are rounded stochastically; ``fp8`` has a scale for 128 elements,
    and elements far below their group's largest move less than in the others.
    """
    offload_moments: bool = False
    """Keep AdamW's moments in host memory while the engine generates, which leaves a GPU more
    memory for the KV cache; a CPU ignores it.
    """
    recompute: Recompute = "none"
    """What the backward computes again, to the same bits, instead of keeping it: nothing, the MLP
    of each layer, or all of each layer.
    """
    router_balance: float = Field(default=0.001, ge=0, le=MAX_FACTOR)
    """Coefficient of the load-balancing loss of a mixture of experts, in each layer: the mean over
    sequences of what is 1 where all experts are chosen equally often.  0 switches it off.  The
    default is what Qwen3-MoE was published with (``router_aux_loss_coef``), a tenth of what models
    are pre-trained with: it keeps experts in use, and hardly moves a router that is balanced.
    """
    router_z: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Coefficient of the router's z-loss, in each layer: the mean over tokens of the squared
    log-sum-exp of its logits.  It keeps logits small, which a router in low precision needs; this
    one computes in FP32.
    """
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e30)
    max_skipped_updates: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Stop after that many updates in a row were skipped because loss or gradient norm was
    not finite.
    """


class TrainingConfig(OptimisationConfig):
    """How the policy learns from its own completions."""

    samples_per_prompt: int = Field(default=16, gt=1, le=MAX_BATCH)
    updates_per_batch: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Cut a step's batch by prompt into that many parts, one update each."""
    epochs: int = Field(default=1, gt=0, le=1000)
    """Go over a step's batch that often."""
    without_signal: Literal["skip", "take"] = "skip"
    """An update that has nothing to learn from, since all rewards of each of its prompts are equal:
    left out, so that weights and moments stay as they are; or taken, by AdamW's momentum and weight
    decay alone.
    """
    old_log_probs: OldLogProbs = "auto"
    """Which log-probabilities the loss's ratio is taken to: those recorded while sampling; those of
    the trainer's forward before its first update of a step, with ``corrections`` for the distance
    between the two; or by default the recorded ones in an exact flow and the trainer's elsewhere.
    """
