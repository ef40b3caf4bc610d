"""Small tensors from the host to the GPU without waiting for it: through page-locked memory, in the
order of the stream.
"""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the GPU; the host goes on at once, and torch keeps the page-locked source until the
    copy has been made.

    On a CPU, where tests run what surrounds the kernels, the tensor itself.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
