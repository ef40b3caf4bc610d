"""Which devices the kernels run on: any CPU, and NVIDIA GPUs of the Hopper generation (sm_90), for which they are written and proven."""

import importlib.util

import torch

_HOPPER = 9


def hopper_has_heads(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether attention on Hopper computes so many query and KV heads of that size."""
    return dim in (64, 128) and heads % kv_heads == 0 and heads // kv_heads <= 16


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
