"""Which devices the kernels run on: any CPU, and NVIDIA GPUs of the Hopper generation (sm_90), for
which they are written and proven.
"""

import importlib.util

import torch

_HOPPER = 9
MOST_QUERY_HEADS = 16
"""Of one KV head."""


def heads_problem(heads: int, kv_heads: int, dim: int) -> str | None:
    """Why attention on Hopper does not compute so many query and KV heads of that size, or None if
    it does.
    """
    if dim in (64, 128) and heads % kv_heads == 0 and heads // kv_heads <= MOST_QUERY_HEADS:
        return None
    return (
        f"the model has {heads} query heads of {dim} over {kv_heads} KV heads, and attention on "
        "the GPU takes head sizes 64 and 128 and "
        f"1 to {MOST_QUERY_HEADS} query heads a KV head"
    )


def hopper_problem() -> str | None:
    """Why no GPU of this machine can be used, or None if one can."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != _HOPPER:
        name = torch.cuda.get_device_name()
        return f"{name} is sm_{major}{minor}, and the GPU kernels are written and proven for Hopper (sm_90) only"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which the GPU kernels are written in; it comes with torch for CUDA: pip install 'isobit[hopper]'"
    return None
