"""The fixtures of all tests.  They import torch and transformers, and stand apart from
``conftest.py`` because the process that starts the workers of pytest-xdist runs no test.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.kernels.spec.backend import SpecBackend
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.models.shapes import model_shape
from isobit.starter import starter_folder
from tests.death import lie_still
from tests.tiny import save_tiny, small_run, tiny_model


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    """One thread and a fixed seed, also after a test that changed them."""
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # before, torch would keep the call and a traceback
        torch.cuda.manual_seed_all(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_dead_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """See ``tests.death``."""
    lie_still(monkeypatch)


@pytest.fixture(autouse=True)
def no_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can see whether bytes survive a loss of power, and waiting is a tenth of a small run.
    A closed file is still an error.
    """
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell, or under nohup, which let their
    children ignore SIGINT and SIGHUP, as a run then rightly does.
    """
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # of the tests alone: exec resets it
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the starter's tokenizer, as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with the starter's tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("reward")
    config = tiny_model(tied_embeddings=False, score_head=True, pad_token_id=0)
    policy = random_policy(config, PrecisionConfig(preset="fp32"), seed=1)
    with torch.no_grad():
        policy.masters["score.weight"].mul_(50.0)  # scores that differ
    save_policy(policy, folder, tokenizer_from=starter_folder())
    return folder


@pytest.fixture
def config_alone(tmp_path: Path) -> Callable[[str], Path]:
    """A folder of a named shape with a config.json and the starter's tokenizer, and no weights."""

    def make(shape: str) -> Path:
        folder = tmp_path / shape
        folder.mkdir(exist_ok=True)
        for file in starter_folder().iterdir():
            if file.name.startswith(("tokenizer", "generation_config", "chat_template")):
                shutil.copyfile(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(model_shape(shape).to_hf()))
        return folder

    return make


@pytest.fixture
def make_config(tiny_folder: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """``small_run`` in a directory of the test's own."""
    return partial(small_run, tiny_folder, tmp_path / "run")


@pytest.fixture
def write_reward(tmp_path: Path) -> Callable[[str], str]:
    """A reward function from the lines of its body, which may use ``prompt`` and ``completion``;
    the name to configure it by.
    """

    def write(body: str) -> str:
        path = tmp_path / "reward.py"
        path.write_text("def reward(prompt, completion):\n    " + body + "\n", encoding="utf-8")
        return f"{path}:reward"

    return write


class FakeMemory:
    """A device's own memory for the specification: it counts what happens to it, and the n-th peak
    that is asked for is n GiB.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._peaks = 0

    def available(self) -> int:
        return 8 << 30

    def free(self) -> int:
        return 64 << 30

    def release_cached(self) -> None:
        self.events.append("empty")

    def peak(self) -> int:
        self._peaks += 1
        return self._peaks << 30

    def reset_peak(self) -> None:
        self.events.append("reset")

    def allocate_in_pages(self) -> None:
        self.events.append("pages")

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeMemory]:
    """From when it is called on, the CPU says that it has a memory of its own."""

    def install() -> FakeMemory:
        if SpecBackend.memory is None:
            monkeypatch.setattr(SpecBackend, "memory", FakeMemory())
        return SpecBackend.memory  # pyright: ignore[reportReturnType]

    return install
