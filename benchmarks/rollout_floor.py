"""A lower bound of an engine's time on this card, from the bytes that it must read and the products
that it must form:

    steps      (KV + scale bytes) / copy bandwidth  +  layers * linears at that batch  +  lm_head
               with FP32 logits
    prompts    layers * (linears in forwards of 16,384 tokens + attention over whole prompts)  +
               lm_head of one row a prompt

summed over the case.  Products and attention are timed with the kernels of
``isobit.kernels.hopper``; products run under a CUDA graph over the weights of several layers, so
that none is read from the L2 cache.  Norms, RoPE and sampling are not counted.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.cases import (
    INT8_ATTENTION,
    MAX_SEQUENCES,
    ROLLOUT_CASES,
    RolloutCase,
    precision_of,
)
from benchmarks.common import RowWriter, measure_card, seconds, versions
from isobit.kernels.hopper.attention import prefill_attention
from isobit.kernels.hopper.gemm import bf16_gemm_nt, fp8_gemm_nt
from isobit.kernels.hopper.int8 import int8_gemm_nt
from isobit.kernels.sizes import delta_carry_bytes
from isobit.kernels.triton.attention import PackedKeys
from isobit.kernels.triton.quantise import publish_blocks, quantise_int8, quantise_rows
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.shapes import model_shape
from isobit.precision.flow import build_flow
from isobit.precision.quant_tensor import E4M3, QuantTensor
from isobit.util.errors import ConfigError

PREFILL_TOKENS = 16384
_PAST_THE_CACHE = 1 << 30  # bytes of weights that one graph reads


def run_floor(mode: str, shape: str, cases: Sequence[str], out: Path) -> None:
    """Measure what each case is made of, and add it up."""
    config = model_shape(shape)
    if config.experts is not None:
        raise ConfigError(f"{shape} has experts, whose floor is not computed")
    if any(ROLLOUT_CASES[name].spread for name in cases):
        raise ConfigError("the floor of lengths that differ is not computed")
    card = measure_card()
    writer = RowWriter(out, "floor", mode, shape, card, versions())
    torch.manual_seed(0)
    batches = {_batch(ROLLOUT_CASES[name]) for name in cases}
    layer = {m: linears_seconds(config, mode, m) for m in {PREFILL_TOKENS} | batches}
    head = {m: head_seconds(config, mode, m) for m in batches}
    for name in cases:
        case = ROLLOUT_CASES[name]
        attention = attention_seconds(config, mode, case) * config.num_layers
        forwards = case.requests * case.prompt_tokens / PREFILL_TOKENS
        of_layers, of_head = config.num_layers * layer[_batch(case)], head[_batch(case)]
        parts = {
            "prompt_gemm": forwards * layer[PREFILL_TOKENS] * config.num_layers,
            "prompt_attention": attention,
            "prompt_head": case.requests / _batch(case) * of_head,
            "step_gemm": (case.new_tokens - 1) * (of_layers + of_head),
            "step_kv": kv_bytes(config, mode, case) / (card["copy_tb_per_s"] * 1e12),
        }
        taken = sum(parts.values())
        writer.write(
            case=name,
            seconds=taken,
            tokens_per_s=case.counted_tokens / taken,
            parts_s=parts,
            layer_us={str(m): s * 1e6 for m, s in layer.items()},
            head_us={str(m): s * 1e6 for m, s in head.items()},
        )


def kv_bytes(config: ModelConfig, mode: str, case: RolloutCase) -> int:
    """Read over a case: step n (the first token comes from the prompt) attends over prompt_tokens +
    n tokens.
    """
    steps = case.new_tokens - 1
    tokens = steps * case.prompt_tokens + steps * (steps + 1) // 2
    return case.requests * tokens * kv_bytes_of_token(config, mode)


def kv_bytes_of_token(config: ModelConfig, mode: str) -> int:
    scale = {"fp8": 1, **dict.fromkeys(INT8_ATTENTION, 4)}.get(mode)
    a_head = 2 * config.head_dim if scale is None else config.head_dim + scale
    layers = config.num_layers - len(config.delta_layers)
    return 2 * layers * config.num_kv_heads * a_head


def step_bytes(config: ModelConfig, mode: str, sequences: int, tokens: int) -> int:
    """What a decode step reads of weights, lm_head and so many tokens of each sequence's K and V,
    and of what it carries; scales of matrices are not counted.
    """
    shape = decoder_shape(config)
    numbers = sum(
        linear.out_features * linear.in_features
        for layer in range(config.num_layers)
        for linear in shape.linears_of(layer)
    )
    head = config.vocab_size * config.hidden_size * (1 if mode == "int8-head" else 2)
    weights = numbers * (2 if mode == "bf16" else 1) + head
    carried = delta_carry_bytes(config, build_flow(precision_of(mode), shape))
    return weights + sequences * (tokens * kv_bytes_of_token(config, mode) + carried)


def linears_seconds(config: ModelConfig, mode: str, rows: int) -> float:
    """One layer's four products over ``rows`` rows."""
    linears = decoder_shape(config).linears_of(0)
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    weights_bytes = sum(n * k for n, k in shapes) * (2 if mode == "bf16" else 1)
    layers = min(config.num_layers, -(-_PAST_THE_CACHE // weights_bytes))
    works = [_product(mode, rows, n, k) for _ in range(layers) for n, k in shapes]
    return graph_seconds(lambda: [work() for work in works]) / layers


def _product(mode: str, rows: int, n: int, k: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    master = torch.randn(n, k, device="cuda") * 0.02
    if mode == "bf16":
        weight = master.bfloat16()
        return lambda: bf16_gemm_nt(x, weight)
    if mode.startswith("int8"):
        left, right = quantise_int8(x), quantise_int8(master)  # as a matrix is published
        return lambda: int8_gemm_nt(left, right)
    blocks = QuantTensor.empty_blocks(n, k, x.device)
    publish_blocks(master, blocks)
    quantised = quantise_rows(x)
    return lambda: fp8_gemm_nt(quantised, blocks, "power_of_two")


def head_seconds(config: ModelConfig, mode: str, rows: int) -> float:
    """FP32 logits of ``rows`` rows."""
    x = torch.randn(rows, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    shape = config.vocab_size, config.hidden_size
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02
    if mode == "int8-head":
        left, right = quantise_int8(x), quantise_int8(weight)
        logits = torch.empty(rows, config.vocab_size, device="cuda")
        return graph_seconds(lambda: int8_gemm_nt(left, right, out=logits))
    return graph_seconds(lambda: bf16_gemm_nt(x, weight, torch.float32))


def attention_seconds(config: ModelConfig, mode: str, case: RolloutCase) -> float:
    """One layer's attention over all prompts of a case, from as many of them as a forward holds."""
    count = max(1, PREFILL_TOKENS // case.prompt_tokens)
    tokens, length = count * case.prompt_tokens, case.prompt_tokens
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    queries, keys, values = (
        torch.randn(tokens, h, dim, dtype=torch.bfloat16, device="cuda")
        for h in (heads, kv_heads, kv_heads)
    )
    scales = None
    packed = PackedKeys(keys, None, values, None)
    if mode in INT8_ATTENTION:
        queries, keys, values = (
            (x * 40).round().clamp(-127, 127).to(torch.int8) for x in (queries, keys, values)
        )
        k_scales, v_scales = torch.full((2, tokens, kv_heads), 0.025, device="cuda")
        packed = PackedKeys(keys, k_scales, values.half(), v_scales)
        scales = torch.full((tokens, heads), 0.025, device="cuda")
    if mode == "fp8":
        k_bytes, v_bytes = torch.randint(
            118, 122, (2, tokens, kv_heads), dtype=torch.uint8, device="cuda"
        )
        queries, keys, values = (
            (x * 60).clamp(-448, 448).to(E4M3) for x in (queries, keys, values)
        )
        packed = PackedKeys(keys, k_bytes, values.half(), v_bytes)
        scales = torch.full((tokens, heads), 2.0**-8, device="cuda")
    starts = torch.arange(count, dtype=torch.int32, device="cuda") * length
    lengths = torch.full_like(starts, length)

    def work() -> object:
        return prefill_attention(
            queries, scales, packed, starts, lengths, starts, lengths, length, length
        )

    return seconds(work, repeats_ms=60) * case.requests / count


def graph_seconds(work: Callable[[], object], repeats_ms: int = 60) -> float:
    """A replay of the captured work, after a run that compiles and loads its kernels."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return seconds(graph.replay, repeats_ms)


def _batch(case: RolloutCase) -> int:
    return min(MAX_SEQUENCES, case.requests)
