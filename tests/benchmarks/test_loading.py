"""The benchmark of loading at a small shape, and what it shows of the host's memory: a folder of
several shards takes no more than what the policy keeps and one shard.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.loading import read_in_fresh_process, write_folder
from isobit.models.config import ModelConfig

CONFIG = ModelConfig("qwen3", 4096, 256, 512, 24, 4, 2, 64, 128, 1e-6, 1e4, tied_embeddings=False)
SHARD = 10_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_folder(CONFIG, folder, SHARD)
    assert len(list(folder.glob("*.safetensors"))) == 4
    return folder


@pytest.mark.parametrize("trainable", [True, False])
def test_memory_of_the_host_while_a_folder_is_read(
    folder: Path, trainable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is given back at once
    lines: list[dict[str, Any]] = list(read_in_fresh_process(folder, "fp8", trainable))
    sizes = next(line for line in lines if line["line"] == "folder")
    memory = next(line for line in lines if line["line"] == "memory")
    numbers = sizes["bytes"] // 2
    assert sizes["largest_file"] <= SHARD + 10_000 and sizes["largest_tensor"] == 4096 * 256 * 2
    least = (4 + 1) * numbers if trainable else numbers
    assert least < memory["policy"] < 1.5 * least, "masters, and a byte or two a number"
    grown = memory["peak"] - memory["before"]
    assert 0.9 * memory["policy"] < grown < memory["policy"] + sizes["largest_file"]
    phases = [line["phase"] for line in lines if line["line"] == "phase"]
    assert phases == ["imports", "weights", "first_token", "total"]
