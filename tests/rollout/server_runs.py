"""Runs by servers beside native ones: their recipes, and all that they leave."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from isobit.commands.diff import OF_THE_MACHINE
from isobit.config.recipes import RunConfig
from isobit.rollout.answers import DrawnSample
from isobit.rollout.http_engine import HttpEngine
from isobit.run.loop import train
from tests.forked import ran
from tests.serve.servers import Running, serving
from tests.tiny import json_lines, with_sections

REWARD = """
from zlib import crc32

def reward(prompt, completion):
    return crc32((prompt.text + str(completion.token_ids)).encode()) % 7 / 7
"""


def two_servers(
    stack: ExitStack, folder: Path, places: Sequence[Path], *words: str, spawn: bool = False
) -> list[Running]:
    """In processes of their own, which take weights from runs."""
    found: list[Running] = []
    for place in places:
        updates = ("--allow-weight-updates", str(place))
        arguments = ("--precision", "fp8", *updates, *words)
        found.append(stack.enter_context(serving(folder, place, *arguments, spawn=spawn)))
    return found


def run_maker(make_config: Callable[..., RunConfig], place: Path) -> Callable[..., RunConfig]:
    """Makes recipes of three steps with rewards that differ, natively or by servers, whose key is
    in the environment.
    """
    (place / "graded.py").write_text(REWARD)

    def make(name: str, servers: Sequence[Running] = (), /, **sections: Any) -> RunConfig:
        rollout: dict[str, Any] = {"max_new_tokens": 24}
        if servers:
            urls = [f"http://127.0.0.1:{one.port}" for one in servers]
            rollout |= {"engine": "http", "servers": urls, "server_key": "env:SERVER_KEY"}
        training = {"steps": 3, "prompts_per_step": 3, "samples_per_prompt": 4}
        return make_config(
            f"{place / 'graded.py'}:reward",
            output=place / name,
            **with_sections(
                {"training": training, "checkpoint": {"every": 1}, "rollout": rollout}, sections
            ),
        )

    return make


def left(root: Path) -> dict[str, Any]:
    """All that a run leaves, figures of the machine aside; of tensors their SHA-256."""
    last = max((root / "checkpoints").glob("step_??????"))
    texts = ("completions.jsonl", "rewards.jsonl", "digests.jsonl")
    tensors = [last / f"{name}.safetensors" for name in ("masters", "optimiser")]
    return {
        **{name: (root / name).read_bytes() for name in texts},
        **{
            path.name: sha256(path.read_bytes()).hexdigest()
            for path in [*tensors, root / "model" / "model.safetensors"]
        },
        "metrics": [
            {name: value for name, value in line.items() if not name.startswith(OF_THE_MACHINE)}
            for line in json_lines(root / "metrics.jsonl")
        ],
    }


def train_and_kill(config: RunConfig, victim: int | None) -> int:
    """For ``ran``. In the middle of the second step, with samples at the second server of which
    some tokens were drawn, that server's process, ``victim``, is killed; the last line says how
    many samples it had.
    """
    accept, killed = HttpEngine._accept, list[int]()

    def accept_and_kill(self: HttpEngine, drawn: DrawnSample) -> None:
        accept(self, drawn)
        if victim and self._weights and self._weights.version == 2 and not killed:
            server = self._servers[1]
            half_done = [
                len(one.log_probs) for one, place in self._there.values() if place is server
            ]
            if sum(half_done) > 10:
                killed.append(self._loads[server].samples)
                os.kill(victim, signal.SIGKILL)

    HttpEngine._accept = accept_and_kill
    train(config)
    print(json.dumps(killed))
    return 0


def check_a_killed_server(
    make_run: Callable[..., RunConfig], servers: Sequence[Running], place: Path, spawn: bool = False
) -> None:
    """Three runs leave the same bytes: a native one, one by two servers, and one whose second
    server is killed.
    """

    def said(name: str, servers: Sequence[Running] = (), victim: int | None = None) -> str:
        config = make_run(name, servers)
        target = "tests.rollout.server_runs:train_and_kill"
        done = ran(target, place, config, victim, spawn=spawn)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        updates = [line for line in done.stdout.splitlines() if "have acknowledged" in line]
        print(*updates, sep="\n")
        return done.stdout

    said("native")
    lines = said("servers", servers)
    assert "servers sample, by the trainer's own function: http://127.0.0.1:" in lines
    assert lines.count("2 of 2 servers have acknowledged") == 3  # before each step
    assert "is down" not in lines
    assert left(place / "servers") == left(place / "native")

    lines = said("killed", servers, servers[1].process.pid)
    (samples,) = json.loads(lines.splitlines()[-1])
    assert samples > 0
    assert lines.count("is down, and others go on with its samples") == 1
    assert lines.count("1 of 2 servers have acknowledged") == 1
    assert left(place / "killed") == left(place / "native")
