"""Whether other tools take an exported folder: one greedy answer of each.

    isobit export RUN_OR_FOLDER --to FOLDER --format fp8
    python -m benchmarks.load_elsewhere vllm FOLDER --out RESULTS            # on a GPU
    python -m benchmarks.load_elsewhere transformers FOLDER --out RESULTS    # on a CPU, dequantised
    python -m benchmarks.load_elsewhere isobit FOLDER [--device cuda] --out RESULTS

vLLM quantises activations and the KV cache in ways of its own, so its answer may part from ours; it
must load every tensor, and its answer be one.  Its linears are counted by the format of their
weights: a skip list that it misunderstood shows there.  Where vLLM comes as an unpacked bundle, put
that on PYTHONPATH.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import Commands, run_command

QUESTION = "What is the capital of France?"
MODEL_LENGTH = 512
MEMORY_UTILIZATION = 0.5


def make_commands() -> Commands:
    commands = Commands(__doc__)
    for run in (vllm, transformers, isobit):
        command = commands.add(run.__name__, run, shape=False)
        command.add_argument("folder", type=Path)
        command.add_argument("--question", default=QUESTION)
        command.add_argument("--new-tokens", type=int, default=32)
        if run is isobit:
            command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return commands


def vllm(arguments: argparse.Namespace) -> None:
    os.environ |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its model can be looked at
        "HF_HUB_OFFLINE": "1",
    }
    import vllm as library  # pyright: ignore[reportMissingImports]

    llm = library.LLM(
        str(arguments.folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MODEL_LENGTH,
        gpu_memory_utilization=MEMORY_UTILIZATION,
        enforce_eager=True,
    )
    prompt, stops = _prompt(arguments.folder, arguments.question)
    sampling = library.SamplingParams(
        temperature=0.0,
        max_tokens=arguments.new_tokens,
        detokenize=False,
        stop_token_ids=list(stops),
    )
    outputs = llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
    answer, formats = tuple(outputs[0].outputs[0].token_ids), llm.apply_model(_weight_formats)[0]
    _write(arguments, "vllm", answer, formats=formats, vllm=library.__version__)


def transformers(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt, stops = _prompt(arguments.folder, arguments.question)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.folder, local_files_only=True)
    made = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=arguments.new_tokens,
        eos_token_id=list(stops),
    )
    answer = tuple(made[0, len(prompt) :].tolist())
    _write(arguments, "transformers", answer, formats=_weight_formats(model))


def isobit(arguments: argparse.Namespace) -> None:
    from isobit.api import generate

    (group,) = generate(
        arguments.folder,
        [arguments.question],
        device=arguments.device,
        rollout={"max_new_tokens": arguments.new_tokens, "temperature": 0.0},
    )
    _write(arguments, f"isobit-{arguments.device}", group.completions[0].token_ids)


def _weight_formats(model: Any) -> dict[str, int]:
    """How many matrices of linears and experts a model holds in each format."""
    formats = (
        str(parameter.dtype).removeprefix("torch.")
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and "scale" not in name
    )
    return dict(Counter(formats))


def _prompt(folder: Path, question: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> the tokens of the question as ``isobit rollout`` asks it, and those that end an answer."""
    from isobit.config.data import ChatConfig
    from isobit.data.prompts import prompts_of_rows
    from isobit.data.sources import Row
    from isobit.data.tokenizer import load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(folder)
    rows = [Row(question, {}, "question")]
    (prompt,) = prompts_of_rows(
        "question", rows, tokenizer, ChatConfig(), context_tokens=MODEL_LENGTH
    )
    return prompt.token_ids, stop_token_ids(tokenizer, folder)


def _write(arguments: argparse.Namespace, name: str, answer: tuple[int, ...], **more: Any) -> None:
    from benchmarks.real_checkpoint import write_result
    from isobit.data.tokenizer import decode, load_tokenizer

    text = decode(load_tokenizer(arguments.folder), answer)
    result = {"question": arguments.question, "answer": text, "token_ids": answer}
    write_result(arguments.out, f"load-{name}", {**result, **more})


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
