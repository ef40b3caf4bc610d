"""One process a GPU on a Ray cluster: the one file that imports ray.

    driver ──> actor of rank 0 ──> python -m isobit.cli.main ..      its lines are shown here
           ──> actor of rank 1 ──> python -m isobit.cli.main ..
           ──> ..

Ray places, starts and watches; no tensor and no sample travels through it.  An actor holds a place
(a GPU, or cores) and the process of a rank, so that a rank that crashes takes nothing of Ray with
it; when an actor dies, the kernel ends its rank.  The ranks of a host see all GPUs that the run has
there, as under torchrun.

Rollouters that are killed, alone or with their actor or node, are started again
(``launch/rollouter_restarts.py``): in their actor, or in a new one in the same place, which Ray may
find on another node.  A rank shares its page with its actor, and what the driver's page and those
of the actors say to each other travels with each look.

A cluster that ``RAY_ADDRESS`` names is joined.  Without it one is started on this machine for the
run: it listens on the loopback interface alone, without dashboard and usage statistics.
"""

import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from signal import SIGKILL
from typing import Any

from isobit.config.base import Device
from isobit.launch.local import RankProcess, free_port, path_of_modules, wait_for_output
from isobit.launch.rank_failure import RankFailure
from isobit.launch.ranks import Rank
from isobit.launch.rollouter_restarts import ranks_with
from isobit.parallel.restart_page import FIRST_RANKS, LAUNCHERS, Entry, RestartPage
from isobit.util.errors import ConfigError
from isobit.util.machine import usable_cores
from isobit.util.terminal import hand_on, say

LOOK_S = 0.2
"""Seconds that an actor waits for its rank's output before it answers."""
PLACE_S = 120.0
"""Seconds for places that others hold to become free."""
CLOSE_S = 15.0
REACH_S = 10.0
"""Seconds for the cluster to answer at all."""


def launch_on_ray(
    arguments: Sequence[str],
    size: int,
    threads: int | None,
    device: Device,
    fewest: int,
    rollouters: int = 0,
) -> None:
    """``python ARGUMENTS`` in ``size`` processes on a Ray cluster, until all have ended without an
    error; in fewer, a multiple of ``fewest``, where the cluster has no room for all.  The last
    ``rollouters`` of them are started again where one is killed.

    Raises RankError and Interrupted as ``launcher.launch`` does, and ConfigError where ray is
    missing or the cluster is too small.
    """
    _connect(size, threads)
    ray = _ray()
    try:
        places = _Places(size, threads or 1, device, fewest)
        with closing(RestartPage.made(rollouters)) if rollouters else nullcontext() as page:
            try:
                places.start(arguments, threads, page)
                ranks_with(page, places.ranks, places.hear, places.start_again).run()
            finally:
                places.close()
    finally:
        ray.shutdown()


def _connect(size: int, threads: int | None) -> None:
    """Join the cluster that the environment names, or start one."""
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address or _is_loopback(address):
        # Ray's own switch for machines where nothing may listen to others: all is on 127.0.0.1.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = _ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not address:
        cores = max(usable_cores(), size * (threads or 1))
        ray.init("local", include_dashboard=False, num_cpus=cores, **quiet)
        return
    try:
        _reach(address)
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at RAY_ADDRESS = {address!r} cannot be joined: {error}"
        ) from None
    if warning := open_to_all(ray.get_runtime_context().gcs_address, os.environ):
        say(warning)


def _ray() -> Any:
    """The library.  Raises ConfigError where it is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ConfigError(
            f"cluster.launcher is 'ray', and ray cannot be imported ({error}): "
            "pip install 'isobit[ray]', or say --cluster.launcher local"
        ) from None
    return ray


def open_to_all(address: str, environment: Mapping[str, str]) -> str | None:
    """A warning for a cluster that others on its network can send code to."""
    if environment.get("RAY_AUTH_MODE", "").lower() == "token" or _is_loopback(address):
        return None
    return (
        f"warning: the Ray cluster at {address} is joined without a token: whoever reaches its "
        "ports can run code as you there; start it and this command with RAY_AUTH_MODE=token"
    )


def _reach(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for ever."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class _Site:
    """The node, addresses and GPUs of an actor."""

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]
    """Their numbers there, or, where CUDA_VISIBLE_DEVICES names them so, UUIDs."""
    cores: int

    @property
    def order(self) -> tuple[str, str, list[tuple[int, str]]]:
        """Host by host, and by the numbers of its GPUs."""
        return self.address, self.node, [(len(gpu), gpu) for gpu in self.gpus]


class _Place:
    """An actor: a place on a node, and the process of a rank in it."""

    def __init__(self) -> None:
        self._rank: RankProcess | None = None
        self._page: RestartPage | None = None
        self._said: list[bytes] = []
        self._problem: str | None = None
        """Why no rank was started."""

    @cached_property
    def _site(self) -> _Site:
        ray = _ray()
        context = ray.get_runtime_context()
        return _Site(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            socket.gethostname(),
            tuple(context.get_accelerator_ids().get("GPU", ())),
            usable_cores(),
        )

    def site(self) -> _Site:
        return self._site

    def free_port(self) -> int:
        """One that nobody listens on here now."""
        return free_port("")

    def start(self, asked: "_Start") -> str | None:
        """Start the rank, in a directory that all hosts see; -> why that is not possible.  One that
        has ended here makes room for it.
        """
        self.close()
        if not os.path.isdir(asked.directory):
            self._problem = (
                f"{socket.gethostname()} has no directory {asked.directory!r}: the run's directory "
                "must lie on a disk that all hosts see, at the same path"
            )
            return self._problem
        place = {**os.environ, "PYTHONPATH": path_of_modules(), **asked.environment}
        if asked.node != self._site.node:  # Ray has moved it, away from the others
            gpus = ",".join(self._site.gpus)
            place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": gpus}
        shared = list[int]()
        if asked.rollouters:
            self._page = self._page or RestartPage.made(asked.rollouters)
            self._page.take(asked.entries)
            self._page.enter(place, asked.of)
            shared.append(self._page.descriptor)
        try:
            self._rank = RankProcess(
                asked.number, asked.arguments, place, self._said.append, asked.directory, shared
            )
        except OSError as error:
            self._problem = f"{socket.gethostname()} cannot start a process: {error}"
            return self._problem
        return None

    def look(self, signals: Sequence[int], entries: Mapping[Entry, int]) -> dict[str, Any]:
        """Hand signals on, and what the driver's page says; -> what has become of the rank, with
        what it has printed and written on its page.
        """
        rank = self._rank
        if rank is None:
            return {"problem": self._problem}
        if self._page is not None:
            self._page.take(entries)
        for number in signals:
            rank.send(number)
        wait_for_output([rank], LOOK_S)
        rank.hear()
        running = rank.is_running()
        said, self._said[:] = b"".join(self._said), []
        return {
            "site": self._site,
            "said": said,
            "exit_code": rank.exit_code,
            "notes": dict(rank.notes),
            "ago": time.monotonic() - rank.failed_at,
            "death": None if running else asdict(rank.death()),
            "entries": {} if self._page is None else self._page.entries(FIRST_RANKS),
        }

    def close(self) -> None:
        """End the rank, if it still runs."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None


@dataclass(frozen=True, slots=True)
class _Start:
    """What an actor is told of the rank that it starts."""

    number: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    node: str
    """The node that the others believe it to be on."""
    rollouters: int
    of: int
    """The start of the rollouters (``isobit.parallel.restart_page``)."""
    entries: Mapping[Entry, int]
    """What the driver's page says."""


class _RemoteRank(Rank):
    """A rank seen through its actor."""

    def __init__(self, number: int, actor: Any, place: int, site: _Site) -> None:
        """``place`` is that of the actor among the run's."""
        super().__init__(number)
        self.actor, self.place, self.site = actor, place, site
        self.is_held = False
        """Whether it has ended, which does not count yet."""
        self.placed_by: float | None = None
        """When its new actor must have a node; None once it has."""
        self.signals: list[int] = []
        """To be handed on."""
        self._notes: Mapping[str, Any] = {}
        self._failed_at = time.monotonic()
        self._death: RankFailure | None = None
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its actor is gone."""
        return self._lost is not None

    @property
    def notes(self) -> Mapping[str, Any]:
        return self._notes

    @property
    def failed_at(self) -> float:
        return self._failed_at

    @property
    def code(self) -> int:
        return 1 if self._death is None else self._death.code  # an actor has no exit code

    def is_running(self) -> bool:
        """Whether it ran at the last look."""
        return self.exit_code is None

    def send(self, number: int) -> None:
        """See ``Rank``; it travels with the next look, since Ray must not be called from within a
        signal's handler.
        """
        self.signals.append(number)

    def describe(self) -> str:
        if self._death is not None:
            return self._death.describe()
        return (
            f"rank {self.number} ({self.site.host}, {self.site.address}) is gone with its actor: "
            f"{self._lost}"
        )

    def close(self) -> None:
        """Its actor does (``_Places.close``)."""

    def take(self, seen: Mapping[str, Any]) -> None:
        """What its actor saw; the first rank's lines are shown."""
        self.site, self.placed_by = seen["site"], None
        if self.number == 0 and seen["said"]:
            hand_on(seen["said"])
        self._notes = seen["notes"]
        self._failed_at = time.monotonic() - seen["ago"]
        if seen["death"] is not None:
            shown = {"last_lines": None} if self.number == 0 else {}
            self._death = RankFailure(**{**seen["death"], **shown})
            self.exit_code = seen["exit_code"]

    def lose(self, reason: str) -> None:
        """Its actor is gone, and the kernel has ended it."""
        self._lost = " ".join(reason.split())
        self._failed_at = time.monotonic()
        self.exit_code = -SIGKILL


class _Places:
    """The actors of a run: on one host where one has room for all, else on as few as possible."""

    def __init__(self, size: int, threads: int, device: Device, fewest: int) -> None:
        self.ranks: list[_RemoteRank] = []
        self._looks: dict[Any, tuple[_RemoteRank, list[int]]] = {}
        """Looks that are under way, with the signals that they hand on."""
        self._actors: list[Any] = []
        nodes = _nodes()
        on_gpus = device == "cuda" or (device == "auto" and any(n.get("GPU") for n in nodes))
        self._bundle = {"CPU": float(threads), **({"GPU": 1.0} if on_gpus else {})}
        room = [_times(self._bundle, node) for node in nodes]
        self.size = size if sum(room) >= size else sum(room) // fewest * fewest
        if self.size < fewest:
            raise ConfigError(
                f"{fewest} processes take {_said(self._bundle)} each, and the Ray cluster has room "
                f"for {sum(room)} of them, on {len(nodes)} nodes; lower --cluster.processes, or "
                "add nodes"
            )
        self._group = _placed(self._bundle, self.size, max(room) >= self.size)
        self._actors = [self._actor(place) for place in range(self.size)]
        self._page: RestartPage | None = None
        self._ends: list[Callable[[], None]] = []
        """Of ranks, not counted yet: rank 0 may have said before that the run is done."""
        self._looked_behind: list[Callable[[], None]] = []
        """Those that rank 0 has been looked at since."""
        self._arguments: Sequence[str] = ()
        self._environments: list[dict[str, str]] = []

    def _actor(self, place: int) -> Any:
        ray = _ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return (
            ray.remote(_Place)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=strategy(self._group, place),
            )
            .remote()
        )

    def start(
        self, arguments: Sequence[str], threads: int | None, page: RestartPage | None
    ) -> None:
        """All ranks, numbered host by host; with ``page`` the last are started again."""
        ray = _ray()
        sites: list[_Site] = ray.get([actor.site.remote() for actor in self._actors])
        places = sorted(range(self.size), key=lambda place: sites[place].order)
        self.ranks = [
            _RemoteRank(number, self._actors[place], place, sites[place])
            for number, place in enumerate(places)
        ]
        port = ray.get(self.ranks[0].actor.free_port.remote())
        ordered = [rank.site for rank in self.ranks]
        self._environments = environments_of(ordered, port, threads)
        self._arguments, self._page = arguments, page
        for problem in ray.get([self._begin(rank, 0) for rank in self.ranks]):
            if problem is not None:
                raise ConfigError(problem)
        hosts = Counter(site.host for site in ordered)
        said = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        say(f"{self.size} processes through Ray: {said}", "stdout")

    def start_again(self, number: int, of: int) -> _RemoteRank:
        """A rollouter, of so many starts, which nobody waits for: what is asked of an actor follows
        what was asked before.
        """
        before = self.ranks[number]
        actor = self._actor(before.place) if before.is_lost else before.actor
        rank = _RemoteRank(number, actor, before.place, before.site)
        if before.is_lost:
            self._actors.append(actor)
            rank.placed_by = time.monotonic() + PLACE_S
        self._begin(rank, of)
        return rank

    def _begin(self, rank: _RemoteRank, of: int) -> Any:
        page = self._page
        rollouters, entries = (page.rollouters, page.entries(LAUNCHERS)) if page else (0, {})
        place = self._environments[rank.number]
        told = rank.number, self._arguments, place, os.getcwd(), rank.site.node, rollouters, of
        return rank.actor.start.remote(_Start(*told, entries))

    def hear(self) -> None:
        """Look at all ranks that run; those whose actors are gone are lost."""
        ray = _ray()
        waited_for = {rank for rank, _ in self._looks.values()}
        for rank in self.ranks:
            if rank.is_running() and not rank.is_held and rank not in waited_for:
                self._look_at(rank)
            elif rank.placed_by is not None and time.monotonic() >= rank.placed_by:
                self._give_up(rank)
        looks = list(self._looks)
        ready = ray.wait(looks, num_returns=len(looks), timeout=2 * LOOK_S)[0] if looks else ()
        for look in ready:
            rank, signals = self._looks.pop(look)
            try:
                self._take(rank, ray.get(look))
            except ray.exceptions.ActorUnavailableError:
                # its node does not answer now: Ray says when it is gone for good
                rank.signals[:0] = signals
            except ray.exceptions.RayActorError as error:
                self._end(rank, partial(rank.lose, str(error)))
        if not self.ranks[0].is_running():
            self._looked_behind, self._ends = self._looked_behind + self._ends, []
        while self._looked_behind and 0 not in (rank.number for rank, _ in self._looks.values()):
            self._looked_behind.pop(0)()

    def _give_up(self, rank: _RemoteRank) -> None:
        """End the actor of a rank for which Ray has found no node."""
        _ray().kill(rank.actor)
        self._looks = {look: one for look, one in self._looks.items() if one[0] is not rank}
        rank.placed_by = None
        free = f"no place of {_said(self._bundle)} has become free in {PLACE_S:.0f} s"
        self._end(rank, partial(rank.lose, f"{free} (`ray status` says who holds them)"))

    def _look_at(self, rank: _RemoteRank) -> None:
        signals, rank.signals = rank.signals, []
        look = rank.actor.look.remote(signals, self._entries_for(rank))
        self._looks[look] = rank, signals
        if rank.number == 0:
            self._looked_behind, self._ends = self._looked_behind + self._ends, []

    def _end(self, rank: _RemoteRank, count: Callable[[], None]) -> None:
        """Count a rank's end, once a later look at rank 0 has said whether the run was done."""
        if rank.number == 0 or self._page is None or not self.ranks[0].is_running():
            count()
        else:
            rank.is_held = True
            self._ends.append(count)

    def _entries_for(self, rank: _RemoteRank) -> Mapping[Entry, int]:
        """What the driver's page says that the rank's may not know."""
        if self._page is None:
            return {}
        return self._page.entries(LAUNCHERS if rank.number == 0 else LAUNCHERS + FIRST_RANKS)

    def _take(self, rank: _RemoteRank, seen: Mapping[str, Any]) -> None:
        """What an actor saw."""
        if "problem" in seen:
            self._end(rank, partial(rank.lose, seen["problem"]))
        elif seen["death"] is not None:
            self._end(rank, partial(rank.take, seen))
        else:
            rank.take(seen)
        if self._page is not None and rank.number == 0:
            self._page.take(seen["entries"])

    def close(self) -> None:
        """End what still runs, and give the places back."""
        ray = _ray()
        closing = [actor.close.remote() for actor in self._actors]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)


def environments_of(sites: Sequence[_Site], port: int, threads: int | None) -> list[dict[str, str]]:
    """What each rank finds in its environment; ``sites`` by rank, those of a node together."""
    counts = Counter(site.node for site in sites)
    gpus: dict[str, list[str]] = {}
    for site in sites:
        gpus.setdefault(site.node, []).extend(site.gpus)
    # On CPUs gradients repeat at a fixed number of threads: the same on all hosts.
    each = threads or max(1, min(site.cores // counts[site.node] for site in sites))
    local = Counter[str]()
    found: list[dict[str, str]] = []
    for site in sites:
        found.append(
            {
                "WORLD_SIZE": str(len(sites)),
                "LOCAL_WORLD_SIZE": str(counts[site.node]),
                "LOCAL_RANK": str(local[site.node]),
                "MASTER_ADDR": sites[0].address,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(each),
                "CUDA_VISIBLE_DEVICES": ",".join(gpus[site.node]),
            }
        )
        local[site.node] += 1
    return found


def _nodes() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in _ray().nodes() if node["Alive"]]


def _times(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How often a bundle fits a node."""
    return min(int(node.get(name, 0) // amount) for name, amount in bundle.items())


def _said(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:.0f} {name}" for name, amount in bundle.items())


def _placed(bundle: Mapping[str, float], size: int, on_one: bool) -> Any:
    """Places for all, or none.  Raises ConfigError where others hold them for too long."""
    util = _ray().util
    strategy = "STRICT_PACK" if on_one else "PACK"
    group = util.placement_group([dict(bundle)] * size, strategy=strategy)
    if not group.wait(PLACE_S):
        util.remove_placement_group(group)
        raise ConfigError(
            f"no {size} places of {_said(bundle)} have become free on the Ray cluster in "
            f"{PLACE_S:.0f} s: others hold them (`ray status` says who)"
        )
    return group
