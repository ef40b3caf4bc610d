"""A bound on memory holds on kernels that know the better bound and on those that do not."""

import os
import resource
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from isobit.rewards import supervisor


def in_a_child(work: Callable[[], None]) -> int:
    """The exit code of a process whose limits end with it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kernel_knows", [True, False])
def test_memory_beyond_the_limit_is_refused(
    kernel_knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit = resource.setrlimit

    def ignoring(kind: int, limits: Any) -> None:
        if kind != resource.RLIMIT_DATA:
            set_limit(kind, limits)

    if not kernel_knows:
        monkeypatch.setattr(resource, "setrlimit", ignoring)

    def work() -> None:
        before = resource.getrlimit(resource.RLIMIT_AS)
        supervisor.limit_memory(16 << 30)
        assert (resource.getrlimit(resource.RLIMIT_AS) == before) == kernel_knows
        bytearray(1 << 20)
        with pytest.raises(MemoryError):
            bytearray(17 << 30)

    assert in_a_child(work) == 0
