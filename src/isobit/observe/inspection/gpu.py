"""The memory that a model takes on a named GPU: to generate alone, and to train.

Generating (``isobit rollout``, ``eval``) holds published weights, a forward and the KV cache;
training holds masters, moments and gradients besides (``isobit.memory.device``, with the settings
that a recipe has by default).
"""

from dataclasses import dataclass

from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.errors import ConfigError
from isobit.kernels.sizes import Sizes
from isobit.memory.cache_size import RESERVE, forward_bytes, num_pages_within
from isobit.memory.device import Bytes, DevicePlan, DevicePlanner
from isobit.memory.gpus import gpu_memory
from isobit.memory.published import published_bytes
from isobit.models.config import ModelConfig
from isobit.precision.flow import PrecisionFlow


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Of one model in one flow on one GPU."""

    gpu: str
    total: int
    """Bytes that a process can have."""
    longest: int
    """Tokens of the longest sequence that is trained."""
    generating: Bytes
    """By name; empty where not one page of the cache fits."""
    cached_tokens: int
    """That the cache then holds."""
    training: DevicePlan | None
    problem: str
    """Why training does not fit; empty where it does."""


def gpu_figures(
    config: ModelConfig, flow: PrecisionFlow, sizes: Sizes, gpu: str, longest: int
) -> GpuFigures:
    """Plan both; nothing is allocated.  Raises ConfigError for a GPU that is not known."""
    total = gpu_memory(gpu)
    generating, cached = _generating(config, flow, sizes, total)
    training, problem = None, ""
    try:
        planner = DevicePlanner(config, flow, sizes, total)
        rollout = None if config.score_head else RolloutConfig()
        training = planner.plan(rollout, TrainingConfig(), longest)
    except ConfigError as error:
        problem = str(error)
    return GpuFigures(gpu, total, longest, generating, cached, training, problem)


def _generating(
    config: ModelConfig, flow: PrecisionFlow, sizes: Sizes, total: int
) -> tuple[Bytes, int]:
    """-> bytes by name, and tokens of the cache."""
    weights = published_bytes(config, flow.one_sided("rollout"), sizes)
    if config.score_head:
        return {"published weights": weights}, 0
    rollout = RolloutConfig()
    forward = forward_bytes(config, flow, rollout, sizes)
    page = sizes.page_bytes(config, flow)
    room = total - RESERVE - weights - forward
    if room < page:
        return {}, 0
    pages = num_pages_within(config, rollout, sizes.page_tokens, page, room)
    found = {"published weights": weights, "forward and logits": forward, "KV pages": pages * page}
    return found, pages * sizes.page_tokens
