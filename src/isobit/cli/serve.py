"""``isobit serve MODEL``: an OpenAI-compatible server (docs/serve.md).

The server takes a run's directory in place of a model folder: its finished model, in the run's
precision.  With ``--follow`` it takes the weights of each checkpoint that the run writes, and with
``--lora-modules`` it has adapters beside the model, each a model of its own for clients.
"""

import os
import signal
import socket
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.cli.listening import PLAIN_HTTP, check_packages, listening_socket
from isobit.cli.options import (
    FOLDER,
    PRECISION,
    THREADS,
    Command,
    also_keys,
    option,
    set_threads,
    whole,
)
from isobit.cli.served_run import FollowedRun, served_settings
from isobit.cli.start import starting
from isobit.config.base import MAX_BATCH
from isobit.store.directory import is_run
from isobit.util.errors import ConfigError
from isobit.util.hosts import LOCAL_NAMES, HostCheck
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.config.commands import ServeConfig
    from isobit.serve.app import ApiServer


PACKAGES = ("prometheus_client", "starlette", "uvicorn")
"""The packages of the extra ``serve``."""


def _variable(text: str) -> str:
    kind, _, name = text.partition(":")
    if kind != "env" or not name.isidentifier():
        raise ArgumentTypeError("name the variable that holds the key, as env:NAME")
    return name


def _module(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ArgumentTypeError(f"{text!r}: name an adapter and its folder, as NAME=PATH")
    return name, Path(path)


_COMMAND = Command(
    "serve",
    "Serve a model folder by OpenAI's interface, in any precision (docs/serve.md).",
    [
        FOLDER,
        PRECISION,
        THREADS,
        option(
            "--host HOST",
            "the address to listen at, by default this machine's own",
            default="127.0.0.1",
        ),
        option("--port PORT", "by default 8000; 0 takes a free one", whole(0, 65535), default=8000),
        option(
            "--api-key env:NAME",
            "the variable of the environment that holds the key which clients must send",
            _variable,
        ),
        option(
            "--allowed-host NAME",
            "names beside this machine's own by which requests may ask for the server, such as "
            "that of a proxy; without a key others are refused at the machine's own address",
            nargs="+",
            default=[],
        ),
        option("--name NAME", "the model's name for clients; by default MODEL as it stands here"),
        option(
            "--lora-modules NAME=PATH",
            "adapters of MODEL, each a model for clients by its name: folders of PEFT, or runs",
            _module,
            nargs="+",
            default=[],
        ),
        option(
            "--follow",
            "MODEL is a run's directory: take the weights of its checkpoints as they are written",
        ),
        option(
            "--allow-weight-updates DIR",
            "let a trainer push weights by vLLM's routes, from files below DIR or in requests, "
            "and runs with rollout.engine = 'http' sample here (docs/engines.md)",
        ),
        option(
            "--max-live N",
            "samples that are served or wait at once, by default 512; more are answered with 429",
            whole(1, MAX_BATCH),
            default=512,
        ),
        option(
            "--grace SECONDS",
            "how long answers may take to their end after SIGTERM, by default 30",
            whole(1, 86400),
            default=30,
        ),
    ],
    also_keys("precision, rollout and data"),
)


def run_serve(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises IsobitError for unusable input before that."""
    options, overrides = _COMMAND.read_some(arguments)
    check_packages("serve", PACKAGES)
    key = _key(options.api_key)
    updated = _updated(options)
    adapters = _adapters(options)
    followed = FollowedRun(Path(options.folder)) if options.follow else None
    settings = served_settings(_COMMAND, options, overrides)
    with listening_socket(options.host, options.port, f"--host {options.host} ") as listener:
        set_threads(options)
        with starting():
            import isobit.serve.app  # noqa: F401
        hosts = _hosts(options, listener.getsockname()[0])
        server = _server(options, settings, key, followed, updated, adapters, hosts)
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


def _updated(options: Namespace) -> Path | None:
    """The folder of new weights, if they may be pushed."""
    if options.allow_weight_updates is None:
        return None
    if options.follow:
        raise ConfigError(
            "--allow-weight-updates and --follow both say where new weights come from; name one"
        )
    if options.api_key is None:
        raise ConfigError(
            "--allow-weight-updates lets whoever reaches the server change its model; add "
            "--api-key env:NAME"
        )
    folder = Path(options.allow_weight_updates)
    if not folder.is_dir():
        raise ConfigError(f"--allow-weight-updates: {folder} is no folder; make it first")
    return folder


def _adapters(options: Namespace) -> dict[str, Path]:
    """The folders of the adapters by their names for clients; a run's are its finished model's."""
    if not options.lora_modules:
        return {}
    if options.follow or options.allow_weight_updates is not None:
        raise ConfigError(
            "--lora-modules is for a model that stays as it is; leave --follow and "
            "--allow-weight-updates out"
        )
    names = [options.name or options.folder, *(name for name, _ in options.lora_modules)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--lora-modules: two models are called {twice!r}; give each its name")
    return {name: path / "model" if is_run(path) else path for name, path in options.lora_modules}


def _server(
    options: Namespace,
    settings: "ServeConfig",
    key: str | None,
    followed: FollowedRun | None,
    updated: Path | None,
    adapters: Mapping[str, Path],
    hosts: HostCheck | None,
) -> "ApiServer":
    from isobit.data.tokenizer import load_tokenizer
    from isobit.kernels.backend import use_back_end
    from isobit.memory.cache_size import batched_tokens
    from isobit.models.folder import LoadedModel, load_adapters, load_sampling_model
    from isobit.models.policy import Policy
    from isobit.rollout.native import NativeEngine
    from isobit.rollout.scoring import TokenScorer
    from isobit.serve.app import ApiServer, Settings
    from isobit.serve.engine import EngineThread
    from isobit.serve.weights import WeightUpdates

    rollout = settings.rollout
    if settings.cluster.rollout_tp > 1:
        raise ConfigError(
            f"cluster.rollout_tp = {settings.cluster.rollout_tp}, but isobit serve runs in one "
            "process; leave it out"
        )
    use_back_end(settings.back_end)
    model = load_sampling_model(options.model, settings.precision, settings.device)
    policy = model.policy
    assert isinstance(policy, Policy)
    if adapters:
        assert isinstance(model, LoadedModel)
        load_adapters(model, settings.precision, adapters)
    if followed is not None:
        followed.start(policy)
    new_weights = None if followed is None else lambda: followed.new_weights(policy)
    tokens = batched_tokens(rollout, policy.backend.sizes)
    scorer = TokenScorer(policy, tokens)  # first: the engine takes the memory that is left
    engine = NativeEngine(policy, rollout, model.tokenizer, seed=0)
    thread = EngineThread(engine, scorer, new_weights)
    name = options.name or options.folder
    serving = Settings(
        name=name,
        key=key,
        max_live=options.max_live,
        chat=settings.data,
        sampling=model.sampling(rollout),
        max_tokens=rollout.max_new_tokens if "max_new_tokens" in rollout.model_fields_set else None,
        precision=settings.precision.name,
        adapters=tuple(adapters),
        folders={name: options.folder}
        | {adapter: str(path) for adapter, path in options.lora_modules},
        hosts=hosts,
    )
    updates = None if updated is None else WeightUpdates(policy, thread, updated)
    return ApiServer(model, load_tokenizer(model.folder), thread, serving, updates)


def _serve(server: "ApiServer", listener: socket.socket, options: Namespace) -> int:
    import uvicorn

    from isobit.serve.connections import HttpConnection, most_connections

    host, port = listener.getsockname()[:2]
    if options.api_key is None and not ip_address(host).is_loopback:
        say(
            f"isobit: WARNING: anyone who reaches {host}:{port} can use this server, web pages "
            "that its users open included; set --api-key env:NAME"
        )
    most = most_connections()
    if most < options.max_live:
        say(
            f"isobit: at most {most} connections are open at once, fewer than the places of "
            "--max-live; raise the limit of open files (ulimit -n)"
        )
    http: Any = partial(HttpConnection, most=most)
    config = uvicorn.Config(
        server.app(),
        lifespan="on",
        http=http,
        backlog=2048,
        timeout_graceful_shutdown=options.grace,
        **PLAIN_HTTP,
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


def _hosts(options: Namespace, address: str) -> HostCheck | None:
    """The names that requests may mean the server by. With a key no page of the web can ask it; at
    a public address nobody knows its names.
    """
    if not options.allowed_host:
        if options.api_key is not None:
            return None
        if not ip_address(address).is_loopback:
            return HostCheck(None)
    return HostCheck((*LOCAL_NAMES, options.host, address, *options.allowed_host))
