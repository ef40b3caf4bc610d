"""Training of a real model's shape on one Hopper GPU, this trainer beside transformers: forward and
backward, and whole updates.

    python -m benchmarks.training pass native CASE... [--shape qwen3-8b] --out DIR
    python -m benchmarks.training pass transformers CASE... --out DIR
    python -m benchmarks.training step native CASE... [--tokens 65536] --out DIR
    python -m benchmarks.training step transformers CASE... --out DIR
    python -m benchmarks.training table DIR

for example with ``fp8:4096x2:none bf16:4096x2:none fp8:16384x1:mlp bf16:16384x1:full``.  A case is
PRECISION:LENGTHxSEQUENCES:RECOMPUTE, the sequences being those of a micro-batch; one process
measures them one after the other, and goes on where the memory does not hold one.  Packed sequences
of one length, random tokens and weights; lm_head never holds all logits at once, on neither side.

pass    forward and backward of a micro-batch without an optimiser, gradients added to those that
        are there; the loss is a weighted sum of every token's log-probability.  Model FLOPs a token
        are 6 P + 12 (L / 2) H D layers, with P the parameters of a token but the embedding.
step    the micro-batches of ``--tokens`` tokens or more, then clip, AdamW with BF16 moments over
        FP32 masters, and publication; the loss is the mean of -log p.  Ours is ``Trainer.update``;
        transformers' is below.

transformers, the baseline, trains in BF16 with SDPA: a batch without padding, cuDNN's attention
first and PyTorch's flash where it refuses, log-probabilities in chunks of rows that the backward
computes again, and its own gradient checkpointing for ``full``.  Its gradients are BF16 and add up
in ``.grad``; the step clips them, gives each in FP32 to its master, one after the other (a second
set of gradients would take the activations' memory), runs the same AdamW, and copies the masters to
the weights.  That is to its advantage: its gradients take half the bytes of our FP32 ones, and
nothing is charged for their rounding at each micro-batch.
"""

import argparse
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks import passes
from benchmarks.cases import PassCase, check_peer, parse_case
from benchmarks.common import Commands, Row, print_by_card, read_rows, run_command, write_json
from benchmarks.passes import Pass, Phases, Step
from isobit.config.training import Recompute, TrainingConfig
from isobit.kernels.backend import backend_of
from isobit.models.config import ModelConfig
from isobit.training.optimiser import build_optimiser

ENGINES = ("native", "transformers")


def make_commands() -> Commands:
    commands = Commands(__doc__)
    for command in (one_pass := commands.add("pass", run_passes), commands.add("step", run_steps)):
        command.add_argument("engine", choices=ENGINES)
        command.add_argument(
            "cases", nargs="+", type=parse_case, metavar="PRECISION:LENGTHxSEQUENCES:RECOMPUTE"
        )
        if command is not one_pass:
            command.add_argument("--tokens", type=int, default=65536, help="of a step, at least")
    commands.add_table(run_table)
    return commands


def run_passes(arguments: argparse.Namespace) -> None:
    make = passes.make_pass if arguments.engine == "native" else make_pass
    passes.measure_passes(make, arguments.engine, _chosen_cases(arguments), arguments.out)


def run_steps(arguments: argparse.Namespace) -> None:
    make = passes.make_step if arguments.engine == "native" else make_step
    passes.measure_steps(
        make, arguments.engine, _chosen_cases(arguments), arguments.tokens, arguments.out
    )


def _chosen_cases(arguments: argparse.Namespace) -> list[PassCase]:
    cases = [replace(case, shape=arguments.shape) for case in arguments.cases]
    if arguments.engine == "transformers":
        check_peer(cases)
    return cases


CHUNK = 1024
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class PeerModel:
    """A model of transformers with random weights."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = config.to_hf()
        described = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(
                described, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        self.model.train()

    def recompute(self, kind: Recompute) -> None:
        """Set what the backward recomputes: none or full."""
        if kind == "full":
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        else:
            self.model.gradient_checkpointing_disable()

    def log_probs(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """int64 [S, L] -> log-probabilities of the tokens behind position ``first``, FP32 [S * (L -
        1 - first)].
        """
        targets = ids[:, first + 1 :].reshape(-1)
        hidden = (
            self.model.model(input_ids=ids, use_cache=False)
            .last_hidden_state[:, first:-1]
            .reshape(targets.numel(), -1)
        )
        head = self.model.lm_head.weight
        parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat(
            [checkpoint(_log_probs, h, head, t, use_reentrant=False) for h, t in parts]
        )  # pyright: ignore[reportArgumentType]


class PeerOptimiser:
    """What the top of this file says, over the parameters of a model."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig) -> None:
        self._parameters = list(model.parameters())
        self._masters = [
            torch.nn.Parameter(parameter.detach().float()) for parameter in self._parameters
        ]
        self._optimisers = [
            build_optimiser({"master": master}, config, backend_of(master.device), seed=number)
            for number, master in enumerate(self._masters)
        ]
        self._max_norm = config.max_grad_norm

    @torch.no_grad()
    def step(self, phases: Phases) -> None:
        """Clip, move the masters, publish, and drop the gradients."""
        with phases("optimiser"):
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
            for parameter, master, optimiser in zip(
                self._parameters, self._masters, self._optimisers, strict=True
            ):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
                optimiser.step()
                master.grad = None
        with phases("publish"):
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)


def fastest_attention() -> AbstractContextManager[object]:
    """cuDNN's attention before the others, for a forward and its backward."""
    return sdpa_kernel(_ATTENTION, set_priority=True)


def make_pass(case: PassCase, device: str = "cuda") -> Pass:
    """Random weights on the card, and the pass over them."""
    peer = PeerModel(case.config, device)
    peer.recompute(case.recompute)
    ids, weights = case.token_ids().to(device), case.weights().to(device).view(-1)

    def one() -> None:
        with fastest_attention():
            (peer.log_probs(ids) * weights).sum().backward()

    return one


def make_step(case: PassCase, microbatches: int, device: str = "cuda") -> Step:
    """A model, its optimiser, and a step over so many micro-batches: the mean of -log p of all
    tokens.
    """
    peer = PeerModel(case.config, device)
    peer.recompute(case.recompute)
    optimiser = PeerOptimiser(peer.model, TrainingConfig(moments="bf16"))
    ids, phases = case.token_ids().to(device), Phases(on_gpu=device != "cpu")

    def one(count: int) -> dict[str, float]:
        phases.start()
        with fastest_attention():
            for _ in range(count):
                with phases("forward"):
                    loss = -peer.log_probs(ids).mean() / microbatches
                with phases("backward"):
                    loss.backward()
        optimiser.step(phases)
        return phases.stop()

    return one


def _log_probs(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, head).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


HEADERS = {
    "pass": (
        "| L x sequences | engine | recompute | tokens/s | model TFLOP/s "
        "| of isobit `bf16` | of transformers | peak GiB |"
    ),
    "step": (
        "| L x sequences | engine | recompute | tokens a step | forward s | backward s "
        "| optimiser s | publish s | tokens/s | of isobit `bf16` | of transformers | peak GiB |"
    ),
}
TITLES = {"pass": "Forward and backward", "step": "Whole steps"}
PHASES = ("forward", "backward", "optimiser", "publish")


def run_table(directory: Path) -> None:
    """Print the tables, and write their lines to ``DIR/training-table.json``."""
    rows = read_rows(directory)
    tables = {
        kind: make_lines([row for row in rows if row.get("kind") == kind]) for kind in HEADERS
    }
    for kind, lines in tables.items():
        rule = "|---|---|---|" + "---:|" * (HEADERS[kind].count("|") - 4)
        print_by_card(f"{TITLES[kind]}, ", (HEADERS[kind], rule), lines, _cells)
    write_json(directory / "training-table.json", tables)


def make_lines(rows: list[Row]) -> list[Row]:
    """Each row with its ratios; None where that card has nothing to compare with.  Of repeated
    measurements the last one counts.

    A pass is held against our BF16 pass at the same setting; a step, whose micro-batch is what
    fits, against the fastest BF16 step of the same length.
    """
    latest = {_key(row): row for row in rows}
    lines = []
    for row in latest.values():
        measured = [
            other
            for other in latest.values()
            if "error" not in other and _family(other) == _family(row)
        ]
        ours = [
            o
            for o in measured
            if (o["engine"], o["mode"]) == ("native", "bf16")
            and (row["kind"] == "step" or _same(o, row))
        ]
        theirs = [o for o in measured if o["engine"] == "transformers"]
        ratios = {"of_native_bf16": _ratio(row, ours), "of_transformers": _ratio(row, theirs)}
        lines.append(row | ratios)
    return sorted(lines, key=_order)


def _ratio(row: Row, others: list[Row]) -> float | None:
    if "error" in row or not others:
        return None
    return row["tokens_per_s"] / max(other["tokens_per_s"] for other in others)


def _family(row: Row) -> tuple[object, ...]:
    return row["kind"], row["shape"], row["length"], row["card"]["uuid"]


def _same(row: Row, other: Row) -> bool:
    return all(row[name] == other[name] for name in ("sequences", "recompute"))


def _key(row: Row) -> tuple[object, ...]:
    return *_family(row), row["engine"], row["mode"], row["sequences"], row["recompute"]


def _order(line: Row) -> tuple[object, ...]:
    names = ("length", "engine", "mode", "recompute", "sequences")
    return line["shape"], line["card"]["uuid"], *(line[name] for name in names)


def _cells(line: Row) -> list[str]:
    name = f"isobit `{line['mode']}`" if line["engine"] == "native" else "transformers BF16"
    cells = [f"{line['length']:,} x {line['sequences']}", name, line["recompute"]]
    if "error" in line:
        return [*cells, line["error"]]
    ratios = [
        "-" if line[key] is None else f"{line[key]:.2f}"
        for key in ("of_native_bf16", "of_transformers")
    ]
    if line["kind"] == "pass":
        cells += [f"{line['tokens_per_s']:,.0f}", f"{line['model_tflop_per_s']:.0f}", *ratios]
    else:
        phases = [f"{line['phases_s'].get(name, 0.0):.2f}" for name in PHASES]
        cells += [f"{line['step_tokens']:,}", *phases, f"{line['tokens_per_s']:,.0f}", *ratios]
    return [*cells, f"{line['peak_gib']:.0f}"]


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
