"""Linux system calls that Python 3.11 does not offer, and what the sandbox makes of them.

``build_root`` makes a new root for the calling process, which has its own namespaces
(`namespaces`). There is no /proc, and the host's root is unmounted.

    /            tmpfs, read-only at the end
    shown        paths of the host, bound read-only at the same path or another
    links        symbolic links, as on the host (/lib -> usr/lib)
    /dev         null and urandom
    /tmp         tmpfs of limited size, the only place to write

``apply_limits`` sets the limits of the process itself, and ``are_threads_bounded`` tries whether
that of threads holds: the kernel exempts the host's root.

``refuse_dangerous_calls`` sets the seccomp filter of system calls. It refuses new processes, other
programs, sockets, mounts, namespaces, access to other processes, memory that no limit counts, and
rarely used interfaces of the kernel. Threads are allowed where the limit holds, and refused where
it does not.

    load the architecture    another one: kill
    load the number          of x32: refuse
    clone                    refused unless it makes a thread; refused without a limit of threads
    clone3                   "no such call": the C library then uses clone
    mmap, mremap             refused at a place far from where the kernel puts memory: each page
                             there takes two more for its page tables, which no limit counts
    each of REFUSED          refused, EPERM
    anything else            allowed
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
import signal
import struct
from collections.abc import Mapping

_LIBC = ctypes.CDLL(None, use_errno=True)

PARENT_DEATH_SIGNAL = 1
NO_NEW_PRIVILEGES = 38
DROP_FROM_BOUNDING_SET = 24
SET_FILTER = 22
FILTER_MODE = 2
CAPABILITIES_V3 = 0x20080522

READ_ONLY, NO_SETUID, NO_DEVICES = 1, 2, 4
"""Flags of a mount; the first three are also MOUNT_ATTR_*'s."""
BIND, RECURSIVE, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
MOUNT_SETATTR = 442  # the same number everywhere
AT_RECURSIVE = 0x8000


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _checked(
        _LIBC.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
        ),
        f"mount {target}",
    )


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without set-uid programs and devices (Linux 5.12).
    Raises OSError naming the target.
    """
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    _checked(
        _LIBC.syscall(
            ctypes.c_long(MOUNT_SETATTR),
            ctypes.c_int(-100),
            ctypes.c_char_p(target.encode()),
            ctypes.c_uint(AT_RECURSIVE),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
        f"mount_setattr {target}",
    )


def pivot(new_root: str, old_root: str) -> None:
    """pivot_root(2) and chdir to the new root. Raises OSError."""
    number = {"x86_64": 155, "aarch64": 41}[platform.machine()]
    _checked(
        _LIBC.syscall(
            ctypes.c_long(number),
            ctypes.c_char_p(new_root.encode()),
            ctypes.c_char_p(old_root.encode()),
        ),
        "pivot_root",
    )
    os.chdir("/")


def detach(target: str) -> None:
    _checked(_LIBC.umount2(target.encode(), DETACH), f"umount {target}")


def no_new_privileges() -> None:
    """Executed programs gain no privileges from now on, such as by set-uid."""
    _checked(_LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _checked(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def die_with_parent() -> None:
    """Be killed when the parent ends. Raises OSError."""
    _checked(_LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")


def drop_privileges(identity: int | None) -> None:
    """Give up all root privileges in this user namespace, permanently, and become the user and
    group ``identity``, if there is one. Raises OSError.
    """
    for capability in range(64):
        _LIBC.prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)  # EINVAL beyond the kernel's last
    if identity is not None:
        os.setgroups([])
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    _checked(_LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def set_filter(instructions: bytes) -> None:
    """Filter every system call by a BPF program of 8-byte instructions. Raises OSError."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(code))
    _checked(_LIBC.prctl(SET_FILTER, FILTER_MODE, ctypes.byref(program), 0, 0), "seccomp")


DEVICES = ("/dev/null", "/dev/urandom")
OLD = "/old-root"
FILES_IN_TMP = 1024


def build_root(
    shown: Mapping[str, str], links: Mapping[str, str], tmp_bytes: int, owner: int = 0
) -> None:
    """Enter the new root: ``shown`` maps a path inside to the host's, ``links`` a path inside to
    its target; ``owner`` may write to /tmp. Raises OSError naming what could not be mounted.
    """
    plain = NO_SETUID | NO_DEVICES
    mount("", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", plain, "size=1m,mode=755")  # noqa: S108  (a place that every host has)
    os.mkdir("/tmp" + OLD)  # noqa: S108
    pivot("/tmp", "/tmp" + OLD)  # noqa: S108
    for inside, host in shown.items():
        _bind(OLD + host, inside)
        make_read_only(inside)
    for device in DEVICES:
        _bind(OLD + device, device)
    for inside, target in links.items():
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        os.symlink(target, inside)
    os.makedirs("/tmp", exist_ok=True)  # noqa: S108
    detach(OLD)
    os.rmdir(OLD)
    remount = 32
    mount("", "/", "", remount | BIND | READ_ONLY | plain)
    bounds = f"size={tmp_bytes},nr_inodes={FILES_IN_TMP},mode=700,uid={owner},gid={owner}"
    mount("tmpfs", "/tmp", "tmpfs", plain, bounds)  # noqa: S108
    os.chdir("/tmp")  # noqa: S108


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    mount(source, target, "", BIND | RECURSIVE)


THREADS = 64


def apply_limits(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Lower the limits of address space, CPU time, file size, descriptors and threads, of which
    there are at most ``THREADS``, the first included.
    """
    bounds = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: THREADS,
        resource.RLIMIT_SIGPENDING: 64,  # also timers
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def are_threads_bounded() -> bool:
    """Whether the kernel holds this process to its limit of processes and threads, by trying to
    fork beyond it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    try:
        child = os.fork()
    except BlockingIOError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return False


LOAD, EQUAL, GREATER, GREATER_EQUAL, BITS_SET, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 40
"""Offsets in struct seccomp_data; the low half of an argument, 4 bytes before the high one."""
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD = 0x10000
X32 = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
MMAP = {"x86_64": 9, "aarch64": 222}
MREMAP = {"x86_64": 25, "aarch64": 216}
TO_A_PLACE = 2 | 4
"""MREMAP_FIXED, MREMAP_DONTUNMAP."""

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
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
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


def program(machine: str, threads: bool, places: tuple[int, int]) -> bytes:
    """The filter for ``machine``, which allows ``threads`` or not, and memory at ``places``, the
    first and the last 4 GiB. Raises OSError if its call numbers are not known here.
    """
    if machine not in ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, f"no filter of system calls for {machine}; there is one for x86_64, arm64"
        )
    column = list(ARCHITECTURES).index(machine)
    numbers = sorted(pair[column] for pair in REFUSED.values() if pair[column] >= 0)
    refuse, no_such_call = ERROR | errno.EPERM, ERROR | errno.ENOSYS
    no_memory, no_thread = ERROR | errno.ENOMEM, ERROR | errno.EAGAIN
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
        (RETURN, 0, 0, ALLOW if threads else no_thread),
        (RETURN, 0, 0, refuse),
        (EQUAL, 0, 6, MMAP[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT + 4),
        (EQUAL, 2, 0, 0),  # anywhere
        (GREATER_EQUAL, 0, 2, places[0]),
        (GREATER, 1, 0, places[1]),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, no_memory),
        (EQUAL, 0, 4, MREMAP[machine]),
        (LOAD, 0, 0, FOURTH_ARGUMENT),
        (BITS_SET, 0, 1, TO_A_PLACE),
        (RETURN, 0, 0, no_memory),
        (RETURN, 0, 0, ALLOW),
    ]
    for number in numbers:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def refuse_dangerous_calls(threads: bool, memory_bytes: int) -> None:
    """Set the filter permanently. Raises OSError if the kernel has no filters."""
    no_new_privileges()
    set_filter(program(platform.machine(), threads, _places(memory_bytes)))


def _places(memory_bytes: int) -> tuple[int, int]:
    """The range of addresses, in units of 2^32, where the kernel puts ``memory_bytes`` of memory:
    from the present end downwards.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        end = ctypes.addressof(ctypes.c_char.from_buffer(page)) >> 32
    return max(0, end - (memory_bytes >> 32) - 1), end + 1
