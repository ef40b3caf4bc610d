"""What a card since Ampere does slowly by the portable kernels; loads on every machine."""

import torch

from isobit.precision.flow import PrecisionFlow

_HOPPER, _DATA_CENTRE_BLACKWELL = 9, 10


def slow_here(flow: PrecisionFlow, device: torch.device) -> list[str]:
    """A sentence on each thing that a flow does slowly on this card; none where there is no card,
    as in Triton's interpreter.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    return slow_on(flow, torch.cuda.get_device_name(device), capability[0])


def slow_on(flow: PrecisionFlow, name: str, generation: int) -> list[str]:
    """The same of a card by its name and the first number of its capability.  The shares of GeForce
    and of FP16 are those of data sheets, the one of Hopper is measured (``isobit.memory.speed``).
    """
    sites = (*flow.rollout.sites, *flow.training.sites)
    formats = {form for site in sites for form in (site.forward, site.dgrad, site.wgrad)}
    lines = list[str]()
    rate = "a quarter" if "GeForce" in name else "half"
    if "e4m3" in formats:
        lines.append(
            f"FP8 products run as such of FP16 on this {name}, at {rate} of INT8's rate by its "
            "data sheet (an estimate): precision = 'int8' is faster here"
        )
    elif "GeForce" in name and "int8" not in formats:
        lines.append(
            f"a {name} multiplies BF16 with FP32 sums at a quarter of INT8's rate by its data "
            "sheet (an estimate): precision = 'int8' is faster here"
        )
    if generation == _HOPPER:
        lines.append(
            "the portable kernels train at half of the speed of the back end 'hopper', and decode "
            "at 0.7 to 0.98 of it (measured, 8B)"
        )
    elif generation == _DATA_CENTRE_BLACKWELL:
        lines.append(
            f"the portable kernels reach a part of this {name}'s rate of products: on Hopper, "
            "which has like instructions, about half (an estimate)"
        )
    return lines
