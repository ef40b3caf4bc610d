"""The trainer's side of environments: one host, which forks a process for each episode
(``isobit.environments.worker``), and the queue of what is asked of them.

    ask     the calls of a turn wait until fewer than ``environment.at_once`` are under way
    poll    what has been answered since, in any order
    end     an episode's process is no longer needed

There is no thread, and nothing waits: a rollout polls between two forwards, and nobody does while a
step learns.  An episode whose process hangs, dies or floods fails alone, with its kind.  If the
host itself ends, its episodes fail with ``crash``, and a new host serves the next ones.  Nothing
that comes from a process is unpickled.
"""

import math
import select
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from isobit.config.environment import ENVIRONMENTS, EnvironmentConfig
from isobit.environments.env_backends import HostStart, Turn
from isobit.environments.python_environments import packed_environment
from isobit.records.messages import Message
from isobit.rewards.grade import LARGEST, Failure
from isobit.rewards.messages import frame
from isobit.rewards.pool import START_DEADLINE_S, GraderProcess
from isobit.util.errors import ToolError, did_you_mean
from isobit.util.option_secrets import from_environment

PLACES = {name: f"isobit.environments.shipped:{name.title()}" for name in ENVIRONMENTS}
"""Environments that ship with Isobit, by name."""
_LINE_LIMIT = 1 << 26
_GRACE_S = 10.0
"""Seconds beyond an episode's deadline after which the host is taken for hung."""
_LONGEST_GAP_S = 1.0
"""Seconds between two polls that count as waiting for the host; the rest is the trainer's own."""
_BARREN_ENDS = 8
"""Hosts in a row that ended without an answer, after which the run ends."""
_MOST_UNANSWERED = 64
"""Episodes in a row without an answer from a server, after which the run ends."""
_LONGEST_NOTE = 300
_MODULE = "isobit.environments.worker"

Key = TypeVar("Key", bound=Hashable)
Opening: TypeAlias = str | Sequence[Message] | None
ResultKind = Literal["ok", "error", "cut", "malformed", "user"]
"""``malformed`` is of a call that could not be read, which no process sees; ``user`` of what an
environment says as the user.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one call, as the model sees it."""

    kind: ResultKind
    text: str


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer of an episode's process to one turn."""

    results: tuple[Result, ...] = ()
    """Results in the order of the calls."""
    opening: Opening = None
    """The opening of a new episode: text for the end of the prompt, or messages in its place."""
    reward: float | None = None
    """The value of ``get_reward``, where it was asked for."""
    turn_reward: float | None = None
    """The value of ``get_turn_reward``, where the class has it."""
    failure: Failure | None = None
    """``deadline``, ``crash``, ``memory``, ``flood``, ``reset``, or a kind of ``LostEpisodeError``:
    the process is no more; or why there is no reward.
    """
    seconds: float = 0.0
    is_over: bool = False
    """Whether the environment has ended the episode."""

    def recorded(self) -> dict[str, Any]:
        """The answer in the form of JSON."""
        failure = self.failure
        return {
            **({} if self.opening is None else {"opening": self.opening}),
            **({"over": True} if self.is_over else {}),
            "results": [[result.kind, result.text] for result in self.results],
            "reward": self.reward,
            **({} if self.turn_reward is None else {"turn_reward": self.turn_reward}),
            "failure": None if failure is None else [failure.kind, failure.message],
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "TurnAnswer":
        """Undo ``recorded``.  Raises KeyError, TypeError and ValueError for other content."""
        failure, opening = content["failure"], content.get("opening")
        results = [(kind, text) for kind, text in content["results"]]
        texts = [*chain.from_iterable(results), *(() if failure is None else failure)]
        reward, turn_reward = content["reward"], content.get("turn_reward")
        messages = opening if isinstance(opening, list) else []
        if (
            not all(isinstance(one, str) for one in texts)
            or not all(isinstance(one, dict) for one in messages)
            or not isinstance(opening, str | list | None)
            or {type(reward), type(turn_reward)} - {int, float, type(None)}
        ):
            raise TypeError
        return cls(
            tuple(Result(kind, text) for kind, text in results),
            opening,
            reward,
            turn_reward,
            None if failure is None else Failure(*failure),
            is_over=bool(content.get("over", False)),
        )


class AnswerLog(Protocol):
    """Recorded answers of environments (``isobit.store.reward_record``)."""

    def begin(self, weights_version: int, prompts: Sequence[tuple[str, int]]) -> None:
        """The answers of a rollout of these prompts, by their visits, come next."""
        ...

    def find(self, key: Sequence[Any]) -> Mapping[str, Any] | None:
        """The answer recorded under ``key`` for this rollout; None without one."""
        ...

    def end(self, answers: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        """All answers of this rollout, in any order, with their keys."""
        ...


class Environments(Generic[Key]):
    """Episodes by their keys, each with a process of its own from its first call on."""

    def __init__(self, config: EnvironmentConfig, most_characters: int) -> None:
        """Start the host; results have at most so many characters.  Raises ToolError for a name
        that no environment has.
        """
        place = PLACES.get(config.place, config.place)
        if config.kind == "class" and ":" not in place and not place.endswith(".py"):
            raise ToolError(
                f"cannot read the environment {place!r}; expected 'path/to/file.py:Class', "
                f"'module:Class' or one of {', '.join(PLACES)}{did_you_mean(place, PLACES)}"
            )
        self._start = HostStart(
            config.kind,
            place,
            from_environment(config.options, "environment"),
            config.deadline_s,
            config.memory_mib << 20,
            most_characters,
            packed_environment(config.place),
        )
        self._deadline_s, self._episode_s = config.deadline_s, config.episode_s
        self._at_once = config.at_once
        self._is_capped = config.openenv is not None
        """Whether ``at_once`` limits the episodes that have begun, and not only those at work."""
        self._unanswered = 0
        """Episodes in a row that had no answer from a server."""
        self._numbers: dict[Key, int] = {}
        """Numbers of the episodes that the present host knows, or will know."""
        self._keys: dict[int, Key] = {}
        self._queue: deque[tuple[Key, tuple[Any, ...]]] = deque()
        self._asked: dict[Key, float] = {}
        """Episodes with a turn under way, with the time by which the host must have answered."""
        self._now, self._looked = 0.0, monotonic()
        """The time for which the host was waited for, and when that was last counted."""
        self._begun: set[Key] = set()
        """Episodes that have a process of the present host."""
        self._lost: dict[Key, str] = {}
        """Episodes whose host has ended since their last turn, with how it ended."""
        self._failed: list[tuple[Key, TurnAnswer]] = []
        self.spare = set[Key]()
        """Episodes that nobody goes on with for now: where a server has no room, theirs end."""
        self.unclaimed: list[tuple[Key, TurnAnswer]] = []
        """Answers to such episodes, for whoever goes on with them."""
        self._count = self._barren_ends = 0
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self.has_reward = False
        """Whether the class has ``get_reward``; known with ``tools``."""
        self.opens = False
        """Whether an episode is asked for its opening before the model draws; likewise."""
        self.leads = False
        """Whether the environment decides after each turn what comes next, and answers all of
        them.
        """
        self.speaks = False
        """Whether the environment may answer as the user."""
        self.has_turn_reward = False
        """Whether the class has ``get_turn_reward``; likewise."""
        self.note = ""
        """The environment's line about itself for the start of a run; likewise."""
        self._open()

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, which the host has to load first.  Raises ToolError."""
        while self._tools is None:
            self._attend(0.1)
        return self._tools

    @property
    def num_waiting(self) -> int:
        """Turns that have not been answered."""
        return len(self._queue) + len(self._asked) + len(self._failed)

    def ask(
        self,
        key: Key,
        columns: Mapping[str, Any],
        turns: Sequence[Turn],
        wants_reward: bool = False,
    ) -> None:
        """Run the calls of ``turns`` and answer those of the last; ``columns`` are for ``reset`` of
        an episode that is new, and without turns nothing else is done.  ``environment.deadline_s``
        holds for each turn, and ``environment.episode_s`` for those before the last.
        """
        if key in self._lost:
            self._failed.append((key, TurnAnswer(failure=Failure("crash", self._lost.pop(key)))))
            return
        questions = sum(self._takes_time(turn) for turn in turns)
        questions += wants_reward and not self.leads
        if key not in self._numbers:
            questions += self.opens
            self._count += 1
            self._numbers[key], self._keys[self._count] = self._count, key
        number = self._numbers[key]
        before = min(max(0, questions - 1) * self._deadline_s, self._episode_s)
        asked = dict(columns), turns, wants_reward, float(self._deadline_s + before)
        self._queue.append((key, ("ask", number, *asked)))

    def _takes_time(self, turn: Turn) -> bool:
        """Whether a turn is asked for by itself, when an episode goes on without a break."""
        return bool(turn.calls) or self.leads or self.has_turn_reward

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Key, TurnAnswer]]:
        """The answers that have come after at most so many seconds. Raises ToolError where no
        process can be had.
        """
        found = self._attend(0.0 if self._failed else timeout_s)
        failed, self._failed = self._failed, []
        return failed + found

    def has(self, key: Key) -> bool:
        """Whether the episode has been asked something, and was not ended since."""
        return key in self._numbers or key in self._lost

    def end(self, key: Key) -> None:
        """End an episode; what was asked of it is not answered any more."""
        self._lost.pop(key, None)
        self.spare.discard(key)
        self._failed = [one for one in self._failed if one[0] != key]
        number = self._numbers.pop(key, None)
        if number is None:
            return
        del self._keys[number]
        self._begun.discard(key)
        self._queue = deque(turn for turn in self._queue if turn[0] != key)
        self._asked.pop(key, None)
        self._host.send(frame(("end", number)))

    def close(self) -> None:
        self._host.end()

    def _open(self) -> None:
        try:
            self._host = GraderProcess(self._start, _MODULE, _LINE_LIMIT)
        except OSError as error:
            raise ToolError(f"no process for environments can be started: {error}") from error
        self._since, self._is_ready = self._now, False

    def _count_time(self) -> None:
        """Let time pass for the host, but for pauses of the trainer, which reads nothing then."""
        now = monotonic()
        self._now += min(now - self._looked, _LONGEST_GAP_S)
        self._looked = now

    def _attend(self, timeout_s: float) -> list[tuple[Key, TurnAnswer]]:
        self._count_time()
        self._hand_out()
        poller = select.poll()
        poller.register(self._host.replies, select.POLLIN)
        if self._host.is_sending:
            poller.register(self._host.requests, select.POLLOUT)
        poller.poll(timeout_s * 1000)
        self._host.flush()
        answers = [one for message in self._host.read() for one in self._hear(message)]
        self._count_time()
        if self._host.is_gone:
            self._replace(self._host.how_it_ended())
        elif not self._is_ready and self._now > self._since + START_DEADLINE_S:
            raise ToolError(f"the environment was not imported within {START_DEADLINE_S:.0f} s")
        elif any(self._now > until for until in self._asked.values()):
            self._replace("its host did not end it at its deadline")
        self._hand_out()
        return answers

    def _hand_out(self) -> None:
        held = list[tuple[Key, tuple[Any, ...]]]()
        while self._queue and self._is_ready and len(self._asked) < self._at_once:
            key, message = self._queue.popleft()
            if self._is_capped and key not in self._begun and not self._has_room():
                held.append((key, message))
                continue
            self._asked[key] = self._now + message[-1] + _GRACE_S
            self._begun.add(key)
            self._host.send(frame(message))
        self._queue.extendleft(reversed(held))

    def _has_room(self) -> bool:
        """Whether a further episode may begin, where a spare one may end for it."""
        if len(self._begun) < self._at_once:
            return True
        spare = next((one for one in self._begun & self.spare if one not in self._asked), None)
        if spare is not None:
            self.end(spare)
        return spare is not None

    def _hear(self, message: Mapping[str, Any]) -> Iterator[tuple[Key, TurnAnswer]]:
        """Read a message of the host, all of which is checked, since tools run below it."""
        match message:
            case {"episode": int(number), **content}:
                yield from self._hear_episode(number, content)
            case {"ready": list(tools), **rest} if not self._is_ready:
                self._tools, self._is_ready = tools, True
                self.has_reward, self.opens = bool(rest.get("has_reward")), bool(rest.get("opens"))
                self.has_turn_reward = bool(rest.get("has_turn_reward"))
                self.leads, self.speaks = bool(rest.get("leads")), bool(rest.get("speaks"))
                self.note = str(rest.get("note") or "")[:_LONGEST_NOTE]
            case {"refused": str(text)} if not self._is_ready:
                raise ToolError(text)

    def _hear_episode(
        self, number: int, content: Mapping[str, Any]
    ) -> Iterator[tuple[Key, TurnAnswer]]:
        key = self._keys.get(number)
        if key is None or self._asked.pop(key, None) is None:
            return
        self._barren_ends = 0
        answer = _answer_of(content)
        if answer.failure is not None and answer.failure.kind == "fatal":
            raise ToolError(f"an episode cannot go on: {answer.failure.message}")
        self._count_unanswered(answer.failure)
        if answer.failure is not None:
            self._forget(key)
        yield key, answer

    def _count_unanswered(self, failure: Failure | None) -> None:
        is_one = self._is_capped and failure is not None and failure.kind == "connection"
        self._unanswered = self._unanswered + 1 if is_one else 0
        if failure is not None and self._unanswered >= _MOST_UNANSWERED:
            raise ToolError(
                f"{failure.message}, which {self._unanswered} episodes in a row had; start the "
                "server again and resume the run (isobit train DIR --resume)"
            )

    def _replace(self, how: str) -> None:
        """End the host and start another; the episodes that it had fail."""
        self._host.end()
        self._barren_ends += 1
        if self._tools is None or self._barren_ends >= _BARREN_ENDS:
            raise ToolError(f"the host of the environments ends again and again: {how}")
        queued = [key for key, _ in self._queue if key in self._begun]
        failure = TurnAnswer(failure=Failure("crash", how))
        self._failed += [(key, failure) for key in (*self._asked, *queued)]
        sent = {*self._asked, *queued}
        self._queue = deque(turn for turn in self._queue if turn[0] not in sent)
        self._lost |= dict.fromkeys(self._begun - sent, how)
        for key in list(self._begun):
            self._forget(key)
        self._asked.clear()
        self._open()

    def _forget(self, key: Key) -> None:
        del self._keys[self._numbers.pop(key)]
        self._begun.discard(key)


def _answer_of(content: Mapping[str, Any]) -> TurnAnswer:
    """An answer from what a process wrote, none of which is trusted."""
    seconds = content.get("seconds")
    took = float(seconds) if isinstance(seconds, float | int) else 0.0
    if "failed" in content:
        kind, message = content["failed"], content.get("message")
        if not (isinstance(kind, str) and isinstance(message, str)):
            kind, message = "flood", "it wrote no answer"
        return TurnAnswer(failure=Failure(kind, message[:2000]), seconds=took)
    results = content.get("results")
    results_read = (
        [_result_of(result) for result in results] if isinstance(results, list) else [None]
    )
    if None in results_read:
        return TurnAnswer(failure=Failure("flood", "it wrote no answer"), seconds=took)
    opening = content.get("opening")
    return TurnAnswer(
        tuple(result_read for result_read in results_read if result_read is not None),
        opening if isinstance(opening, str) or _are_messages(opening) else None,
        _number_of(content.get("reward")),
        _number_of(content.get("turn_reward")),
        seconds=took,
        is_over=content.get("over") is True,
    )


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )


def _number_of(value: Any) -> float | None:
    is_number = isinstance(value, float) and math.isfinite(value) and abs(value) <= LARGEST
    return value if is_number else None


def _result_of(value: Any) -> Result | None:
    match value:
        case [("ok" | "error" | "cut" | "user") as kind, str(text)]:
            return Result(kind, text.encode("utf-8", "replace").decode())
    return None
