"""What a model has to have to be scored with: a policy has it, and so has a frozen model."""

from typing import Protocol

from isobit.kernels.backend import Backend
from isobit.models.decoder import Decoder
from isobit.models.weights import Weights
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import Side


class Scorable(Protocol):
    """Published weights, and the decoder that reads them."""

    @property
    def backend(self) -> Backend:
        """Computes with them."""
        ...

    @property
    def flow(self) -> PrecisionFlow:
        """Their formats, of which the training side counts."""
        ...

    @property
    def decoder(self) -> Decoder:
        """Reads them."""
        ...

    def weights(self, side: Side) -> Weights:
        """What a side reads."""
        ...
