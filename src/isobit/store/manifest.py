"""``run.json``: what is needed to understand a run later or to repeat its bits, and what a run's
directory has to know of a training (``TrainingRun``).

Gradients repeat at a fixed number of threads on one kind of CPU (the instruction set chooses the
kernels), so both are recorded beside the versions, the resolved configuration and the formats of
every site.

Machines of one class of bits compute the same bits from the same inputs at the same number of
threads:

    device        cpu or cuda
    arithmetic    of a CPU: SHA-256 of the results of torch's operations on fixed inputs.  The
                  instruction set alone is not enough: AVX2 and AVX-512 multiply matrices to the
                  same bits and differ in softmax, and MKL and oneDNN choose for themselves
                  (benchmarks/instruction_sets.py)
    torch         its version
    kernels       SHA-256 of the syntax of Isobit's kernels and formats, without comments,
                  docstrings and names of files
    PACKAGE       versions of the packages that compute for the kernels
"""

import ast
import hashlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

import isobit
from isobit.config.recipes import Recipe
from isobit.data.sampler import PromptSampler
from isobit.kernels.backend import support
from isobit.models.decoder import parameter_count
from isobit.models.folder import LoadedModel
from isobit.models.policy import Policy
from isobit.precision.flow import PrecisionFlow, Site, graph_differences
from isobit.training.trainer import Trainer
from isobit.util.machine import openmp_libraries, processor_name, read_memory, usable_cores

_COMPUTE = ("kernels", "precision")  # folders of the package
_GEMMS = ((1, 128, 128), (7, 300, 130), (64, 1024, 512), (257, 2048, 96))
"""M, K, N: one row, odd sizes, and longer than a block of each library."""


def class_of_bits(device: torch.device, libraries: Mapping[str, str]) -> dict[str, str]:
    """The class of this machine; ``libraries`` are those that the back end needs, by version."""
    return {
        "device": device.type,
        **({"arithmetic": arithmetic_sha256()} if device.type == "cpu" else {}),
        "torch": torch.__version__,
        "kernels": kernels_sha256(),
        **libraries,
    }


@cache
def kernels_sha256() -> str:
    """Of the source that decides what an operation computes."""
    package = Path(__file__).parents[1]
    return definitions_sha256(
        {
            ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_text()
            for folder in _COMPUTE
            for path in (package / folder).rglob("*.py")
        }
    )


def definitions_sha256(sources: Mapping[str, str]) -> str:
    """Of what modules, given by dotted names, define and execute.

    A global name counts as the definition that it refers to: ``linear.dgrad`` and ``dgrad`` are
    equal under the right imports.  Definitions of one name in several modules are distinguished by
    their syntax, and by their module where that is equal too.
    """
    trees = {module: ast.parse(source) for module, source in sources.items()}
    labels = _labels(trees)
    statements: list[str] = []
    for module, tree in trees.items():
        syntax = _Syntax(module, tree, labels)
        statements += (
            labels[module].get(getattr(statement, "name", ""), "") + syntax.text(statement)
            for statement in tree.body
            if not isinstance(statement, ast.Import | ast.ImportFrom)
            and not _says_nothing(statement)
        )
    return hashlib.sha256("\n".join(sorted(statements)).encode()).hexdigest()


_Labels = dict[str, dict[str, str]]  # by module and name: the text that stands for a definition


def _labels(trees: Mapping[str, ast.Module]) -> _Labels:
    plain = _Syntax("", ast.Module([], []), {})
    found: _Labels = {module: {} for module in trees}
    for module, tree in trees.items():
        for statement in tree.body:
            for name in _bound(statement):
                found[module][name] = found[module].get(name, "") + plain.text(statement)
    modules = Counter(name for names in found.values() for name in names)
    copies = Counter(one for names in found.values() for one in names.items())
    for module, names in found.items():
        for name, text in names.items():
            which = hashlib.sha256(text.encode()).hexdigest() if modules[name] > 1 else ""
            names[name] = f"@{name}:{which}" + (module if copies[name, text] > 1 else "")
    return found


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement defines or assigns."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


class _Syntax:
    """The syntax of a module as text that is the same in every version of Python."""

    _UNREAD = frozenset({"ctx", "kind", "type_comment"})

    def __init__(self, module: str, tree: ast.Module, labels: _Labels) -> None:
        self._labels = labels
        self._names = dict(labels.get(module, {}))
        self._modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._names |= {one.asname: f"@{one.name}" for one in node.names if one.asname}
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    self._add_import(str(node.module), one.name, one.asname or one.name)

    def _add_import(self, module: str, name: str, local: str) -> None:
        full = f"{module}.{name}"
        if full in self._labels:
            self._modules[local] = full
        else:
            outside = f"@{name if _is_ours(module) else full}"
            self._names[local] = self._labels.get(module, {}).get(name, outside)

    def text(self, node: Any) -> str:
        """Of a node, a list of nodes or a constant."""
        if isinstance(node, list):
            return f"[{','.join(self.text(one) for one in node if not _says_nothing(one))}]"
        if isinstance(node, ast.Name) and node.id in self._names:
            return self._names[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self._modules.get(node.value.id, "")
            if node.attr in self._labels.get(module, {}):
                return self._labels[module][node.attr]
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = ",".join(
            f"{name}={self.text(value)}"
            for name, value in ast.iter_fields(node)
            if name not in self._UNREAD and value is not None and value != []
        )
        return f"{type(node).__name__}({fields})"


def _says_nothing(node: ast.AST) -> bool:
    """Whether it is a docstring or an import from this package."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.ImportFrom) and _is_ours(str(node.module))


def _is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == isobit.__name__


@cache
def arithmetic_sha256() -> str:
    """Of the results of the specification's operations, on one thread."""
    threads, digest = torch.get_num_threads(), hashlib.sha256()
    torch.set_num_threads(1)
    try:
        for result in _results():
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()


def _results() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    for m, k, n in _GEMMS:
        a, b = drawn(m, k), drawn(n, k)
        yield a @ b.T
        yield a.T @ drawn(m, n)
        yield a.bfloat16() @ b.bfloat16().T
    x = drawn(64, 1000) * 5
    size = x.abs()
    yield from (x.exp(), x.expm1(), size.log(), size.log1p(), size.sqrt(), size.rsqrt())
    yield from (x.sigmoid(), silu(x), x.cos(), x.sin(), x.bfloat16().float())
    yield from (x.sum(-1), x.sum(0), x.double().sum(-1), x.square().mean(-1), x.cumsum(-1))
    yield from (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1))


class Extra(Protocol):
    """A part of a training, beside policy and trainer, that a checkpoint saves and restores, such
    as a reference model or a replay buffer.
    """

    def state(self) -> Mapping[str, Any]:
        """Serialisable as JSON; must differ whenever ``tensors`` differ."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of its own file, by name; without any there is no file."""
        ...

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Return to a saved state.  Raises CheckpointError where that is impossible."""
        ...


class TrainingRun(Protocol):
    """A prepared training."""

    @property
    def config(self) -> Recipe: ...

    @property
    def model(self) -> LoadedModel: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def sampler(self) -> PromptSampler: ...

    @property
    def extras(self) -> Mapping[str, Extra]:
        """By the name of its file."""
        ...

    @property
    def inputs(self) -> Mapping[str, str]:
        """Digests by name of what is read beside the recipe: data, tokenizer, the user's code
        (``isobit.run.digests``).  They must be the same when a run is resumed.
        """
        ...

    def data_figures(self) -> dict[str, Any]:
        """Numbers about the data, for the manifest."""
        ...

    def engine_figures(self) -> dict[str, Any] | None:
        """The sizes of its engine, for the manifest; None where nothing is generated."""
        ...


_LIBRARIES = ("transformers", "safetensors", "datasets", "reasoning-gym", "numpy")


def manifest(run: TrainingRun, hosts: Sequence[str]) -> dict[str, Any]:
    """The manifest of a run that is about to start, serialisable as JSON; ``hosts`` by rank."""
    policy, engine = run.model.policy, run.engine_figures()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        **environment(policy.device),
        "machine": {**machine(), **processes(hosts)},
        "model": {
            "folder": str(run.model.folder),
            **_parameters(policy),
            "config": asdict(policy.config),
        },
        "data": run.data_figures(),
        "inputs": dict(run.inputs),
        "engine": engine,
        "precision": precision_graph(policy.flow, engine is None or "engine" not in engine),
        "config": run.config.model_dump(mode="json"),
    }


def _parameters(policy: Policy) -> dict[str, int]:
    """Of the model, and with LoRA also of its adapters."""
    trained = sum(map(prod, policy.shapes.values()))
    if policy.config.lora is None:
        return {"parameters": trained}
    return {"parameters": parameter_count(policy.config), "trained": trained}


def environment(device: torch.device) -> dict[str, Any]:
    """What a gradient's bits depend on beside the configuration, and the class of bits."""
    offered = support(device.type)
    libraries, model = (*_LIBRARIES, *offered.libraries), offered.device_model(device)
    return {
        "versions": {
            "isobit": isobit.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with its build, which a wheel of PyPI's leaves out
            **{name: _version(name) for name in libraries},
        },
        "device": {
            "type": device.type,
            **({"model": model} if model is not None else {}),
            "machine": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "bits": class_of_bits(device, {name: _version(name) for name in offered.libraries}),
    }


@cache  # each checkpoint asks, and the answers stand in files
def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # a run that reads JSONL needs no datasets, for example
        return "not installed"


def machine() -> dict[str, Any]:
    """The machine, which explains the run's speed but none of its bits."""
    memory = read_memory()
    return {
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": memory.total if memory else None,
        "openmp": openmp_libraries(),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
    }


def processes(hosts: Sequence[str]) -> dict[str, Any]:
    """The number of processes, in all and on each host."""
    return {"processes": len(hosts), "hosts": dict(Counter(hosts))}


def precision_graph(flow: PrecisionFlow, one_function: bool) -> dict[str, Any]:
    """Both graphs site by site, and where they differ; ``one_function`` is False where another
    engine samples, which computes neither.
    """
    return {
        "preset": flow.preset,
        "exact": flow.exact and one_function,
        "differing_sites": [
            difference.name for difference in graph_differences(flow.rollout, flow.training)
        ],
        "rollout": [_formats(site) for site in flow.rollout.sites],
        "training": [_formats(site) for site in flow.training.sites],
    }


def _formats(site: Site) -> dict[str, object]:
    """A site without its sizes."""
    return {name: value for name, value in asdict(site).items() if name != "parts"}
