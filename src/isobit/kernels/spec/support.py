"""What the specification says of itself: it computes everything, on every machine."""

from isobit.kernels.spec import sizes as sizes  # noqa: PLC0414 (said to be part of this module)

has_own_memory = False


def is_present() -> bool:
    """Every machine has a CPU."""
    return True


def problem() -> str | None:
    """See ``Support``."""
    return None


def model_problem(heads: int, kv_heads: int, head_dim: int, preset: str) -> str | None:
    """See ``Support``."""
    return None
