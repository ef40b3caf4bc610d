"""The process that hosts environments: ``python -m isobit.environments.worker``, started by
``isobit.environments.pool`` and supervised like one that grades (``isobit.rewards.supervisor``).

It imports the user's class once and forks a process for each episode, which makes the instance,
calls ``reset`` and then the tools.  So an episode that hangs, dies or floods ends alone, and what a
tool leaves in globals is not seen by another episode.

    trainer  --frames-->  host  --frames-->  episode
    trainer  <--lines---  host  <--lines---  episode

To the host: ``HostStart``, then ``("ask", episode, columns, turns, wants_reward, seconds)``, which
begins the episode if it is new, runs the calls of all ``turns`` and answers those of the last, in
so many seconds; and ``("end", episode)``.  ``get_turn_reward``, where the class has it, is asked
behind the calls of each turn.  From the host, as JSON:

    {"ready": [schemas of the tools], ..} or {"refused": message}
    {"episode": 7, "results": [["ok", text], ["error", text], ["cut", text]], "seconds": 0.1}
    {"episode": 7, "opening": text, ...} for the prompt, of an episode that is new; or messages
    {"episode": 7, "over": true, ...} where the environment has ended the episode
    {"episode": 7, "reward": 1.0, "turn_reward": 0.5, ...} where one was asked for
    {"episode": 7, "failed": kind, "message": text, ..}: ``deadline``, ``crash``, ``memory``,
        ``flood``, ``reset``, or a kind of ``LostEpisodeError``; the episode is no more.  ``fatal``
        ends the run: the environment's own code cannot be used

The host runs no code of the class after the import and its class method ``_prepare``, where it has
one: with the options, once, for what all episodes share and none changes; text that it returns is
said at the start of a run.  The host ends an episode that takes longer than it may with all
processes below it, and one that sends anything but the keys of an answer, since a tool may have
written into the pipe.

The trainer reads nothing while a step learns, so the host keeps what no pipe has room for, and
never waits for one: an answer counts from the moment at which it could be read.
"""

import json
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn, Protocol

from isobit.environments.env_backends import HostStart, Turn
from isobit.environments.openenv import HostedOpenEnv, LostEpisodeError
from isobit.environments.tasksets import HostedTaskset, is_classic
from isobit.environments.tool_classes import HostedClass
from isobit.environments.verifiers_classic import HostedVerifiers
from isobit.rewards.grade import failure_of
from isobit.rewards.messages import FrameReader, PipeWriter, frame, read_frame, write_all
from isobit.rewards.supervisor import descendants, leave_to_trainer, limit_memory, supervised
from isobit.util.errors import ToolError, how_it_ended
from isobit.util.strict_json import parsed_line

_END_S = 0.3
"""Seconds that a process which closed its pipe gets to end, so that its exit code is known."""
_GLANCE_S = 0.2
"""Seconds between looks for episodes that ended or took too long."""
_REST_S = 5.0
"""Seconds in which an answer must be whole whose beginning came in time."""
_FORM = 6
"""Bytes that JSON takes for a character, at most."""
_OF_AN_ANSWER = frozenset(
    {"results", "opening", "over", "reward", "turn_reward", "failed", "message"}
)
"""Keys that an episode may send; ``isobit.environments.pool`` checks what stands under them."""


# The process of an episode.


class HostedEpisode(Protocol):
    """One episode in its process.  Where a method raises ToolError, the run ends."""

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Begin with the columns of the row; what is said of the prompt."""
        ...

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        """Take ``turns``; what is said of the last, with the reward where it is wanted."""
        ...


class Hosted(Protocol):
    """An environment that a host has loaded."""

    def ready(self) -> dict[str, Any]:
        """The message to the trainer."""
        ...

    def open(self) -> HostedEpisode:
        """An episode, in its own process."""
        ...


def load(start: HostStart) -> Hosted:
    """Load the environment of a host.  Raises ToolError, and what the user's code raises."""
    if start.kind == "verifiers":
        return HostedVerifiers(start) if is_classic() else HostedTaskset(start)
    return HostedOpenEnv(start) if start.kind == "openenv" else HostedClass(start)


class EpisodeProcess:
    """Answers requests until its pipe ends."""

    def __init__(self, hosted: Hosted, requests: int, replies: int) -> None:
        self._hosted, self._requests, self._replies = hosted, requests, replies

    def run(self) -> NoReturn:
        try:
            columns, *rest = read_frame(self._requests)
            session, answer = self._begin(columns)
            while True:
                turns, wants_reward = rest
                if turns or wants_reward:
                    answer |= session.answer(turns, wants_reward)
                self._reply({"results": [], **answer})
                answer = {}
                _, *rest = read_frame(self._requests)
        except EOFError:
            os._exit(0)
        except MemoryError:
            self._fail("memory", "it took more than environment.memory_mib allows")
        except SystemExit as error:
            self._fail("crash", f"it called sys.exit({error.code!r:.40})")
        except ToolError as error:
            self._fail("fatal", str(error))
        except LostEpisodeError as error:
            self._fail(error.kind, str(error))
        except BaseException as error:  # of a tool's destructors, or a closed descriptor
            self._fail("crash", failure_of(error).message)

    def _begin(self, columns: Mapping[str, Any]) -> tuple[HostedEpisode, dict[str, Any]]:
        try:
            session = self._hosted.open()
            return session, session.begin(columns)
        except (MemoryError, SystemExit, ToolError, LostEpisodeError):
            raise
        except BaseException as error:
            self._fail("reset", failure_of(error).message)

    def _fail(self, kind: str, message: str) -> NoReturn:
        with suppress(OSError):
            self._reply({"failed": kind, "message": message[:2000]})
        os._exit(1)

    def _reply(self, content: Mapping[str, Any]) -> None:
        write_all(self._replies, (json.dumps(content, allow_nan=False) + "\n").encode())


# The host.


@dataclass(slots=True)
class RunningEpisode:
    pid: int
    requests: PipeWriter
    replies: int
    began: float | None = None
    """The time at which it was asked; None while nothing is asked."""
    seconds: float = 0.0
    """How long it may take."""
    due: float = 0.0
    """The time at which it is late."""
    unread: bytearray = field(default_factory=bytearray)


class Host:
    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = FrameReader(requests), PipeWriter(replies)
        self._episodes: dict[int, RunningEpisode] = {}
        self._lost: dict[int, dict[str, Any]] = {}
        """What is said of episodes that ended while nothing was asked, once something is."""

    def run(self) -> NoReturn:
        """Load the class and serve until the trainer closes the pipe."""
        try:
            self._start: HostStart = read_frame(self._requests.descriptor)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _allow_pipes()
            self._hosted = self._load()
            self._imports = _private_bytes()
            while True:
                self._serve()
        except EOFError:
            os._exit(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)

    def _load(self) -> Hosted:
        try:
            hosted = load(self._start)
            self._say(hosted.ready())
            return hosted
        except ToolError as error:
            refused = str(error)
        except BaseException as error:
            refused = f"the environment cannot be loaded: {failure_of(error).message}"
        write_all(self._replies.descriptor, (json.dumps({"refused": refused}) + "\n").encode())
        os._exit(1)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._requests.descriptor, select.POLLIN)
        by_descriptor = {one.replies: key for key, one in self._episodes.items()}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        unsent = [self._replies, *(one.requests for one in self._episodes.values())]
        for writer in unsent:
            if writer.is_sending:
                poller.register(writer.descriptor, select.POLLOUT)
        before = monotonic()
        ready = {descriptor for descriptor, _ in poller.poll(_GLANCE_S * 1000)}
        for descriptor in ready & by_descriptor.keys():
            self._hear(by_descriptor[descriptor])
        if self._requests.descriptor in ready:
            for message in self._requests.read():
                self._take(message)
        self._replies.write()
        for episode in self._episodes.values():
            _write(episode.requests)
        self._end_late(before)

    def _end_late(self, now: float) -> None:
        """End the episodes that were late at a time up to which all have been heard."""
        for key, episode in list(self._episodes.items()):
            if episode.began is None or now <= episode.due:
                continue
            why = f"took longer than environment.deadline_s = {self._start.deadline_s:g}"
            if episode.seconds > self._start.deadline_s:
                why += f" allows for turns that are run again: {episode.seconds:g} s"
            self._drop(key, "deadline", why)

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("ask", int(key), columns, turns, bool(wants_reward), float(seconds)):
                if key in self._lost:
                    self._say(self._lost.pop(key))
                    return
                if key not in self._episodes:
                    try:
                        self._episodes[key] = self._fork()
                    except OSError as error:
                        why = f"no process could be started for it: {error}"
                        self._say({"episode": key, "failed": "crash", "message": why})
                        return
                episode = self._episodes[key]
                episode.began, episode.seconds = monotonic(), seconds
                episode.due = episode.began + seconds
                episode.requests.add(frame((columns, turns, wants_reward)))
                _write(episode.requests)
            case ("end", int(key)):
                self._lost.pop(key, None)
                self._end(key)

    def _fork(self) -> RunningEpisode:
        """A process for an episode.  Raises OSError where there can be none."""
        with ExitStack() as opened:
            to_read, requests = _pipe(opened)
            replies, to_write = _pipe(opened)
            pid = os.fork()
            opened.pop_all()
        if pid:
            os.close(to_read)
            os.close(to_write)
            os.set_blocking(replies, False)
            return RunningEpisode(pid, PipeWriter(requests), replies)
        leave_to_trainer()
        others = [
            descriptor
            for episode in self._episodes.values()
            for descriptor in (episode.requests.descriptor, episode.replies)
        ]
        own = self._requests.descriptor, self._replies.descriptor
        for descriptor in (*own, requests, replies, *others):
            os.close(descriptor)
        self._replies.clear()  # it counts as memory of the episode
        limit_memory(self._imports + self._start.memory_bytes)
        EpisodeProcess(self._hosted, to_read, to_write).run()

    def _hear(self, key: int) -> None:
        """Read all that an episode has written."""
        most = (self._start.most_characters + 4096) * _FORM * 32
        while (episode := self._episodes.get(key)) is not None:
            try:
                chunk = os.read(episode.replies, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self._drop(key, "crash", self._how_it_ended(episode))
                return
            if not episode.unread:
                episode.due = max(episode.due, monotonic() + _REST_S)
            episode.unread += chunk
            if len(episode.unread) <= most and b"\n" not in chunk:
                continue
            line, end, rest = bytes(episode.unread).partition(b"\n")
            if not end or rest:
                self._drop(key, "flood", "it wrote into the pipe of its answers")
            else:
                episode.unread.clear()
                self._answer(key, line)

    def _answer(self, key: int, line: bytes) -> None:
        episode = self._episodes[key]
        content = parsed_line(line)
        if content is None or not content.keys() <= _OF_AN_ANSWER or episode.began is None:
            self._drop(key, "flood", "it wrote into the pipe of its answers")
            return
        seconds = monotonic() - episode.began
        episode.began = None
        self._say({**content, "episode": key, "seconds": seconds})
        if "failed" in content:
            self._end(key)

    def _drop(self, key: int, kind: str, message: str) -> None:
        """End an episode; whoever waits for it, or next asks it, is told."""
        began = self._episodes[key].began
        self._end(key)
        failure = {"episode": key, "failed": kind, "message": message}
        if began is None:
            self._lost[key] = failure
        else:
            self._say({**failure, "seconds": monotonic() - began})

    def _end(self, key: int) -> None:
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        os.close(episode.requests.descriptor)
        os.close(episode.replies)
        for pid in [*descendants(episode.pid), episode.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(episode.pid, 0)

    def _how_it_ended(self, episode: RunningEpisode) -> str:
        until = monotonic() + _END_S
        with suppress(ChildProcessError):
            pid, status = os.waitpid(episode.pid, os.WNOHANG)
            while not pid and monotonic() < until:
                sleep(0.002)
                pid, status = os.waitpid(episode.pid, os.WNOHANG)
            if pid:
                return f"its process {how_it_ended(os.waitstatus_to_exitcode(status))}"
        return "its process closed the pipe of its answers"

    def _say(self, content: Mapping[str, Any]) -> None:
        self._replies.add((json.dumps(content) + "\n").encode())
        self._replies.write()


def _pipe(opened: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with ``opened``."""
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


def _write(requests: PipeWriter) -> None:
    try:
        requests.write()
    except OSError:  # the episode has ended, which its pipe tells
        requests.clear()


def _allow_pipes() -> None:
    """Each episode takes two descriptors of the host, and hundreds may be open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _private_bytes() -> int:
    """The private memory of this process, with which its episodes begin; 0 where the system
    does not tell.
    """
    with suppress(OSError):
        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


if __name__ == "__main__":
    supervised(lambda requests, replies: Host(requests, replies).run())
