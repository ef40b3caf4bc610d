"""The two engines of ``benchmarks.rollout``: Isobit's through its public interface, and vLLM.

Isobit records log-probabilities in the timed run, as it always does.  vLLM has the same shape and
dummy weights, at the settings of the reference figures that ``rollout.REFERENCE`` checks it
against.  FP8 linears are requested in ``config.json``, as a checkpoint with 128x128 blocks does,
and the FP8 cache by ``kv_cache_dtype``.  vLLM's dummy FP8 weights are so small that E4M3 rounds
them to zero, on which a GEMM may run faster than on real ones: to vLLM's advantage.
"""

import importlib.metadata
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.cases import (
    MAX_SEQUENCES,
    ROLLOUT_CASES,
    WARM_UP_TOKENS,
    RolloutCase,
    make_requests,
    precision_of,
    rollout_prompts,
)
from benchmarks.common import Row, RowWriter, card_memory_gib, measure_card, versions
from benchmarks.rollout_floor import step_bytes
from isobit.config.rollout import RolloutConfig
from isobit.launch.local import launch
from isobit.launch.own_rank import as_rank
from isobit.models.config import ModelConfig
from isobit.models.function import SampledPolicy
from isobit.models.policy import Policy, random_masters
from isobit.models.policy_share import PolicyShare
from isobit.models.shapes import model_shape
from isobit.models.tensor_parallel import check_ranks
from isobit.parallel.black_box import end_with_launcher
from isobit.parallel.launched import is_launched
from isobit.parallel.world import ALONE, World
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.util.errors import ConfigError


def run_native(
    mode: str,
    shape: str,
    cases: Sequence[str],
    out: Path,
    started_at: float,
    speculation: int | None = None,
) -> None:
    """Time each case once, after a run of the same prompts with a few new tokens; ``started_at`` is
    when the process began, and ``speculation`` that of ``rollout``.
    """
    card, started_at = _card(started_at)
    writer = RowWriter(out, "native", mode, shape, card, native_versions())
    time_cases(mode, shape, cases, writer, started_at, ALONE, speculation)


def run_shared(
    mode: str, shape: str, cases: Sequence[str], out: Path, started_at: float, ranks: int
) -> None:
    """The same of an engine that so many GPUs share, in as many processes, which this one starts
    unless it is one of them; the first one writes.
    """
    box = end_with_launcher()
    if not is_launched():
        launch(["-m", "benchmarks.rollout", *sys.argv[1:]], ranks)
        return
    writer = None
    if os.environ["RANK"] == "0":  # before this process has a GPU; the others wait for it
        writer = RowWriter(out, f"native-tp{ranks}", mode, shape, measure_card(), native_versions())
    with as_rank(box) as world:
        check_ranks(ranks, world)
        time_cases(mode, shape, cases, writer, started_at, world)


def time_cases(
    mode: str,
    shape: str,
    cases: Sequence[str],
    writer: RowWriter | None,
    started_at: float,
    world: World,
    speculation: int | None = None,
) -> None:
    policy, engine = start(mode, shape, world, speculation)
    startup = perf_counter() - started_at
    if writer is not None:
        print(f"first token {startup:.1f} s after the start of the process", flush=True)
    for name in cases:
        case = ROLLOUT_CASES[name]
        prompts = rollout_prompts(case, policy.config.vocab_size)
        lengths = case.lengths(case.new_tokens)
        # Ragged ends have steps of every size, which are captured when they are first taken.
        few = lengths if case.spread else min(WARM_UP_TOKENS, case.new_tokens)
        warm_up = seconds_to_complete(engine, prompts, few)
        seconds = seconds_to_complete(engine, prompts, lengths)
        if writer is None:
            continue
        writer.write(
            case=name,
            log_probs=True,
            speculation=speculation,
            seconds=seconds,
            tokens_per_s=case.counted_tokens / seconds,
            startup_s=startup,
            warm_up_s=warm_up,
            memory_gib=card_memory_gib(),
            torch_peak_gib=torch.cuda.max_memory_allocated() / 2**30,
            stats=asdict(engine.stats),
        )


STEP_PROMPT = 512
STEPS = 256  # that are timed, behind the first 24


def run_steps(modes: Sequence[str], shape: str, counts: Sequence[int], out: Path) -> None:
    """Milliseconds of a decode step of so many sequences in each flow, one after the other on one
    card, without guesses: the lesser of two runs of ``STEPS`` more new tokens behind prompts of
    ``STEP_PROMPT``.  Its floor is the bytes of weights, lm_head and KV cache that it reads, at the
    copy bandwidth.
    """
    card = measure_card()
    for mode in modes:
        policy, engine = start(mode, shape, speculation=0)
        writer = RowWriter(out, "steps", mode, shape, card, native_versions())
        time_steps(partial(seconds_to_complete, engine), policy.config, mode, counts, card, writer)
        del policy, engine
        torch.cuda.empty_cache()


def run_peer_steps(mode: str, shape: str, counts: Sequence[int], out: Path) -> None:
    """The same of vLLM."""
    card = measure_card()
    writer = RowWriter(out, "steps-vllm", mode, shape, card, peer_versions())
    with peer_engine(mode, shape, MODEL_LENGTH) as llm:
        time_steps(partial(peer_seconds, llm), model_shape(shape), mode, counts, card, writer)


def time_steps(
    seconds: Callable[[Sequence[Sequence[int]], int], float],
    config: ModelConfig,
    mode: str,
    counts: Sequence[int],
    card: Row,
    writer: RowWriter,
) -> None:
    """A row for each number of sequences; ``seconds(prompts, new_tokens)`` is what a run takes."""
    for count in counts:
        case = RolloutCase(count, STEP_PROMPT, 24 + STEPS)
        prompts = rollout_prompts(case, config.vocab_size)
        seconds(prompts, 24)
        few = seconds(prompts, 24)
        many = min(seconds(prompts, case.new_tokens) for _ in range(2))
        read = step_bytes(config, mode, count, STEP_PROMPT + 24 + STEPS // 2)
        floor = 1e3 * read / (card["copy_tb_per_s"] * 1e12)
        step = 1e3 * (many - few) / STEPS
        writer.write(case=f"step-{count}", step_ms=step, floor_ms=floor)


def start(
    mode: str, shape: str, world: World = ALONE, speculation: int | None = None
) -> tuple[SampledPolicy, NativeEngine]:
    """Random weights made on the card, or this rank's share of them, an engine over them, and its
    first token.
    """
    config, precision = model_shape(shape), precision_of(mode)
    device = world.own_device(torch.device("cuda"))
    masters = random_masters(config, 0, device)
    policy = (
        Policy(config, precision, masters, device, trainable=False)
        if world.size == 1
        else PolicyShare(config, precision, masters, world, device)
    )
    rollout = RolloutConfig(
        max_sequences=MAX_SEQUENCES, max_batched_tokens=16384, speculation=speculation
    )
    engine = NativeEngine(policy, rollout, None, seed=0)
    seconds_to_complete(engine, rollout_prompts(RolloutCase(1, 16, 1), policy.config.vocab_size), 1)
    return policy, engine


def seconds_to_complete(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], new_tokens: int | Sequence[int]
) -> float:
    """Seconds until all completions are on the host, log-probabilities included."""
    requests = make_requests(prompts, new_tokens)
    began = perf_counter()
    completions = generate(engine, requests)
    seconds = perf_counter() - began
    for request, (completion,) in zip(requests, completions, strict=True):
        wanted = request.sampling.max_new_tokens
        assert len(completion.token_ids) == len(completion.log_probs) == wanted
        assert all(map(math.isfinite, completion.log_probs))
    return seconds


def describe_card() -> dict[str, Any]:
    """The card, and the versions of Isobit's dependencies."""
    return {"card": measure_card(), "versions": native_versions()}


def native_versions() -> dict[str, str]:
    """torch, triton and DeepGEMM."""
    try:
        deep_gemm = importlib.metadata.version("sgl-deep-gemm")
    except importlib.metadata.PackageNotFoundError:
        deep_gemm = "not installed"
    return versions() | {"sgl-deep-gemm": deep_gemm}


os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


MEMORY_UTILIZATION = 0.88
MODEL_LENGTH, LONG_MODEL_LENGTH = 8192, 33792
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def run_peer(
    mode: str,
    shape: str,
    cases: Sequence[str],
    with_log_probs: Sequence[str],
    out: Path,
    started_at: float,
) -> None:
    """Time each case once, after a run of the same prompts with a few new tokens; those of
    ``with_log_probs`` twice.
    """
    card, started_at = _card(started_at)
    writer = RowWriter(out, "vllm", mode, shape, card, peer_versions())
    with peer_engine(mode, shape, model_length(cases)) as llm:
        vocab_size = model_shape(shape).vocab_size
        peer_seconds(llm, rollout_prompts(RolloutCase(1, 16, 1), vocab_size), 1)
        startup = perf_counter() - started_at
        print(f"first token {startup:.1f} s after the start of the process", flush=True)
        for name in cases:
            case = ROLLOUT_CASES[name]
            prompts = rollout_prompts(case, vocab_size)
            # 0: the log-probability of the sampled token only
            for log_probs in (None, 0) if name in with_log_probs else (None,):
                few = case.lengths(WARM_UP_TOKENS)
                warm_up = peer_seconds(llm, prompts, few, logprobs=log_probs)
                lengths = case.lengths(case.new_tokens)
                seconds = peer_seconds(llm, prompts, lengths, logprobs=log_probs)
                writer.write(
                    case=name,
                    log_probs=log_probs is not None,
                    seconds=seconds,
                    tokens_per_s=case.counted_tokens / seconds,
                    startup_s=startup,
                    warm_up_s=warm_up,
                    memory_gib=card_memory_gib(),
                    kv_tokens=_kv_tokens(llm),
                )


def _card(started_at: float) -> tuple[dict[str, Any], float]:
    """The card, and when the process began, moved by the time that measuring the card took."""
    began = perf_counter()
    card = measure_card()
    return card, started_at + perf_counter() - began


def peer_versions() -> dict[str, str]:
    """torch, triton and vLLM."""
    import vllm  # pyright: ignore[reportMissingImports]

    return versions() | {"vllm": vllm.__version__}


def model_length(cases: Sequence[str]) -> int:
    """The length of the reference figures, or that of long cases; ConfigError for a mix."""
    is_long = {
        ROLLOUT_CASES[name].prompt_tokens + ROLLOUT_CASES[name].new_tokens > MODEL_LENGTH
        for name in cases
    }
    if len(is_long) > 1:
        raise ConfigError(
            f"'context' needs max_model_len {LONG_MODEL_LENGTH}, the others are measured with "
            f"{MODEL_LENGTH}: two commands"
        )
    return LONG_MODEL_LENGTH if is_long == {True} else MODEL_LENGTH


@contextmanager
def peer_engine(
    mode: str, shape: str, length: int, enable_prefix_caching: bool = False
) -> Iterator[Any]:
    """vLLM with dummy weights and sequences of at most ``length`` tokens.  CUDA graphs, chunked
    prefill and asynchronous scheduling are its defaults.
    """
    import vllm  # pyright: ignore[reportMissingImports]

    config = model_shape(shape).to_hf()
    config |= {} if mode == "bf16" else {"quantization_config": _BLOCKS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_cache_dtype="fp8" if mode == "fp8" else "auto",
            max_num_seqs=MAX_SEQUENCES,
            max_model_len=length,
            gpu_memory_utilization=MEMORY_UTILIZATION,
            enable_prefix_caching=enable_prefix_caching,
            generation_config="vllm",
        )


def peer_seconds(
    llm: Any, prompts: Sequence[Sequence[int]], new_tokens: int | Sequence[int], **options: Any
) -> float:
    """Seconds until vLLM has all completions, sampled at temperature 1; new tokens of all or of
    each prompt.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    fixed = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    every = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    sampling = [SamplingParams(max_tokens=n, **fixed, **options) for n in every]
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    began = perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    seconds = perf_counter() - began
    for n, request in zip(every, outputs, strict=True):
        assert [len(answer.token_ids) for answer in request.outputs] == [n] * options.get("n", 1)
    return seconds


def _kv_tokens(llm: Any) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size
