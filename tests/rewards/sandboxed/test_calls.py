"""The filter of system calls, run here by a small interpreter of its own."""

import errno
import struct

import pytest

from isobit.rewards.sandboxed import kernel
from isobit.rewards.sandboxed.kernel import (
    ALLOW,
    ARCHITECTURES,
    CLONE,
    ERROR,
    KILL,
    REFUSED,
    program,
)

REFUSE, NO_SUCH_CALL = ERROR | errno.EPERM, ERROR | errno.ENOSYS
READ = {"x86_64": 0, "aarch64": 63}


PLACES = 5, 7
"""The first and the last 4 GiB of memory."""


def decides(code: bytes, architecture: int, number: int, argument: int = 0, fourth: int = 0) -> int:
    """What classic BPF returns for struct seccomp_data."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, 0, 0, fourth, 0, 0)
    position = accumulator = 0
    while True:
        operation, then, otherwise, value = struct.unpack_from("=HBBI", code, 8 * position)
        position += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x15:
                position += then if accumulator == value else otherwise
            case 0x25:
                position += then if accumulator > value else otherwise
            case 0x35:
                position += then if accumulator >= value else otherwise
            case 0x45:
                position += then if accumulator & value else otherwise
            case 0x06:
                return value
            case _:
                raise AssertionError(hex(operation))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_call_is_decided(machine: str) -> None:
    code, architecture = program(machine, True, PLACES), ARCHITECTURES[machine]
    column = list(ARCHITECTURES).index(machine)
    for name, numbers in REFUSED.items():
        if numbers[column] >= 0:
            assert decides(code, architecture, numbers[column]) == REFUSE, name
    assert decides(code, architecture, READ[machine]) == ALLOW
    assert decides(code, architecture, CLONE[machine], kernel.CLONE_THREAD | 0xF00) == ALLOW
    assert decides(code, architecture, CLONE[machine], 17) == REFUSE
    assert decides(code, architecture, kernel.CLONE3) == NO_SUCH_CALL
    assert decides(code, architecture, kernel.X32 | READ[machine]) == REFUSE
    assert decides(code, 0x40000003, READ[machine]) == KILL


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_threads_are_refused_where_nothing_limits_them(machine: str) -> None:
    code, architecture = program(machine, False, PLACES), ARCHITECTURES[machine]
    for flags in (kernel.CLONE_THREAD, kernel.CLONE_THREAD | 0xF00, (1 << 32) - 1):
        assert decides(code, architecture, CLONE[machine], flags) == ERROR | errno.EAGAIN
    assert decides(code, architecture, CLONE[machine], 17) == REFUSE


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_memory_is_had_near_other_memory(machine: str) -> None:
    code, architecture = program(machine, True, PLACES), ARCHITECTURES[machine]
    gib = 1 << 30
    places = {0: True, 4096: True, 20 * gib: True, 32 * gib - 4096: True}
    places |= {20 * gib - 4096: False, 32 * gib: False, (1 << 64) - 4096: False, 4 * gib: False}
    for place, is_near in places.items():
        found = decides(code, architecture, kernel.MMAP[machine], place)
        assert found == (ALLOW if is_near else ERROR | errno.ENOMEM), hex(place)
    for flags, is_allowed in ((0, True), (1, True), (3, False), (5, False), (7, False)):
        found = decides(code, architecture, kernel.MREMAP[machine], 0, flags)
        assert found == (ALLOW if is_allowed else ERROR | errno.ENOMEM), flags


def test_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="no filter of system calls for riscv64"):
        program("riscv64", True, PLACES)
