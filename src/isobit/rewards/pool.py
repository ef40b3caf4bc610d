"""The processes that grade, and the queue of their tasks.

    submitted tasks -> queue -> idle process -> one message -> a line for each completion

A task is one reward's work on one group. Its process answers completion by completion, so that the
deadline holds for each of them and results before a crash are kept:

    took too long     the process is killed; the current completion fails with kind ``deadline``
    ended, crashed    the current completion fails with kind ``crash``
    the rest          goes to another process

For a function that is called for all completions at once, all those without an answer fail, and one
call has the deadlines of all completions together.

There is no thread: ``poll`` serves the processes, and ``wait`` calls it until tasks are done. Each
process is a new interpreter in its own session, which inherits no descriptors, locks or state.
"""

import math
import os
import pickle
import select
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, get_args

from isobit.records.text import Completion, Prompt
from isobit.rewards.counts import bounded
from isobit.rewards.grade import LARGEST, Failure, Outcome
from isobit.rewards.messages import LINE_LIMIT, frame
from isobit.rewards.python_rewards import PREFIX, packed_reward
from isobit.rewards.signatures import Columns, Mode
from isobit.rewards.worker import GraderStart
from isobit.util.errors import RewardError, how_it_ended
from isobit.util.strict_json import parsed_line

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_END_S = 3.0
"""Seconds in which a process must end once it is told to."""
_NOISE = 1500


class GraderProcess:
    def __init__(
        self, start: Any, module: str = "isobit.rewards.worker", line_limit: int = LINE_LIMIT
    ) -> None:
        """Run ``module``, whose first message is ``start`` and whose lines have at most so many
        bytes.
        """
        self._line_limit = line_limit
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(  # noqa: S603  a module of ours
            # -P: a json.py in the working directory must not be imported
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # for an interpreter that fails to start
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests, self.replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self.requests, self.replies):
            os.set_blocking(descriptor, False)
        self._unsent, self._unread, self._noise = bytearray(frame(start)), bytearray(), ""
        self.is_gone = False
        """Whether the process has ended and all its output was read."""
        self._exit: str | None = None

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a frame; what the pipe does not take now is sent by ``flush``."""
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self.requests, memoryview(self._unsent)[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:  # it has ended, which ``read`` detects
            self._unsent.clear()

    def read(self) -> Iterator[Mapping[str, Any]]:
        self.is_gone = self._process.poll() is not None  # its whole output is in the pipe by now
        try:
            while chunk := os.read(self.replies, 1 << 16):
                self._unread += chunk
                yield from self._lines()
                if len(self._unread) > self._line_limit:  # not a message
                    self._keep_noise(bytes(self._unread))
                    self._unread.clear()
            self.is_gone = True
        except BlockingIOError:
            pass  # a child may keep the pipe open after the process has ended
        if self.is_gone:
            self._keep_noise(bytes(self._unread))
            self._unread.clear()

    def how_it_ended(self) -> str:
        code = self._process.wait()
        return self._exit or _exit_text(code, self._noise)

    def end(self) -> None:
        """End the process and its children, and wait for that."""
        self.dismiss()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def dismiss(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _lines(self) -> Iterator[Mapping[str, Any]]:
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread[:] = rest
        for line in lines:
            content = parsed_line(line)
            if content is None:
                self._keep_noise(line)
            elif type(code := content.get("ended")) is int:
                self._exit = _exit_text(code, content.get("output"))
            else:
                yield content

    def _keep_noise(self, printed: bytes) -> None:
        self._noise = (self._noise + printed.decode("utf-8", "replace") + "\n")[-_NOISE:]


def _exit_text(code: int, output: Any) -> str:
    """``its process was killed by SIGSEGV; the last it printed was ..``"""
    text = f"its process {how_it_ended(code)}"
    printed = " ".join(str(output or "").split())
    fault = printed.find("Fatal Python error")  # the frames below it are in the order of blame
    last = printed[fault : fault + 500] if fault >= 0 else printed[-500:]
    return f"{text}; the last it printed was {last!r}" if last else text


Watch = Callable[[], None]
"""Called several times a second while waiting; an exception of it ends the waiting."""
Inside = Callable[[], AbstractContextManager[None]]
"""A context around each call of a reward in the run's own process, which handles signals."""

DEFAULT_WORKERS = 4
"""The most processes by default."""
TICK_S = 0.1
START_DEADLINE_S = 300.0
"""Seconds for starting an interpreter and importing the modules of the rewards."""
FAILED_STARTS = 3
"""Failed starts in a row that end the run."""
_MODES = frozenset(get_args(Mode))
BARREN_ENDS = 32
"""Processes in a row that ended without a single reward, after which the run ends."""


@dataclass(slots=True, eq=False)
class Task:
    """One reward's work on the completions of one prompt, in their order."""

    part: str
    prompt: Prompt
    completions: Sequence[Completion]
    outcomes: list[Outcome | None] = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of the grader (``isobit.rewards.counts``)."""

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.completions)

    @property
    def is_done(self) -> bool:
        return None not in self.outcomes

    def missing(self) -> list[int]:
        return [index for index, outcome in enumerate(self.outcomes) if outcome is None]


@dataclass(slots=True, eq=False)
class GraderSlot:
    process: GraderProcess
    since: float
    """Time at which it was started, was given its task, or gave its last answer."""
    is_ready: bool = False
    task: Task | None = None
    indices: list[int] = field(default_factory=list)
    """The completions of the task by their place in the message."""
    is_last: bool = False
    """Whether the process ends after its last answer."""

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.task is None and not self.is_last


class Pool:
    def __init__(
        self,
        rewards: Mapping[str, tuple[str, Mapping[str, Any]]],
        workers: int | None,
        deadline_s: float,
        memory_mib: int,
    ) -> None:
        """Start ``workers`` processes for rewards by part: a function's name with its options."""
        given = [name for name, _ in rewards.values() if name.startswith(PREFIX)]
        packed = {name: packed_reward(name) for name in given}
        self._start = GraderStart(dict(rewards), packed, memory_mib << 20)
        self.size = workers or min(len(os.sched_getaffinity(0)), DEFAULT_WORKERS)
        self._deadline_s = deadline_s
        self._modes: dict[str, Mode] = {}
        self._descriptions: dict[str, str] = {}
        self._columns: dict[str, Columns] = {}
        self._queue: deque[Task] = deque()
        self._failed_starts = self._barren_ends = 0
        self._workers: list[GraderSlot] = []
        try:
            while len(self._workers) < self.size:
                self._add_worker()
        except BaseException:
            self.close()
            raise

    def describe(self) -> Mapping[str, str]:
        """The rewards as the first loaded process recognised them, which is waited for. Raises
        RewardError if they cannot be loaded.
        """
        while not self._descriptions:
            self._attend(TICK_S)
        return self._descriptions

    def columns(self) -> Mapping[str, Columns]:
        """The columns that each reward takes. Waits and raises as ``describe`` does."""
        self.describe()
        return self._columns

    def submit(self, task: Task) -> None:
        """Put a task into the queue. Raises as ``poll`` does."""
        self._queue.append(task)
        self.poll()

    def poll(self) -> None:
        """Read answers, end processes that take too long, and give out tasks, without waiting.

        Raises RewardError if a reward cannot be loaded or says that nothing can be graded, and if
        processes fail again and again.
        """
        self._attend(0.0)

    def wait(self, tasks: Sequence[Task], watch: Watch, inside: Inside = nullcontext) -> None:
        """Return when the tasks are done. Raises as ``poll`` does, and what ``watch`` raises."""
        while not all(task.is_done for task in tasks):
            watch()
            self._attend(TICK_S)

    def close(self) -> None:
        for worker in self._workers:
            worker.process.dismiss()
        while self._workers:
            self._workers.pop().process.end()

    def _attend(self, timeout_s: float) -> None:
        self._give_out()
        for worker in self._select(timeout_s) or self._workers:
            for message in worker.process.read():
                self._hear(worker, message)
        now = monotonic()
        for worker in list(self._workers):
            if worker.process.is_gone:
                self._has_ended(worker)
            elif now > worker.since + self._allowed(worker):
                self._took_too_long(worker)
        self._give_out()

    def _select(self, timeout_s: float) -> list[GraderSlot]:
        """The processes with output, or that have ended."""
        poller = select.poll()
        for worker in self._workers:
            poller.register(worker.process.replies, select.POLLIN)
            if worker.process.is_sending:
                poller.register(worker.process.requests, select.POLLOUT)
        events = dict(poller.poll(timeout_s * 1000))
        for worker in self._workers:
            if worker.process.requests in events:
                worker.process.flush()
        return [worker for worker in self._workers if worker.process.replies in events]

    def _give_out(self) -> None:
        while self._queue:
            idle = next((worker for worker in self._workers if worker.is_idle), None)
            if idle is None:
                break
            self._hand(idle, self._queue.popleft())
        while self._queue and len(self._workers) < self.size:
            self._add_worker()

    def _hand(self, worker: GraderSlot, task: Task) -> None:
        worker.indices = task.missing()
        completions = [task.completions[index] for index in worker.indices]
        try:
            message = frame((task.part, task.prompt, completions))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise RewardError(
                f"the row of prompt {task.prompt.id} cannot be handed to a grading process: "
                f"{error}; leave the column out, or set reward.in_process = true"
            ) from error
        worker.task, worker.since = task, monotonic()
        worker.process.send(message)

    def _add_worker(self) -> None:
        try:
            process = GraderProcess(self._start)
        except OSError as error:
            raise RewardError(f"no grading process can be started: {error}") from error
        self._workers.append(GraderSlot(process, monotonic()))

    def _hear(self, worker: GraderSlot, message: Mapping[str, Any]) -> None:
        """Read a message of a grader, all of which is checked, since it has run text of a model."""
        match message:
            case {"ready": dict(parts)} if not worker.is_ready and self._are_parts(parts):
                worker.is_ready, self._failed_starts = True, 0
                self._modes = {part: mode for part, (mode, _, _) in parts.items()}
                self._descriptions = {part: text for part, (_, text, _) in parts.items()}
                self._columns = {part: columns for part, (_, _, columns) in parts.items()}
            case {"refused": str(text)} if not worker.is_ready:
                raise RewardError(text)
            case {"fatal": str(text)} if worker.is_ready:
                raise RewardError(text)
            case {"item": place, **rest} if type(place) is int:
                if 0 <= place < len(worker.indices):
                    self._answered(worker, place, rest)

    def _are_parts(self, parts: Mapping[str, Any]) -> bool:
        return parts.keys() == self._start.rewards.keys() and all(
            isinstance(part, list)
            and len(part) == 3
            and part[0] in _MODES
            and isinstance(part[1], str)
            and _are_columns(part[2])
            for part in parts.values()
        )

    def _answered(self, worker: GraderSlot, place: int, answer: Mapping[str, Any]) -> None:
        task = worker.task
        if task is None or task.outcomes[worker.indices[place]] is not None:
            return
        task.outcomes[worker.indices[place]] = _outcome_of(answer)
        if isinstance(counts := answer.get("counts"), dict):
            task.counts.update(bounded(counts))
        worker.since, worker.is_last = monotonic(), bool(answer.get("last"))
        self._barren_ends = self._barren_ends if worker.is_last else 0
        if worker.is_last or task.is_done:
            self._release(worker)

    def _release(self, worker: GraderSlot) -> None:
        """Take the worker's task from it; what is left of it goes to the front of the queue."""
        if worker.task is not None and not worker.task.is_done:
            self._queue.appendleft(worker.task)
        worker.task, worker.indices = None, []

    def _allowed(self, worker: GraderSlot) -> float:
        if not worker.is_ready:
            return START_DEADLINE_S
        if worker.task is None:
            return math.inf
        together = self._modes[worker.task.part] == "together"
        return self._deadline_s * (len(worker.indices) if together else 1)

    def _took_too_long(self, worker: GraderSlot) -> None:
        if not worker.is_ready:
            raise RewardError(
                f"a grading process did not import its rewards within {START_DEADLINE_S:.0f} s"
            )
        self._replace(
            worker,
            Failure(
                "deadline", f"took longer than reward.deadline_s = {self._deadline_s:g} allows"
            ),
        )

    def _has_ended(self, worker: GraderSlot) -> None:
        how = worker.process.how_it_ended()
        if not worker.is_ready:
            self._failed_starts += 1
            if not self._descriptions or self._failed_starts >= FAILED_STARTS:
                raise RewardError(f"the rewards cannot be loaded: {how}")
        self._replace(worker, Failure("crash", how))

    def _replace(self, worker: GraderSlot, failure: Failure) -> None:
        """End a worker; what it was grading fails."""
        self._workers.remove(worker)
        worker.process.end()
        task = worker.task
        if task is not None:
            one_by_one = self._modes[task.part] == "each"
            missing = task.missing()
            for index in missing[:1] if one_by_one else missing:
                task.outcomes[index] = failure
            self._release(worker)
        self._barren_ends += 1
        if self._barren_ends >= BARREN_ENDS:
            raise RewardError(
                f"{BARREN_ENDS} grading processes in a row ended without a single reward; of the "
                f"last: {failure.message}"
            )


def _are_columns(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(places, list) and all(isinstance(place, str) for place in places)
        for places in value
    )


def _outcome_of(answer: Mapping[str, Any]) -> Outcome:
    """The outcome in a line of a grader."""
    match answer:
        case {"value": float(value)} if abs(value) <= LARGEST:
            return value
        case {"kind": str(kind), "message": str(message)}:
            return Failure(kind, message)
    return Failure("no reward", "its process sent a line that is no answer")
