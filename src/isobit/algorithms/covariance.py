"""The tokens of an update whose log-probability and advantage covary most.

A policy's entropy falls by what a step's log-probabilities and advantages covary, and a few tokens
carry most of that (arXiv 2505.22617, section 3).  With means over all N tokens of the update, a
token's part is

    cov[i] = (log pi_old[i] - mean log pi_old) * (A[i] - mean A)

Clip-Cov picks ``covariance_fraction`` * N of the tokens with cov in [covariance_low,
covariance_high] at random; KL-Cov picks as many with the largest cov.  At least one is picked where
there is any.

Unlike the published implementations, which take the current policy's log-probabilities in each
micro-batch, the choice is made from the old ones with the whole update in view, so that it does not
depend on how the update is cut.  Means are rounded once (``math.fsum``), and what is random, as
well as the order of equal covariances (many tokens have a log-probability of exactly 0), comes from
noise that is keyed by a sequence's token ids and the token's place in it.
"""

import math
from collections.abc import Sequence
from random import Random

import torch

from isobit.config.algorithm import TokenClipConfig
from isobit.records.batch import PackedBatch


def select(config: TokenClipConfig, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """All micro-batches of an update -> which of their response tokens are picked, bool [N_m]."""
    found = covariances(batches)
    noise = torch.cat([_noise(batch) for batch in batches])
    number = max(int(config.covariance_fraction * found.numel()), 1)
    candidates = torch.arange(found.numel())
    if config.covariance == "clip_cov":
        within = (found >= config.covariance_low) & (found <= config.covariance_high)
        candidates = candidates[within]
        order = noise[candidates].argsort()
    else:
        order = noise.argsort()
        order = order[found[order].argsort(descending=True, stable=True)]
    picked = torch.zeros(found.numel(), dtype=torch.bool)
    picked[candidates[order[:number]]] = True
    return list(picked.split([batch.targets.numel() for batch in batches]))


def covariances(batches: Sequence[PackedBatch]) -> torch.Tensor:
    """Each token's part of the covariance, float64 [N] over all micro-batches; the formula is at
    the top of this file.
    """
    log_probs = torch.cat([batch.old_log_probs for batch in batches]).double()
    advantages = torch.cat([batch.advantages for batch in batches]).double()
    return _centred(log_probs) * _centred(advantages)


def _centred(values: torch.Tensor) -> torch.Tensor:
    return values - math.fsum(values.tolist()) / max(values.numel(), 1)


def _noise(batch: PackedBatch) -> torch.Tensor:
    """A number in [0, 1) for each response token, whatever the packing; float64 [N]."""
    starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    found = []
    for index, length in enumerate(batch.lengths):
        ids = batch.token_ids[starts[index] : starts[index] + length]
        random = Random(ids.numpy().tobytes())  # noqa: S311 - no secret
        found += [random.random() for _ in range(length)]
    return torch.tensor(found, dtype=torch.float64)[batch.rows]
