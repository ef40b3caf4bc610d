"""Small models whose shapes use every kernel, on the GPU.  Without a GPU that the back end takes
(``--back-end``, by default Hopper's) no file of this folder is imported.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from isobit.config.base import BackEnd
from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.backend import use_back_end
from isobit.kernels.operands import DeltaShape
from isobit.models.config import Experts, ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.policy import Policy, random_policy
from isobit.precision.quant_tensor import ScaleKind

QWEN3 = ModelConfig("qwen3", 1000, 512, 768, 3, 8, 2, 128, 1024, 1e-6, 1e6, tied_embeddings=False)
QWEN2 = ModelConfig("qwen2", 1000, 512, 768, 3, 16, 1, 64, 1024, 1e-6, 1e6, tied_embeddings=True)
STARTER = ModelConfig("qwen3", 128, 128, 384, 4, 2, 2, 64, 1024, 1e-6, 1e4, tied_embeddings=True)
SMOLLM2 = ModelConfig("llama", 1000, 576, 1040, 3, 9, 3, 64, 1024, 1e-5, 1e5, tied_embeddings=True)
MOE = replace(QWEN3, family="qwen3_moe", experts=Experts(16, 4, 256, True, dense_layers=(0,)))
SHAPES = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "llama": replace(QWEN3, family="llama", num_heads=4, num_kv_heads=4),
    "window": replace(QWEN3, family="mistral", sliding_window=100),
    "starter": STARTER,  # one block along K, one group a row, a vocabulary of one tile
    "smollm2": SMOLLM2,  # short blocks along every side, and in q, k, v, gate and up
    "moe": MOE,
    "phi": replace(QWEN3, family="phi3", num_kv_heads=8, head_dim=96),
    "gemma": replace(
        QWEN3, family="gemma3_text", num_heads=4, num_kv_heads=1, head_dim=256, sliding_window=100,
        windowless_layers=(2,), window_rope_theta=1e4,
    ),
    "gpt_oss": replace(
        QWEN3, family="gpt_oss", num_heads=16, head_dim=64, sliding_window=100,
        windowless_layers=(1,), experts=Experts(16, 4, 256, True),
    ),
    "hybrid": replace(
        QWEN3, family="qwen3_5_text", num_heads=4, num_kv_heads=1, head_dim=256,
        partial_rotary_factor=0.25, delta=DeltaShape(4, 8, 64, 128, 4), delta_layers=(0, 2),
    ),
    "hybrid_experts": replace(
        QWEN3, family="qwen3_next", experts=Experts(16, 4, 256, True, shared_size=256),
        partial_rotary_factor=0.25, delta=DeltaShape(2, 8, 128, 64, 4), delta_layers=(0, 2),
    ),
}  # fmt: skip
RANKING = [
    name
    for name, shape in SHAPES.items()
    if shape.experts is None and FAMILIES[shape.family].reward_architecture is not None
]
"""Those that reward models have, without experts."""


def pytest_configure(config: pytest.Config) -> None:
    if has_card(config):
        name: BackEnd = config.getoption("back_end")  # pyright: ignore[reportAssignmentType]
        use_back_end(name)


def has_card(config: pytest.Config) -> bool:
    if not torch.cuda.is_available():
        return False
    major = torch.cuda.get_device_capability()[0]
    return major == 9 if config.getoption("back_end") == "hopper" else major >= 8


class SkippedFile(pytest.Module):
    """A file of tests that nothing here can run."""

    def collect(self) -> Any:
        """Raises pytest's Skipped before the file is imported, whose kernels may need Triton."""
        pytest.skip("needs a GPU that the back end takes")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """pytest's own reading of a file where there is a card (None)."""
    if has_card(parent.config):
        return None
    return SkippedFile.from_parent(parent, path=module_path)


GIB_PER_WORKER = 6
GIB_OF_A_LARGE_TEST = 28
LARGE_AT_ONCE = 2


def pytest_xdist_auto_num_workers() -> int | None:
    """As many processes for ``-n auto`` as the GPU's free memory and the CPU's cores allow."""
    if not torch.cuda.is_available():
        return None
    free = torch.cuda.mem_get_info()[0] >> 30
    fitting = (free - LARGE_AT_ONCE * GIB_OF_A_LARGE_TEST) // GIB_PER_WORKER
    return max(1, min(fitting, (os.cpu_count() or 1) - 2))


@pytest.fixture
def large(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """For a test that takes more memory than a worker's share: of the workers with even numbers, as
    of those with odd ones, one has such a test at a time.
    """
    place = int(worker_id.removeprefix("gw")) % LARGE_AT_ONCE if worker_id != "master" else 0
    with FileLock(tmp_path_factory.getbasetemp().parent / f"large-{place}.lock"):
        free_memory()
        yield
        free_memory()


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """A worker keeps at most a gibibyte that no tensor needs for its next test."""
    yield
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > 1 << 30:
        free_memory()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything in this folder is marked ``gpu``.  The limit of a test that is ``large`` begins
    with its call: it may wait for others for longer than any of them takes, and where kernels are
    to be compiled first, for longer than the limit.
    """
    limit = config.getoption("timeout") or config.getini("timeout")
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):  # paths would take a second
            item.add_marker("gpu")
            if "large" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(float(limit), func_only=True))


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def shapes() -> Mapping[str, ModelConfig]:
    return SHAPES


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    def make(
        shape: str,
        preset: Preset,
        scales: ScaleKind = "power_of_two",
        trainable: bool = True,
        **options: Any,
    ) -> Policy:
        last = 1 if shape == "llama" else 0
        precision = PrecisionConfig(preset=preset, scales=scales, last_layers_bf16=last, **options)
        return random_policy(SHAPES[shape], precision, 0, "cuda", trainable)

    return make
