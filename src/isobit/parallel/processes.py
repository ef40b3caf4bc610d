"""Several processes as one world: the one file that imports torch.distributed.

Tensors of the host are sent by gloo, those of GPUs by NCCL, or within a host by copy engines
(``isobit.parallel.exchanges``).  The board is torch's store, which rank 0 or the launcher keeps.  A
lost connection to another rank is a ``PeerError``.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from threading import Lock, Thread, Timer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from isobit.parallel.exchanges import (
    Exchanges,
    PeerCopies,
    PostedExchanges,
    Slices,
    Work,
    shared_numbers,
    try_copies,
)
from isobit.parallel.gather_rows import complete
from isobit.parallel.launched import is_launched, rank_of_host, restarts, take_place
from isobit.parallel.restart_page import RestartPage
from isobit.parallel.world import Alone, Board, Pulse, World, decode, encode, run_and_gather
from isobit.util.errors import ConfigError, PeerError
from isobit.util.terminal import gib, say

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has another name for it."""
_FOR_EVER = timedelta(days=7)
"""The limit of a collective: the watch finds ranks that are silent for too long."""
WAITED_S = 30.0
"""Seconds after which a line says that other processes are waited for."""
_LOOK_S = 0.05
_MEMORY = Path("/dev/shm")  # noqa: S108
"""The folder of files that stay in memory."""
_worlds = count()  # worlds of a process, each with its own names in the store


class _StoreBoard:
    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, name: str, number: int) -> int:
        with _peers():
            return self._store.add(f"counter/{name}", number)

    def post(self, name: str, note: bytes) -> None:
        key = f"note/{name}"
        with _peers():
            self._store.set(key, note)  # pyright: ignore[reportArgumentType] (takes bytes)
            self._store.check([key])  # ``set`` does not wait until the store has it

    def read(self, name: str) -> bytes | None:
        key = f"note/{name}"
        with _peers():
            return self._store.get(key) if self._store.check([key]) else None

    def remove(self, name: str) -> None:
        with _peers():
            self._store.delete_key(f"note/{name}")


class Processes:
    """``World`` on torch.distributed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        local_rank: int,
        page: RestartPage | None = None,
    ) -> None:
        """``page`` is that of a launcher which starts the last ranks again.  Those of a later start
        are a world of their own, and ``store`` is that of the run, as it is of all others.
        """
        self.run_size, self.page = size, page
        first = 0
        self.run_store = store
        if page is not None and page.start > 0:
            first, size = size - page.rollouters, page.rollouters
            store = PrefixStore(f"rollouters of start {page.start}", store)
        self.rank, self.size, self.local_rank = rank - first, size, local_rank
        self.numbers: tuple[int, ...] = tuple(range(first, first + size))
        self.host = socket.gethostname()
        self.pulse = Pulse()
        self._store = store
        self.board: Board = _StoreBoard(PrefixStore("isobit", store))
        self.meeting: Meeting | None = None
        """The last that this rank has taken part in."""
        self.is_whole = True
        """Whether all its ranks live to the end."""
        self._shared: list[Any] = []  # memory that other ranks write to
        gpu = None
        if _on_gpus():
            # some launchers show each process its own GPU alone
            number = local_rank % torch.cuda.device_count()
            torch.cuda.set_device(number)
            gpu = str(torch.cuda.get_device_properties(number).uuid)
        dist.init_process_group(
            _backend(),
            store=PrefixStore("torch", store),
            rank=self.rank,
            world_size=size,
            timeout=_FOR_EVER,
        )
        self._group: dist.ProcessGroup | None = dist.group.WORLD
        places = self.all_gather([gpu, self.host])
        self._gpus: list[str | None] = [gpu for gpu, _ in places]
        self._here = [host for _, host in places].count(self.host)
        """The run's ranks on this host."""

    def split(self, cuts: Sequence[int]) -> World:
        return self.split_groups([range(first, last) for first, last in pairwise(cuts)])

    def split_groups(self, groups: Sequence[Sequence[int]]) -> World:
        mine = next(group for group in groups if self.rank in group)
        # Only its own, since ranks outside this world do not come here.  Even of one: torch names
        # a group by how many its ranks are in.
        group = dist.new_group(
            [self.numbers[rank] for rank in mine], timeout=_FOR_EVER, use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup)
        return _Part(self, group, mine) if len(mine) > 1 else Single(self)

    def meet(self, start: int) -> "Meeting":
        """All ranks of the run, with the rollouters of a start, in a group of their own.  Raises
        PeerError where these are lost before they have come.
        """
        made, errors = list[Meeting](), list[Exception]()

        def make() -> None:
            try:
                made.append(Meeting(self, start))
            except Exception as error:
                errors.append(error)

        # a rank that is lost would be waited for: then the thread is left behind, with a
        # connection of its own
        thread = Thread(target=make, name="meeting", daemon=True)
        thread.start()
        with self.pulse.waiting("a meeting"), _peers():
            while thread.is_alive():
                thread.join(_LOOK_S)
                page = self.page
                if page is None or made:
                    continue
                if page.read("starts") > start or page.read("over"):
                    raise PeerError(None, "the rollouters are gone")
            if errors:
                raise errors[0]
        self.meeting = made[0]
        return made[0]

    def board_of_run(self) -> Board:
        """The board of the ranks that began the run, for those that come back."""
        return _StoreBoard(PrefixStore("isobit", self.run_store))

    def own_device(self, device: torch.device) -> torch.device:
        if device.type != "cuda":
            return device
        sharing = [rank for rank, gpu in enumerate(self._gpus) if gpu == self._gpus[self.rank]]
        if len(sharing) > 1:
            raise ConfigError(
                f"ranks {' and '.join(map(str, sharing))} would compute on one GPU of "
                f"{self.host}, which has {torch.cuda.device_count()}; start at most one process a "
                "GPU (cluster.processes), or set device = 'cpu'"
            )
        return torch.device(device.type, torch.cuda.current_device())

    def all_gather(self, mine: Any) -> list[Any]:
        with self.pulse.waiting("all_gather"), _peers():
            data = torch.frombuffer(bytearray(encode(mine)), dtype=torch.uint8)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: data.numel()] = data
            gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(gathered, padded, group=self._group)
        return [
            decode(bytes(part[: int(size)].numpy()))
            for part, size in zip(gathered, sizes, strict=True)
        ]

    def all_gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        cuts: Sequence[Sequence[int]],
        places: Sequence[int] | None = None,
    ) -> None:
        with self.pulse.waiting("all_gather_rows"), _peers():
            complete(tensors, cuts, places or range(self.size), self.rank, self._swap)

    def exchange(self, send: Slices, receive: Slices) -> Work:
        """Send ``send[r]`` to rank r and receive ``receive[r]`` from it: FP32, contiguous, of equal
        sizes on both ends.  The entries of this rank are ignored.  Both are in use until the work
        is waited for.
        """
        with _peers():
            return _Watched(self._swap(send, receive), self.pulse)

    def all_gather_stack(self, mine: torch.Tensor) -> torch.Tensor:
        stack = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device)
        with self.pulse.waiting("all_gather_stack"), _peers():
            stacked, sent = (x.view(-1).view(torch.uint8) for x in (stack, mine))
            _all_gather(stacked, sent, group=self._group)
        return stack

    def exchanges(self, numbers: int, device: torch.device, buffers: int = 2) -> Exchanges:
        wanted = self.all_gather([numbers, self.host])
        numbers = max(largest for largest, _ in wanted)
        hosts = {host for _, host in wanted}
        if device.type == "cuda" and len(hosts) == 1:
            copies, problem = self._peer_copies(numbers, device, buffers)
            if copies is not None:
                return copies
            if self.rank == 0:
                say(
                    f"isobit: gradients travel by NCCL's kernels instead of copy engines, because "
                    f"{problem}"
                )
        return PostedExchanges(self.exchange, self.rank, self.size, numbers, device, buffers)

    def shared(self, size: int, device: torch.device) -> list[torch.Tensor]:
        if device.type != "cuda":
            return self._shared_host_memory(max(1, size))
        memory, problem = self._shared_memory(max(1, -(-size // 4)), device)
        if problem:
            raise ConfigError(
                f"GPUs of {self.host} cannot read each other's memory ({problem}), which processes "
                "that share an engine do; set cluster.rollout_tp = 1"
            )
        return [one.view(torch.uint8)[:size] for one in memory]

    def _shared_host_memory(self, size: int) -> list[torch.Tensor]:
        """Files without a name, once all have opened them."""
        has_room = all(self.all_gather(_has_room(self._here * size)))
        memory, mine, problem = list[torch.Tensor](), "", ""
        with ExitStack() as stack:
            try:
                folder = TemporaryDirectory(prefix="isobit-", dir=_MEMORY if has_room else None)
                mine = str(Path(stack.enter_context(folder)) / "rows")
                with open(mine, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                problem = _first_line(error)
            names = self.all_gather(mine)
            if not (problem := self._first_problem(problem)):
                try:
                    memory = [
                        torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
                        for name in names
                    ]
                except (OSError, RuntimeError) as error:
                    problem = _first_line(error)
                problem = self._first_problem(problem)
        if problem:
            raise ConfigError(
                f"{self.size} processes that share an engine need {gib(size)} each that all of "
                f"them can read, in {_MEMORY} or the folder of temporary files, and cannot have it "
                f"({problem}); make room there, or set cluster.rollout_tp = 1"
            )
        return memory

    def _peer_copies(
        self, numbers: int, device: torch.device, buffers: int
    ) -> tuple[PeerCopies | None, str]:
        """The series on every rank, or on none, and the problem."""
        try:
            size = shared_numbers(self.size, numbers, buffers)
            memory, problem = self._shared_memory(size, device)
        except torch.OutOfMemoryError as error:
            return None, _first_line(error)
        if problem:
            return None, problem
        copies, problem = try_copies(memory, self.rank, numbers, buffers)
        problem = self._first_problem(problem)
        return (None, problem) if problem else (copies, "")

    def _shared_memory(self, numbers: int, device: torch.device) -> tuple[list[torch.Tensor], str]:
        """Zeros of every rank that each can write to, kept as long as the world, or the first
        problem of any rank.  Raises torch.OutOfMemoryError on all where one has not the memory.
        """
        # one device each is visible where the launcher says so, and then all have one name
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        # no multicast: nothing here adds, and it is the part that drivers fail at
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        made: list[torch.Tensor] = []

        def allocate() -> str:
            try:
                from torch.distributed import _symmetric_memory as symmetric

                made.append(symmetric.empty(numbers, dtype=torch.float32, device=device).zero_())
                torch.cuda.synchronize(device)
            except torch.OutOfMemoryError:
                raise
            except (ImportError, AttributeError, RuntimeError) as error:
                return _first_line(error)
            return ""

        # all meet below, or none: one that is missing would be waited for
        if problem := next(filter(None, run_and_gather(self, allocate)), ""):
            return [], problem
        memory: list[torch.Tensor] = []
        try:
            memory = self._met(made[0])
        except (ImportError, AttributeError, RuntimeError) as error:
            problem = _first_line(error)
        return memory, self._first_problem(problem)

    def _met(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The memory of every rank, once all are here with theirs."""
        from torch.distributed import _symmetric_memory as symmetric

        assert self._group is not None
        shared = symmetric.rendezvous(mine, self._group)
        self._shared.append((mine, shared))
        return [
            mine if rank == self.rank else shared.get_buffer(rank, mine.shape, torch.float32)
            for rank in range(self.size)
        ]

    def _first_problem(self, mine: str) -> str:
        """The first problem of any rank, or ""."""
        return next((one for one in self.all_gather(mine) if one), "")

    def _swap(self, send: Slices, receive: Slices) -> "_Joint":
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        operations = [
            dist.P2POp(call, tensor, group=self._group, tag=number, group_peer=other)
            for call, side in ((dist.isend, send), (dist.irecv, receive))
            for other in others
            for number, tensor in enumerate(side[other])
            if tensor.numel()
        ]
        return _Joint(dist.batch_isend_irecv(operations) if operations else [])

    def barrier(self, what: str) -> None:
        with self.pulse.waiting(what):
            self.all_gather(None)

    def watch_board(self, longest_s: float) -> Board:
        """A board for a thread beside the run, with its own connection; calls fail after
        ``longest_s`` seconds without an answer.
        """
        store = _own_connection(self.run_store)
        store.set_timeout(timedelta(seconds=longest_s))
        return _StoreBoard(PrefixStore("watch", store))

    def leave(self) -> None:
        """End the connection to the other processes."""
        dist.destroy_process_group()


class _Part(Processes):
    """Some of the processes of another world."""

    def __init__(self, whole: Processes, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.local_rank = whole.local_rank
        self.numbers = tuple(whole.numbers[rank] for rank in ranks)
        self.host, self.pulse, self._group = whole.host, whole.pulse, group
        name = f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
        self._store = self.run_store = PrefixStore(name, whole._store)
        self.page, self.meeting = None, None
        self.board: Board = _StoreBoard(PrefixStore("isobit", self._store))
        self._shared: list[Any] = []
        self._gpus = [whole._gpus[rank] for rank in ranks]
        self._here = whole._here


class Meeting(Processes):
    """All ranks of a run, once more, in a group that no other depends on: it can be broken off
    where ranks are lost.
    """

    def __init__(self, own: Processes, start: int) -> None:
        """``own`` is the world that this rank began with, ``start`` that of the rollouters."""
        self.rank, self.size, self.local_rank = own.numbers[own.rank], own.run_size, own.local_rank
        self.numbers = tuple(range(own.run_size))
        self.host, self.pulse, self.start = own.host, own.pulse, start
        self.page, self.meeting = None, None
        name = f"meeting of start {start}"
        self._store = self.run_store = PrefixStore(name, _own_connection(own.run_store))
        self.board: Board = _StoreBoard(PrefixStore("isobit", self._store))
        self._shared: list[Any] = []
        self._gpus: list[str | None] = []  # nothing is computed in it
        self._here = own._here
        self._lock, self.is_broken = Lock(), False
        # torch has no public name for a group with ranks that its first one lacks
        group, _ = distributed_c10d._new_process_group_helper(
            self.size,
            self.rank,
            [],
            _backend(),
            PrefixStore("torch", self._store),
            group_name=distributed_c10d.GroupName(name),
            timeout=_FOR_EVER,
        )
        assert isinstance(group, dist.ProcessGroup)
        ranks = {rank: rank for rank in range(self.size)}
        distributed_c10d._world.pg_group_ranks[group] = ranks
        self._group = group

    def break_off(self) -> None:
        """End what waits in it, here and on other ranks; by any thread."""
        with self._lock:
            if not self.is_broken and self._group is not None:
                self.is_broken = True
                self._group.abort()

    def close(self) -> None:
        """Break it off, and give it back."""
        self.break_off()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class Single(Alone):
    """One process of another world."""

    def __init__(self, whole: Processes) -> None:
        super().__init__()
        self.numbers = (whole.numbers[whole.rank],)
        self.pulse = whole.pulse
        self._whole = whole

    def own_device(self, device: torch.device) -> torch.device:
        """See ``World``: the others may compute on the same GPU."""
        return self._whole.own_device(device)


class _Joint:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Watched:
    """A work whose wait is recorded in the pulse."""

    def __init__(self, work: Work, pulse: Pulse) -> None:
        self._work, self._pulse = work, pulse

    def wait(self) -> None:
        with self._pulse.waiting("exchange"), _peers():
            self._work.wait()


def _on_gpus() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if _on_gpus() else "gloo"


def _own_connection(store: Store) -> Store:
    """The same store, for another thread: a call that waits would hold up all others."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue] (is there)


def _has_room(size: int) -> bool:
    """Whether files that stay in memory can have so many bytes."""
    return _MEMORY.is_dir() and disk_usage(_MEMORY).free > size


@contextmanager
def _peers() -> Iterator[None]:
    """Turn errors of a collective into PeerError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ConnectionError) as error:
        raise PeerError(None, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _others_of_world() -> str:
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    place = f"{said['MASTER_ADDR']}:{said['MASTER_PORT']}"
    return f"all {said['WORLD_SIZE']} processes of the run at {place}, here as rank {said['RANK']}"


@contextmanager
def joined(page: RestartPage | None = None) -> Iterator[World]:
    """The world of a launcher (``isobit.parallel.launched``), which may start some of its ranks
    again by a ``page``; or this process alone.
    """
    if not is_launched():
        yield Alone()
        return
    if dist.is_initialized():
        raise ConfigError(
            "this process is still joined to others, by a run that ended with an error or by the "
            "script itself; start the script again on all ranks"
        )
    take_place()
    waiting = Timer(WAITED_S, say, [f"isobit: waiting for {_others_of_world()}"])
    waiting.daemon = True
    waiting.start()
    try:
        store, rank, size = next(iter(rendezvous("env://")))
    except dist.DistError as error:
        raise ConfigError(
            f"the processes of the run have not found each other ({_first_line(error)}); were as "
            f"many started as WORLD_SIZE says ({os.environ['WORLD_SIZE']}), and can each reach "
            f"MASTER_ADDR ({os.environ['MASTER_ADDR']}) at MASTER_PORT "
            f"({os.environ['MASTER_PORT']})?"
        ) from None
    finally:
        waiting.cancel()
    own = PrefixStore(f"start {restarts()} world {next(_worlds)}", store)
    world = Processes(own, rank, size, rank_of_host(), page)
    yield world
    # Not after an error: the others may not come here, and NCCL would wait for them.
    with suppress(PeerError) if page is not None else nullcontext():
        if world.is_whole:
            world.barrier("the end")
    world.leave()
