"""The table ``training``: steps, batches and the optimiser."""

from typing import Literal

from pydantic import Field

from isobit.config.base import MAX_BATCH, MAX_COUNT, MAX_FACTOR, MAX_PROCESSES, MAX_STEPS, Strict

Recompute = Literal["none", "mlp", "full"]
OldLogProbs = Literal["auto", "recorded", "recomputed"]
Moments = Literal["fp32", "bf16", "fp8"]
"""Formats of AdamW's moments, from the largest to the smallest."""


class OptimisationConfig(Strict):
    """Steps, batches and the optimiser, for every kind of training."""

    steps: int = Field(default=20, gt=0, le=MAX_STEPS)
    """Steps of the whole run; ``data.epochs`` sets them instead."""
    prompts_per_step: int = Field(default=16, gt=0, le=MAX_BATCH)
    """Prompts of a step's batch."""
    tokens_per_microbatch: int = Field(default=4096, gt=0, le=MAX_COUNT)
    """Most tokens of one forward and backward; lower it if memory runs out."""
    slots: int = Field(default=1, gt=0, le=MAX_PROCESSES)
    """Partial sums of an update's gradient: micro-batch i goes to sum i mod ``slots``. On several
    hosts set it to their number or a multiple, so that gradients cross the network once for each
    sum. The bits of a run depend on it; more than one take 4 bytes a parameter on each host.
    """
    learning_rate: float = Field(default=1e-6, gt=0, le=MAX_FACTOR)
    """AdamW's learning rate after the warmup."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warmup; linear and cosine fall to ``min_learning_rate`` after the
    last update.
    """
    min_learning_rate: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """The learning rate at which the schedules linear and cosine end."""
    warmup_updates: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Updates over which the learning rate rises linearly."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """The same as a share of all updates of the run, rounded up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    moments: Moments = "fp32"
    """Format of AdamW's moments: 8, 4 or 2 bytes a parameter for both, to save memory. ``bf16`` and
    ``fp8`` are rounded stochastically, and ``fp8`` has one scale for 128 elements.
    """
    offload_moments: bool = False
    """Keep AdamW's moments in host memory during generation, to free memory for the KV cache."""
    recompute: Recompute = "none"
    """What the backward recomputes to save memory: nothing, the MLPs, or whole layers."""
    router_balance: float = Field(default=0.001, ge=0, le=MAX_FACTOR)
    """Coefficient of the load-balancing loss of a mixture of experts, in each layer; 0 is off. The
    default is Qwen3-MoE's ``router_aux_loss_coef``, a tenth of what is usual in pre-training.
    """
    router_z: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Coefficient of the router's z-loss, in each layer: the mean over tokens of the squared
    log-sum-exp of its logits, which keeps them small.
    """
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e30)
    """Gradients with a larger norm are scaled down to it."""
    max_skipped_updates: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Skipped updates in a row (loss or gradient norm not finite) before the run stops."""


class TrainingConfig(OptimisationConfig):
    samples_per_prompt: int = Field(default=16, gt=0, le=MAX_BATCH)
    """Completions of each prompt, which form a group. 1 is for ``reinforce_pp``, ``ppo`` and
    ``remax``, which do not compare them with each other.
    """
    updates_per_batch: int = Field(default=1, gt=0, le=MAX_BATCH)
    """Divide a step's batch by prompt into this many parts, with one update each."""
    epochs: int = Field(default=1, gt=0, le=1000)
    """Passes over a step's batch."""
    rate_by_ess: bool = False
    """Multiply the learning rate of each update by the square root of the effective share of its
    sequences (VCPO, arXiv 2602.17616), so that stale samples move the weights less.
    """
    shared_prefix: bool = False
    """Compute the prompt of a group once in each micro-batch, forward and backward, rather than
    once for each completion. Log-probabilities have the same bits; gradients are added up in
    another order.
    """
    without_signal: Literal["skip", "take"] = "skip"
    """What becomes of an update in which every group has zero variance: skip leaves weights and
    moments unchanged; take applies AdamW's momentum and weight decay.
    """
    old_log_probs: OldLogProbs = "auto"
    """The denominator of the loss's ratio: recorded while sampling; recomputed by the trainer
    before the step's first update, with ``corrections`` for the difference; auto takes recorded in
    an exact flow and recomputed otherwise.
    """
