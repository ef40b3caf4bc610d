"""What every test runs under: one thread, no network, fixed seeds.

The environment is set before the first import of torch and transformers, and reaches the processes
that tests start.
"""

import gc
import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
os.environ["GOMP_SPINCOUNT"] = "0"  # threads that wait leave the cores to the other tests

import isobit  # noqa: F401, I001  sets OpenMP's spinning, which must precede torch
from collections.abc import Generator
from typing import Any

import pytest

from tests import fork_server

pytest_plugins = ["tests.suites"]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        config.pluginmanager.register(Workers())
        return
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        fork_server.use(address)
    config.pluginmanager.import_plugin("tests.fixtures")


class Workers:
    """What the process that starts the workers of pytest-xdist tells them."""

    def __init__(self) -> None:
        self._fork_server = fork_server.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["fork_server"] = self._fork_server


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported to collect the tests lives as long as they do.  Looking through it for
    garbage takes 4 s while it grows, and 0.3 s in each full collection, of which a run that is out
    of memory makes its own.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
