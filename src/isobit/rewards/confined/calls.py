"""The seccomp filter of system calls in the sandbox.

It refuses new processes (also against fork bombs: the kernel's own limit does not hold for root),
other programs, sockets, mounts, namespaces, access to other processes, memory that no limit counts,
and rarely used interfaces of the kernel. Threads are allowed.

    load the architecture    another one: kill
    load the number          of x32: refuse
    clone                    refused unless it makes a thread
    clone3                   "no such call": the C library then uses clone
    each of REFUSED          refused, EPERM
    anything else            allowed
"""

import errno
import platform
import struct

from . import kernel

LOAD, EQUAL, GREATER_EQUAL, BITS_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; the low half of the first argument."""
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD = 0x10000
X32 = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435

REFUSED: dict[str, tuple[int, int]] = {
    # name: number on x86_64, on aarch64 (-1: not there)
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "landlock_create_ruleset": (444, 444),
}


def program(machine: str) -> bytes:
    """The filter for ``machine``. Raises OSError if its call numbers are not known here."""
    if machine not in ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, f"no filter of system calls for {machine}; there is one for x86_64, arm64"
        )
    column = list(ARCHITECTURES).index(machine)
    numbers = sorted(pair[column] for pair in REFUSED.values() if pair[column] >= 0)
    refuse, no_such_call = ERROR | errno.EPERM, ERROR | errno.ENOSYS
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (GREATER_EQUAL, 0, 1, X32),
        (RETURN, 0, 0, refuse),
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, no_such_call),
        (EQUAL, 0, 4, CLONE[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (BITS_SET, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, refuse),
    ]
    for number in numbers:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def refuse_dangerous_calls() -> None:
    """Set the filter permanently. Raises OSError if the kernel has no filters."""
    kernel.no_new_privileges()
    kernel.set_filter(program(platform.machine()))
