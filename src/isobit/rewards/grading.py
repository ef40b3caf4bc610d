"""Grading as a run does it: all rewards of its configuration, by processes or in this one.

    with Graders(config.reward) as graders:
        graders.describe()                  waits until the rewards are loaded, or refuses them
        graders.submit(group)               as soon as a group is complete
        graders.poll()                      now and then, while other work is done
        stats = graders.collect(groups)     fills their rewards

``collect`` submits what has not been.  Rewards come out in the order of the groups, completions and
parts, whatever the processes took for each.  It is ``fill`` and ``stats``: several ranks each fill
some of the groups, and count all of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Self, TypeAlias

from isobit.config.reward import WHOLE, RewardConfig, RewardPart
from isobit.errors import RewardError
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.counts import take
from isobit.rewards.form import Reward
from isobit.rewards.function import load_reward
from isobit.rewards.grade import GradeStats, Tally
from isobit.rewards.outcome import Outcome, outcome_of
from isobit.rewards.pool import Inside, Pool, Scoring, Task, Watch
from isobit.rewards.repetition import Repetition

ModelScores: TypeAlias = Mapping[str, Callable[[Sequence[tuple[Prompt, Completion]]], list[float]]]
"""Of each part that is a model: what scores pairs of prompts and completions, in this process."""


class Graders:
    """All rewards of a configuration, at work until closed."""

    def __init__(self, config: RewardConfig) -> None:
        """Begin to load the rewards.  Raises RewardError where no process can be started, and with
        ``in_process`` what ``load_reward`` raises.
        """
        self._config, self._parts = config, config.named()
        functions = {
            name: (part.function, part.options)
            for name, part in self._parts.items()
            if part.function is not None
        }
        self._scoring: Scoring
        if config.in_process or not functions:
            self._scoring = InProcess(
                {name: load_reward(*function) for name, function in functions.items()}
            )
        else:
            self._scoring = Pool(functions, config.workers, config.deadline_s, config.memory_mib)
        self._submitted: dict[int, tuple[Group, dict[str, Task]]] = {}
        self._repetition = Repetition()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, if there are any, with their children."""
        self._scoring.close()

    def describe(self) -> list[str]:
        """A line for each reward, with the form that was recognised, and one on who calls them.

        Waits until they are loaded.  Raises RewardError where one cannot be.
        """
        functions = self._scoring.describe()
        lines = [
            f"{_label(name)}: {_weight(part)}{functions.get(name, f'model {part.model}')}"
            for name, part in self._parts.items()
        ]
        if not functions:
            return lines
        if isinstance(self._scoring, Pool):
            count, config = self._scoring.size, self._config
            who = f"{count} processes" if count > 1 else "1 process"
            lines[-1] += f"; {who}, {config.deadline_s:g} s and {config.memory_mib:,} MiB each"
        else:
            lines[-1] += "; in the process of the run"
        return lines

    def submit(self, group: Group) -> None:
        """Begin to grade a group whose completions are all there.  Raises as ``collect`` does."""
        tasks = {}
        for name, part in self._parts.items():
            if part.function is not None:
                tasks[name] = Task(name, group.prompt, list(group.completions))
        self._submitted[id(group)] = group, tasks
        for task in tasks.values():
            self._scoring.submit(task)

    def poll(self) -> None:
        """Look after the processes, without waiting for any.  Raises as ``collect`` does."""
        self._scoring.poll()

    def collect(
        self,
        groups: Sequence[Group],
        models: ModelScores | None = None,
        watch: Watch | None = None,
        inside: Inside = nullcontext,
    ) -> GradeStats:
        """Fill ``rewards`` and ``reward_parts`` of the groups, and say how it went.

        Raises RewardError as ``fill`` and ``stats`` do.
        """
        return self.stats(self.fill(groups, models, watch, inside))

    def fill(
        self,
        groups: Sequence[Group],
        models: ModelScores | None = None,
        watch: Watch | None = None,
        inside: Inside = nullcontext,
    ) -> list[Tally]:
        """Fill ``rewards`` and ``reward_parts`` of the groups; what was counted in each.

        ``watch`` is called some times a second, and what it raises ends the grading: no reward is
        filled then.  Where rewards are called in this process it is called between two calls, and
        each of them stands in a block of ``inside``.  Raises RewardError where a reward says that
        nothing can be graded, and where no process stays up.
        """
        for group in groups:
            if id(group) not in self._submitted:
                self.submit(group)
        tasks = [self._submitted[id(group)][1] for group in groups]
        all_tasks = [task for parts in tasks for task in parts.values()]
        watch = watch or (lambda: None)
        self._scoring.wait(all_tasks, watch, inside)
        differing = self._repetition.differing(
            tasks[0] if tasks else {}, self._scoring, watch, inside
        )
        of_models = self._model_outcomes(groups, models or {})
        weights = {name: part.weight for name, part in self._parts.items()}
        tallies: list[Tally] = []
        for index, group in enumerate(groups):
            del self._submitted[id(group)]
            outcomes = {name: _outcomes(task) for name, task in tasks[index].items()}
            tally = Tally()
            tally.fill(group, weights, outcomes | {n: of[index] for n, of in of_models.items()})
            for task in tasks[index].values():
                tally.counts.update(task.counts)
            tallies.append(tally)
        if tallies:
            tallies[0].counts.update(differing)
        return tallies

    def stats(self, tallies: Sequence[Tally]) -> GradeStats:
        """What was counted in all groups of a grading, in their order.  Raises RewardError where
        more than ``max_failed_fraction`` failed, or all did.
        """
        total = Tally()
        for tally in tallies:
            total.add(tally)
        return total.stats(self._config.max_failed_fraction)

    def _model_outcomes(
        self, groups: Sequence[Group], models: ModelScores
    ) -> dict[str, list[list[Outcome]]]:
        """By part that is a model, and by group."""
        pairs = [(group.prompt, one) for group in groups for one in group.completions]
        found: dict[str, list[list[Outcome]]] = {}
        for name, part in self._parts.items():
            if part.model is None:
                continue
            if name not in models:
                raise RewardError(f"{_label(name)} is the model {part.model}, which nothing scores")
            scores = iter(models[name](pairs))
            found[name] = [
                [outcome_of(next(scores)) for _ in group.completions] for group in groups
            ]
        return found


class InProcess:
    """Calls the rewards in this very process; they can do to it what they like, but for a fork of
    it that comes back from a reward: that ends there.
    """

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._rewards, self._pid = rewards, os.getpid()

    def describe(self) -> Mapping[str, str]:
        """Each reward in a line, by part."""
        return {name: reward.describe() for name, reward in self._rewards.items()}

    def submit(self, task: Task) -> None:
        """Nothing is done before it is waited for."""

    def poll(self) -> None:
        """Nothing goes on by itself."""

    def wait(self, tasks: Sequence[Task], watch: Watch, inside: Inside) -> None:
        """Do the tasks.  Raises RewardError where a reward does, and what ``watch`` or a signal in
        a block of ``inside`` raises.
        """
        for task in tasks:
            if task.is_done:
                continue
            take()  # what others met in this process
            try:
                graded = self._rewards[task.part].grade(task.prompt, task.completions)
                for index, outcome in _each_inside(inside, graded):
                    task.outcomes[index] = outcome
                    task.counts.update(take())
                    self._check_process()
                    watch()
            except BaseException:
                self._check_process()
                raise

    def close(self) -> None:
        """Nothing was started."""

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            os._exit(1)


def _each_inside(
    inside: Inside, graded: Iterator[tuple[int, Outcome]]
) -> Iterator[tuple[int, Outcome]]:
    while True:
        with inside():
            answered = next(graded, None)
        if answered is None:
            return
        yield answered


def _outcomes(task: Task) -> list[Outcome]:
    return [outcome for outcome in task.outcomes if outcome is not None]


def _label(name: str) -> str:
    return WHOLE if name == WHOLE else f"{WHOLE} {name}"


def _weight(part: RewardPart) -> str:
    return "" if part.weight == 1 else f"{part.weight:g} x "
