"""Facts about the machine from the operating system: processor, cores, memory, OpenMP."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_PROCESSORS = Path("/proc/cpuinfo")
_LIMITS = {  # cgroup v2, then v1: the limit of a container and what it uses of it
    Path("/sys/fs/cgroup/memory.max"): Path("/sys/fs/cgroup/memory.current"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"): Path(
        "/sys/fs/cgroup/memory/memory.usage_in_bytes"
    ),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of main memory, or of a container's limit where that is smaller."""

    total: int
    available: int
    """What a process can take without swapping."""


def read_memory() -> Memory | None:
    if not _MEMORY.is_file():
        return None
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for limit_file, used_file in _LIMITS.items():
        if (
            limit_file.is_file()
            and used_file.is_file()
            and (limit := limit_file.read_text().strip()).isdecimal()
        ):
            total, available = (
                min(total, int(limit)),
                min(available, max(0, int(limit) - int(used_file.read_text()))),
            )
    return Memory(total, available)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """The processor's name, or its architecture where the operating system does not say."""
    lines = _PROCESSORS.read_text().splitlines() if _PROCESSORS.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def openmp_libraries() -> list[str]:
    maps = Path("/proc/self/maps")
    paths = (
        {line.split()[-1] for line in maps.read_text().splitlines()} if maps.is_file() else set()
    )
    return sorted(
        name
        for name in {Path(path).name for path in paths}
        if name.startswith(("libgomp", "libiomp", "libomp"))
    )
