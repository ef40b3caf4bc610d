"""What the doctor found and where, as one JSON page that can be attached to a public issue.

Beside the findings it has the versions, the class of bits (generation, back end, digest of the
kernels), the processor and the GPU.  Paths, and the names of the user and of the host, are replaced
in every text; addresses of web pages stay.
"""

import getpass
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from isobit.kernels.backend import back_end_of, is_present, support, usable_devices
from isobit.proof.doctor import Examination
from isobit.store.manifest import environment, machine
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text

FORMAT = 1
_PATH = re.compile(r"(https?://[^\s'\"]+)|(?<![\w.~])~?(?:/[^\s/'\"():;,=]+)+/?")


def report(examination: Examination, directory: Path) -> dict[str, Any]:
    """The page of an examination, which tried out files in ``directory``."""
    usable = next(device for device, problem in usable_devices().items() if problem is None)
    device = torch.device(usable)
    cards = [torch.device(kind) for kind in usable_devices() if is_present(kind)]
    page = {
        "format": FORMAT,
        "back_end": back_end_of(usable),
        **environment(device),
        "cards": [dict(figures) for one in cards if (figures := support(one.type).figures(one))],
        "machine": machine(),
        **examination.as_json(),
    }
    return without_names(page, _names(directory))


def write_report(examination: Examination, directory: Path, path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    text = json_text(report(examination, directory), indent=2)
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {str(path)!r} cannot be written: {error.strerror}") from None


def _names(directory: Path) -> dict[str, str]:
    """What must not be in a report, and what stands for it; paths as a whole, since they may hold
    spaces.
    """
    names = {str(directory): "PATH", str(directory.absolute()): "PATH"}
    with suppress(OSError, RuntimeError):
        names |= {str(directory.resolve()): "PATH", str(Path.home()): "PATH"}
    host = socket.gethostname()
    names |= dict.fromkeys((host, host.partition(".")[0]), "HOST")
    with suppress(OSError, KeyError):  # a user without an entry has no name
        names[getpass.getuser()] = "USER"
    return {name: stands for name, stands in names.items() if len(name) > 1}


def without_names(found: Any, names: Mapping[str, str]) -> Any:
    """The same with every text of it rid of ``names`` and of paths."""
    if isinstance(found, str):
        for name in sorted(names, key=len, reverse=True):
            found = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name], found)
        return _PATH.sub(lambda match: match[1] or "PATH", found)
    if isinstance(found, Mapping):
        return {key: without_names(value, names) for key, value in found.items()}
    if isinstance(found, Sequence):
        return [without_names(value, names) for value in found]
    return found
