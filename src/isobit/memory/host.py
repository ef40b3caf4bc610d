"""An estimate of the main memory that a run on the CPU takes, before anything of it exists.

P parameters, C hidden size, I intermediate size, V vocabulary, D head size, H query and G KV heads,
a bytes of an activation (2, or 4 in fp32), f bytes of a number of Q, K, V and of the cache (1, 2 or
4), T tokens of the largest micro-batch, S tokens of the longest sequence.  Sums run over layers.

    masters             4 P                                         FP32
    gradients           4 P                                         during the training of a step
    optimiser moments   8 P, 4 P, or 2 P + P / 64                   AdamW's two: FP32, BF16, or 8 bits with a byte of scale for 128
    published weights   the matrices in each side's format, once where the sides agree: N K + N K /
                        4096 in E4M3, else 2 or 4 N K; the rest, and lm_head on its grid once more,
                        in the activations' format; the rotary table
    KV pages            pages * 2 * 64 G (D f + 1)                  a byte of scale a vector
    activations         T [4 a C + 3 a I + a H D + (H + 2 G)(D f + 1) + 4 H + 8]   what a layer keeps for its backward
                        + T [a (H + 2 G) D + 4 (H + G)]             with a norm of Q and K
                        + T [3 a C + 4 D]                           once: final norm, hidden states, rotary rows
    workspace           the largest of these, which follow one another:
      GEMM              8 T K + 8 N K + 16 T N                      FP64 operands and product, of the largest linear
      attention         24 W H D + 1536 W H forward, 4 W (4 H + 6 G) D + 9 B H min(S, 512) S
                        backward, of B sequences, W tokens
      logits chunk      8 V C + 16 max(2^22, V)                     the head in FP64, and a chunk of logits in all its forms

Masters, gradients, moments, published weights and pages are exact (the tests compare them with the
tensors), activations come within a few per cent, the workspaces are upper estimates of short-lived
tensors.  Python, torch, the data, the allocator's gaps and the copies that exist while a model is
loaded (less than training takes) are not counted.  Rollout needs neither gradients nor activations.
A step of 27 million parameters with 4096 tokens peaked at 1.2 times the estimate, since malloc
keeps pages of freed workspaces: the warning comes with that margin.
"""

from dataclasses import dataclass
from math import prod

from isobit.config.schema import RolloutConfig, TrainingConfig
from isobit.kernels.spec.kv_cache import KvCache
from isobit.memory.cache_size import batched_tokens, num_pages_for
from isobit.memory.machine import gib
from isobit.models.config import ModelConfig
from isobit.models.policy import master_shapes
from isobit.precision.flow import LinearShape, PrecisionFlow, Site
from isobit.precision.formats import BLOCK, DTYPES
from isobit.training.optimiser import moment_bytes

MARGIN = 1.2
"""What a process may take beyond the estimate (see above)."""

_MODEL = "model"
_QUERY_BLOCK = 512
_GROUP_TOKENS = 4096
_LOGITS_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One part of the estimate."""

    name: str
    size: int
    """Bytes."""
    lowered_by: str
    """The key that lowers it."""
    passing: bool = False
    """Workspace, of which only the largest counts."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What the training of a step takes, its most demanding part."""

    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> int:
        """Bytes: everything that stays, and the largest workspace."""
        return sum(item.size for item in self.items if not item.passing) + max(
            item.size for item in self.items if item.passing
        )

    @property
    def largest(self) -> MemoryItem:
        """The item that takes most."""
        return max(self.items, key=lambda item: item.size)

    def size(self, name: str) -> int:
        """Bytes of one item."""
        return next(item.size for item in self.items if item.name == name)

    def warning(self, available: int) -> str | None:
        """A line if the run may take more than is available: the largest item, and the keys that
        lower it or another.
        """
        if MARGIN * self.total <= available:
            return None
        key = self.largest.lowered_by
        advice = f"{self.largest.name} is the largest item ({gib(self.largest.size)})"
        advice += (
            f": lower {key}" if key != _MODEL else f", and {_MODEL} sets it; {self._next_advice()}"
        )
        return f"warning: the run may take {gib(MARGIN * self.total)}, but {gib(available)} are free; {advice}"

    def _next_advice(self) -> str:
        item = max(
            (item for item in self.items if item.lowered_by != _MODEL), key=lambda item: item.size
        )
        return f"the largest that another key lowers is {item.name} ({gib(item.size)}): {item.lowered_by}"


def estimate_memory(
    shape: ModelConfig,
    flow: PrecisionFlow,
    rollout: RolloutConfig,
    training: TrainingConfig,
    longest: int,
) -> MemoryEstimate:
    """The estimate for sequences of at most ``longest`` tokens.  Raises ConfigError where
    ``rollout`` gives the cache no page.
    """
    masters = [prod(sizes) for sizes in master_shapes(shape).values()]
    parameters = sum(masters)
    tokens = microbatch_tokens(training, longest)
    microbatch = "training.tokens_per_microbatch"
    pages_key = "rollout.kv_memory_gib" if rollout.kv_pages is None else "rollout.kv_pages"
    return MemoryEstimate(
        (
            MemoryItem("masters", 4 * parameters, _MODEL),
            MemoryItem("gradients", 4 * parameters, _MODEL),
            MemoryItem("optimiser moments", moment_bytes(masters, training.moments), _MODEL),
            MemoryItem("published weights", published_bytes(shape, flow), _MODEL),
            MemoryItem(
                "KV pages",
                num_pages_for(shape, flow, rollout) * KvCache.page_bytes(shape, flow),
                pages_key,
            ),
            MemoryItem("activations", activation_bytes(shape, flow, tokens), microbatch),
            MemoryItem(
                "GEMM workspace",
                gemm_bytes(shape, max(tokens, batched_tokens(rollout, on_gpu=False))),
                microbatch,
                passing=True,
            ),
            MemoryItem(
                "attention workspace",
                attention_bytes(shape, longest),
                "rollout.max_new_tokens",
                passing=True,
            ),
            MemoryItem("logits chunk", _logits_bytes(shape), _MODEL, passing=True),
        )
    )


def microbatch_tokens(training: TrainingConfig, longest: int) -> int:
    """Tokens of the largest micro-batch: a sequence is never cut, and a step has only so many."""
    step = training.prompts_per_step * training.samples_per_prompt * longest
    return min(max(training.tokens_per_microbatch, longest), step)


def published_bytes(shape: ModelConfig, flow: PrecisionFlow, on_gpu: bool = False) -> int:
    """What both sides read, matrices that they share counted once, and the rotary table.

    A CPU has the head once more, on its grid.
    """
    size = DTYPES[flow.training.activations].itemsize
    shapes = master_shapes(shape)
    plain = sum(prod(sizes) for name, sizes in shapes.items() if "_proj" not in name)
    linears = sum(
        _linear_bytes(site, linear, shape.qkv_bias and name == "qkv_proj")
        for layer in range(shape.num_layers)
        for name, linear in shape.shape.linears.items()
        for site in {flow.rollout.linear(layer, name), flow.training.linear(layer, name)}
    )
    head = 0 if on_gpu else shape.vocab_size * shape.hidden_size
    return size * (plain + head) + linears + 4 * shape.max_positions * shape.head_dim


def activation_bytes(shape: ModelConfig, flow: PrecisionFlow, tokens: int) -> int:
    """What the forward of a micro-batch keeps for its backward."""
    a = DTYPES[flow.training.activations].itemsize
    queries, heads = shape.num_heads, shape.num_heads + 2 * shape.num_kv_heads
    layer = (
        a * (4 * shape.hidden_size + 3 * shape.intermediate_size + queries * shape.head_dim)
        + 4 * queries
        + 8
    )
    if shape.qk_norm:
        layer += a * heads * shape.head_dim + 4 * (queries + shape.num_kv_heads)
    formats = [
        DTYPES[flow.training.attention_format(number)].itemsize
        for number in range(shape.num_layers)
    ]
    encoded = sum(heads * (shape.head_dim * f + 1) for f in formats)
    return tokens * (
        shape.num_layers * layer + encoded + 3 * a * shape.hidden_size + 4 * shape.head_dim
    )


def gemm_bytes(shape: ModelConfig, tokens: int) -> int:
    """The FP64 operands and product of the largest linear, its FP32 sum and the block that is added
    to it.
    """
    return max(
        8 * tokens * linear.in_features
        + 8 * linear.out_features * linear.in_features
        + 16 * tokens * linear.out_features
        for linear in shape.shape.linears.values()
    )


def attention_bytes(shape: ModelConfig, longest: int) -> int:
    """Attention of a padded group of the longest sequences."""
    sequences = max(1, _GROUP_TOKENS // longest)
    rows = sequences * longest
    forward = rows * shape.num_heads * (24 * shape.head_dim + 1536)
    copies = 4 * rows * (4 * shape.num_heads + 6 * shape.num_kv_heads) * shape.head_dim
    return max(
        forward, copies + 9 * sequences * shape.num_heads * min(longest, _QUERY_BLOCK) * longest
    )


def _logits_bytes(shape: ModelConfig) -> int:
    return 8 * shape.vocab_size * shape.hidden_size + 16 * max(_LOGITS_CHUNK, shape.vocab_size)


def _linear_bytes(site: Site, linear: LinearShape, bias: bool) -> int:
    numbers = linear.out_features * linear.in_features
    width = DTYPES["fp32" if site.forward == "fp32" else "bf16"].itemsize
    matrix = numbers + 4 * (numbers // BLOCK**2) if site.forward == "e4m3" else width * numbers
    return matrix + (width * linear.out_features if bias else 0)
