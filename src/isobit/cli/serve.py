"""``isobit serve MODEL``: an OpenAI-compatible server (docs/serve.md)."""

import os
import signal
import socket
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from isobit.cli.arguments import folder_parser, set_threads, settings_from, whole
from isobit.cli.main import starting
from isobit.config.base import MAX_BATCH
from isobit.util.errors import ConfigError
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.config.recipes import GenerationConfig
    from isobit.serve.app import Server

PACKAGES = ("prometheus_client", "starlette", "uvicorn")
"""Of the extra ``serve``."""


def run_serve(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises IsobitError for unusable input before that."""
    options, overrides = _parser().parse_known_args(arguments)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"isobit serve needs {', '.join(missing)}, which the extra `serve` brings: "
            "pip install 'isobit[serve]'"
        )
    key = _key(options.api_key)

    from isobit.config.recipes import GenerationConfig

    settings = settings_from(GenerationConfig, {"precision": options.precision}, overrides)
    with _listening(options.host, options.port) as listener:
        set_threads(options)
        with starting():
            import isobit.serve.app  # noqa: F401
        server = _server(options, settings, key)
        return _serve(server, listener, options)


def _key(name: str | None) -> str | None:
    """The key that a variable of the environment holds, so that no list of processes shows it."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"--api-key is env:{name}, but the environment has no variable {name} with a key; "
            f"set it: {name}=... isobit serve"
        )
    return key


def _listening(host: str, port: int) -> socket.socket:
    """Raises ConfigError for an address that cannot be listened at, before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened at: {error.strerror or error}; name "
            "another port, or end what uses it"
        ) from error


def _server(options: Namespace, settings: "GenerationConfig", key: str | None) -> "Server":
    from isobit.data.tokenizer import load_tokenizer
    from isobit.memory.cache_size import batched_tokens
    from isobit.models.folder import load_sampling_model
    from isobit.models.policy import Policy
    from isobit.rollout.native import NativeEngine
    from isobit.rollout.scoring import TokenScorer
    from isobit.serve.app import Server, Settings
    from isobit.serve.engine import EngineThread

    rollout = settings.rollout
    if settings.cluster.rollout_tp > 1:
        raise ConfigError(
            f"cluster.rollout_tp = {settings.cluster.rollout_tp}, but isobit serve runs in one "
            "process; leave it out"
        )
    model = load_sampling_model(options.folder, settings.precision, settings.device)
    assert isinstance(model.policy, Policy)
    tokens = batched_tokens(rollout, model.policy.backend.sizes)
    scorer = TokenScorer(model.policy, tokens)  # first: the engine takes the memory that is left
    engine = NativeEngine(model.policy, rollout, model.tokenizer, seed=0)
    serving = Settings(
        name=options.name or options.folder,
        key=key,
        max_live=options.max_live,
        chat=settings.data,
        sampling=model.sampling(rollout),
        max_tokens=rollout.max_new_tokens if "max_new_tokens" in rollout.model_fields_set else None,
        precision=settings.precision.preset,
    )
    return Server(model, load_tokenizer(model.folder), EngineThread(engine, scorer), serving)


def _serve(server: "Server", listener: socket.socket, options: Namespace) -> int:
    import uvicorn

    host, port = listener.getsockname()[:2]
    if options.api_key is None and host not in ("127.0.0.1", "::1"):
        say(f"isobit: anyone who reaches {host}:{port} can use this server; set --api-key env:NAME")
    config = uvicorn.Config(
        server.app(),
        log_config=None,
        access_log=False,
        http="h11",
        ws="none",
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_graceful_shutdown=options.grace,
    )
    runner = uvicorn.Server(config)
    server.is_draining = lambda: runner.should_exit

    def end() -> None:
        runner.should_exit = True

    server.thread.on_fault = end
    shown = f"[{host}]" if ":" in host else host
    print(
        f"isobit: {server.settings.name} in {server.settings.precision} on "
        f"{server.model.policy.device}, at http://{shown}:{port}/v1",
        flush=True,
    )
    # uvicorn raises the signal again that has ended it: a graceful end is no failure
    signal.signal(signal.SIGTERM, lambda *_: None)
    runner.run(sockets=[listener])
    return 0 if server.thread.has_ended_well else 1


def _variable(text: str) -> str:
    kind, _, name = text.partition(":")
    if kind != "env" or not name.isidentifier():
        raise ArgumentTypeError("name the variable that holds the key, as env:NAME")
    return name


def _parser() -> ArgumentParser:
    parser = folder_parser(
        "serve",
        "Serve a model folder by OpenAI's interface, in any precision (docs/serve.md).",
        "precision, rollout and data",
        with_seed=False,
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen at, by default this machine's own",
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8000, help="by default 8000; 0 takes a free one"
    )
    parser.add_argument(
        "--api-key",
        type=_variable,
        metavar="env:NAME",
        help="the variable of the environment that holds the key which clients must send",
    )
    parser.add_argument(
        "--name", help="the model's name for clients; by default MODEL as it stands here"
    )
    parser.add_argument(
        "--max-live",
        type=whole(1, MAX_BATCH),
        default=512,
        metavar="N",
        help="samples that are served or wait at once, by default 512; more are answered with 429",
    )
    parser.add_argument(
        "--grace",
        type=whole(1, 86400),
        default=30,
        metavar="SECONDS",
        help="how long answers may take to their end after SIGTERM, by default 30",
    )
    return parser
