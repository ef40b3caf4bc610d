"""Which ends of rollouters start them again, and which end the run."""

import signal
from collections.abc import Callable, Iterator

import pytest

from isobit.launch.ranks import RankError, Ranks
from isobit.launch.rollouter_restarts import RollouterRestarts
from isobit.parallel.restart_page import FIRST_RANKS, LAUNCHERS, VARIABLE, RestartPage
from isobit.util.errors import Interrupted, PeerError
from tests.launch.test_ranks import Given

KILLED = -int(signal.SIGKILL)


class Replaced(Given):
    """One that is closed when others take its place."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.was_closed, self.heard = False, list[int]()
        self.is_held = False
        """Whether a driver keeps it from its end."""

    def send(self, number: int) -> None:
        self.heard.append(number)
        if not self.is_held:
            super().send(number)

    def close(self) -> None:
        assert not self.was_closed
        self.was_closed = True


class Played:
    """A trainer and two rollouters, whose news come one look after the other."""

    def __init__(self, page: RestartPage) -> None:
        self.page, self.started = page, list[tuple[int, int]]()
        self.fails: Exception | None = None
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

    def nothing(self) -> None: ...

    def stop(self) -> None:
        signal.raise_signal(signal.SIGTERM)

    def answers(self) -> None:
        self.page.write("answered", self.page.read("starts") + 1)

    def _start(self, number: int, of: int) -> Replaced:
        if self.fails is not None and number == 2:
            raise self.fails
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


def test_one_that_has_lost_the_killed_one_may_be_seen_long_before(played: Played) -> None:
    """A driver may close the connections of a process seconds before that has ended."""
    played.run(played.dies(1, PeerError.exit_code), played.nothing, played.dies(2))
    assert played.started == [(1, 1), (2, 1)]


def test_one_that_has_lost_no_other_ends_the_run(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.launch.rollouter_restarts.KILL_S", 0.0)
    with pytest.raises(RankError, match="rank 1 is gone"):
        played.run(played.dies(1, PeerError.exit_code), played.nothing)
    assert played.page.read("over") == 1


def test_they_start_once_all_have_ended_and_signals_arrive_meanwhile(played: Played) -> None:
    held, trainer, numbers = played.ranks[1], played.ranks[0], list[int]()
    held.is_held = True

    def save() -> None:
        trainer.is_held = True  # it saves, and goes on
        signal.raise_signal(signal.SIGUSR1)
        numbers.extend([*trainer.heard, played.page.read("starts"), len(played.started)])

    played.run(played.dies(2), save, played.dies(1))
    assert numbers == [signal.SIGUSR1, 1, 0]
    assert played.started == [(1, 1), (2, 1)]


def test_a_rollouter_that_ends_early_without_an_error_ends_the_run(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that calls os._exit, say."""
    with pytest.raises(RankError):
        played.run(played.dies(2, 0), played.dies(0, PeerError.exit_code))
    assert played.page.read("over") == 1
    assert "rank 2 has ended before the trainers were done" in capsys.readouterr().err


def test_what_keeps_a_rollouter_from_starting_is_raised(played: Played) -> None:
    played.fails = OSError("too many open files")
    with pytest.raises(OSError, match="too many open files"):
        played.run(played.dies(2))


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


def test_signals_reach_those_that_came_back_once_they_have_answered(played: Played) -> None:
    with pytest.raises(Interrupted):
        played.run(played.dies(1), played.answers, played.stop)
    assert [rank.heard for rank in played.ranks] == [[signal.SIGTERM]] * 3


def test_one_that_the_trainers_find_silent_elsewhere_is_killed_once(played: Played) -> None:
    def name() -> None:
        played.ranks[0].found = {"silent": [2, 0]}

    played.run(name, played.nothing, played.nothing, played.answers, played.nothing)
    assert played.started == [(1, 1), (2, 1)]
    assert played.page.read("starts") == 1


def test_what_was_said_of_an_earlier_start_kills_none_of_a_later(played: Played) -> None:
    def name() -> None:
        played.ranks[0].found = {"silent": [2, 0]}

    played.run(played.dies(1), name, played.answers, played.nothing)
    assert played.started == [(1, 1), (2, 1)]
    assert not played.ranks[2].heard


def test_a_signal_ends_those_that_have_not_and_the_trainers_are_told(played: Played) -> None:
    """They write a checkpoint, for which they have time."""
    played.ranks[0].is_held = True

    def check() -> None:
        assert [rank.heard for rank in played.ranks] == [[signal.SIGTERM], *[[signal.SIGKILL]] * 2]
        assert [rank.exit_code for rank in played.ranks] == [None, 0, 0]
        assert played.page.read("over") == 1

    with pytest.raises(Interrupted):
        played.run(played.dies(1), played.stop, check, played.dies(0, PeerError.exit_code))


def test_a_rank_reads_the_page_that_the_launcher_has_made(played: Played) -> None:
    environment = {"OTHER": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    played.page.enter(environment, 3)
    found = RestartPage.inherited(environment)
    assert found is not None
    assert (found.rollouters, found.start, found.read("ready")) == (2, 3, 1)
    assert VARIABLE not in environment, "what a rank starts is no rank"
    assert environment == {"OTHER": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    assert RestartPage.inherited(environment) is None


def test_pages_of_two_hosts_have_what_was_taken_from_the_other(played: Played) -> None:
    other = RestartPage.made(2)
    played.page.write("starts", 3)
    other.take(played.page.entries(LAUNCHERS))
    other.write("answered", 2)
    played.page.take(other.entries(FIRST_RANKS))
    assert [played.page.read("starts"), played.page.read("ready")] == [3, 0]
    assert [other.read("starts"), played.page.read("answered")] == [3, 2]
    other.close()
