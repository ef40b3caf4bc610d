"""What a process can have of a GPU's memory, and how its allocator is set; without a GPU."""

import pytest
import torch

from isobit.kernels.triton import memory
from isobit.kernels.triton.memory import GpuMemory

GPU = torch.device("cuda", 0)


def test_what_is_available_counts_what_torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 140))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    assert (GpuMemory(GPU).free(), GpuMemory(GPU).available()) == (100, 130)


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_environment_sets_is_left_alone(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(memory, "_set_allocator", found.append)
    for name in memory._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    GpuMemory(GPU).allocate_in_pages()
    assert found == ([] if variable else ["expandable_segments:True"])
