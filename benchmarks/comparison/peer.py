"""vLLM with the same shape and dummy weights, at the settings of the reference figures that
``comparison.table`` checks it against.

FP8 linears are asked for as a checkpoint with 128x128 blocks does it, in ``config.json``; the KV
cache by ``kv_cache_dtype``.  vLLM fills FP8 weights with numbers so small that E4M3 rounds them to
zero, on which a GEMM may run faster than on real ones: to vLLM's advantage.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from benchmarks.comparison.card import measure_card, versions
from benchmarks.comparison.cases import CASES, MAX_SEQUENCES, WARM_UP_TOKENS, Case, random_prompts
from benchmarks.comparison.rows import RowWriter, card_memory_gib
from isobit.models.config import model_shape
from isobit.util.errors import ConfigError

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
    import vllm  # pyright: ignore[reportMissingImports]

    before_card = perf_counter()
    card = measure_card()
    started_at += perf_counter() - before_card
    writer = RowWriter(out, "vllm", mode, shape, card, versions() | {"vllm": vllm.__version__})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(mode, shape)))
        llm = vllm.LLM(folder, **engine_arguments(mode, model_length(cases)))
        vocab_size = model_shape(shape).vocab_size
        _generate(llm, random_prompts(Case(1, 16, 1), vocab_size), 1, None)
        startup = perf_counter() - started_at
        print(f"first token {startup:.1f} s after the start of the process", flush=True)
        for name in cases:
            case = CASES[name]
            prompts = random_prompts(case, vocab_size)
            for log_probs in (
                (None, 0) if name in with_log_probs else (None,)
            ):  # 0: of the sampled token alone
                warm_up = _generate(llm, prompts, min(WARM_UP_TOKENS, case.new_tokens), log_probs)
                seconds = _generate(llm, prompts, case.new_tokens, log_probs)
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


def model_config(mode: str, shape: str) -> dict[str, Any]:
    """The ``config.json`` that vLLM is given."""
    config = model_shape(shape).to_hf()
    return config if mode == "bf16" else config | {"quantization_config": _BLOCKS}


def model_length(cases: Sequence[str]) -> int:
    """Of the reference figures, or what the longest case needs; raises ConfigError for a mix of
    both.
    """
    is_long = {CASES[name].prompt_tokens + CASES[name].new_tokens > MODEL_LENGTH for name in cases}
    if len(is_long) > 1:
        raise ConfigError(
            f"'context' needs max_model_len {LONG_MODEL_LENGTH}, the others are measured with "
            f"{MODEL_LENGTH}: two commands"
        )
    return LONG_MODEL_LENGTH if is_long == {True} else MODEL_LENGTH


def engine_arguments(mode: str, length: int) -> dict[str, Any]:
    """What is not vLLM's own default: CUDA graphs, chunked prefill and asynchronous scheduling
    are.
    """
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8" if mode == "fp8" else "auto",
        "max_num_seqs": MAX_SEQUENCES,
        "max_model_len": length,
        "gpu_memory_utilization": MEMORY_UTILIZATION,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
    }


def _generate(
    llm: Any, prompts: Sequence[Sequence[int]], new_tokens: int, log_probs: int | None
) -> float:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=log_probs,
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    began = perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    seconds = perf_counter() - began
    assert all(len(request.outputs[0].token_ids) == new_tokens for request in outputs)
    return seconds


def _kv_tokens(llm: Any) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size
