"""The outside baseline's rollout: vLLM in BF16, in a process that has the card to itself.

Its settings are those of ``comparison.peer``, with vLLM's own prefix caching, so that the samples
of a prompt share it (forgotten between the warm-up and the timed call), and without
log-probabilities, since this baseline computes them again.  To its advantage: it keeps 88% of the
card, though a trainer would have to make room for it, and neither waking it nor giving it new
weights is counted.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.comparison.card import measure_card, versions
from benchmarks.comparison.peer import engine_arguments, model_config
from benchmarks.comparison.rows import RowWriter, card_memory_gib
from benchmarks.rl_steps.cases import CASES, WARM_UP_TOKENS, Case
from isobit.models.config import model_shape


def run_rollouts(shape: str, names: Sequence[str], out: Path) -> None:
    """One timed rollout of each case."""
    import vllm  # pyright: ignore[reportMissingImports]

    writer = RowWriter(
        out, "vllm", "bf16", shape, measure_card(), versions() | {"vllm": vllm.__version__}
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config("bf16", shape)))
        length = max(CASES[name].length for name in names)
        llm = vllm.LLM(folder, **engine_arguments("bf16", length) | {"enable_prefix_caching": True})
        for name in names:
            case = CASES[name]
            prompts = case.random_prompts(model_shape(shape).vocab_size)
            generate(llm, prompts, case, WARM_UP_TOKENS)
            seconds = generate(llm, prompts, case, case.new_tokens)
            writer.write(
                kind="rl",
                part="rollout",
                case=name,
                seconds=seconds,
                phases_s={"rollout": seconds},
                rollout_tokens_per_s=case.sequences * case.new_tokens / seconds,
                memory={"rollout": {"peak_gib": card_memory_gib()}},
            )


def generate(llm: Any, prompts: Sequence[Sequence[int]], case: Case, new_tokens: int) -> float:
    """Seconds until all completions are there; the prompts are not cached before."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = SamplingParams(
        n=case.samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    assert llm.reset_prefix_cache(), "vLLM would find the prompts of the call before in its cache"
    began = perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    seconds = perf_counter() - began
    answers = [answer for request in outputs for answer in request.outputs]
    assert len(answers) == case.sequences
    assert all(len(answer.token_ids) == new_tokens for answer in answers)
    return seconds
