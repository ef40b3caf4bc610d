"""GPUs by name, for plans on a machine that has none: the memory that a process finds free on one
that nobody else uses.

That of an H200 is measured (docs/memory.md: 138.7 to 139.3 of 139.8 GiB); an H100 has 79.2 GiB, and
the driver keeps about as much.
"""

from isobit.errors import ConfigError

_GIB = 1 << 30
GPUS: dict[str, int] = {"h100": 78 * _GIB, "h200": 139 * _GIB}
"""Bytes."""


def gpu_memory(name: str) -> int:
    """Bytes that a process can have.  Raises ConfigError, with the names that are known."""
    if name not in GPUS:
        raise ConfigError(f"the GPU {name!r} is not known; known are {', '.join(GPUS)}")
    return GPUS[name]
