"""One engine of several ranks, each of which computes its part of every forward
(``isobit.models.tensor_parallel``): for a caller the engine of the first of them.

    first rank      tells the others of each call that changes anything, and makes it
    the others      follow: they make the calls that they are told of

All have the same samples and the same weights, so all plan the same forwards and draw the same
tokens.  A call is told of by 8 bytes, behind which are its arguments; ``step`` has none.

    int64       bytes of what follows; 0 for ``step``
    [name, arguments], as ``isobit.parallel.world`` encodes values

A rank whose call fails where those of the others go on, as out of memory, raises at once and agrees
with nobody (``raised_alone``): the others are in the middle of a forward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from isobit.models.function import LogProbFunction
from isobit.models.policy_share import PublishedShare
from isobit.parallel.world import World, decode, encode, raised_alone
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.records.wire import completions_of, completions_value
from isobit.rollout.engine import Follow, SampleEvent
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request, requests_of
from isobit.util.errors import (
    IsobitError,
    MismatchError,
    OutOfMemoryError,
    PeerError,
    StoppedAtOnce,
)

T = TypeVar("T")


class SharedEngine:
    """A ``RolloutEngine`` of the ranks of a world.

    Args:
        share: this rank's part of the weights.
        engine: draws by it; that of every rank has the same settings.
        world: the ranks that share the engine.
        peers: the ranks at this one's place in all such worlds: the first ranks, the second ..
    """

    def __init__(
        self, share: PublishedShare, engine: NativeEngine, world: World, peers: World
    ) -> None:
        self._share, self._own, self._world = share, engine, world
        self.peers = peers
        self._is_lost = False
        """Whether the others may wait for something else than a call."""

    @property
    def sharing(self) -> "SharedEngine":
        return self

    def led(self, lead: Callable[[], T], others: Callable[[], T]) -> T:
        """What ``lead`` returns on the first rank, which uses the engine in it, and ``others`` on
        the others, once they have followed its calls.  All ranks of the engine together.
        """
        if self._world.rank > 0:
            self._follow()
            return others()
        try:
            made = lead()
        except StoppedAtOnce:
            raise
        except BaseException:
            self._tell("end", self._state())
            raise
        self._tell("end", self._state())
        return made

    def _follow(self) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "step": self._own.step,
            "submit": lambda requests: self._own.submit(_requests_of(requests)),
            "abort": lambda names: self._own.abort(_handles_of(names)),
            "withdraw": lambda names: self._own.withdraw(_handles_of(names)),
            "admit": self._admit,
            "take_weights": self._take_weights,
        }
        while True:
            name, arguments = self._hear()
            if name == "end":
                return self._check(*arguments)
            try:
                self._made(calls[name], *arguments)
            except IsobitError as error:
                if _is_of_one_rank(error):
                    raise
            self._world.pulse.beat()

    def _check(self, expected: Sequence[int]) -> None:
        """Raises MismatchError where this rank's samples are not those of the first one."""
        found = self._state()
        if found != list(expected):
            said, by_first = (
                "{} tokens in {} forwards and has {} samples left".format(*state)
                for state in (found, expected)
            )
            numbers = ", ".join(map(str, self._world.numbers))
            raise raised_alone(
                MismatchError(
                    f"the ranks {numbers}, which share an engine, have come apart: this one has "
                    f"drawn {said}, and the first {by_first}; a machine or a connection between "
                    "them is faulty: take it out and go on with --resume"
                )
            )

    def _state(self) -> list[int]:
        stats = self._own.stats
        return [stats.generated_tokens, stats.forwards, self._own.num_live]

    def _tell(self, name: str, *arguments: Any) -> None:
        """Have the others make a call, where they hear."""
        if self._is_lost:
            return
        message = b"" if name == "step" else encode([name, arguments])
        self._passed(torch.tensor([len(message)]))
        if message:
            self._passed(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def _hear(self) -> tuple[str, Sequence[Any]]:
        """The call that the first rank tells of."""
        size = int(self._passed(torch.zeros(1, dtype=torch.int64))[0])
        if not size:
            return "step", ()
        room = torch.zeros(size, dtype=torch.uint8)
        name, arguments = decode(bytes(self._passed(room)[0].numpy()))
        return name, arguments

    def _passed(self, mine: torch.Tensor) -> torch.Tensor:
        """What each rank brings.  One that has lost another tells nobody anything from then on."""
        try:
            return self._world.all_gather_stack(mine)
        except PeerError as error:
            self._is_lost = True
            raised_alone(error)
            raise

    def _made(self, call: Callable[..., T], *arguments: Any) -> T:
        """A call on this rank.  Raises what the others raise too; all else at once."""
        try:
            return call(*arguments)
        except Exception as error:
            if isinstance(error, IsobitError) and not _is_of_one_rank(error):
                raise
            self._is_lost = True
            raise raised_alone(error) from None

    # What changes anything.

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        assert follow == "end", "samples of a run are followed to their end alone"
        self._tell("submit", [_value_of(request) for request in requests])
        return self._made(self._own.submit, requests)

    def step(self) -> list[SampleEvent]:
        if self._own.num_live:
            self._tell("step")
        return self._made(self._own.step)

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        asked = list(handles)
        self._tell("abort", _names_of(asked))
        return self._made(self._own.abort, asked)

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        asked = list(handles)
        self._tell("withdraw", _names_of(asked))
        return self._made(self._own.withdraw, asked)

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        asked = [_value_of(one) for one in requests_of(half_done, requests, ()).values()]
        completions = completions_value(list(half_done.values()))
        self._tell("admit", asked, _names_of(half_done), completions)
        self._made(self._own.admit, requests, half_done)

    def _admit(
        self, requests: Sequence[Any], names: Sequence[Any], completions: Mapping[str, Any]
    ) -> None:
        half_done = dict(zip(_handles_of(names), completions_of(completions), strict=True))
        self._own.admit(_requests_of(requests), half_done)

    def take_weights(self) -> None:
        self._tell("take_weights")
        self._made(self._take_weights)

    def _take_weights(self) -> None:
        """Cut what was published last, and begin with an empty cache, on all ranks or on none: one
        may have given its memory back alone, for a reward model.
        """
        if not all(self._world.all_gather(self._share.is_current)):
            self.release()
            self._share.cut()
        self._own.take_weights()

    def release(self) -> None:
        """Give memory back on this rank; others do so at the latest when they take weights."""
        self._own.release()
        self._share.drop()

    # What changes nothing, and is the same on all ranks.

    @property
    def function(self) -> LogProbFunction:
        return self._own.function

    @property
    def stats(self) -> EngineStats:
        return self._own.stats

    @property
    def num_live(self) -> int:
        return self._own.num_live

    @property
    def num_running(self) -> int:
        return self._own.num_running

    @property
    def has_room(self) -> bool:
        return self._own.has_room

    def check(self, requests: Sequence[Request]) -> None:
        self._own.check(requests)

    def num_drawn(self, handle: Handle) -> int:
        return self._own.num_drawn(handle)

    def figures(self) -> dict[str, Any]:
        return self._own.figures()

    def notes(self) -> list[str]:
        return self._own.notes()


def _is_of_one_rank(error: IsobitError) -> bool:
    """Whether an engine raises it for something that other ranks may not have met."""
    return isinstance(error, OutOfMemoryError | PeerError | MismatchError)


def _names_of(handles: Iterable[Handle]) -> list[list[Any]]:
    return [[one.prompt_id, one.visit, one.sample] for one in handles]


def _handles_of(names: Sequence[Sequence[Any]]) -> list[Handle]:
    return [Handle(*name) for name in names]


def _value_of(request: Request) -> dict[str, Any]:
    """A request as an engine reads it: without texts and columns."""
    prompt = request.prompt
    return asdict(replace(request, prompt=Prompt(prompt.id, "", prompt.token_ids)))


def _requests_of(values: Sequence[Mapping[str, Any]]) -> list[Request]:
    return [_request_of(**value) for value in values]


def _request_of(
    prompt: Mapping[str, Any],
    sampling: Mapping[str, Any],
    keys: Sequence[int] | None,
    **others: Any,
) -> Request:
    lists = {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop_strings")}
    return Request(
        Prompt(prompt["id"], "", tuple(prompt["token_ids"])),
        sampling=SamplingParams(**{**sampling, **lists}),
        keys=None if keys is None else tuple(keys),
        **others,
    )
