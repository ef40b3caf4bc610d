"""Adapters beside all weights: publishing, decoding and a training step of one shape.

    python -m benchmarks.lora [--device cuda] [--shape qwen3-8b] [--precision fp8] [--ranks 16,32]
                              [--parts publish,linears,decode,step] [--layers N] [--out FILE]

Random weights made on the device; rank 0 stands for all weights, without adapters.  Adapters are on
all linears.  One rank is measured after the other, and what does not fit leaves a row that says so.

publish    ``Policy.publish``, with its check of what was delivered: the median of ``REPEATS``, and
           the bytes that are published of what learns
decode     milliseconds of a decode step of 1, 32 and 256 sequences behind prompts of 512 tokens
           (the lesser of two runs of ``STEPS`` more tokens), and on a GPU the kernels of a step of
           32 sequences: how many, and microseconds of each name
linears    microseconds of each linear of a layer in decode steps of 1, 32, 128 and 256 sequences
           (captured, over ``LAYERS`` layers' weights): the linear; with its adapter; and with it
           otherwise (``OTHERWISE``); of ``--tokens-at-once`` tokens, those of the adapter's own
           forward and backward
step       an update over ``--tokens`` tokens: seconds by phase, with micro-batches of sequences of
           4,096 tokens and ``--recompute``

Ratios to rank 0 are of rows of one call.  ``--tiny`` is a small shape and small sizes, on any
device, to see that it runs.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.cases import PassCase, make_requests, precision_of, rollout_prompts
from benchmarks.cases import RolloutCase as Prompts
from benchmarks.common import (
    allocate_in_pages,
    card_row,
    kernel_times,
    names_of,
    printed,
    run_command,
    seconds,
    write_json,
)
from benchmarks.passes import free_memory, make_step, measured, peak_gib
from benchmarks.rollout_engines import seconds_to_complete
from isobit.config.lora import LORA_TARGETS
from isobit.config.rollout import RolloutConfig
from isobit.kernels.operands import AdapterGradients, AdapterWeight, LinearWeight
from isobit.models.adapters import adapter_masters
from isobit.models.config import Lora, ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.shapes import model_shape
from isobit.precision.flow import LinearShape
from isobit.rollout.native import NativeEngine

REPEATS = 9
STEPS = 128
FIRST = 24
"""New tokens of the shorter run, by whose end all sequences decode."""
PROFILED = 32
"""Sequences, and steps that are profiled."""
PARTS = ("publish", "linears", "decode", "step")
LAYERS = 4
OTHERWISE: dict[str, dict[str, Any]] = {
    "in order": {"overlaps": False},
    "in order, summed first": {"overlaps": False, "_sums_first": lambda *_: True},
    "summed first": {"_sums_first": lambda *_: True},
    "summed by each": {"_sums_first": lambda *_: False},
}
"""What these ways set in the products or in the module of the kernels: none begins before the last
one ended; the parts of x A^T are summed by a kernel of its own, or by every program that adds to y.
"""
TINY = ModelConfig("qwen3", 512, 256, 512, 2, 4, 2, 64, 256, 1e-6, 1e4, False)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    shape: ModelConfig
    counts: tuple[int, ...]
    prompt: int
    steps: int
    first: int
    length: int
    sequences: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Sizes":
        if arguments.tiny:
            return cls(TINY, (1, 2), 16, 4, 3, 32, 2)
        shape = model_shape(arguments.shape)
        if arguments.layers is not None:
            shape = replace(shape, num_layers=arguments.layers)
        return cls(shape, (1, PROFILED, 256), 512, STEPS, FIRST, 4096, arguments.sequences)

    def config(self, rank: int) -> ModelConfig:
        return replace(self.shape, lora=Lora(rank, 2.0 * rank, LORA_TARGETS) if rank else None)


@dataclass(frozen=True, slots=True)
class AdaptedCase(PassCase):
    """A micro-batch of a policy with adapters."""

    adapted: ModelConfig | None = None

    @property
    def config(self) -> ModelConfig:
        assert self.adapted is not None
        return self.adapted


def publish(rank: int, sizes: Sizes, mode: str, device: str) -> Row:
    policy = random_policy(sizes.config(rank), precision_of(mode), seed=0, device=device)
    took = list[float]()
    for _ in range(REPEATS + 2):
        with timed(took, device):
            policy.publish()
    changed = policy.change.share
    return {
        "publish_ms": 1e3 * median(took[2:]),
        "published_bytes": learnt_bytes(policy),
        "masters": sum(master.numel() for master in policy.parameters()),
        "changed": changed,
    }


def learnt_bytes(policy: Policy) -> int:
    """What is published of the masters that learn, once where both sides read one tensor."""
    held = dict[int, int]()
    paths = {name.rpartition(".")[0] for name in policy.masters}
    for side in ("rollout", "training"):
        weights = policy.weights(side)
        for path, linear in weights.linears.items():
            if path in paths:
                matrix = linear.matrix
                tensors = (
                    (matrix,)
                    if isinstance(matrix, torch.Tensor)
                    else (matrix.values, matrix.scales)
                )
                held |= {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        plain = (weights.plain[name] for name in policy.masters if name in weights.plain)
        held |= {tensor.data_ptr(): tensor.nbytes for tensor in plain}
    return sum(held.values())


@contextmanager
def timed(took: list[float], device: str) -> Iterator[None]:
    """Append the seconds of a block, to its end on the device."""
    synchronise(device)
    began = perf_counter()
    yield
    synchronise(device)
    took.append(perf_counter() - began)


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def decode(rank: int, sizes: Sizes, mode: str, device: str) -> Row:
    config = sizes.config(rank)
    policy = random_policy(config, precision_of(mode), seed=0, device=device, trainable=False)
    if rank:
        fill(policy)
    rollout = RolloutConfig(max_sequences=max(sizes.counts), kv_pages=pages(sizes, policy))
    engine, row = NativeEngine(policy, rollout, None, seed=0), Row()
    for count in sizes.counts:
        case = Prompts(count, sizes.prompt, sizes.first + sizes.steps)
        prompts = rollout_prompts(case, config.vocab_size)
        seconds_to_complete(engine, prompts, sizes.first)
        few = seconds_to_complete(engine, prompts, sizes.first)
        many = min(seconds_to_complete(engine, prompts, case.new_tokens) for _ in range(2))
        step = (many - few) / sizes.steps
        row[f"step_ms_{count}"], row[f"tokens_per_s_{count}"] = 1e3 * step, count / step
    if device != "cpu":
        row["kernels"] = kernels_of_a_step(engine, sizes, config)
    return row


def pages(sizes: Sizes, policy: Policy) -> int:
    length = sizes.prompt + sizes.first + sizes.steps
    return (max(sizes.counts) + 1) * -(-length // policy.backend.sizes.page_tokens)


def fill(policy: Policy) -> None:
    """With numbers in B, which is zeros at the start: the same work, and no row of zeros."""
    for name in adapter_masters(policy.config):
        held = policy.weights("rollout").linears[name.removesuffix(".weight")].matrix
        if name.endswith("lora_B.weight") and isinstance(held, torch.Tensor):
            held.normal_(0, 0.01)


def kernels_of_a_step(engine: NativeEngine, sizes: Sizes, config: ModelConfig) -> Row:
    """Of a decode step of ``PROFILED`` sequences."""
    case = Prompts(PROFILED, sizes.prompt, sizes.first + 2 * PROFILED)
    requests = make_requests(rollout_prompts(case, config.vocab_size), case.new_tokens)
    handles = [handle for group in engine.submit(requests) for handle in group]
    for _ in range(sizes.first):
        engine.step()
    times = kernel_times(engine.step, PROFILED)
    engine.abort(handles)
    return {
        "launches": sum(launches for _, launches in times.values()),
        "us": sum(time for time, _ in times.values()),
        "by_name": {name: [round(time, 1), round(n, 1)] for name, (time, n) in times.items()},
    }


def linears(rank: int, sizes: Sizes, mode: str, tokens: int) -> Row:
    config = replace(sizes.config(rank), num_layers=LAYERS)
    policy = random_policy(config, precision_of(mode), seed=0, device="cuda", trainable=False)
    if rank:
        fill(policy)
    row = Row()
    for layer in policy.decoder.layers[:1]:
        for site in (*layer.attention.sites(), *layer.mlp.sites()):
            if site.linear is not None:
                name = site.name.rpartition(".")[2]
                row[name] = {}
                for count in (1, PROFILED, 128, 256):
                    case = _Products(policy, name, site.linear, count)
                    row[name][str(count)] = case.captured_us(rank)
                if rank:
                    row[name][str(tokens)] = _Products(policy, name, site.linear, tokens).us()
    return row


class _Products:
    """A linear of all layers of a policy, and its inputs."""

    def __init__(self, policy: Policy, name: str, shape: LinearShape, tokens: int) -> None:
        self._backend, weights = policy.backend, policy.weights("rollout")
        self._pairs = list[tuple[LinearWeight, AdapterWeight | None]]()
        ends = list(accumulate(shape.parts.values()))
        columns = tuple(map(slice, (0, *ends), ends))
        for layer in range(LAYERS):
            path = f"layers.{layer}.{name}"
            parts = [weights.linears.get(f"{path}.lora_{kind}") for kind in "AB"]
            adapter = None
            if parts[0] is not None and parts[1] is not None:
                adapter = AdapterWeight(parts[0], parts[1], columns, 2.0)
            self._pairs.append((weights.linears[path], adapter))
        self._x = torch.randn(tokens, shape.in_features, device="cuda").bfloat16()
        self._read = self._backend.linear_input(self._x, self._pairs[0][0].site).read

    def captured_us(self, rank: int) -> Row:
        """Of each way, a layer's linear."""
        ways = {"alone": self._alone} | ({"added": self._added} if rank else {})
        made = Row()
        for name, way in ways.items():
            graph = self._backend.capture(lambda way=way: self._all(way))
            made[name] = round(1e6 * seconds(graph.replay) / LAYERS, 2)
        for name, values in OTHERWISE.items() if rank else ():
            with kernels_with(values):
                graph = self._backend.capture(lambda: self._all(self._added))
            made[f"added, {name}"] = round(1e6 * seconds(graph.replay) / LAYERS, 2)
        return made

    def us(self) -> Row:
        """Of the adapter alone, of so many tokens as are trained on at once."""
        backend, (weight, adapter) = self._backend, self._pairs[0]
        assert adapter is not None
        y = backend.linear(self._read, weight)
        low = backend.adapter_low(self._x, adapter)
        dx = torch.zeros_like(self._x)
        matrices = adapter.down.matrix, adapter.up.matrix
        grads = AdapterGradients(
            *(
                torch.zeros(one.shape, device="cuda")
                for one in matrices
                if isinstance(one, torch.Tensor)
            )
        )
        work = {
            "low": lambda: backend.adapter_low(self._x, adapter),
            "forward": lambda: backend.add_adapter(y, self._x, adapter, save=True),
            "backward": lambda: backend.adapter_backward(y, self._x, low, dx, adapter, grads),
        }
        return {name: round(1e6 * seconds(one), 2) for name, one in work.items()}

    def _all(self, way: Callable[[LinearWeight, AdapterWeight | None], torch.Tensor]) -> Any:
        return tuple(way(*pair) for pair in self._pairs)

    def _alone(self, weight: LinearWeight, adapter: AdapterWeight | None) -> torch.Tensor:
        return self._backend.linear(self._read, weight)

    def _added(self, weight: LinearWeight, adapter: AdapterWeight | None) -> torch.Tensor:
        assert adapter is not None
        y = self._backend.linear(self._read, weight)
        self._backend.add_adapter(y, self._x, adapter)
        return y


@contextmanager
def kernels_with(values: Mapping[str, Any]) -> Iterator[None]:
    """Values of names in the products or in the module of the kernels, which needs Triton."""
    products = importlib.import_module("isobit.kernels.hopper.products").HopperProducts
    kernels = importlib.import_module("isobit.kernels.triton.linear")
    owners = {name: products if hasattr(products, name) else kernels for name in values}
    own = {name: getattr(owner, name) for name, owner in owners.items()}
    for name, value in values.items():
        setattr(owners[name], name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(owners[name], name, value)


def step(rank: int, sizes: Sizes, mode: str, device: str, recompute: Any, tokens: int) -> Row:
    case = AdaptedCase(
        mode, sizes.length, sizes.sequences, recompute, "", adapted=sizes.config(rank)
    )
    count = -(-tokens // case.tokens)
    one = make_step(case, count, device)
    one(1)
    steps = [one(count) for _ in range(3)]
    took = median(sum(phases.values()) for phases in steps)
    return {
        "step_tokens": count * case.tokens,
        "step_s": took,
        "trained_tokens_per_s": count * case.tokens / took,
        "phases_s": {name: median(phases[name] for phases in steps) for name in steps[0]},
        **({} if device == "cpu" else {"peak_gib": peak_gib()}),
    }


def run(arguments: argparse.Namespace) -> None:
    device, sizes, mode = arguments.device, Sizes.of(arguments), arguments.precision
    rows: list[Row] = []
    if device != "cpu":
        allocate_in_pages()
        rows.append(printed(card_row()))
    tokens = 2 * sizes.length * sizes.sequences if arguments.tiny else arguments.tokens
    parts: dict[str, Callable[[int], Row]] = {
        "publish": lambda rank: publish(rank, sizes, mode, device),
        "linears": lambda rank: linears(rank, sizes, mode, arguments.tokens_at_once),
        "decode": lambda rank: decode(rank, sizes, mode, device),
        "step": lambda rank: step(rank, sizes, mode, device, arguments.recompute, tokens),
    }
    for name in arguments.parts:
        whole: Row | None = None
        for rank in (0, *arguments.ranks):
            free_memory()
            row = measured(lambda name=name, rank=rank: parts[name](rank))
            whole = row if rank == 0 else whole
            row |= {"part": name, "rank": rank, "precision": mode, "shape": arguments.shape}
            rows.append(printed(row | ratios(row, whole)))
            write_json(arguments.out, rows)


def ratios(row: Row, whole: Row | None) -> Row:
    """Of the figures of a rank to those of all weights."""
    if whole is None or row is whole:
        return {}
    names = [name for name in row if name.endswith(("_ms", "_bytes", "step_s")) or "per_s" in name]
    names += [name for name in row if name.startswith("step_ms_")]
    found = {name: row[name] / whole[name] for name in dict.fromkeys(names) if whole.get(name)}
    return {"of_all_weights": {name: round(value, 4) for name, value in found.items()}}


def _ranks(text: str) -> Sequence[int]:
    return [int(rank) for rank in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--ranks", type=_ranks, default=[16, 32])
    parser.add_argument(
        "--parts", type=names_of(PARTS, "parts"), default=["publish", "decode", "step"]
    )
    parser.add_argument("--layers", type=int, help="so many of the shape's layers")
    parser.add_argument("--recompute", default="mlp", choices=("none", "mlp", "full"))
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=32768, help="of an update")
    parser.add_argument("--tokens-at-once", type=int, default=4096, help="of the part linears")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
