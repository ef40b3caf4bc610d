"""The protocol of an engine that draws samples, whatever program it is.

Requests come and go while others run; ``step`` is the only thing that takes long.

    submit -> handles      the samples wait in line
    step   -> events       some tokens are drawn; the samples that ended, and increments of those
                           that are followed
    abort  -> events       samples end where they stand
    withdraw               half-done samples leave, to go on elsewhere
    admit                  half-done samples of another engine go on here
    take_weights           what is drawn from now on is drawn from the weights published last
    release                the device has its memory back until the next step

``generate`` is the loop for those who want completions and nothing else.  What an engine did, how
far a ``generate`` call has come and what an engine is asked for are plain records.

A half-done sample moves between engines as a completion that was aborted, without its K and V.  The
engine that takes it computes them again, as after a preemption, and draws on at the next position:
the sample's noise is keyed by its name and its place, so the tokens are those that the first engine
would have drawn.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from isobit.models.function import LogProbFunction
from isobit.parallel.world import World
from isobit.records.text import Completion
from isobit.rollout.engine_stats import EngineStats, Progress
from isobit.rollout.requests import Handle, Request
from isobit.util.errors import RequestError

Follow = Literal["end", "tokens", "text"]
"""The events of a sample: its end alone; its tokens as they are drawn; or their text as well, which
takes the time of decoding twice.
"""


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """Something that happened to a sample.

    What is told of a followed sample's tokens, log-probabilities and text adds up to those of its
    completion; for one that is not followed they are empty.
    """

    handle: Handle
    token_ids: tuple[int, ...] = ()
    """Drawn since the sample's last event."""
    log_probs: tuple[float, ...] = ()
    truncated_log_probs: tuple[float, ...] = ()
    routings: tuple[int, ...] = ()
    text: str = ""
    completion: Completion | None = None
    """Set when the sample has ended: there is no later event of it."""


def parted(
    events: Iterable[SampleEvent], handles: Collection[Handle]
) -> tuple[list[SampleEvent], list[SampleEvent]]:
    """The events of these samples, and those of all others, each in their order."""
    of_handles: list[SampleEvent] = []
    others: list[SampleEvent] = []
    for event in events:
        (of_handles if event.handle in handles else others).append(event)
    return of_handles, others


T = TypeVar("T")


class Sharing(Protocol):
    """The ranks of one engine (``isobit.rollout.shared_engine``)."""

    peers: World
    """The ranks at this one's place in all engines."""

    def led(self, lead: Callable[[], T], others: Callable[[], T]) -> T:
        """What ``lead`` returns on the first rank, which uses the engine in it, and ``others`` on
        the others, once they have followed its calls.
        """
        ...


class Sampler(Protocol):
    """A source of samples: an engine, or episodes around one."""

    @property
    def sharing(self) -> Sharing | None:
        """The ranks that share the engine; None for one of this rank alone."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine last had no live sample; a new record each time."""
        ...

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        ...

    @property
    def num_running(self) -> int:
        """Samples that take part in the steps; the other live ones wait in line."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a further sample would soon have a place and memory, beside those that wait."""
        ...

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse, with a RequestError that names prompt and numbers, what can never be served, and
        what is live already.
        """
        ...

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """Take on requests; a handle for each sample, in their order.

        Raises:
            RequestError: as ``check`` does; then none of them is taken on.
        """
        ...

    def step(self) -> list[SampleEvent]:
        """Draw tokens for some of the live samples; nothing happens without any.

        An error may belong to samples alone: it names them (``IsobitError.samples``), they have
        ended, all others are live, and what else has happened is told by the next step.  After any
        other error no sample is live, and the engine can be asked again.

        Raises:
            NonFiniteError: if the model's output holds a NaN or an infinity.
            OutOfMemoryError: if the device has not the memory.
        """
        ...

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with finish reason "aborted" and the tokens so far; what
        they held is free.

        Handles of samples that have ended, and been told of, are passed over; they do not come
        back (``Request.comes_back``).
        """
        ...

    def num_drawn(self, handle: Handle) -> int:
        """Tokens that a live sample has drawn."""
        ...

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let live samples go half done, in their order of arrival: as ``abort`` would end them,
        without text.  Nothing more is told of them, and what they held is free.

        Handles of samples that have ended are passed over.
        """
        ...

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """Take on half-done samples that an engine with the same weights and the same seed has let
        go; ``requests`` are theirs, and may be others too.  They are followed to their end alone,
        and draw what they would have drawn there.

        Raises:
            RequestError: where one is live already, and for what can never be served here; then
                none of them is taken on.
        """
        ...

    def take_weights(self) -> None:
        """Go on with the weights that were published last.

        Tokens drawn before keep their log-probabilities and versions; the K and V of live samples
        are computed again.
        """
        ...


class RolloutEngine(Sampler, Protocol):
    """Draws samples from a policy."""

    @property
    def function(self) -> LogProbFunction:
        """The function whose values the recorded log-probabilities are."""
        ...

    def figures(self) -> dict[str, Any]:
        """Its sizes, for a run's manifest."""
        ...

    def notes(self) -> list[str]:
        """Lines for a run's console on what happened since the last call."""
        ...

    def release(self) -> None:
        """Give all memory but that of the weights back to the device until the next step.

        Live samples stay, and draw what they would have drawn.
        """
        ...


def generate(
    engine: Sampler,
    requests: Sequence[Request],
    progress: Callable[[Progress], None] | None = None,
    complete: Callable[[int, list[Completion]], None] | None = None,
) -> list[list[Completion]]:
    """The completions of each request, in the order of the requests and of their samples.

    The engine must have nothing else to do.  ``progress`` is called after every step, ``complete``
    with the index of a request and its completions once it has all of them; an error that one
    raises aborts all samples and passes through.

    Raises:
        RequestError: where a sample is live; and what ``Sampler.submit`` and ``step`` raise.
    """
    check_is_free(engine)
    engine.take_weights()
    handles = engine.submit(requests)
    total = sum(map(len, handles))
    completions: dict[Handle, Completion] = {}
    group_of = {handle: index for index, group in enumerate(handles) for handle in group}
    missing = [len(group) for group in handles]
    try:
        while len(completions) < total:
            for event in engine.step():
                if event.completion is not None:
                    completions[event.handle] = event.completion
                    index = group_of[event.handle]
                    missing[index] -= 1
                    if complete is not None and not missing[index]:
                        complete(index, [completions[handle] for handle in handles[index]])
            if progress is not None:
                stats, running = engine.stats, engine.num_running
                tokens, seconds = stats.generated_tokens, stats.seconds
                progress(Progress(len(completions), running, total, tokens, seconds))
    except BaseException:
        engine.abort(handle for group in handles for handle in group)
        raise
    return [[completions[handle] for handle in group] for group in handles]


def check_is_free(engine: Sampler) -> None:
    """Raises RequestError where a sample is live."""
    if engine.num_live:
        raise RequestError(
            f"generate needs the engine for itself, and {engine.num_live} samples of it are live: "
            "their events would be lost; step until they have ended, or abort them"
        )
