"""``run.json``: what is needed to understand a run later or to repeat its bits.

Gradients repeat at a fixed number of threads on one kind of CPU (the instruction set chooses the
kernels), so both are recorded beside the versions, the resolved configuration and the formats of
every site.
"""

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import torch

import isobit
from isobit.kernels.backend import support
from isobit.models.decoder import parameter_count
from isobit.models.policy import Policy
from isobit.precision.flow import PrecisionFlow, Site, graph_differences
from isobit.store.class_of_bits import class_of_bits
from isobit.store.training_run import TrainingRun
from isobit.util.machine import openmp_libraries, processor_name, read_memory, usable_cores

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


def recorded_targets(manifest: Mapping[str, Any]) -> Sequence[str] | None:
    """The linears that a run's manifest says have adapters; None where it says nothing."""
    found: Any = manifest
    for key in ("model", "config", "lora", "targets"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, list) else None


def _parameters(policy: Policy) -> dict[str, int]:
    """The number of parameters of the model, and with LoRA also of its adapters."""
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
