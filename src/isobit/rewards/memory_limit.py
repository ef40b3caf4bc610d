"""The bound on the memory of a process that grades.

What counts is memory that the process writes and shares with nobody: its heap, its arrays, its
stacks (RLIMIT_DATA of Linux; as ``VmData`` in ``/proc/PID/status``).  Not counted are the text of
libraries, files that are mapped to be read, and address space that is reserved and not used: a CUDA
build of torch maps many GiB of those when it is imported, and takes some hundred MiB of memory.
Shared memory (``/dev/shm``, ``mmap.mmap(-1, n)``) is not counted either.
"""

import mmap
import resource


def limit_memory(size: int) -> None:
    """Have this process, and each that it starts, fail to get more than ``size`` bytes.

    A kernel that does not hold processes to that bound is given one of the whole address space.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if not _is_held_to(size):
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _is_held_to(size: int) -> bool:
    """Whether memory beyond ``size`` bytes is refused; none of it is touched."""
    try:
        mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False
