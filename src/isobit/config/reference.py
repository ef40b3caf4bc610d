"""The table ``reference``: the model that a KL penalty holds the policy to."""

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_STEPS


class ReferenceConfig(Strict):
    """The reference model: frozen weights in the flow's formats, a byte a linear weight in
    ``fp8``.  It is there where ``algorithm.kl_coefficient`` is above 0.
    """

    model: str | None = None
    """A Hugging Face folder or a name of the hub, with the policy's vocabulary, or ``starter``; by
    default what ``model`` names.
    """
    refresh_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps after which it takes the policy's weights of that moment; 0 is never."""
    offload: bool = False
    """Keep it in host memory except while it scores, which leaves a GPU more memory for the KV
    cache and for training; a CPU ignores it.
    """
