"""Whether a request means this server, by the names in its ``Host`` and ``Origin``.

A browser sends the requests of any page to any address, this machine's own included, and a page can
change neither header.  A page whose name was rebound by DNS to this machine sends that name as
``Host``; one that asks this machine without being able to read the answer sends its own name as
``Origin``.  Programs send no ``Origin``.
"""

import re
from collections.abc import Iterable
from typing import Literal

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
"""Addresses by which a machine means itself."""
_ADDRESS = re.compile(r"(?:\[([0-9a-f:.%]+)\]|([^:\[\]]*?)\.?)(?::([0-9]*))?")


class HostCheck:
    """Lets in requests that mean a server by one of its names.

    Args:
        names: without a port; None for any name, when an ``Origin`` has to have the same.
        port: that names in ``Host`` have to have; None for any, as behind a forwarded port.
    """

    def __init__(self, names: Iterable[str] | None, port: int | None = None) -> None:
        self._names = None if names is None else {name.lower() for name in names}
        self._port = port

    def wrong_header(
        self, headers: Iterable[tuple[bytes, bytes]]
    ) -> Literal["Host", "Origin"] | None:
        """The header for which a request is to be refused; ``headers`` have names in lower case."""
        found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1").lower())
        if len(found[b"host"]) != 1:
            return "Host"
        name, port = _parts(found[b"host"][0])
        if self._names is not None and name not in self._names:
            return "Host"
        if self._port is not None and port != str(self._port):
            return "Host"
        allowed = {name} if self._names is None else self._names
        origins = [_parts(origin.partition("://")[2])[0] for origin in found[b"origin"]]
        return None if all(origin and origin in allowed for origin in origins) else "Origin"


def _parts(address: str) -> tuple[str, str]:
    """Name and port of NAME, NAME:PORT, [IPV6] or [IPV6]:PORT; empty for what is none of them."""
    match = _ADDRESS.fullmatch(address)
    return ("", "") if match is None else (match[1] or match[2] or "", match[3] or "")
