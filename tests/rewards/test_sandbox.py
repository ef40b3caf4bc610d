"""The sandbox against code that means harm: each tries something, and prints what came of it."""

import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.rewards import sandbox
from isobit.rewards.load import load_reward
from isobit.rewards.sandbox import (
    Bubblewrap,
    Launcher,
    Namespaces,
    OutputLimitError,
    Process,
    ProcessLimits,
    SandboxError,
    TimeLimitError,
    Unsandboxed,
    launcher,
    launchers,
    trial,
)
from isobit.rewards.sandboxed import namespaces
from isobit.rewards.sandboxed.kernel import THREADS
from isobit.rewards.sandboxed.main import MEMORY
from isobit.util.errors import RewardError

LIMITS = ProcessLimits(20.0, 256 << 20)


IS_ROOT = os.geteuid() == 0


@pytest.fixture(
    scope="module", params=[Bubblewrap(), Namespaces(IS_ROOT)], ids=lambda each: each.name
)
def inside(request: pytest.FixtureRequest) -> Launcher:
    if reason := trial(request.param):
        pytest.skip(f"{request.param.name} does not work here: {reason}")
    return request.param


def run(
    code: str, launched_by: Launcher, limits: ProcessLimits = LIMITS, stdin: bytes = b""
) -> str:
    process = Process("script", {"code": code}, limits, launched_by, stdin=stdin)
    output, _ = process.finish(1 << 20)
    return output.decode()


def attempts(*statements: str) -> str:
    """A script that prints ``refused`` for each statement that raises OSError, else its value."""
    tries = "\n".join(
        f"try:\n    print({statement})\nexcept OSError:\n    print('refused')"
        for statement in statements
    )
    return f"import os, socket, subprocess, sys\n{tries}\n"


def test_a_program_reads_and_prints(inside: Launcher) -> None:
    assert run("print(sum(map(int, input().split())))", inside, stdin=b"1 2 3\n") == "6\n"
    assert (
        run("import sys\nprint(len(sys.stdin.read()))", inside, stdin=b"x" * 3_000_000)
        == "3000000\n"
    )


def test_threads_and_the_library_work(inside: Launcher) -> None:
    code = (
        "import asyncio, collections, decimal, fractions, heapq, itertools, json, re\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "async def main(): return 'loop'\nprint(asyncio.run(main()))\n"
        "try:\n    print(sum(ThreadPoolExecutor(16).map(int, range(100))))\n"
        "except RuntimeError as error:\n    print(error)"
    )
    threads = "4950" if inside.threads == THREADS else "can't start new thread"
    assert run(code, inside) == f"loop\n{threads}\n"


RAW_THREADS = """
import ctypes, mmap, os, sys
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b83800000031d24531d24531c00f054885c07401c3b8220000000f05ebf7"))
clone = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_void_p)(
    ctypes.addressof(ctypes.c_char.from_buffer(code)))
stack = ctypes.addressof(ctypes.c_char.from_buffer(mmap.mmap(-1, 4096))) + 4096
count = 1
while count < 300 and clone(0x50F00 | EXTRA, stack) > 0:
    count += 1
print(count)
sys.stdout.flush()
os._exit(0)
"""
"""Makes threads by the system call itself, which share a page of stack and only wait."""


@pytest.mark.few(5)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it is machine code")
@pytest.mark.parametrize("extra", [0, 0x80800000])  # also untraced, in another I/O context
@pytest.mark.parametrize(
    "launched_by", [*launchers(), Unsandboxed()], ids=lambda one: f"{one.name}-{one.as_nobody}"
)
def test_threads_are_bounded_without_a_library(launched_by: Launcher, extra: int) -> None:
    if reason := trial(launched_by):
        pytest.skip(f"{launched_by.name} does not work here: {reason}")
    count = int(run(RAW_THREADS.replace("EXTRA", str(extra)), launched_by))
    assert launched_by.threads in (1, THREADS)
    assert 1 <= count <= launched_by.threads


@pytest.mark.skipif(not IS_ROOT, reason="only root is exempt from the limit of threads")
def test_root_that_cannot_be_limited_has_no_threads() -> None:
    plain, nobody = Namespaces(), Namespaces(as_nobody=True)
    if trial(plain) or trial(nobody):
        pytest.skip("no sandbox works here")
    assert (plain.threads, nobody.threads) == (1, THREADS)
    assert "no threads" in plain.describe()
    assert f"at most {THREADS} threads" in nobody.describe()
    assert run("import os\nprint(os.getuid(), os.getgid(), os.getgroups())", nobody) == "1 1 []\n"


def test_a_sandbox_with_threads_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {"refused": None, "alone": 1, "another": 1, "threads": 64}

    class Fake(Unsandboxed):
        def __init__(self, name: str) -> None:
            self.name = name

    def fake_trial(candidate: Launcher) -> str | None:
        candidate.threads = threads.get(candidate.name, 64)
        return None if candidate.threads else "why"

    monkeypatch.setattr(sandbox, "trial", fake_trial)
    for names, expected in (
        ("refused alone threads", "threads"),
        ("refused alone another", "alone"),
        ("refused", Unsandboxed.name),
    ):
        monkeypatch.setattr(sandbox, "launchers", lambda names=names: map(Fake, names.split()))
        assert launcher.__wrapped__(True).name == expected


def test_a_process_whose_starter_died_while_it_changed_its_user_ends() -> None:
    ended, held = os.pipe()
    os.close(held)
    child = os.fork()
    if not child:
        namespaces.stay_bound(ended)
        os._exit(0)
    os.close(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_no_new_processes(inside: Launcher) -> None:
    code = attempts(
        "os.fork()",
        "os.posix_spawn(sys.executable, ['python'], {})",
        "subprocess.run([sys.executable, '-c', ''])",
        "os.execv(sys.executable, ['python'])",
    )
    assert run(code, inside) == "refused\n" * 4


def test_a_fork_bomb_stays_one_process(inside: Launcher) -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    with pytest.raises(TimeLimitError):
        run(code, inside, ProcessLimits(0.7, 256 << 20))


def test_many_threads_are_bounded_by_memory(inside: Launcher) -> None:
    code = (
        "import threading, time\ncount = 0\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "        count += 1\nexcept (RuntimeError, MemoryError):\n    print(count < 200)\n"
        "import os, sys\nsys.stdout.flush()\nos._exit(0)"
    )
    assert run(code, inside) == "True\n"


def test_no_sockets(inside: Launcher) -> None:
    code = attempts(
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.create_connection(('127.0.0.1', 80), timeout=1)",
    )
    assert run(code, inside) == "refused\n" * 4


def test_nothing_outside_is_written(inside: Launcher, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("whole")
    places = [
        "/x",
        "/usr/lib/x",
        "/dev/x",
        "/isobit/sandboxed/x",
        str(canary),
        sys.base_prefix + "/lib/x",
    ]
    code = attempts(*(f"open({place!r}, 'w')" for place in places), f"os.remove({str(canary)!r})")
    assert run(code, inside) == "refused\n" * 7
    assert canary.read_text() == "whole"
    assert not any(Path(place).exists() for place in places if place != str(canary))


def test_nothing_of_the_host_is_read(
    inside: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBIT_SECRET", "secret")
    (tmp_path / "secret").write_text("secret")
    unseen = [
        str(tmp_path),
        __file__,
        "/etc/passwd",
        "/proc/self",
        "/sys",
        "/home",
        "/var",
        "/old-root",
    ]
    code = attempts(*(f"os.stat({path!r})" for path in unseen))
    assert run(code, inside) == "refused\n" * len(unseen)
    assert run("import os\nprint(sorted(os.environ.items()))", inside).count("secret") == 0
    assert run("import os\nprint(os.listdir('/tmp'), sorted(os.listdir('/dev')))", inside) == (
        "[] ['null', 'urandom']\n"
    )


def test_only_its_own_descriptors_are_open(inside: Launcher) -> None:
    code = (
        "import os\nopened = []\nfor number in range(64):\n    try:\n        os.fstat(number)\n"
        "        opened.append(number)\n    except OSError:\n        pass\nprint(opened)"
    )
    assert run(code, inside) == "[0, 1, 2]\n"


def test_no_other_process_is_seen_or_signalled(inside: Launcher) -> None:
    code = attempts(f"os.kill({os.getpid()}, 0)", f"os.kill({os.getppid()}, 0)")
    assert "None" not in run(code, inside) or os.getpid() < 3
    run("import os, signal\nos.kill(-1, signal.SIGKILL)", inside)


def test_no_namespaces_mounts_or_privileges(inside: Launcher) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.unshare(0x00020000),\n"
        "      libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/tmp', 2),\n"
        "      libc.ptrace(0, 0, 0, 0), libc.chroot(b'/tmp'), libc.sethostname(b'x', 1))"
    )
    assert run(code, inside) == "-1 -1 -1 -1 -1 -1 -1\n"


def test_memory_is_bounded(inside: Launcher) -> None:
    process = Process("script", {"code": "x = bytearray(1 << 30)"}, LIMITS, inside)
    assert process.finish(100) == (b"", MEMORY)


def test_memory_that_takes_page_tables_of_its_own_is_refused(inside: Launcher) -> None:
    """Each page at a place far from others takes two more, which no limit counts."""
    code = (
        "import ctypes, mmap\nmap = ctypes.CDLL(None).mmap\nmap.restype = ctypes.c_long\n"
        "near = ctypes.addressof(ctypes.c_char.from_buffer(mmap.mmap(-1, 1 << 20)))\n"
        "page = (ctypes.c_size_t(4096), 3, 0x22, -1, ctypes.c_long(0))\n"
        "places = [0, near, near - (1 << 33), 1 << 40, (1 << 47) - (1 << 30)]\n"
        "print([map(ctypes.c_void_p(place), *page) > 0 for place in places])\n"
        "move = ctypes.CDLL(None).mremap\nmove.restype = ctypes.c_long\n"
        "print([move(ctypes.c_void_p(near), ctypes.c_size_t(4096), ctypes.c_size_t(4096), flags,\n"
        "            ctypes.c_void_p(1 << 40)) > 0 for flags in (1, 3, 5)])"
    )
    expected = "[True, True, False, False, False]\n[True, False, False]\n"
    assert run(code, inside) == expected


def test_timers_are_bounded(inside: Launcher) -> None:
    code = (
        "import ctypes\ncreate = ctypes.CDLL(None).timer_create\ncount, made = 0, ctypes.c_long()\n"
        "while count < 1000 and create(1, None, ctypes.byref(made)) == 0: count += 1\nprint(count)"
    )
    assert int(run(code, inside)) <= 64


def test_files_are_bounded(inside: Launcher) -> None:
    code = (
        "total = 0\ntry:\n    for number in range(100):\n"
        "        with open(f'/tmp/{number}', 'wb', buffering=0) as file:\n"
        "            total += file.write(bytes(1 << 20))\n"
        "except OSError:\n    print(total <= 16 << 20)"
    )
    assert run(code, inside) == "True\n"


def test_memory_that_no_limit_counts_is_refused(inside: Launcher) -> None:
    code = attempts("os.memfd_create('x')")
    assert run(code, inside) == "refused\n"


def test_output_is_bounded(inside: Launcher) -> None:
    process = Process("script", {"code": "while True: print('x' * 1000)"}, LIMITS, inside)
    with pytest.raises(OutputLimitError):
        process.finish(10_000)


@pytest.mark.parametrize("code", ["import time\ntime.sleep(3600)", "while True: pass"])
def test_time_is_bounded(inside: Launcher, code: str) -> None:
    process = Process("script", {"code": code}, ProcessLimits(0.5, 256 << 20), inside)
    with pytest.raises(TimeLimitError):
        process.finish(100)


def ends_soon(reading: int) -> bool:
    """Whether whoever held the other end of a pipe has gone."""
    ready, _, _ = select.select([reading], [], [], 20)
    return bool(ready) and os.read(reading, 1) == b""


@pytest.fixture
def held() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


SLEEPS = (
    "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(3600)"
)


def test_all_of_it_ends(inside: Launcher, held: tuple[int, int]) -> None:
    reading, writing = held
    limits = ProcessLimits(0.5, 256 << 20)
    process = Process("script", {"code": SLEEPS}, limits, inside, pass_fds=(writing,))
    os.close(writing)
    with pytest.raises(TimeLimitError):
        process.finish(100)
    assert ends_soon(reading)


def test_it_ends_with_whoever_started_it(inside: Launcher, held: tuple[int, int]) -> None:
    """A grader's process that is killed leaves nothing behind."""
    reading, writing = held
    starter = (
        "import sys, time\nfrom isobit.rewards.sandbox import *\n"
        f"Process('script', {{'code': {SLEEPS!r}}}, ProcessLimits(3600, 256 << 20), "
        f"launcher(False), pass_fds=({writing},))\nprint('started', flush=True)\n"
        "time.sleep(3600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", starter],
        stdout=subprocess.PIPE,
        pass_fds=(writing,),
        env={**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])},
    )
    os.close(writing)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    time.sleep(0.3)  # it may be anywhere between its first instruction and the code
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ends_soon(reading)


def test_descriptors_are_given_back(inside: Launcher) -> None:
    run("1", inside)
    before = sorted(os.listdir("/proc/self/fd"))
    for code in ("print(1)", "import os\nos._exit(3)"):
        run(code, inside)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def none_works(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox, "launchers", lambda: [Missing(), Forbidden()])
    launcher.cache_clear()
    yield
    launcher.cache_clear()


class Missing(Bubblewrap):
    needs = ("no-such-program",)


class Forbidden(Namespaces):
    def root(self) -> dict[str, object]:
        return {"shown": {"/x": "/no/such"}, "links": {}, "tmp_bytes": 1}


@pytest.mark.usefixtures("none_works")
def test_without_a_sandbox_code_is_refused_with_an_explanation() -> None:
    with pytest.raises(RewardError) as refused:
        launcher(False)
    text = str(refused.value)
    assert "there is no no-such-program" in text and "namespaces: " in text
    assert "install bubblewrap" in text and "unsandboxed = true" in text


@pytest.mark.usefixtures("none_works")
def test_without_a_sandbox_code_runs_where_that_is_allowed_by_name() -> None:
    assert isinstance(launcher(True), Unsandboxed)


def test_a_grader_that_runs_code_says_what_confines_it(inside: Launcher) -> None:
    launcher.cache_clear()
    assert f"; {launcher(False).describe()}" in load_reward("code").describe()
    assert "sandbox" not in load_reward("exact_match").describe()


@pytest.mark.usefixtures("none_works")
def test_a_grader_says_that_no_sandbox_works() -> None:
    assert "none works on this machine" in load_reward("code").describe()
    assert "unsandboxed = true" in load_reward("code", {"unsandboxed": True}).describe()


def test_a_sandbox_is_taken_even_if_none_is_demanded(inside: Launcher) -> None:
    launcher.cache_clear()
    assert not isinstance(launcher(True), Unsandboxed)


def test_unsandboxed_code_is_still_bounded() -> None:
    assert run(attempts("os.fork()", "socket.socket()"), Unsandboxed()) == "refused\n" * 2
    with pytest.raises(TimeLimitError):
        run("while True: pass", Unsandboxed(), ProcessLimits(0.5, 256 << 20))


def test_a_sandbox_that_fails_is_no_wrong_answer(inside: Launcher) -> None:
    if not isinstance(inside, Namespaces):
        pytest.skip("its root is another's")
    with pytest.raises(SandboxError, match="mount /x"):
        run("print(1)", Forbidden())
    assert "mount /x" in str(trial(Forbidden()))
