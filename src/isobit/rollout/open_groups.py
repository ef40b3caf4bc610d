"""Groups that an engine draws over several versions of the weights (``isobit.records.schedule``).

    resume     half-done samples go into the engine, which holds the newest weights
    turn       groups begin while they may, and the engine takes a step
    pause      half-done samples leave the engine, with the tokens that they have

A sample goes on with other weights than it began with: K and V of its tokens are computed again,
and each token keeps its log-probability under the weights that drew it, given all tokens before it.
So the version of each token says all that there is to say, and a sample that is drawn again by the
same versions, so many tokens by each, has the same bits (``draw_to``).

The alternative, that samples end by the weights that they began with, needs the weights twice on
each GPU.  What going on costs is a prefill of what is half done for each version.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from isobit.records.schedule import Name
from isobit.records.text import Completion, Group
from isobit.rollout.engine import SampleEvent, Sampler
from isobit.rollout.engine_stats import EngineStats, Periods
from isobit.rollout.requests import Handle, Request


@dataclass(slots=True)
class OpenGroup:
    """A group from its submission until a step learns from it."""

    request: Request
    begun_after: int
    """Steps that the weights had behind them."""
    samples: dict[int, Completion] = field(default_factory=dict)
    """Those that are known outside the engine: all of them between ``pause`` and ``resume``.
    One that is half done has the reason "aborted".
    """
    group: Group | None = None
    """Set once all samples have ended."""
    home: int = 0
    """The rank that draws it, or has drawn its last sample."""
    place: int = -1
    """Its place among the groups of all ranks, if it has begun in this step."""

    @property
    def name(self) -> Name:
        return self.request.prompt.id, self.request.visit

    def handle(self, sample: int) -> Handle:
        return Handle(*self.name, sample)

    @property
    def half_done(self) -> dict[Handle, Completion]:
        """The samples that have not ended."""
        return {
            self.handle(sample): completion
            for sample, completion in self.samples.items()
            if completion.finish_reason == "aborted"
        }

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens drawn of each sample."""
        return tuple(self.samples[sample].length for sample in sorted(self.samples))

    def close_if_whole(self) -> bool:
        """Whether the last of its samples has just ended."""
        if self.group is not None or len(self.samples) < self.request.samples or self.half_done:
            return False
        completions = [self.samples[sample] for sample in range(self.request.samples)]
        self.group = Group(self.request.prompt, self.request.visit, completions)
        return True

    def cut(self, targets: Mapping[Handle, int]) -> int:
        """Shorten samples to their targets.  -> The tokens that were dropped."""
        dropped = 0
        for sample, completion in self.samples.items():
            length = targets.get(self.handle(sample), completion.length)
            if completion.length > length:
                dropped += completion.length - length
                self.samples[sample] = cut(completion, length)
        return dropped

    def copy(self) -> "OpenGroup":
        """The same group, whose samples do not change with this one's."""
        return replace(self, samples=dict(self.samples))


class OpenGroups:
    """The open groups of a run, in the order of the prompts, and the engine that draws them."""

    def __init__(
        self,
        engine: Sampler,
        begin: Callable[[], OpenGroup | None],
        on_whole: Callable[[Group], None],
        rank: int = 0,
    ) -> None:
        """``begin`` gives the next group, or None while none may begin; ``on_whole`` is called
        with each group whose last sample has ended here, which is the ``rank``.
        """
        self.engine, self._begin, self._on_whole = engine, begin, on_whole
        self._rank = rank
        self.groups: list[OpenGroup] = []
        self._live: dict[Handle, OpenGroup] = {}
        """The samples in the engine."""
        self._returned = 0
        self._periods = Periods(engine)

    def begin_count(self) -> None:
        """Count what the engine does from now on; it has nothing to do."""
        self._periods, self._returned = Periods(self.engine), 0

    @property
    def counted(self) -> EngineStats:
        """What the engine has done since ``begin_count``."""
        self._periods.note()
        return self._periods.total

    @property
    def kept_tokens(self) -> int:
        """Tokens drawn since ``begin_count``, less those that were drawn behind the place where a
        sample was to stop.
        """
        return self.counted.generated_tokens - self._returned

    @property
    def tokens(self) -> int:
        """Tokens of all samples, as far as they are known outside the engine."""
        return sum(sum(group.lengths) for group in self.groups)

    @property
    def num_live(self) -> int:
        """Samples in the engine."""
        return len(self._live)

    @property
    def num_ended(self) -> int:
        """Samples of the open groups that have ended."""
        return sum(len(group.samples) - len(group.half_done) for group in self.groups)

    def resume(self, names: Collection[Name] | None = None) -> None:
        """Put the half-done samples of this rank's groups, or of those with ``names``, into the
        engine, which takes the newest weights.
        """
        self.engine.take_weights()
        wanted = [one for one in self._own if names is None or one.name in names]
        half_done = {
            handle: (group, completion)
            for group in wanted
            for handle, completion in group.half_done.items()
        }
        if half_done:
            requests = [group.request for group in wanted]
            self.engine.admit(requests, {handle: one for handle, (_, one) in half_done.items()})
        self._periods.note()
        for handle, (group, _) in half_done.items():
            self._live[handle] = group
            del group.samples[handle.sample]

    def turn(self) -> None:
        """Begin what may begin and has room, and draw a token of each sample that runs."""
        while self.engine.has_room and (group := self._begin()) is not None:
            self.groups.append(group)
            self._submit(group)
        events = self.engine.step()
        self._note(events)
        if events:
            self._close()

    def pause(self) -> None:
        """Take the half-done samples out of the engine."""
        self._withdraw(list(self._live))
        self._close()

    def stop(self) -> None:
        """Leave the engine empty after an error; the groups are of no use any more."""
        live, self._live = self._live, {}
        self.engine.abort(live)

    def draw_to(
        self,
        names: Collection[Name],
        lengths: Mapping[Name, Sequence[int]],
        watch: Callable[[], None],
    ) -> None:
        """Draw this rank's groups with these ``names`` with the newest weights, those with
        ``lengths`` to so many tokens of each sample, and the others to their end.  ``watch`` is
        called after every step.
        """
        self.resume(names)
        for group in self._own:
            if group.name in names and not group.samples and group.handle(0) not in self._live:
                self._submit(group)
        targets = {
            group.handle(sample): length
            for group in self.groups
            for sample, length in enumerate(lengths.get(group.name, ()))
        }
        self._stop_at(targets)
        while self._live:
            self._note(self.engine.step())
            self._stop_at(targets)
            watch()
        for group in self.groups:
            self._returned += group.cut(targets)
        self._close()

    def take(self, places: Collection[int]) -> list[Group]:
        """Close whole groups, by their places: a step learns from them."""
        taken = [group.group for place, group in enumerate(self.groups) if place in places]
        self.groups = [one for place, one in enumerate(self.groups) if place not in places]
        assert len(taken) == len(places)
        return [group for group in taken if group is not None]

    @property
    def _own(self) -> list[OpenGroup]:
        return [group for group in self.groups if group.home == self._rank]

    def _submit(self, group: OpenGroup) -> None:
        [handles] = self.engine.submit([group.request])
        self._periods.note()
        self._live |= dict.fromkeys(handles, group)

    def _withdraw(self, handles: Collection[Handle]) -> None:
        for handle, completion in self.engine.withdraw(handles).items():
            self._live.pop(handle).samples[handle.sample] = completion
        if self._live and not self.engine.num_live:
            self._note(self.engine.step())  # the last of them have ended

    def _stop_at(self, targets: Mapping[Handle, int]) -> None:
        """Take the samples out that have their tokens."""
        live = [handle for handle in self._live if handle in targets]
        self._withdraw(
            [one for one in live if self.engine.num_drawn(one) >= targets[one]] if live else []
        )

    def _note(self, events: Iterable[SampleEvent]) -> None:
        for event in events:
            if event.completion is not None:
                self._live.pop(event.handle).samples[event.handle.sample] = event.completion

    def _close(self) -> None:
        for group in self._own:
            if group.close_if_whole():
                assert group.group is not None
                self._on_whole(group.group)


def cut(completion: Completion, length: int) -> Completion:
    """The first ``length`` drawn tokens of an answer, as of a sample that is half done."""
    sequence = completion.sequence
    drawn = np.flatnonzero(sequence.loss_mask)
    kept = drawn[:length]
    stop = int(kept[-1]) + 1 if len(kept) else int(drawn[0]) if len(drawn) else sequence.length
    return Completion(replace(sequence.first(stop), drawn=length), "", "aborted")
