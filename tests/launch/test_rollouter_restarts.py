"""Which ends of rollouters start them again, and which end the run."""

import signal
from collections.abc import Callable, Iterator

import pytest

from isobit.launch.ranks import RankError, Ranks
from isobit.launch.rollouter_restarts import RollouterRestarts
from isobit.parallel.restart_page import VARIABLE, RestartPage
from isobit.util.errors import Interrupted, PeerError
from tests.launch.test_ranks import Given

KILLED = -int(signal.SIGKILL)


class Replaced(Given):
    """One that is closed when others take its place."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.was_closed, self.heard = False, list[int]()

    def send(self, number: int) -> None:
        self.heard.append(number)
        super().send(number)

    def close(self) -> None:
        self.was_closed = True


class Played:
    """A trainer and two rollouters, whose news come one look after the other."""

    def __init__(self, page: RestartPage) -> None:
        self.page, self.started = page, list[tuple[int, int]]()
        self.ranks = [Replaced(0), Replaced(1), Replaced(2)]
        self._restarts = RollouterRestarts(page, self.ranks, self._start)

    def run(self, *news: Callable[[], None]) -> None:
        left = iter([*news, self.end])

        def hear() -> None:
            next(left)()

        Ranks(self.ranks, hear, self._restarts.look).run()

    def end(self) -> None:
        """All have ended well."""
        for rank in self.ranks:
            rank.exit_code = rank.exit_code or 0

    def dies(self, number: int, code: int = KILLED) -> Callable[[], None]:
        return lambda: setattr(self.ranks[number], "exit_code", code)

    def answers(self) -> None:
        self.page.write("answered", self.page.read("starts") + 1)

    def _start(self, number: int, of: int) -> Replaced:
        self.started.append((number, of))
        return Replaced(number)


@pytest.fixture
def played() -> Iterator[Played]:
    page = RestartPage.made(2)
    page.write("ready", 1)
    yield Played(page)
    page.close()


def test_all_rollouters_are_started_again_where_one_was_killed(played: Played) -> None:
    before = list(played.ranks)
    played.run(played.dies(2))
    assert played.started == [(1, 1), (2, 1)]
    assert [rank.was_closed for rank in before[1:]] == [True, True]
    assert played.ranks[0] is before[0]
    assert played.page.read("starts") == 1


def test_one_that_has_lost_the_killed_one_follows_from_it(played: Played) -> None:
    def both() -> None:
        played.dies(1, PeerError.exit_code)()
        played.dies(2)()

    played.run(both)
    assert played.started == [(1, 1), (2, 1)]


def test_the_third_death_without_an_answer_ends_the_run(played: Played) -> None:
    with pytest.raises(RankError, match="rank 1 is gone"):
        played.run(played.dies(1), played.dies(2), played.dies(1))
    assert played.page.read("over") == 1
    assert played.started == [(1, 1), (2, 1), (1, 2), (2, 2)]


def test_deaths_with_an_answer_between_are_not_counted_together(played: Played) -> None:
    played.run(played.dies(1), played.dies(1), played.answers, *[played.dies(2)] * 2)
    assert played.page.read("starts") == 4


@pytest.mark.parametrize("code", [1, PeerError.exit_code])
def test_an_error_of_a_rollouter_ends_the_run(code: int, played: Played) -> None:
    with pytest.raises(RankError):
        played.run(played.dies(1, code))
    assert played.started == []
    assert played.page.read("over") == 1


def test_a_death_before_the_trainers_are_ready_ends_the_run(played: Played) -> None:
    played.page.write("ready", 0)
    with pytest.raises(RankError):
        played.run(played.dies(1))
    assert played.started == []


def test_the_death_of_a_trainer_ends_the_run(played: Played) -> None:
    def both() -> None:
        played.dies(1)()
        played.dies(0)()

    with pytest.raises(RankError):
        played.run(both)
    assert played.started == []


def test_how_rollouters_end_once_the_run_is_done_is_no_failure(played: Played) -> None:
    def done() -> None:
        played.page.write("done", 1)
        played.dies(1)()

    played.run(done)
    assert played.started == []


def test_those_that_were_started_again_are_told_to_stop_by_the_trainers(played: Played) -> None:
    def stop() -> None:
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        played.run(played.dies(1), stop)
    assert [rank.heard for rank in played.ranks] == [[signal.SIGTERM], [], []]


def test_a_rank_reads_the_page_that_the_launcher_has_made(played: Played) -> None:
    environment = {"OTHER": "1", **played.page.place(3)}
    found = RestartPage.inherited(environment)
    assert found is not None
    assert (found.rollouters, found.start, found.read("ready")) == (2, 3, 1)
    assert environment == {"OTHER": "1"}, "what a rank starts is no rank"
    assert RestartPage.inherited(environment) is None
    assert VARIABLE not in environment
