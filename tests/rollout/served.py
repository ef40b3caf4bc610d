"""Servers in threads of the test's process, and engines that ask them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn

from isobit.config.data import ChatConfig
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig, RunRolloutConfig
from isobit.data.tokenizer import load_tokenizer
from isobit.models.config import ModelConfig
from isobit.models.folder import SamplingModel
from isobit.models.policy import Policy, random_policy
from isobit.records.text import SamplingParams
from isobit.rollout.http_engine import HttpEngine
from isobit.rollout.native import NativeEngine
from isobit.rollout.scoring import TokenScorer
from isobit.serve.app import ApiServer, Settings
from isobit.serve.engine import EngineThread
from isobit.serve.weights import WeightUpdates
from isobit.starter import starter_folder
from isobit.store.manifest import environment
from tests.rollout.test_exactness import TINY
from tests.rollout.test_sequence import BYTES

SEED = 3


@contextmanager
def served(
    preset: Preset = "fp8",
    config: ModelConfig = TINY,
    key: str | None = None,
    updates: bool = True,
    places: int = 64,
    port: int = 0,
    **sizes: Any,
) -> Iterator[str]:
    """The address of a server with random weights, which are others than those of any test."""
    policy = random_policy(config, PrecisionConfig(preset=preset), seed=77, trainable=False)
    scorer, rollout = TokenScorer(policy, 100), RolloutConfig(**sizes)
    thread = EngineThread(NativeEngine(policy, rollout, None, 0), scorer)
    folder = starter_folder()
    model = SamplingModel(folder, policy, load_tokenizer(folder), ())
    settings = Settings("tiny", key, places, ChatConfig(), SamplingParams(16), None, preset)
    weights = WeightUpdates(policy, thread, Path()) if updates else None
    app = ApiServer(model, load_tokenizer(folder), thread, settings, weights).app()
    listener = uvicorn.Config(
        app, port=port, lifespan="on", log_config=None, timeout_graceful_shutdown=2
    )
    with listening(listener) as address:
        yield address


@contextmanager
def listening(config: uvicorn.Config) -> Iterator[str]:
    """The address of an application that a thread serves."""
    runner = uvicorn.Server(config)
    running = threading.Thread(target=runner.run)
    running.start()
    try:
        while not runner.started:
            assert running.is_alive(), "the server has not started"
            running.join(0.01)
        yield f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}"
    finally:
        runner.should_exit = True
        running.join()


@contextmanager
def altered(address: str, change: Callable[[str, int, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """The address of a proxy of a server that answers what ``change`` makes of path, status and
    body.
    """

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            connection = HTTPConnection(address.removeprefix("http://"))
            connection.request(self.command, self.path, self.rfile.read(size), dict(self.headers))
            response = connection.getresponse()
            status, body = change(self.path, response.status, response.read())
            connection.close()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    running = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    running.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        proxy.server_close()
        running.join()


def engine_of(
    policy: Policy, *servers: str, key: str | None = None, run: str | None = None, **keys: Any
) -> HttpEngine:
    config = RunRolloutConfig(engine="http", servers=servers, **keys)
    bits = environment(policy.device)["bits"]
    return HttpEngine(policy, config, key, BYTES, SEED, bits, run)


def native_of(policy: Policy, **sizes: Any) -> NativeEngine:
    return NativeEngine(policy, RolloutConfig(**sizes), BYTES, SEED)
