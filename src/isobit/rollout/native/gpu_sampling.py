"""Drawing on a GPU: what the kernels need of each sample, and the choice between the fused draw and
the one with filters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.hopper.sampling import sample_tokens, sample_truncated
from isobit.kernels.hopper.transfer import to_device
from isobit.rollout.native.sequence import Sample


@dataclass(frozen=True, slots=True)
class DrawnOnGpu:
    """A token int64 [N] for each sample with its log-probability FP32 [N]; and under the truncated
    distribution where any has a filter.
    """

    samples: Sequence[Sample]
    tokens: Tensor
    log_probs: Tensor
    truncated: Tensor | None = None


def truncates(samples: Sequence[Sample]) -> bool:
    """Whether any sample has a filter."""
    return any(sample.prompt.request.sampling.truncates for sample in samples)


def draw(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> DrawnOnGpu:
    """The next token of each sample from its row of ``logits`` FP32 [R, V]; nothing is waited
    for.
    """
    device = logits.device
    sampling = [sample.prompt.request.sampling for sample in samples]
    index = to_device(torch.tensor(rows, dtype=torch.int32), device)
    temperatures = to_device(
        torch.tensor([params.temperature for params in sampling], dtype=torch.float32), device
    )
    keys = to_device(torch.tensor([sample.key for sample in samples]), device)
    positions = to_device(torch.tensor([sample.length for sample in samples]), device)
    noise = index, temperatures, keys, positions
    if not truncates(samples):
        return DrawnOnGpu(samples, *sample_tokens(logits, *noise))
    top_k = torch.tensor([params.top_k for params in sampling])
    top_p = torch.tensor([params.top_p for params in sampling], dtype=torch.float64)
    min_p = torch.tensor([params.min_p for params in sampling], dtype=torch.float64)
    return DrawnOnGpu(
        samples,
        *sample_truncated(logits, *noise, *(to_device(x, device) for x in (top_k, top_p, min_p))),
    )
