"""AdamW over the FP32 masters, the clip of the gradient's norm, and the learning rate of each update.

AdamW is torch's (decoupled weight decay, arXiv 1711.05101), in its fused form: the fastest on a CPU as well, and it repeats its bits.
Only matrices decay: norms and biases have no scale to be held down.
"""

import math
from collections.abc import Iterable

import torch

from isobit.config.schema import TrainingConfig


def learning_rate(update: int, config: TrainingConfig, total_updates: int) -> float:
    """The learning rate of update 0, 1, .. ``total_updates`` - 1.

    It rises linearly over ``warmup_steps`` updates, never from 0, and has its full value at the update after them.  From there it
    is constant, or falls as half a cosine that would reach 0 at ``total_updates``.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return config.learning_rate * (update + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimiser(masters: Iterable[torch.nn.Parameter], config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over the masters; the trainer sets the learning rate before each step."""
    masters = list(masters)
    matrices = [master for master in masters if master.dim() >= 2]
    vectors = [master for master in masters if master.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    """The same learning rate for every parameter group."""
    for group in optimiser.param_groups:
        group["lr"] = value


def gradient_norm(masters: Iterable[torch.nn.Parameter]) -> float:
    """The 2-norm of all gradients together, before clipping."""
    gradients = [master.grad for master in masters if master.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def clip_gradients(masters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients down together so that their norm, given as ``norm``, becomes at most ``max_norm``."""
    torch.nn.utils.clip_grads_with_norm_(masters, max_norm, torch.tensor(norm))
