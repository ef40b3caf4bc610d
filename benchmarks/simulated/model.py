"""What a model takes: seconds of a decode step and of a micro-batch, bytes of weights and cache."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from benchmarks.comparison.device import card_planner
from benchmarks.simulated import measured
from isobit.config.tables import Recompute
from isobit.memory.device import DevicePlanner
from isobit.models.config import SHAPES, ModelConfig
from isobit.models.decoder import master_shapes

GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """A shape in ``fp8``."""

    name: str
    config: ModelConfig

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the masters."""
        return master_shapes(self.config)

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def active(self) -> float:
        """Those that a token goes through; the embedding only looks up."""
        experts = self.config.experts
        share = 1.0 if experts is None else experts.top_k / experts.count
        return sum(
            prod(shape) * (share if ".experts." in name else 1)
            for name, shape in self.shapes.items()
            if name != "embed_tokens.weight"
        )

    @cached_property
    def embedding(self) -> int:
        """Parameters whose gradients come last in a backward."""
        return prod(self.shapes["embed_tokens.weight"])

    @cached_property
    def planner(self) -> DevicePlanner:
        """Of one card's memory."""
        return card_planner(self.config, "fp8", int(measured.MEMORY_GIB * GIB))

    @cached_property
    def kv_bytes(self) -> float:
        """K and V of a token, with their scales."""
        sizes, flow = self.planner.sizes, self.planner.flow
        return sizes.page_bytes(self.config, flow) / sizes.page_tokens

    @cached_property
    def decode_256(self) -> float:
        """A step of 256 sequences beside K and V."""
        if self.config.experts is not None:
            return measured.DECODE_30B_A3B
        if self.name == "qwen3-8b":
            return measured.DECODE[256]
        return measured.DECODE_32B * self.parameters / MODELS["qwen3-32b"].parameters

    def decode_s(self, sequences: int) -> float:
        """A step beside K and V."""
        dense = _on_the_line(sequences) / measured.DECODE[256] * self.decode_256
        experts = self.config.experts
        if experts is None:
            return dense
        read = 1 - (1 - experts.top_k / experts.count) ** sequences
        share = measured.EXPERTS_SHARE
        return dense * (1 - share) + self.decode_256 * share * read

    @cached_property
    def prefill_s(self) -> float:
        """A token of a prompt."""
        return measured.PREFILL * self.active / MODELS["qwen3-8b"].active

    def pass_s(self, length: int, recompute: Recompute) -> float:
        """Forward and backward of one sequence."""
        config = self.config
        keys = 3 * 4 * (length / 2) * config.num_heads * config.head_dim * config.num_layers
        rate = measured.PASS_TFLOPS[recompute]
        if config.experts is not None:
            rate *= measured.EXPERTS_TFLOPS / measured.PASS_TFLOPS["none"]
        return length * (6 * self.active + keys) / (rate * 1e12)


def _on_the_line(sequences: int) -> float:
    """``measured.DECODE`` between its points; beyond the last in proportion."""
    points = list(measured.DECODE)
    place = bisect_left(points, sequences)
    if place == len(points):
        return measured.DECODE[points[-1]] * sequences / points[-1]
    right = points[place]
    left = points[max(place - 1, 0)]
    share = (sequences - left) / (right - left) if right > left else 0.0
    return measured.DECODE[left] * (1 - share) + measured.DECODE[right] * share


_LLAMA_70B = replace(
    SHAPES["llama-3.1-8b"], hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
MODELS = {
    "qwen3-8b": Model("qwen3-8b", SHAPES["qwen3-8b"]),
    "qwen3-32b": Model("qwen3-32b", SHAPES["qwen3-32b"]),
    "llama-3.1-70b": Model("llama-3.1-70b", _LLAMA_70B),
    "qwen3-30b-a3b": Model("qwen3-30b-a3b", SHAPES["qwen3-30b-a3b"]),
}
