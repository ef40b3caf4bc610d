"""Gradients by NCCL's own kernels, as between hosts: to see what copy engines are worth."""

from isobit.parallel.exchanges import Exchanges
from isobit.parallel.processes import Processes


def without_copy_engines() -> None:
    """For the rest of this process."""

    def none(*_: object) -> tuple[Exchanges | None, str]:
        return None, "the benchmark compares the two"

    Processes._peer_copies = none  # pyright: ignore[reportAttributeAccessIssue]
