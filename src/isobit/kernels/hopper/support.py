"""What the Hopper back end says of itself: NVIDIA GPUs of the Hopper generation (sm_90), for which
its kernels are written and proven.  Loads on every machine.
"""

import importlib.util

import torch

from isobit.kernels.hopper import sizes as sizes  # noqa: PLC0414 (said to be part of this module)

has_own_memory = True

_HOPPER = 9
MOST_QUERY_HEADS = 16
"""Of one KV head."""


def is_present() -> bool:
    """Whether torch sees an NVIDIA GPU."""
    return torch.cuda.is_available()


def problem() -> str | None:
    """Why no GPU of this machine can be used, or None if one can."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != _HOPPER:
        name = torch.cuda.get_device_name()
        return (
            f"{name} is sm_{major}{minor}, and the GPU kernels are written and proven for Hopper "
            "(sm_90) only"
        )
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed, which the GPU kernels are written in; it comes with torch "
            "for CUDA: pip install 'isobit[hopper]'"
        )
    return None


def model_problem(heads: int, kv_heads: int, head_dim: int, preset: str) -> str | None:
    """Why the kernels do not compute a model with so many query and KV heads of that size in a
    flow, or None.
    """
    if preset == "fp32":
        return "precision 'fp32' is the CPU's reference"
    repeat, rest = divmod(heads, kv_heads)
    if head_dim in (64, 128) and not rest and repeat <= MOST_QUERY_HEADS:
        return None
    return (
        f"the model has {heads} query heads of {head_dim} over {kv_heads} KV heads, and attention "
        f"on the GPU takes head sizes 64 and 128 and 1 to {MOST_QUERY_HEADS} query heads a KV head"
    )
