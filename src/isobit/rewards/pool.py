"""Processes that grade, and who of them does what.

    submitted tasks -> queue -> idle process -> one message -> a line for each completion

A task is one reward's work on one group.  Its process answers completion by completion, so that a
deadline counts for each of them and what came before a crash is kept:

    took too long     the process is ended; the completion in hand fails with kind ``deadline``
    ended, crashed    likewise, with kind ``crash``
    the rest          goes to another process

Where a function is called for all completions at once, or for all at the same time, nobody can say
which of them it was: all that have no answer fail.  A call for all of them has their deadlines
together.

Nothing here runs by itself: ``poll`` looks after the processes, and ``wait`` calls it until tasks
are done.  Work goes on meanwhile in the processes that have some.
"""

import math
import os
import pickle
import select
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from isobit.errors import RewardError
from isobit.records.text import Completion, Prompt
from isobit.rewards.counts import bounded
from isobit.rewards.form import Mode
from isobit.rewards.given import PREFIX, packed_reward
from isobit.rewards.outcome import Failure, Outcome
from isobit.rewards.process import GraderProcess
from isobit.rewards.wire import frame
from isobit.rewards.worker import Start

Watch = Callable[[], None]
"""Called some times a second while something is waited for; what it raises ends the waiting."""
Inside = Callable[[], AbstractContextManager[None]]
"""Entered around each call of a reward in this process: what a signal does meanwhile."""

DEFAULT_WORKERS = 4
"""At most, where nobody asks for more."""
TICK_S = 0.1
START_DEADLINE_S = 300.0
"""For an interpreter to come up and import the modules of the rewards."""
FAILED_STARTS = 3
"""So many in a row are no accident."""
BARREN_ENDS = 32
"""After so many processes in a row that ended without a single reward, no more are started."""


@dataclass(slots=True, eq=False)
class Task:
    """One reward's work on the completions of one prompt, in their order."""

    part: str
    prompt: Prompt
    completions: Sequence[Completion]
    outcomes: list[Outcome | None] = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    """What the reward's grader met in them (``isobit.rewards.counts``)."""

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.completions)

    @property
    def is_done(self) -> bool:
        """Whether every completion has its outcome."""
        return None not in self.outcomes

    def missing(self) -> list[int]:
        """The completions that have none."""
        return [index for index, outcome in enumerate(self.outcomes) if outcome is None]


class Scoring(Protocol):
    """Who does tasks: a pool, or this very process."""

    def describe(self) -> Mapping[str, str]:
        """Each reward in a line, by part."""
        ...

    def submit(self, task: Task) -> None:
        """Take a task on."""
        ...

    def poll(self) -> None:
        """Look after what goes on by itself."""
        ...

    def wait(self, tasks: Sequence[Task], watch: Watch, inside: Inside) -> None:
        """Return when the tasks are done."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(slots=True, eq=False)
class Worker:
    """A process and what it is at."""

    process: GraderProcess
    since: float
    """When it was started, was given its task, or gave its last answer."""
    is_ready: bool = False
    task: Task | None = None
    indices: list[int] = field(default_factory=list)
    """The completions of the task by their place in the message."""
    is_last: bool = False
    """Whether it ends after its last answer."""

    @property
    def is_idle(self) -> bool:
        """Whether it could take a task."""
        return self.is_ready and self.task is None and not self.is_last


class Pool:
    """Processes that grade; see the module."""

    def __init__(
        self,
        rewards: Mapping[str, tuple[str, Mapping[str, Any]]],
        workers: int | None,
        deadline_s: float,
        memory_mib: int,
    ) -> None:
        """Begin to start ``workers`` processes for rewards by part: a function's name with its
        options.
        """
        given = [name for name, _ in rewards.values() if name.startswith(PREFIX)]
        packed = {name: packed_reward(name) for name in given}
        self._start = Start(dict(rewards), packed, memory_mib << 20)
        self._size = workers or min(len(os.sched_getaffinity(0)), DEFAULT_WORKERS)
        self._deadline_s = deadline_s
        self._modes: dict[str, Mode] = {}
        self._descriptions: dict[str, str] = {}
        self._queue: deque[Task] = deque()
        self._failed_starts = self._barren_ends = 0
        self._workers: list[Worker] = []
        try:
            while len(self._workers) < self._size:
                self._add_worker()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many processes there are when there is work for all."""
        return self._size

    def describe(self) -> Mapping[str, str]:
        """The rewards as the first process that is up has recognised them, which is waited for.

        Raises RewardError where they cannot be loaded.
        """
        while not self._descriptions:
            self._attend(TICK_S)
        return self._descriptions

    def submit(self, task: Task) -> None:
        """Put a task into the queue.  Raises as ``poll`` does."""
        self._queue.append(task)
        self.poll()

    def poll(self) -> None:
        """Hear what has been said, end what takes too long, and give out work; never waits.

        Raises RewardError where a reward cannot be loaded or says that nothing can be graded, and
        where no process stays up.
        """
        self._attend(0.0)

    def wait(self, tasks: Sequence[Task], watch: Watch, inside: Inside = nullcontext) -> None:
        """Return when the tasks are done.  Raises as ``poll`` does, and what ``watch`` raises.  No
        reward is called ``inside`` this process.
        """
        while not all(task.is_done for task in tasks):
            watch()
            self._attend(TICK_S)

    def close(self) -> None:
        """End the processes and their children."""
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

    def _select(self, timeout_s: float) -> list[Worker]:
        """The processes that have said something, or are gone."""
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
        while self._queue and len(self._workers) < self._size:
            self._add_worker()

    def _hand(self, worker: Worker, task: Task) -> None:
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
        self._workers.append(Worker(process, monotonic()))

    def _hear(self, worker: Worker, message: Mapping[str, Any]) -> None:
        match message:
            case {"ready": dict(parts)} if not worker.is_ready:
                worker.is_ready, self._failed_starts = True, 0
                self._modes = {part: mode for part, (mode, _) in parts.items()}
                self._descriptions = {part: text for part, (_, text) in parts.items()}
            case {"refused": str(text)} | {"fatal": str(text)}:
                raise RewardError(text)
            case {"item": int(place), **rest} if place < len(worker.indices) and place >= 0:
                self._answered(worker, place, rest)

    def _answered(self, worker: Worker, place: int, answer: Mapping[str, Any]) -> None:
        task = worker.task
        if task is None or task.outcomes[worker.indices[place]] is not None:
            return
        value = answer.get("value")
        if isinstance(value, float) and math.isfinite(value):
            outcome: Outcome = value
        else:
            outcome = Failure(str(answer.get("kind")), str(answer.get("message")))
        task.outcomes[worker.indices[place]] = outcome
        if isinstance(counts := answer.get("counts"), dict):
            task.counts.update(bounded(counts))
        worker.since, worker.is_last = monotonic(), bool(answer.get("last"))
        self._barren_ends = self._barren_ends if worker.is_last else 0
        if worker.is_last or task.is_done:
            self._release(worker)

    def _release(self, worker: Worker) -> None:
        """Take the worker's task from it; what is left of it is the next to be given out."""
        if worker.task is not None and not worker.task.is_done:
            self._queue.appendleft(worker.task)
        worker.task, worker.indices = None, []

    def _allowed(self, worker: Worker) -> float:
        """Seconds from ``worker.since`` on."""
        if not worker.is_ready:
            return START_DEADLINE_S
        if worker.task is None:
            return math.inf
        together = self._modes[worker.task.part] == "together"
        return self._deadline_s * (len(worker.indices) if together else 1)

    def _took_too_long(self, worker: Worker) -> None:
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

    def _has_ended(self, worker: Worker) -> None:
        how = worker.process.how_it_ended()
        if not worker.is_ready:
            self._failed_starts += 1
            if not self._descriptions or self._failed_starts >= FAILED_STARTS:
                raise RewardError(f"the rewards cannot be loaded: {how}")
        self._replace(worker, Failure("crash", how))

    def _replace(self, worker: Worker, failure: Failure) -> None:
        """End a worker; what it had in hand fails."""
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
