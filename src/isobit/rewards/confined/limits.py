"""Bounds that a process of the sandbox sets itself before it runs what it was given."""

import resource


def apply(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Set soft and hard limits: address space, CPU time, size of a file, descriptors, threads.

    A limit that is already lower stays.
    """
    bounds = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(kind, (bound, bound))
