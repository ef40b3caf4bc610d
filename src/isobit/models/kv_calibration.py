"""Calibration of the scales of Q, K and V by a forward of prompts.

``isobit.precision.kv_scales`` says when a flow has such scales, and where else they come from.
"""

from collections.abc import Sequence

import torch

from isobit.models.policy import Policy
from isobit.parallel.world import run_and_gather
from isobit.records.packing import first_fit_decreasing


def calibrate_kv_scales(
    policy: Policy, prompts: Sequence[Sequence[int]], tokens_per_batch: int
) -> None:
    """Set a policy's scales of Q, K and V by a forward of its rollout side over ``prompts``, of
    which each rank of its world takes some; all ranks call it with the same ones, while no engine
    has a live sample. The scales do not depend on batches and ranks
    (``isobit.precision.kv_scales``).
    """
    scales = policy.kv_scales
    world = policy.world
    to_device = policy.backend.to_device
    assert scales is not None, "the flow has scales a token"

    @torch.no_grad()
    def measure() -> list[list[float]]:
        mine = prompts[world.rank :: world.size]
        for members in first_fit_decreasing([len(ids) for ids in mine], tokens_per_batch):
            lengths = tuple(len(mine[place]) for place in members)
            token_ids = torch.tensor([token for place in members for token in mine[place]])
            positions = to_device(torch.cat([torch.arange(length) for length in lengths]))
            attend = policy.backend.packed_attention(policy.flow.rollout, lengths, positions)
            weights, routes = policy.weights("rollout"), policy.decoder.routes()
            policy.decoder.hidden_states(weights, to_device(token_ids), attend, routes)
        return scales.sampled.tolist()

    with scales.measuring():
        maxima = run_and_gather(world, measure)
    scales.take_prompts(maxima)
