"""``run.json``: what is needed to understand a run later, or to repeat its bits.

Gradients repeat at a fixed number of threads and on one kind of CPU (the instruction set chooses the kernels), so both are recorded
beside the versions, the resolved configuration and the formats of every site on both sides.
"""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

import isobit
from isobit.precision.compare import graph_differences
from isobit.precision.flow import PrecisionFlow
from isobit.run.setup import Run

_LIBRARIES = ("torch", "transformers", "safetensors", "datasets", "reasoning-gym", "numpy")


def manifest(run: Run) -> dict[str, Any]:
    """The manifest of a run that is about to start, ready for JSON."""
    policy = run.model.policy
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"isobit": isobit.__version__, "python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
        "device": {
            "type": "cpu",
            "machine": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "model": {
            "folder": str(run.model.folder),
            "parameters": sum(master.numel() for master in policy.parameters()),
            "config": asdict(policy.config),
        },
        "data": {
            "training_prompts": run.sampler.state()["prompts"],
            "dropped_prompts": run.dropped_prompts,
            "evaluation_problems": {name: len(prompts) for name, prompts in run.evaluator.sets.items()},
        },
        "precision": precision_graph(policy.flow),
        "config": run.config.model_dump(mode="json"),
    }


def precision_graph(flow: PrecisionFlow) -> dict[str, Any]:
    """Both graphs site by site, where they differ, and the linears that had to stay in BF16."""
    return {
        "preset": flow.preset,
        "exact": flow.exact,
        "fallbacks": list(flow.fallbacks),
        "differing_sites": [difference.name for difference in graph_differences(flow.rollout, flow.training)],
        "rollout": [asdict(site) for site in flow.rollout.sites],
        "training": [asdict(site) for site in flow.training.sites],
    }
