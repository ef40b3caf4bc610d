"""A run that samples with ``vllm serve`` (docs/engines.md): the real program, on the same card.

    pytest tests/gpu/test_vllm_server.py -s        # some 90 s a flow

``ISOBIT_SMOLLM2`` names a folder of ``tools/smollm2.sh`` to do it with in place of the starter.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from isobit.config.precision import PrecisionConfig
from isobit.models.folder import read_config
from isobit.models.policy import random_policy
from isobit.rollout.vllm_server import start_command
from isobit.starter import starter_folder
from tests.gpu.test_vllm import RECIPE, check_updates, run

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
OPTIONS = "--enforce-eager --gpu-memory-utilization 0.3 --max-num-seqs 64 --max-model-len 512"
STARTS_IN_S = 150
PROGRAM = "vllm serve", f"{sys.executable} -m vllm.entrypoints.cli.main serve"
"""The script that a user calls need not be on the path here."""


@contextmanager
def vllm_serve(command: str, port: int, log: Path) -> Iterator[str]:
    """The address of a server that is ready, as a user starts it."""
    with open(log, "wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command} {OPTIONS} --port {port}".replace(*PROGRAM)],
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_IN_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            try:
                with urlopen(f"{url}/health", timeout=2):
                    break
            except (URLError, OSError):
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(("preset", "port"), [("bf16", 8311), ("fp8-rollout", 8312)])
def test_each_update_of_a_run_arrives_at_a_server(tmp_path: Path, preset: str, port: int) -> None:
    """By the server's own tensors, and by log-probabilities near those of the trainer."""
    folder = Path(os.environ.get("ISOBIT_SMOLLM2", starter_folder()))
    precision = PrecisionConfig.model_validate(preset)
    policy = random_policy(read_config(folder), precision, 1)
    command = start_command(policy, tmp_path / "weights", folder)
    recipe, output = tmp_path / "recipe.toml", tmp_path / "run"
    text = RECIPE.replace("steps = 2", "steps = 3").replace(
        "engine_options = { enforce_eager = true }",
        f'servers = ["http://127.0.0.1:{port}"]\nweights_folder = "{tmp_path / "weights"}"',
    )
    # By the tokens, so that every step has a signal, and weights to send, whatever the model.
    reward = "def luck(prompt, completion):\n    return float(sum(completion.token_ids) % 2)\n"
    (tmp_path / "reward.py").write_text(reward)
    text = text.replace("isobit.starter.tasks:correct_answer", f"{tmp_path / 'reward.py'}:luck")
    recipe.write_text(text)
    with vllm_serve(command, port, tmp_path / "server.log"):
        changes = ("--model", folder, "--output", output, "--precision.preset", preset)
        said = run("-m", "isobit.cli.main", "train", recipe, *changes)
    check_updates(said, output, 3, preset)
