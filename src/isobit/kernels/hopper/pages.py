"""Pages of the KV cache on Hopper, in numbers: what a plan of the memory needs to know on a machine
without Triton, too.
"""

from isobit.errors import ConfigError
from isobit.kernels.spec.kv_cache import KvShape
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import DTYPES, Format

PAGE_TOKENS = 128


def page_formats(shape: KvShape, flow: PrecisionFlow) -> tuple[Format, ...]:
    """The format of each layer's pages.  Raises ConfigError for one that attention on a GPU does
    not take.
    """
    formats: tuple[Format, ...] = tuple(
        flow.rollout.attention_format(layer) for layer in range(shape.num_layers)
    )
    if "fp32" in formats:
        raise ConfigError("the fp32 flow runs on the CPU: attention on a GPU takes e4m3 and bf16")
    return formats


def page_bytes(shape: KvShape, flow: PrecisionFlow) -> int:
    """Bytes of one page over all layers, scales included."""
    vectors = 2 * PAGE_TOKENS * shape.num_kv_heads
    return sum(
        vectors * (shape.head_dim * DTYPES[format].itemsize + (format == "e4m3"))
        for format in page_formats(shape, flow)
    )
