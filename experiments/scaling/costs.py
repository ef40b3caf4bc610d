"""The figures that the simulation rests on, each with where it was measured (what is marked as
assumed was not), and what follows for a model: seconds of a decode step and of a micro-batch, bytes
of weights and cache.

Rates are bytes a second, times seconds, for Qwen3-8B's shape in ``fp8`` on one H200 unless it says
otherwise; rows and tables are those of docs/performance.md.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from benchmarks.common import card_planner
from isobit.config.training import Recompute, TrainingConfig
from isobit.memory.device import DevicePlanner
from isobit.models.config import ModelConfig
from isobit.models.decoder import master_shapes
from isobit.models.shapes import SHAPES
from isobit.models.tensor_parallel import with_heads_of_a_rank

# The card and its links.
MEMORY_GIB = 139.2
"""GiB of a card that a process can use: benchmarks/memory.py."""
KV_READ = 3.98e12
"""Of decode attention, 256 sequences of 2,048: "Attention kernels"."""
EXCHANGE = 312e9
"""NVLink, out of one GPU, a layer's gradients of 8B between two by the copy engines: 386 MB in
1.23 ms (``benchmarks.parallel links``).  Assumed to be the same among eight.
"""
GATHER = 244e9
"""NVLink, into one GPU, the published bytes of 8B: 4.73 GB in 19.4 ms (the same place)."""
SLOWED = 0.64 / EXCHANGE
"""Seconds that computation loses for each byte that travels beside it: with two GPUs a round of
16,384 tokens took 54.9 ms more than with one (``benchmarks.parallel train``), of which the ordered
sum is 20.1, the embedding 4.0, and 48.4 of the transfer were hidden.  Assumed to be the same for
bytes that leave by a NIC.
"""
NIC = 50e9
"""One NIC of 400 Gb/s a GPU, its nominal rate: assumed."""
HOST_NETWORK = 1e9
"""What a rank receives of records (tokens, log-probabilities) over the hosts' own network: assumed.
"""
RECORD_TOKEN = 0.035e-6
"""Host time of a token that another rank drew, to make its records: `python -m experiments.scaling
records` on an AMD EPYC core.
"""
MESSAGE = {"nvlink": 5e-6, "nic": 10e-6}
"""Of each message, beside its bytes, one after the other on each link: assumed."""
GPUS_A_HOST = 8

# Decoding: what a step takes beside reading K and V.
DECODE = {1: 3.7e-3, 8: 3.5e-3, 32: 3.3e-3, 64: 3.2e-3, 128: 5.2e-3, 256: 6.0e-3}
"""By sequences: steps of 1, 8, 32 and 128 (h200-measurements.md, second round), of 64 and 256 (case
``8k`` and ``short``, whole calls), less K and V at ``KV_READ``; in between on a line.
"""
DECODE_32B = 22.2e-3
"""Qwen3-32B, 256 sequences: case ``short``, as above.  Assumed: at other numbers of sequences in
the proportions of 8B.
"""
DECODE_30B_A3B = 13.5e-3
"""Qwen3-30B-A3B, 256 sequences: case ``short``, as above."""
EXPERTS_SHARE = 0.65
"""Of that, reading the experts' weights: assumed.  Fewer sequences read fewer experts."""
SHARED_GATHER = 72e-6
"""One of the four gathers of a layer where GPUs share an engine, if each computes an even part of a
decode step: with it two generate the 7,719 tokens a second of 32B that they were measured to (256
samples of 1,024 tokens, docs/cluster.md).  Assumed to be the same among eight.
"""
PREFILL = 1 / 67_168
"""A token of a prompt or of a sample that moved: case ``prefill``.  Assumed: in proportion to the
parameters that a token goes through.
"""

# Training.
PASS_TFLOPS = {"none": 778.0, "mlp": 708.0, "full": 620.0}
"""Model TFLOP/s of forward and backward by ``training.recompute``: 4,096 x 2; ``full`` from
16,384 x 1 in proportion to ``mlp``.  Assumed: larger dense models reach the same.
"""
EXPERTS_TFLOPS = 480.0
"""Of a mixture, nothing recomputed: moe-2.7b, 4,096 x 4.  Assumed: Qwen3-30B-A3B reaches it too."""
BACKWARD_SHARE = 0.707
"""The backward's share of a pass: case ``2k``, 25.3 of 35.8 s."""
LAYER_ADD = 0.474e-3
"""The ordered sum of the slices that a rank receives of one layer: two H200s (the same place).
Assumed: in proportion to parameters, whatever the number of slices (all of them together are a
whole layer).
"""
LAYER_NUMBERS = 192.9e6
"""Parameters of that layer."""
OPTIMISER, PUBLISH, OTHER = 0.045, 0.0149, 0.70
"""Case ``2k``.  The first two are shared by the ranks; ``OTHER`` (cache and graphs given back and
made again) is not.
"""
PARAMETERS_8B = 8.19e9

GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """What a shape takes in ``fp8``."""

    name: str
    config: ModelConfig
    rollout_tp: int = 1
    """GPUs that share an engine, and the matrices of its layers."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the masters."""
        return master_shapes(self.config)

    @cached_property
    def parameters(self) -> int:
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
        """The memory plan of one card."""
        planner = card_planner(self.config, "fp8", int(MEMORY_GIB * GIB))
        return replace(planner, rollout_tp=self.rollout_tp)

    @cached_property
    def of_others(self) -> int:
        """Bytes of the layers' matrices that a GPU does not publish, and gathers."""
        whole = replace(self.planner, rollout_tp=1)
        own, all_of_it = (one.weight_bytes(TrainingConfig()) for one in (self.planner, whole))
        return all_of_it["published weights"] - own["published weights"]

    @cached_property
    def gathers_s(self) -> float:
        """Seconds of the gathers of a decode step."""
        return 0.0 if self.rollout_tp == 1 else 4 * self.config.num_layers * SHARED_GATHER

    @cached_property
    def kv_bytes(self) -> float:
        """Bytes of K and V of a token, with their scales, on one GPU."""
        sizes, flow = self.planner.sizes, self.planner.flow
        config = with_heads_of_a_rank(self.config, self.rollout_tp)
        return sizes.page_bytes(config, flow) / sizes.page_tokens

    @cached_property
    def decode_256(self) -> float:
        """Seconds of a decode step of 256 sequences, reading K and V not included."""
        if self.config.experts is not None:
            return DECODE_30B_A3B
        if self.name == "qwen3-8b":
            return DECODE[256]
        return DECODE_32B * self.parameters / MODELS["qwen3-32b"].parameters

    def decode_s(self, sequences: int) -> float:
        """Seconds of a decode step, reading K and V not included."""
        dense = _on_the_line(sequences) / DECODE[256] * self.decode_256
        dense = dense / self.rollout_tp + self.gathers_s
        experts = self.config.experts
        if experts is None:
            return dense
        read = 1 - (1 - experts.top_k / experts.count) ** sequences
        share = EXPERTS_SHARE
        return dense * (1 - share) + self.decode_256 * share * read

    @cached_property
    def prefill_s(self) -> float:
        """Seconds of a token of a prompt."""
        config, ranks = self.config, self.rollout_tp
        one = PREFILL * self.active / MODELS["qwen3-8b"].active
        sent = config.num_heads * config.head_dim + config.intermediate_size
        sent = config.num_layers * (sent + 4 * config.hidden_size) * (ranks - 1) / ranks
        return one / ranks + sent / GATHER

    def pass_s(self, length: int, recompute: Recompute) -> float:
        """Seconds of forward and backward of one sequence."""
        config = self.config
        keys = 3 * 4 * (length / 2) * config.num_heads * config.head_dim * config.num_layers
        rate = PASS_TFLOPS[recompute]
        if config.experts is not None:
            rate *= EXPERTS_TFLOPS / PASS_TFLOPS["none"]
        return length * (6 * self.active + keys) / (rate * 1e12)


def _on_the_line(sequences: int) -> float:
    """``measured.DECODE`` between its points; beyond the last in proportion."""
    points = list(DECODE)
    place = bisect_left(points, sequences)
    if place == len(points):
        return DECODE[points[-1]] * sequences / points[-1]
    right = points[place]
    left = points[max(place - 1, 0)]
    share = (sequences - left) / (right - left) if right > left else 0.0
    return DECODE[left] * (1 - share) + DECODE[right] * share


_LLAMA_70B = replace(
    SHAPES["llama-3.1-8b"], hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
MODELS = {
    "qwen3-8b": Model("qwen3-8b", SHAPES["qwen3-8b"]),
    "qwen3-32b": Model("qwen3-32b", SHAPES["qwen3-32b"]),
    "llama-3.1-70b": Model("llama-3.1-70b", _LLAMA_70B),
    "qwen3-30b-a3b": Model("qwen3-30b-a3b", SHAPES["qwen3-30b-a3b"]),
}
