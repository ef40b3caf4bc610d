"""A folder straight to the GPU: what comes out is what the CPU reads, and the host needs less than
1.2 times the largest tensor beside the mapped files, whatever is read.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.loading import read_in_fresh_process, write_folder
from isobit.config.precision import PrecisionConfig
from isobit.models.config import Experts, ModelConfig
from isobit.models.folder import load_policy, read_masters

SMALL = ModelConfig("qwen3", 1000, 320, 448, 2, 8, 2, 64, 1024, 1e-6, 1e6, tied_embeddings=True)
EXPERTS = ModelConfig(
    "qwen3_moe", 512, 256, 512, 2, 4, 2, 64, 512, 1e-6, 1e4, False,
    experts=Experts(32, 4, 128, True),
)  # fmt: skip
LARGE = ModelConfig("qwen3", 151936, 4096, 8192, 2, 32, 8, 128, 1024, 1e-6, 1e6, False)


@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_masters_are_the_same_numbers_as_on_a_cpu(config: ModelConfig, tmp_path: Path) -> None:
    write_folder(config, tmp_path, 1_000_000)
    host: dict[str, Any] = dict(read_masters(tmp_path, config))
    for name, master in read_masters(tmp_path, config, "cuda"):
        assert isinstance(master, torch.Tensor) and master.is_cuda
        assert torch.equal(master.cpu(), host[name])


def test_fp8_is_taken_as_it_is(tmp_path: Path) -> None:
    """The folder is what the exporter writes; its bytes and scales are the GPU's own."""
    from tests.models.test_quantised_checkpoint import QKV, is_as_stored, write

    stored = write(tmp_path)
    policy = load_policy(tmp_path, PrecisionConfig(preset="fp8"), "cuda", trainable=False)
    matrix: Any = policy.weights("rollout").linears["layers.1.qkv_proj"].matrix
    assert matrix.values.is_cuda
    on_host = type(matrix)(matrix.values.cpu(), matrix.scales.cpu(), "128x128", matrix.parts)
    assert is_as_stored(on_host, stored, QKV)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("trainable", [False, True])
def test_memory_of_the_host(tmp_path_factory: pytest.TempPathFactory, trainable: bool) -> None:
    folder = tmp_path_factory.getbasetemp() / "large"
    if not (folder / "config.json").is_file():
        write_folder(LARGE, folder, 5 * 10**9)
    list(read_in_fresh_process(folder, "fp8", trainable))  # compiles what is not in the caches
    lines = list(read_in_fresh_process(folder, "fp8", trainable))
    sizes = next(line for line in lines if line["line"] == "folder")
    memory = next(line for line in lines if line["line"] == "memory")
    print(lines)
    assert memory["peak"] - memory["before"] < 1.2 * sizes["largest_tensor"]
