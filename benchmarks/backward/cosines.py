"""Gradients of the ``fp8`` flow, matrix by matrix, against the exact backward of the same forward
bits and against plain FP32.
"""

from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from benchmarks.backward.deep_model import Size, batch_of, text, trained_policy
from benchmarks.backward.exact import Alone, cosine, cosines, exact_backward
from benchmarks.backward.plain import plain_gradients
from isobit.kernels.backend import backend_of
from isobit.kernels.operands import LinearWeight
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass
from isobit.precision.flow import Site
from isobit.records.batch import PackedBatch

SMALLEST, MEAN, ALONE = 0.995, 0.998, 0.9985
"""The bars: every matrix, their mean, and one linear alone."""
TINY = 1e-12
"""The root mean square of all gradients where they are small."""
WORST = 10

Gradients = dict[str, torch.Tensor]


def compare(size: Size, device: str) -> dict[str, Any]:
    """Everything, as it goes to a file."""
    policy, losses = trained_policy(size, device)
    batch = batch_of(size, size.steps)
    log_probs, ours = gradients(policy, batch)
    with exact_backward(policy) as alone:
        exact_log_probs, exact = gradients(policy, batch)
    factor = TINY / root_mean_square(exact)
    _, tiny = gradients(policy, batch, factor)
    with exact_backward(policy) as alone_tiny:
        _, tiny_exact = gradients(policy, batch, factor)
    assert torch.equal(log_probs, exact_log_probs), "both have one forward"
    fp32_loss, fp32 = plain_gradients(policy, text(size, size.steps).to(device))
    found = {
        "size": asdict(size),
        "losses": {
            "first": losses[0],
            "last": losses[-1],
            "of_the_batch": -float(log_probs.mean()),
            "of_the_batch_in_fp32": fp32_loss,
        },
        "exact": summary(ours, exact),
        "tiny": {"root_mean_square": root_mean_square(tiny_exact), **summary(tiny, tiny_exact)},
        "fp32": summary(ours, fp32),
        "alone": {
            "in_the_model": smallest(alone),
            "in_the_model_tiny": smallest(alone_tiny),
            "random": random_linear(device, 1.0),
            "random_tiny": random_linear(device, TINY),
        },
    }
    return found | {"bars": bars(found)}


def bars(found: dict[str, Any]) -> dict[str, bool]:
    """Which of the bars are met."""
    every, mean = f"every matrix at least {SMALLEST}", f"mean at least {MEAN}"
    alone = [value for pair in found["alone"].values() for value in pair.values()]
    return {
        every: found["exact"]["smallest"] >= SMALLEST,
        mean: found["exact"]["mean"] >= MEAN,
        f"{every}, gradients of {TINY:g}": found["tiny"]["smallest"] >= SMALLEST,
        f"{mean}, gradients of {TINY:g}": found["tiny"]["mean"] >= MEAN,
        f"one linear alone at least {ALONE}": min(alone) >= ALONE,
    }


def smallest(alone: Alone) -> dict[str, float]:
    """Over the linears of a model, each alone."""
    return {"dx": min(dx for dx, _ in alone.values()), "dw": min(dw for _, dw in alone.values())}


def gradients(
    policy: Policy, batch: PackedBatch, factor: float = 1.0
) -> tuple[torch.Tensor, Gradients]:
    """Log-probabilities of the targets, and the gradients of ``factor`` times the mean of their
    negatives, by master.
    """
    scored = ScoredPass(policy, batch, "none")
    log_probs = scored.forward().log_probs
    scored.backward(torch.full_like(log_probs, -factor / log_probs.numel()))
    return log_probs, take_gradients(policy)


def take_gradients(policy: Policy) -> Gradients:
    """By master, which have none afterwards."""
    found = {
        name: master.grad for name, master in policy.masters.items() if master.grad is not None
    }
    for master in policy.parameters():
        master.grad = None
    assert found.keys() == policy.masters.keys()
    return found


def summary(ours: Gradients, others: Gradients) -> dict[str, Any]:
    """Cosines of the matrices: the smallest, the mean and the worst ten."""
    found = {
        name: cosine(gradient, others[name])
        for name, gradient in ours.items()
        if gradient.ndim == 2
    }
    worst = sorted(found, key=lambda name: found[name])[:WORST]
    return {
        "matrices": len(found),
        "smallest": found[worst[0]],
        "mean": fmean(found.values()),
        "worst": {name: found[name] for name in worst},
    }


def root_mean_square(found: Gradients) -> float:
    """Over all elements of all gradients."""
    squares = sum(float(gradient.double().square().sum()) for gradient in found.values())
    return (squares / sum(gradient.numel() for gradient in found.values())) ** 0.5


def random_linear(device: str, size: float) -> dict[str, float]:
    """A linear by itself, 512 x 1536 over 4,096 tokens: normal operands, the rows of dY of
    different sizes around ``size``.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    backend = backend_of(torch.device(device))
    site = Site("alone", "linear", "e4m3", dgrad="e4m3", wgrad="e4m3")
    weight = LinearWeight(site, backend.publish(site, (normal(512, 1536) * 0.02).to(device)))
    dy, x = normal(4096, 512) * normal(4096, 1).exp() * size, normal(4096, 1536)
    operands = dy.bfloat16().to(device), x.bfloat16().to(device)
    dx_cosine, dw_cosine = cosines(*operands, weight, backend)
    return {"dx": dx_cosine, "dw": dw_cosine}
