"""What the HTTP servers of ``isobit serve`` and ``isobit ui`` share."""

import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from isobit.util.errors import ConfigError

PLAIN_HTTP: dict[str, Any] = {
    "log_config": None,
    "access_log": False,
    "ws": "none",
    "server_header": False,
    "proxy_headers": False,
}
"""What uvicorn is told by either server."""


def check_packages(command: str, names: Sequence[str]) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"isobit {command} needs {', '.join(missing)}, which the extra `serve` brings: "
            "pip install 'isobit[serve]'"
        )


def listening_socket(host: str, port: int, option: str = "") -> socket.socket:
    """Raises ConfigError for an address that cannot be listened at, before a model is loaded;
    ``option`` is how the host was given.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"{option}--port {port} cannot be listened at: {error.strerror or error}; name "
            "another port, or end what uses it"
        ) from error
