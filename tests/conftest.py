"""What every test runs under: one thread, no network, fixed seeds.

The environment is set before the first import of torch and transformers, and reaches the processes that tests start.
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

import isobit  # noqa: F401, I001  sets OpenMP's spinning, which must precede torch
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("isobit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("isobit")


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    """One thread and a fixed seed, also after a test that changed them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
