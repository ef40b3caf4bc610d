"""Whether other tools take an exported folder: one greedy answer of each.

    isobit export RUN_OR_FOLDER --to FOLDER --format fp8
    python -m benchmarks.load_elsewhere vllm FOLDER [--beside FOLDER_IN_BF16 --flow int8-linear]
                                                    --out RESULTS            # on a GPU
    python -m benchmarks.load_elsewhere transformers FOLDER --out RESULTS    # on a CPU, dequantised
    python -m benchmarks.load_elsewhere isobit FOLDER [--device cuda] --out RESULTS
    python -m benchmarks.load_elsewhere int8 FOLDER_IN_BF16 --out RESULTS    # on a CPU

vLLM quantises activations and the KV cache in ways of its own, so its answer may part from ours; it
must load every tensor, and its answer be one.  Its linears are counted by the format of their
weights: a skip list that it misunderstood shows there.  Each linear in INT8 is compared with its
definition, x H W, on what it is given: the largest error is relative to the norm of the output, and
has that of rounding x.  Where vLLM comes as an unpacked bundle, put that on PYTHONPATH.

A greedy answer hangs on its closest choice, so ``--beside`` also takes the root mean square of the
change of each token's log-probability in this repository's docs: of vLLM's export against our BF16,
of the flow that it was exported from against our BF16, and of the two against each other.

``int8`` exports a folder in INT8 and has transformers with compressed-tensors read it, in FP32,
with the Hadamard matrices of its ``transform_config``.  It prints the root mean square of the
change of each token's log-probability in this repository's docs, against FP32: of the export, of
the flow ``int8-linear``, and of the two against each other: they multiply by the same weights, and
round inputs to amax / 127.5 and amax / 127.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.common import Commands, run_command

if TYPE_CHECKING:
    import torch

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
        if run is vllm:
            command.add_argument("--beside", type=Path, help="what the folder was exported from")
            command.add_argument("--flow", default="int8-linear")
            command.add_argument("--windows", type=int, default=4)
            command.add_argument("--length", type=int, default=500, help="tokens of a window")
    command = commands.add(int8.__name__, int8, shape=False)
    command.add_argument("folder", type=Path)
    command.add_argument("--windows", type=int, default=4)
    command.add_argument("--length", type=int, default=512, help="tokens of a window")
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
    errors: dict[str, float] = {}
    llm.apply_model(partial(_compare_linears, errors=errors))
    outputs = llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
    answer, formats = tuple(outputs[0].outputs[0].token_ids), llm.apply_model(_weight_formats)[0]
    found = {"formats": formats, "linear_errors": errors, "vllm": library.__version__}
    if arguments.beside is not None:
        found["rms"] = _beside(
            llm, library.SamplingParams(max_tokens=1, prompt_logprobs=0), arguments
        )
    _write(arguments, "vllm", answer, **found)


def _beside(llm: Any, scoring: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """How far log-probabilities in this repository's docs are from each other, in nats."""
    import torch

    from benchmarks.real_checkpoint import windows_of_docs

    windows = windows_of_docs(arguments.folder, arguments.windows, arguments.length)
    asked = [{"prompt_token_ids": list(window)} for window in windows]
    theirs = torch.tensor(
        [
            told[token].logprob
            for window, output in zip(
                windows, llm.generate(asked, scoring, use_tqdm=False), strict=True
            )
            for token, told in zip(window[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )
    bf16, flow = (
        _log_probs_in(arguments.beside, name, windows, "cuda") for name in ("bf16", arguments.flow)
    )
    return {
        "tokens": len(theirs),
        "vllm against bf16": _rms(theirs, bf16),
        f"{arguments.flow} against bf16": _rms(flow, bf16),
        f"vllm against {arguments.flow}": _rms(theirs, flow),
    }


def _log_probs_in(
    folder: Path, flow: str, windows: Sequence[tuple[int, ...]], device: str
) -> "torch.Tensor":
    """In one of our flows, of all tokens but the first of each window."""
    import torch

    from isobit.models.folder import load_policy
    from isobit.models.scorer import Scorer
    from isobit.records.packing import lay_end_to_end
    from isobit.records.sequence import TokenSequence

    scorer = Scorer(load_policy(folder, flow, device, trainable=False))
    sequences = [TokenSequence.of_answer(window[:1], window[1:]) for window in windows]
    scores = [scorer.score(lay_end_to_end([one])).log_probs for one in sequences]
    return torch.cat(scores).cpu()


def _rms(a: "torch.Tensor", b: "torch.Tensor") -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def _compare_linears(model: "torch.nn.Module", errors: dict[str, float]) -> None:
    """Have vLLM's linears behind a Hadamard matrix note their largest error, by name and rows."""
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "input_transform", None) is not None:
            module.register_forward_pre_hook(_keep_input, with_kwargs=True)
            size = next(iter(method.input_tfms.values())).scheme.head_dim
            hook = partial(_note_error, errors=errors, name=name.split(".")[-1], size=size)
            module.register_forward_hook(hook)


def _keep_input(module: Any, args: Any, kwargs: Any) -> None:
    """A copy: vLLM transforms in place."""
    module.given = (args[0] if args else kwargs["input_"]).clone()


def _note_error(
    module: Any, args: Any, output: Any, errors: dict[str, float], name: str, size: int
) -> None:
    from isobit.precision.quant_tensor import hadamard_matrix

    given = module.given.float()
    rows, columns = given.shape
    matrix = hadamard_matrix(size).to(given) / size**0.5
    turned = (given.view(rows, -1, size) @ matrix).view(rows, columns)
    weight = module.weight.float()
    weight = weight if len(weight) == columns else weight.t()
    expected = turned @ (weight * module.weight_scale.float().view(1, -1))
    found = output[0] if isinstance(output, tuple) else output
    error = float((found.float() - expected).norm() / expected.norm())
    place = f"{name}, {rows} rows"
    errors[place] = max(error, errors.get(place, 0.0))


def transformers(arguments: argparse.Namespace) -> None:
    import torch

    prompt, stops = _prompt(arguments.folder, arguments.question)
    model = _in_transformers(arguments.folder)
    made = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=arguments.new_tokens,
        eos_token_id=list(stops),
    )
    answer = tuple(made[0, len(prompt) :].tolist())
    _write(arguments, "transformers", answer, formats=_weight_formats(model))


def _in_transformers(folder: Path, **settings: Any) -> Any:
    """A folder as transformers reads it, with the Hadamard matrices that it leaves out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **settings)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    transforms = stored.get("quantization_config", {}).get("transform_config")
    if transforms is not None:
        from compressed_tensors.transform import (  # pyright: ignore[reportMissingImports]
            TransformConfig,
            apply_transform_config,
        )

        apply_transform_config(model, TransformConfig.model_validate(transforms))
    return model


def isobit(arguments: argparse.Namespace) -> None:
    from isobit.api import generate

    (group,) = generate(
        arguments.folder,
        [arguments.question],
        device=arguments.device,
        rollout={"max_new_tokens": arguments.new_tokens, "temperature": 0.0},
    )
    _write(arguments, f"isobit-{arguments.device}", group.completions[0].token_ids)


def int8(arguments: argparse.Namespace) -> None:
    import torch

    from benchmarks.real_checkpoint import windows_of_docs, write_result
    from isobit.commands.export import export, find_source

    windows = windows_of_docs(arguments.folder, arguments.windows, arguments.length)
    with TemporaryDirectory() as place:
        target = Path(place) / "int8"
        result = export(find_source(arguments.folder, None, print), target, "int8")
        exported = _in_transformers(target, dtype=torch.float32)
        of_export = _log_probs(exported, windows)
    fp32 = _log_probs(_in_transformers(arguments.folder, dtype=torch.float32), windows)
    ours = _log_probs_in(arguments.folder, "int8-linear", windows, "cpu")

    found = {
        "tokens": len(fp32),
        "matrices": result.quantised,
        "export against fp32": _rms(of_export, fp32),
        "int8-linear against fp32": _rms(ours, fp32),
        "export against int8-linear": _rms(of_export, ours),
    }
    write_result(arguments.out, "load-int8", found)


def _log_probs(model: Any, windows: Sequence[tuple[int, ...]]) -> "torch.Tensor":
    """Of all tokens but the first of each window."""
    import torch

    made = list[torch.Tensor]()
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            made.append(log_probs.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(made)


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
    from isobit.data.stop_tokens import stop_token_ids
    from isobit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    rows = [Row(question, {}, "question")]
    (prompt,) = prompts_of_rows(
        "question", rows, tokenizer, ChatConfig(), context_tokens=MODEL_LENGTH
    )
    return prompt.token_ids, stop_token_ids(tokenizer, folder)


def _write(arguments: argparse.Namespace, name: str, answer: tuple[int, ...], **more: Any) -> None:
    from benchmarks.real_checkpoint import write_result
    from isobit.data.encoding import decode
    from isobit.data.tokenizer import load_tokenizer

    text = decode(load_tokenizer(arguments.folder), answer)
    result = {"question": arguments.question, "answer": text, "token_ids": answer}
    write_result(arguments.out, f"load-{name}", {**result, **more})


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
