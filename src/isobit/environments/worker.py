"""The process that hosts environments: ``python -m isobit.environments.worker``, started by
``isobit.environments.pool`` and supervised like one that grades (``isobit.rewards.supervisor``).

It imports the user's class once and forks a process for each episode, which makes the instance,
calls ``reset`` and then the tools.  So an episode that hangs, dies or floods ends alone, and what a
tool leaves in globals is not seen by another episode.

    trainer  --frames-->  host  --frames-->  episode
    trainer  <--lines---  host  <--lines---  episode

To the host: ``HostStart``, then ``("ask", episode, columns, turns, wants_reward)``, which begins
the episode if it is new, runs the calls of all ``turns`` and answers those of the last; and
``("end", episode)``.  ``get_turn_reward``, where the class has it, is asked behind the calls of
each turn.  From the host, as JSON:

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
said at the start of a run.  The host ends an episode that takes longer than the deadline with all
processes below it, and one that sends anything but the keys of an answer, since a tool may have
written into the pipe.
"""

import json
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from isobit.rewards.messages import frame, read_frame, write_all
from isobit.rewards.supervisor import descendants, leave_to_trainer, limit_memory, supervised
from isobit.util.errors import ToolError, how_it_ended
from isobit.util.strict_json import parsed_line

_END_S = 0.3
"""Seconds that a process which closed its pipe gets to end, so that its exit code is known."""
_GLANCE_S = 0.2
"""Seconds between looks for episodes that ended or took too long."""
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
    requests: int
    replies: int
    began: float | None = None
    """The time at which it was asked; None while nothing is asked."""
    unread: bytearray = field(default_factory=bytearray)


class Host:
    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._episodes: dict[int, RunningEpisode] = {}

    def run(self) -> NoReturn:
        """Load the class and serve until the trainer closes the pipe."""
        try:
            self._start: HostStart = read_frame(self._requests)
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
            self._say({"refused": str(error)})
        except BaseException as error:
            self._say({"refused": f"the environment cannot be loaded: {failure_of(error).message}"})
        os._exit(1)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._requests, select.POLLIN)
        by_descriptor = {one.replies: key for key, one in self._episodes.items()}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(_GLANCE_S * 1000):
            if descriptor == self._requests:
                self._take(read_frame(self._requests))
            elif by_descriptor[descriptor] in self._episodes:
                self._hear(by_descriptor[descriptor])
        late = monotonic() - self._start.deadline_s
        for key, episode in list(self._episodes.items()):
            if episode.began is not None and episode.began < late:
                seconds = f"{self._start.deadline_s:g}"
                self._drop(key, "deadline", f"took longer than environment.deadline_s = {seconds}")

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("ask", int(key), columns, turns, bool(wants_reward)):
                if key not in self._episodes:
                    self._episodes[key] = self._fork()
                episode = self._episodes[key]
                episode.began = monotonic()
                with suppress(OSError):  # it has ended, which its pipe tells
                    write_all(episode.requests, frame((columns, turns, wants_reward)))
            case ("end", int(key)):
                self._end(key)

    def _fork(self) -> RunningEpisode:
        (to_read, requests), (replies, to_write) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid:
            os.close(to_read)
            os.close(to_write)
            os.set_blocking(replies, False)
            return RunningEpisode(pid, requests, replies)
        leave_to_trainer()
        others = [
            fd for episode in self._episodes.values() for fd in (episode.requests, episode.replies)
        ]
        for descriptor in (self._requests, self._replies, requests, replies, *others):
            os.close(descriptor)
        limit_memory(self._imports + self._start.memory_bytes)
        EpisodeProcess(self._hosted, to_read, to_write).run()

    def _hear(self, key: int) -> None:
        episode = self._episodes[key]
        try:
            chunk = os.read(episode.replies, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._drop(key, "crash", self._how_it_ended(episode))
            return
        episode.unread += chunk
        line, end, rest = bytes(episode.unread).partition(b"\n")
        most = (self._start.most_characters + 4096) * _FORM * 32
        if len(episode.unread) > most or rest:
            self._drop(key, "flood", "it wrote into the pipe of its answers")
        elif end:
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
        """End an episode; whoever waits for it is told."""
        began = self._episodes[key].began
        self._end(key)
        if began is not None:
            failure = {"failed": kind, "message": message, "seconds": monotonic() - began}
            self._say({"episode": key, **failure})

    def _end(self, key: int) -> None:
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        os.close(episode.requests)
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
        write_all(self._replies, (json.dumps(content) + "\n").encode())


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
