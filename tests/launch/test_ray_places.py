"""How many ranks a Ray cluster is asked for, and when their ends count, without a cluster."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isobit.cli import training
from isobit.config.recipes import Recipe
from isobit.config.tables import ClusterConfig
from isobit.launch import local, ray_launcher
from isobit.launch.ray_launcher import _Places, _RemoteRank, _Site
from isobit.parallel.restart_page import RestartPage
from isobit.util.errors import ConfigError


def test_as_many_are_taken_as_share_engines_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 3.0}]
    monkeypatch.setattr(ray_launcher, "_nodes", lambda: nodes)
    monkeypatch.setattr(ray_launcher, "_placed", lambda *_: None)
    monkeypatch.setattr(_Places, "_actor", lambda *_: None)
    assert [_Places(8, 1, "cpu", fewest).size for fewest in (1, 2, 4, 5)] == [7, 6, 4, 5]
    assert _Places(7, 1, "cpu", 2).size == 7
    for size in (8, 16):
        with pytest.raises(ConfigError, match=r"8 processes take 1 CPU each, .* room for 7 of"):
            _Places(size, 1, "cpu", 8)


def test_a_run_is_started_again_by_as_many_as_share_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    class Config:
        cluster = ClusterConfig(launcher="ray", processes=8, rollout_tp=2)
        threads, device = 1, "cpu"

    def with_restarts(start: Any, words: list[str], restarts: int) -> None:
        start(words, False)
        start(words, True)

    def launch(words: Any, size: int, threads: Any, device: Any, fewest: int, _: int) -> None:
        asked.append((size, fewest))

    monkeypatch.setattr(local, "with_restarts", with_restarts)
    monkeypatch.setattr(ray_launcher, "launch_on_ray", launch)
    training._launch("train", cast("Recipe", Config()), [])
    assert asked == [(8, 8), (8, 2)]


def test_ranks_are_numbered_by_host_and_gpu_however_these_are_named() -> None:
    """A node whose CUDA_VISIBLE_DEVICES has UUIDs gives these out."""

    def site(address: str, *gpus: str) -> _Site:
        return _Site(f"node of {address}", address, "host", gpus, 8)

    a, b = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-0b1c2d3e"
    sites = [site("2", "0"), site("1", "10"), site("1", "9"), site("0", a), site("0", b)]
    found = [(one.address, one.gpus) for one in sorted(sites, key=lambda one: one.order)]
    assert found == [("0", (b,)), ("0", (a,)), ("1", ("9",)), ("1", ("10",)), ("2", ("0",))]
    assert sorted([site("1"), site("0")], key=lambda one: one.order)[0] == site("0")


class GoneError(Exception):
    """An actor is."""


class Hears:
    """A trainer and a rollouter whose actors say what the test says."""

    def __init__(self, page: RestartPage) -> None:
        site = _Site("node", "address", "host", (), 1)
        self.says: list[Any] = [None, None]
        self.places = cast("Any", object.__new__(_Places))
        self.places.__dict__ |= {"_page": page, "_looks": {}, "_ends": [], "_looked_behind": []}
        self.places._bundle = {"CPU": 1.0}
        self.killed: list[Any] = []
        """The actors that were."""
        self.places.ranks = self.ranks = [
            _RemoteRank(0, None, 0, site),
            _RemoteRank(1, None, 1, site),
        ]
        for rank in self.ranks:
            remote = SimpleNamespace(remote=lambda *_, number=rank.number: (number, object()))
            rank.actor = SimpleNamespace(look=remote)

    def wait(self, looks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return looks[::-1], []  # the rollouter's first

    def get(self, look: tuple[int, object]) -> Any:
        said = self.says[look[0]]
        if isinstance(said, Exception):
            raise said
        return {"site": None, "said": b"", "notes": {}, "ago": 0.0, "exit_code": None} | said

    def hear(self, trainer: Any, rollouter: Any) -> list[int | None]:
        self.says = [trainer, rollouter]
        self.places.hear()
        return [rank.exit_code for rank in self.ranks]


RUNS = {"death": None, "entries": {"done": 0}}
DONE = {"death": None, "entries": {"done": 1}}


@pytest.fixture
def hears(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hears]:
    page = RestartPage.made(1)
    found = Hears(page)
    errors = SimpleNamespace(ActorUnavailableError=ValueError, RayActorError=GoneError)
    calls = {"wait": found.wait, "get": found.get, "kill": found.killed.append}
    ray = SimpleNamespace(**calls, exceptions=errors)
    monkeypatch.setattr(ray_launcher, "_ray", lambda: ray)
    yield found
    page.close()


def test_a_rollouters_end_counts_once_the_trainer_has_said_whether_the_run_was_done(
    hears: Hears,
) -> None:
    assert hears.hear(RUNS, GoneError()) == [None, None]
    assert hears.places._page.read("done") == 0
    assert hears.hear(DONE, AssertionError("it is looked at no more")) == [None, -9]
    assert hears.places._page.read("done") == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_rollouters_end_counts_where_the_trainer_is_gone_too(
    hears: Hears, together: bool
) -> None:
    if not together:
        assert hears.hear(RUNS, GoneError()) == [None, None]
    assert hears.hear(GoneError(), GoneError()) == [-9, -9]


def test_signals_reach_an_actor_that_did_not_answer(hears: Hears) -> None:
    hears.ranks[1].send(15)
    hears.hear(RUNS, ValueError())
    assert hears.ranks[1].signals == [15]


def test_a_rollouter_for_which_no_node_is_found_is_lost_and_says_so(
    hears: Hears, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollouter = hears.ranks
    monkeypatch.setattr(
        ray_launcher._ray(), "wait", lambda looks, **_: ([one for one in looks if one[0] == 0], [])
    )
    rollouter.placed_by = float("inf")
    assert hears.hear(RUNS, None) == [None, None]
    rollouter.placed_by = 0.0
    assert hears.hear(RUNS, None) == [None, None]
    assert hears.hear(RUNS, None) == [None, -9]
    assert hears.killed == [rollouter.actor]
    assert "no place of 1 CPU has become free in 120 s" in rollouter.describe()
    assert trainer.is_running()
