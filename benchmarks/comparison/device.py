"""The memory that the card has for itself, and what a run of a model's shape would plan in it."""

import torch

from isobit.config.tables import PrecisionConfig
from isobit.kernels.backend import DeviceMemory, backend_of, support
from isobit.memory.device import DevicePlanner
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.precision.flow import build_flow

CARD = "cuda"


def card_memory() -> DeviceMemory:
    """As the back end of the card offers it."""
    memory = backend_of(torch.device(CARD)).memory
    assert memory is not None, "a card has memory for itself"
    return memory


def allocate_in_pages() -> None:
    """Let torch's allocator map single pages, as a run does; before anything is on the card."""
    card_memory().allocate_in_pages()


def card_planner(config: ModelConfig, precision: str, total: int | None = None) -> DevicePlanner:
    """Plans for the card's back end; of ``total`` bytes, or of those that this process can have
    now.
    """
    flow = build_flow(PrecisionConfig.model_validate(precision), decoder_shape(config))
    total = card_memory().available() if total is None else total
    return DevicePlanner(config, flow, support(CARD).sizes, total)
