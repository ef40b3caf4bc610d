"""AdamW on noisy quadratics whose gradients fall tenfold midway, where their minimum moves too:
what the format of the moments does.

    loss = mean over 512 parameters of c (w - minimum)^2    c from 0.3 to 3
    grad = c (w - minimum) + noise,                         times 0.1 from step 1,501 on, of 3,000

A second moment that cannot decay keeps the size of the first half's gradients, and all later steps
are ten times too short.
"""

import torch

from isobit.config.tables import Moments, TrainingConfig
from isobit.kernels.backend import backend_of
from isobit.kernels.spec.optimiser import decode_second
from isobit.training.optimiser import build_optimiser

STEPS = 3000
SIZE = 512
LAST = 200
"""Steps whose mean loss is a run's final one."""
LEARNING_RATE = 1e-2


def descend(
    moments: Moments, beta2: float, seed: int, learning_rate: float = LEARNING_RATE
) -> tuple[float, float]:
    """-> the mean loss of the last 200 steps, and the mean of v after the last."""
    config = TrainingConfig(learning_rate=learning_rate, beta2=beta2, moments=moments)
    curvature = torch.logspace(-0.5, 0.5, SIZE)
    minimum = _normal(seed)
    master = torch.nn.Parameter(minimum + 0.5)
    optimiser = build_optimiser({"master": master}, config, backend_of(master.device), seed)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        if step == STEPS // 2 + 1:
            minimum = minimum - 0.5
        distance = master.detach() - minimum
        slope = curvature * distance
        losses.append(float((slope * distance).mean()))
        master.grad = (1.0 if step <= STEPS // 2 else 0.1) * (
            slope + _normal((seed + 1) * 100_000 + step)
        )
        optimiser.step()
    state = optimiser.state[master]
    second = (
        decode_second(state["exp_avg_sq"], state["exp_avg_sq_scale"])
        if moments == "fp8"
        else state["exp_avg_sq"]
    )
    return sum(losses[-LAST:]) / LAST, float(second.float().mean())


def _normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
