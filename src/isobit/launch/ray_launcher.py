"""One process a GPU on a Ray cluster: the one file that imports ray.

    driver ──> actor of rank 0 ──> python -m isobit.cli.main ..      its lines are shown here
           ──> actor of rank 1 ──> python -m isobit.cli.main ..
           ──> ..

Ray places, starts and watches; no tensor and no sample travels through it.  An actor holds a place
(a GPU, or cores) and the process of a rank, so that a rank that crashes takes nothing of Ray with
it; when an actor dies, the kernel ends its rank.  The ranks of a host see all GPUs that the run has
there, as under torchrun.

A cluster that ``RAY_ADDRESS`` names is joined.  Without it one is started on this machine for the
run: it listens on the loopback interface alone, without dashboard and usage statistics.
"""

import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isobit.config.base import Device
from isobit.launch.local import RankProcess, free_port, path_of_modules, wait_for_output
from isobit.launch.rank_failure import RankFailure
from isobit.launch.ranks import Rank, Ranks
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
    arguments: Sequence[str], size: int, threads: int | None, device: Device, fewest: int
) -> None:
    """``python ARGUMENTS`` in ``size`` processes on a Ray cluster, until all have ended without an
    error; in fewer, a multiple of ``fewest``, where the cluster has no room for all.

    Raises RankError and Interrupted as ``launcher.launch`` does, and ConfigError where ray is
    missing or the cluster is too small.
    """
    _connect(size, threads)
    ray = _ray()
    try:
        places = _Places(size, threads or 1, device, fewest)
        try:
            places.start(arguments, threads)
            Ranks(places.ranks, places.hear).run()
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
        self._said: list[bytes] = []

    def site(self) -> _Site:
        ray = _ray()
        context = ray.get_runtime_context()
        return _Site(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            socket.gethostname(),
            tuple(context.get_accelerator_ids().get("GPU", ())),
            usable_cores(),
        )

    def free_port(self) -> int:
        """One that nobody listens on here now."""
        return free_port("")

    def start(
        self, number: int, arguments: Sequence[str], environment: Mapping[str, str], directory: str
    ) -> str | None:
        """Start the rank, in a directory that all hosts see; -> why that is not possible."""
        if not os.path.isdir(directory):
            return (
                f"{socket.gethostname()} has no directory {directory!r}: the run's directory must "
                "lie on a disk that all hosts see, at the same path"
            )
        place = {**os.environ, "PYTHONPATH": path_of_modules(), **environment}
        self._rank = RankProcess(number, arguments, place, self._said.append, directory)
        return None

    def look(self, signals: Sequence[int]) -> dict[str, Any]:
        """Hand signals on; -> what has become of the rank, with what it has printed since."""
        rank = self._rank
        assert rank is not None, "it was started"
        for number in signals:
            rank.send(number)
        wait_for_output([rank], LOOK_S)
        rank.hear()
        running = rank.is_running()
        said, self._said[:] = b"".join(self._said), []
        return {
            "said": said,
            "exit_code": rank.exit_code,
            "notes": dict(rank.notes),
            "ago": time.monotonic() - rank.failed_at,
            "death": None if running else asdict(rank.death()),
        }

    def close(self) -> None:
        """End the rank, if it still runs."""
        if self._rank is not None:
            self._rank.close()


class _RemoteRank(Rank):
    """A rank seen through its actor."""

    def __init__(self, number: int, actor: Any, site: _Site) -> None:
        super().__init__(number)
        self.actor, self.site = actor, site
        self.signals: list[int] = []
        """To be handed on."""
        self._notes: Mapping[str, Any] = {}
        self._failed_at = time.monotonic()
        self._death: RankFailure | None = None
        self._lost: str | None = None

    @property
    def notes(self) -> Mapping[str, Any]:
        return self._notes

    @property
    def failed_at(self) -> float:
        return self._failed_at

    @property
    def code(self) -> int:
        return 1 if self._death is None else self._death.code

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
        if self.number == 0 and seen["said"]:
            hand_on(seen["said"])
        self._notes = seen["notes"]
        self._failed_at = time.monotonic() - seen["ago"]
        if seen["death"] is not None:
            shown = {"last_lines": None} if self.number == 0 else {}
            self._death = RankFailure(**{**seen["death"], **shown})
            self.exit_code = seen["exit_code"]

    def lose(self, reason: str) -> None:
        """Its actor is gone."""
        self._lost = " ".join(reason.split())
        self._failed_at = time.monotonic()
        self.exit_code = 1


class _Places:
    """The actors of a run: on one host where one has room for all, else on as few as possible."""

    def __init__(self, size: int, threads: int, device: Device, fewest: int) -> None:
        self.ranks: list[_RemoteRank] = []
        self._looks: dict[Any, _RemoteRank] = {}
        self._actors: list[Any] = []
        nodes = _nodes()
        on_gpus = device == "cuda" or (device == "auto" and any(n.get("GPU") for n in nodes))
        bundle = {"CPU": float(threads), **({"GPU": 1.0} if on_gpus else {})}
        room = [_times(bundle, node) for node in nodes]
        self.size = size if sum(room) >= size else sum(room) // fewest * fewest
        if self.size < fewest:
            raise ConfigError(
                f"{fewest} processes take {_said(bundle)} each, and the Ray cluster has room for "
                f"{sum(room)} of them, on {len(nodes)} nodes; lower --cluster.processes, or add "
                "nodes"
            )
        self._group = _placed(bundle, self.size, max(room) >= self.size)
        self._actors = [self._actor(bundle, index) for index in range(self.size)]

    def _actor(self, bundle: Mapping[str, float], index: int) -> Any:
        ray = _ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return (
            ray.remote(_Place)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=strategy(self._group, index),
            )
            .remote()
        )

    def start(self, arguments: Sequence[str], threads: int | None) -> None:
        """All ranks, numbered host by host."""
        ray = _ray()
        sites: list[_Site] = ray.get([actor.site.remote() for actor in self._actors])
        found = sorted(zip(sites, self._actors, strict=True), key=lambda one: one[0].order)
        self.ranks = [
            _RemoteRank(number, actor, site) for number, (site, actor) in enumerate(found)
        ]
        port = ray.get(self.ranks[0].actor.free_port.remote())
        ordered = [site for site, _ in found]
        environments = environments_of(ordered, port, threads)
        problems = ray.get(
            [
                rank.actor.start.remote(rank.number, arguments, environment, os.getcwd())
                for rank, environment in zip(self.ranks, environments, strict=True)
            ]
        )
        for problem in problems:
            if problem is not None:
                raise ConfigError(problem)
        hosts = Counter(site.host for site in ordered)
        said = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        say(f"{self.size} processes through Ray: {said}", "stdout")

    def hear(self) -> None:
        """Look at all ranks that run; those whose actors are gone are lost."""
        ray = _ray()
        waited_for = set(self._looks.values())
        for rank in self.ranks:
            if rank.is_running() and rank not in waited_for:
                signals, rank.signals = rank.signals, []
                self._looks[rank.actor.look.remote(signals)] = rank
        looks = list(self._looks)
        ready, _ = ray.wait(looks, num_returns=len(looks), timeout=2 * LOOK_S)
        for look in ready:
            rank = self._looks.pop(look)
            try:
                rank.take(ray.get(look))
            except ray.exceptions.ActorUnavailableError:
                pass  # its node does not answer now: Ray says when it is gone for good
            except ray.exceptions.RayActorError as error:
                rank.lose(str(error))

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
