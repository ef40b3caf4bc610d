"""Which card this is, and its copy bandwidth: bytes read and written a second by a copy of a
gigabyte.
"""

import multiprocessing
from typing import Any

import torch

_BYTES = 1 << 30


def measure_card() -> dict[str, Any]:
    """In a process of its own: an engine's own process should find the card untouched, and may want
    to fork.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(_measure).get(timeout=60)


def _measure() -> dict[str, Any]:
    import triton

    source = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(
        lambda: target.copy_(source), warmup=20, rep=50, return_mode="median"
    )
    assert isinstance(milliseconds, float)
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "copy_tb_per_s": 2 * _BYTES / milliseconds / 1e9,
    }


def versions() -> dict[str, str]:
    """Of what every row depends on."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}
