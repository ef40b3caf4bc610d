"""Linux system calls that Python 3.11 does not offer, and what the sandbox makes of them.

``build_root`` makes a new root for the calling process, which `unshare` gave its own namespaces.
There is no /proc, and the host's root is unmounted.

    /            tmpfs, read-only at the end
    shown        paths of the host, bound read-only at the same path or another
    links        symbolic links, as on the host (/lib -> usr/lib)
    /dev         null and urandom
    /tmp         tmpfs of limited size, the only place to write

``apply_limits`` sets the limits of the process itself.
"""

import ctypes
import os
import platform
import resource
from collections.abc import Mapping

_LIBC = ctypes.CDLL(None, use_errno=True)

NO_NEW_PRIVILEGES = 38
DROP_FROM_BOUNDING_SET = 24
SET_FILTER = 22
FILTER_MODE = 2
CAPABILITIES_V3 = 0x20080522

READ_ONLY, NO_SETUID, NO_DEVICES = 1, 2, 4
"""Flags of a mount; the first three are also MOUNT_ATTR_*'s."""
BIND, RECURSIVE, DETACH = 4096, 16384, 2
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


def drop_capabilities() -> None:
    """Give up all root privileges in this user namespace, permanently."""
    for capability in range(64):
        _LIBC.prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)  # EINVAL beyond the kernel's last
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


def build_root(shown: Mapping[str, str], links: Mapping[str, str], tmp_bytes: int) -> None:
    """Enter the new root: ``shown`` maps a path inside to the host's, ``links`` a path inside to
    its target. Raises OSError naming what could not be mounted.
    """
    plain = NO_SETUID | NO_DEVICES
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
    bounds = f"size={tmp_bytes},nr_inodes={FILES_IN_TMP},mode=700"
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


def apply_limits(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Lower the limits of address space, CPU time, file size, descriptors and threads."""
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
