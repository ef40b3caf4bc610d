"""Open groups that all ranks of a world draw together, until a step can choose its batch.

    hand out    a rank begins the next group whenever its engine has room, up to a limit; those that
                are half done are shared out in their order
    tell        each tells rank 0 which of its groups have become whole
    choose      rank 0 chooses, and all take what is half done out of their engines
    gather      all ranks have all samples then, whoever has drawn them
    draw on     where engines and trainer are apart, they draw while the step learns, and gather
                again when it has learnt

A rank that fails, or is told to stop, says so; all leave, and all raise.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter, sleep
from typing import Any

from isobit.parallel.world import World, run_and_gather
from isobit.records.schedule import Name
from isobit.records.text import Group
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.engine import Sampler
from isobit.rollout.engine_stats import EngineStats, of_all_ranks
from isobit.rollout.open_groups import OpenGroup, OpenGroups
from isobit.rollout.requests import Request
from isobit.rollout.shared import WorkQueue
from isobit.util.errors import CheckpointError

Choose = Callable[[Sequence[tuple[int, bool]]], list[int] | None]
"""The places that a step learns from, among groups in the order of the prompts, each with
``begun_after`` and whether it is whole; None while it waits.
"""
_LOOK_S = 0.02
"""Seconds between two looks at the board, where there are other ranks."""


class SharedGroups:
    """The open groups of all ranks, in the order of the prompts, the same on each between two
    steps.
    """

    def __init__(
        self,
        world: World,
        engine: Sampler,
        next_request: Callable[[], Request],
        on_whole: Callable[[Group], None],
        is_graded: Callable[[Group], bool],
        keeps_homes: bool = False,
    ) -> None:
        """``next_request`` gives the next prompt's; ``on_whole`` is called on the rank that has
        drawn the last sample of a group, and ``is_graded`` says there whether it was waited for.
        With ``keeps_homes`` a group stays at the rank that has begun it, where it has one.
        """
        self._keeps_homes = keeps_homes
        self._world, self._next_request, self._is_graded = world, next_request, is_graded
        self.open = OpenGroups(engine, self._begin, on_whole, world.rank)
        self._queue = WorkQueue(world)
        self._first = self._limit = self._done = 0
        self._dealt: list[Request] = []
        """The requests of the step's own groups, as far as this rank has seen them."""

    @property
    def groups(self) -> list[OpenGroup]:
        return self.open.groups

    def begin_step(self, done: int, most: int) -> None:
        """Begin to count a step, by weights that have ``done`` steps behind them, in which at most
        ``most`` groups are begun.  All ranks together.
        """
        self._count_anew()
        self._limit, self._done = most, done
        self.open.begin_count()
        half_done = [group for group in self.groups if group.group is None]
        for place, group in enumerate(half_done):
            if not self._keeps_homes or not 0 <= group.home < self._world.size:
                group.home = place % self._world.size

    def draw(
        self, choose: Choose, watch: Callable[[], None], stays: bool = False
    ) -> tuple[list[int], list[int]]:
        """Draw until ``choose`` has chosen.  -> The places that it has, and the rank that has each
        whole group's last sample.  With ``stays`` half-done samples stay in the engines, and a
        group counts as whole once it is graded, too, or its rank has nothing else to draw.

        Raises what an engine or ``watch`` raises, on all ranks.
        """

        def drawn() -> dict[str, Any]:
            self.open.resume()
            places = self._turns(choose, watch, stays)
            if not stays:
                self.open.pause()
            return {"chosen": places, **self._mine()}

        shares = self._gather(drawn)
        places: list[int] = shares[0]["chosen"]
        return places, [self.groups[place].home for place in places]

    def follow(
        self,
        whole: Sequence[Name],
        lengths: Mapping[Name, Sequence[int]],
        watch: Callable[[], None],
    ) -> tuple[list[int], list[int]]:
        """Draw some groups to their end, and others as far as ``lengths`` says.  -> As ``draw``,
        of those that are whole.
        """
        wanted = {*whole, *lengths}

        def drawn() -> dict[str, Any]:
            known = {group.name for group in self.groups}
            while wanted - known:
                if len(self._dealt) >= self._limit:
                    raise CheckpointError(
                        f"the line of step {self._done + 1} in schedule.jsonl names groups that "
                        f"are not among the next prompts: {sorted(wanted - known)[:3]}; put the "
                        "run's own line back, or take this one and those behind it out of the "
                        "file: these steps are then drawn anew"
                    )
                request = self._next_request()
                known.add((request.prompt.id, request.visit))
                self._dealt.append(request)
            for index, request in enumerate(self._dealt):
                place, home = self._first + index, index % self._world.size
                self.groups.append(OpenGroup(request, self._done, home=home, place=place))
            self.open.draw_to(wanted, lengths, watch)
            return self._mine()

        self._gather(drawn)
        places = [[group.name for group in self.groups].index(name) for name in whole]
        return places, [self.groups[place].home for place in places]

    def take(self, places: Sequence[int]) -> list[Group]:
        """The groups at these places, which are not open any more.  On all ranks alike."""
        taken = self.open.take(places)
        self._count_anew()
        return taken

    def draw_on(self, ended: Callable[[], bool], watch: Callable[[], None]) -> None:
        """Draw, and begin groups, until ``ended``, which each rank asks for itself, or until this
        one has nothing left to draw.
        """
        self.open.resume()
        while not ended():
            next_look = perf_counter() + _LOOK_S
            while perf_counter() < next_look:
                self.open.turn()
                watch()
                if not self.open.num_live and len(self._dealt) >= self._limit:
                    return

    def go_back(self, groups: list[OpenGroup]) -> None:
        """Drop what this rank's engine has, and go on with these groups, which are the same on all
        ranks.
        """
        self.open.stop()
        self.open.groups = groups
        self._count_anew()

    def end_step(self) -> tuple[EngineStats, int]:
        """-> What the engines of all ranks have done, and the tokens that samples got from them.
        All ranks together.
        """

        def paused() -> dict[str, Any]:
            self.open.pause()
            stats = {"stats": asdict(self.open.counted), "kept": self.open.kept_tokens}
            return {**stats, **self._mine()}

        shares = self._gather(paused)
        total = of_all_ranks([EngineStats(**one["stats"]) for one in shares])
        return total, sum(one["kept"] for one in shares)

    def _count_anew(self) -> None:
        """All ranks have the same groups; those that begin from now on come behind them."""
        self._limit -= len(self._dealt)
        self._queue, self._dealt = WorkQueue(self._world), []
        self._first = len(self.groups)

    def _turns(self, choose: Choose, watch: Callable[[], None], stays: bool) -> list[int]:
        """Draw until rank 0 has chosen, or a rank has failed.  -> The places, on rank 0."""
        world, queue = self._world, self._queue
        told, next_look = set[int](), 0.0
        whole = set[int]()
        if not stays:
            whole |= {place for place, group in enumerate(self.groups) if group.group is not None}
        before, is_new = frozenset(whole), True
        while True:
            if world.size == 1 or perf_counter() >= next_look:
                if queue.is_stopped:
                    return []
                now = self._whole_here(graded=stays) - before - told
                if now:
                    queue.send_home(0, " ".join(map(str, now)).encode())
                    told |= now
                if world.rank == 0:
                    heard = {int(one) for note in queue.come_home() for one in note.split()}
                    whole |= heard
                    places = choose(self._standing(whole)) if is_new or heard else None
                    if places is not None:
                        if world.size > 1:
                            queue.stop()
                        return places
                    is_new = False
                    self._check_choosable(whole)
                self._check_live()
                next_look = perf_counter() + _LOOK_S
            self.open.turn()
            if not self.open.num_live and world.size > 1:
                with world.pulse.waiting("samples"):
                    sleep(_LOOK_S)
            watch()

    def _check_choosable(self, whole: Collection[int]) -> None:
        """Raise CheckpointError where all groups that may begin are whole, and none was chosen."""
        if len(self._dealt) >= self._limit and len(whole) >= self._first + self._limit:
            raise CheckpointError(
                f"all {len(whole)} groups that may begin are whole, and a step can learn from none "
                "of them: the open groups of the checkpoint are not of this run's schedule"
            )

    def _check_live(self) -> None:
        """Raise CheckpointError where a group of this rank will never be whole."""
        if self.open.num_live:
            return
        for group in self.groups:
            if group.group is None and group.home == self._world.rank:
                raise CheckpointError(
                    f"prompt {group.name[0]!r} has {len(group.samples)} of "
                    f"{group.request.samples} samples, and nothing is drawn for it: the open "
                    "groups of the checkpoint are not of this run's settings"
                )

    def _whole_here(self, graded: bool) -> set[int]:
        """The places of this rank's whole groups; only of graded ones, as long as it draws."""
        graded = graded and self.open.num_live > 0
        return {
            place
            for place, group in zip(self._places(), self.groups, strict=True)
            if group.group is not None
            and group.home == self._world.rank
            and (not graded or self._is_graded(group.group))
        }

    def _standing(self, whole: set[int]) -> list[tuple[int, bool]]:
        """All groups that rank 0 knows of; what others have begun lately is half done at best."""
        begun = [group.begun_after for group in self.groups[: self._first]]
        last = max([len(begun) - 1, *whole])
        begun += [self._done] * (last + 1 - len(begun))
        return [(after, place in whole) for place, after in enumerate(begun)]

    def _places(self) -> list[int]:
        """The places of this rank's groups among those of all ranks."""
        new = [group.place for group in self.groups[self._first :]]
        return [*range(self._first), *new]

    def _begin(self) -> OpenGroup | None:
        """The next group that no rank has begun; None where none may begin in this step."""
        if self._limit <= len(self._dealt):
            return None
        index = self._queue.take_ticket()
        while len(self._dealt) <= min(index, self._limit - 1):
            self._dealt.append(self._next_request())
        if index >= self._limit:
            return None
        home, place = self._world.rank, self._first + index
        return OpenGroup(self._dealt[index], self._done, home=home, place=place)

    def _mine(self) -> dict[str, Any]:
        """The samples of this rank's groups outside of its engine, as a message to others."""
        if self._world.size == 1:
            return {}
        placed = zip(self._places(), self.groups, strict=True)
        mine = [(place, group) for place, group in placed if group.home == self._world.rank]
        samples = [(place, one, group) for place, group in mine for one in sorted(group.samples)]
        return {
            "dealt": len(self._dealt),
            "places": [place for place, _ in mine],
            "names": [(place, sample) for place, sample, _ in samples],
            **completions_value([group.samples[sample] for _, sample, group in samples]),
        }

    def _gather(self, drawn: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What every rank makes; from then on all have all groups and samples."""

        def attempt() -> dict[str, Any]:
            try:
                return drawn()
            except BaseException:
                self.open.stop()
                self._queue.stop()
                raise

        shares = run_and_gather(self._world, attempt)
        self._queue.clear()
        if self._world.size > 1:
            self._take_in(shares)
        return shares

    def _take_in(self, shares: Sequence[Mapping[str, Any]]) -> None:
        while len(self._dealt) < max(share["dealt"] for share in shares):
            self._dealt.append(self._next_request())
        here = {group.place: group for group in self.groups[self._first :]}
        groups = self.groups[: self._first]
        for index, request in enumerate(self._dealt):
            place = self._first + index
            groups.append(here.get(place) or OpenGroup(request, self._done, place=place))
        _take_over(groups, shares, self._world.rank)
        self.open.groups = groups


def _take_over(
    groups: Sequence[OpenGroup], shares: Sequence[Mapping[str, Any]], own_rank: int
) -> None:
    """Give groups, by their places, the samples that other ranks have drawn of them."""
    for rank, share in enumerate(shares):
        if rank == own_rank:
            continue
        for place in share["places"]:
            groups[place].home, groups[place].samples = rank, {}
        for (place, sample), completion in zip(share["names"], completions_of(share), strict=True):
            groups[place].samples[sample] = completion
    for group in groups:
        group.close_if_whole()
