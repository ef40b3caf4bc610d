"""Outliers planted in a checkpoint, and what each precision makes of them, on a CPU.

    python -m benchmarks.outliers accuracy DIR --out benchmarks/results/outliers
    python -m benchmarks.outliers verify starter --out benchmarks/results/outliers
    python -m benchmarks.outliers table benchmarks/results/outliers

A factor f of 2^4, 2^8 and 2^14, in every layer:

norm       8 channels of both norms' weights times f, undone in the matrices that read them
down_proj  8 channels in front of down_proj times f, by up_proj, undone in down_proj
stream     f times the embeddings' rms, added to one channel of every 16th token; lm_head keeps the
           embeddings as they were

The first two leave the function alone, the third does not.  Every plant is measured against its own
``fp32``, over the tokens of the project's docs in windows: the rms of the change of a token's
log-probability, and against its own ``bf16`` the share of places with another most likely token.
``verify`` compares rollout and training in ``int8`` with the same outliers.  ``int8, not folded``
is ``int8`` without ``isobit.models.outliers.fold_norms``.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Commands, Row, markdown, run_command, write_json
from benchmarks.real_checkpoint import windows_of_docs
from isobit.config.precision import named_precision
from isobit.models.config import ModelConfig
from isobit.models.folder import model_folder, read_config, read_masters
from isobit.models.policy import Policy
from isobit.proof.verify import VerifyOptions, verify_policy

SITES = ("norm", "down_proj", "stream")
FACTORS = (2.0**4, 2.0**8, 2.0**14)
FLOWS = ("fp32", "bf16", "fp8", "int8-linear", "int8")
NOT_FOLDED = "int8, not folded"
_CHANNELS, _EVERY = 8, 16
_OPTIONS = VerifyOptions(prompts=4, samples=2, max_new_tokens=6)

Masters = Iterator[tuple[str, torch.Tensor]]


def channels_of(width: int) -> torch.Tensor:
    """``_CHANNELS`` of them, spread over blocks of the Hadamard matrix and places in a block."""
    return torch.arange(_CHANNELS) * (width // _CHANNELS) + 3


def planted(masters: Masters, config: ModelConfig, site: str, factor: float) -> Masters:
    """The same masters, changed in place."""
    hidden, inner = channels_of(config.hidden_size), channels_of(config.intermediate_size)
    for name, values in masters:
        own = name.removesuffix(".weight").rpartition(".")[2]
        if site == "norm" and own in ("input_norm", "post_attention_norm"):
            values[hidden] *= factor
        elif site == "norm" and own in ("qkv_proj", "gate_up_proj"):
            values[:, hidden] /= factor
        elif site == "down_proj" and own == "gate_up_proj":
            values[config.intermediate_size + inner] *= factor
        elif site == "down_proj" and own == "down_proj":
            values[:, inner] /= factor
        elif site == "stream" and own == "embed_tokens":
            values[::_EVERY, hidden[0]] += factor * values.square().mean().sqrt()
        yield name, values


def untied(folder: Path, config: ModelConfig) -> Masters:
    """FP32 masters, with a matrix of lm_head's own."""
    head: torch.Tensor | None = None
    for name, values in read_masters(folder, config):
        assert isinstance(values, torch.Tensor), "a folder in BF16 or FP32"
        values = values.float().clone()
        if name == "embed_tokens.weight" and config.tied_embeddings:
            head = values.clone()
        yield name, values
    if head is not None:
        yield "lm_head.weight", head


def policy_of(folder: Path, flow: str, site: str, factor: float) -> Policy:
    config = read_config(folder)
    masters = planted(untied(folder, config), config, site, factor)
    is_folded = flow != NOT_FOLDED
    unfolded = patch("isobit.models.published.fold_norms", lambda masters, *_: masters)
    with nullcontext() if is_folded else unfolded:
        return Policy(
            replace(config, tied_embeddings=False),
            named_precision(flow if is_folded else "int8"),
            masters,
            trainable=False,
        )


@torch.no_grad()
def score(policy: Policy, windows: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all tokens but a window's first, FP32, and the most likely ones."""
    weights, lengths = policy.weights("training"), tuple(map(len, windows))
    places = torch.cat([torch.arange(count) for count in lengths])
    attend = policy.backend.packed_attention(policy.flow.training, lengths, places)
    ids = torch.tensor([one for window in windows for one in window])
    hidden = policy.decoder.hidden_states(weights, ids, attend)
    rows = (places > 0).nonzero()[:, 0]
    log_probs = policy.decoder.lm_head.logits(weights, hidden[rows - 1]).log_softmax(-1)
    return log_probs.gather(1, ids[rows, None])[:, 0], log_probs.argmax(-1)


def measure(folder: Path, windows: Sequence[tuple[int, ...]], site: str, factor: float) -> Row:
    """The figures of each flow."""
    flows, exact, usual = dict[str, Any](), torch.empty(0), torch.empty(0)
    for flow in (*FLOWS, *((NOT_FOLDED,) if site == "norm" else ())):
        log_probs, best = score(policy_of(folder, flow, site, factor), windows)
        if flow == "fp32":
            exact = log_probs
        elif flow == "bf16":
            usual = best
        one = {"perplexity": math.exp(-float(log_probs.double().mean()))}
        if flow != "fp32":
            one["rms"] = float((log_probs - exact).double().square().mean().sqrt())
            one["changed"] = float((best != usual).double().mean())
        flows[flow] = one
        print(site, factor, flow, one, flush=True)
    return flows


def verified(folder: Path, site: str, factor: float) -> Row:
    """``isobit verify`` in ``int8``, with the same outliers planted."""
    made = verify_policy(policy_of(folder, "int8", site, factor), _OPTIONS)
    found = {
        "tokens_compared": made.comparison.tokens_compared,
        "tokens_differing": made.comparison.tokens_differing,
        "operations_differ": any(seen.difference is not None for seen in made.operations),
    }
    print("verify", site, factor, found, flush=True)
    return found


CASES = [("", 1.0), *((site, factor) for factor in FACTORS for site in SITES)]


def run_accuracy(arguments: argparse.Namespace) -> None:
    folder = model_folder(arguments.folder)
    windows = windows_of_docs(folder, arguments.windows, arguments.length)
    found = {"windows": arguments.windows, "length": arguments.length, "rows": list[Row]()}
    for site, factor in CASES:
        flows = measure(folder, windows, site, factor)
        found["rows"].append({"site": site, "factor": factor, "flows": flows})
        write_json(arguments.out / "accuracy.json", found | about(folder))


def run_verify(arguments: argparse.Namespace) -> None:
    folder = model_folder(arguments.folder)
    rows = list[Row]()
    for site, factor in CASES:
        rows.append({"site": site, "factor": factor} | verified(folder, site, factor))
        write_json(arguments.out / "verify.json", {"rows": rows} | about(folder))


def about(folder: Path) -> Row:
    return {"model": folder.name, "torch": torch.__version__}


def print_table(directory: Path) -> None:
    """rms against ``fp32``, share changed against ``bf16``, and what ``verify`` found."""
    accuracy, checked = (
        json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        for name in ("accuracy", "verify")
    )
    flows = (*FLOWS[1:], NOT_FOLDED)
    names = [f"`{flow}`" for flow in flows[:-1]] + ["`int8`, not folded"]
    print(markdown(["planted", "f", "`fp32` perplexity", *names, "differing"]))
    print("|---|---" + "|---:" * (len(flows) + 2) + "|")
    measured = {(row["site"], row["factor"]): row["flows"] for row in accuracy}
    for row in checked:
        found = measured.get((row["site"], row["factor"]), {})
        factor = f"2^{math.log2(row['factor']):.0f}" if row["site"] else "-"
        cells = [row["site"] or "nothing", factor]
        cells.append(f"{found['fp32']['perplexity']:.4g}" if found else "")
        for flow in flows:
            one = found.get(flow)
            changed = "" if one is None or flow == "bf16" else f", {one['changed']:.1%}"
            cells.append("" if one is None else f"{one['rms']:.3f}{changed}")
        cells.append(f"{row['tokens_differing']} of {row['tokens_compared']:,}")
        print(markdown(cells))


def make_commands() -> Commands:
    commands = Commands(__doc__)
    command = commands.add("accuracy", run_accuracy, shape=False)
    command.add_argument("folder", type=Path)
    command.add_argument("--windows", type=int, default=2)
    command.add_argument("--length", type=int, default=128, help="tokens of a window")
    commands.add("verify", run_verify, shape=False).add_argument("folder", type=Path)
    commands.add_table(print_table)
    return commands


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
