"""The rewards of a run: all parts of its configuration, graded in processes or in this one.

    with Graders(config.reward) as graders:
        graders.describe()                  waits until the rewards are loaded, or refuses them
        graders.check_columns(sets)         refuses prompts without columns that they take
        graders.submit(group)               as soon as a group is complete
        graders.poll()                      now and then, during other work
        stats = graders.collect(groups)     fills their rewards

``collect`` submits the groups that were not submitted. Rewards are in the order of the groups,
completions and parts, however long each took. ``collect`` is ``fill`` and ``stats``: several ranks
each fill some of the groups, and count all of them.

What the parts add up to, and what becomes of one that fails, is in ``isobit.rewards.tally``.

The 8th, 16th, 32nd, ... grading is repeated for one group, to detect rewards that depend on more
than the completion, such as a counter, a running mean or random numbers: a resumed run, or one with
another number of processes, would get other rewards. Differences are only counted.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Self, TypeAlias

from isobit.config.reward import WHOLE, RewardConfig
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.counts import take
from isobit.rewards.grade import Outcome, failure_of, outcome_of
from isobit.rewards.load import RewardFunction, load_reward
from isobit.rewards.pool import Inside, Pool, Task, Watch
from isobit.rewards.reference_check import check_columns
from isobit.rewards.signatures import Columns, Reward
from isobit.rewards.tally import GradeStats, Tally
from isobit.util.errors import RewardError
from isobit.util.terminal import counted

Grading: TypeAlias = Callable[[Sequence[Group]], GradeStats]
"""Fills the rewards of groups; raises RewardError if too many failed."""


def grade(
    groups: Sequence[Group], reward: RewardFunction, max_failed_fraction: float = 1.0
) -> GradeStats:
    """Fill ``group.rewards`` of every group, one for each completion in order, by a plain function
    (prompt, completion) in this process.

    Raises ``RewardError`` with the first error if a larger share than ``max_failed_fraction``
    failed, or all did. A ``RewardError`` of the reward itself passes through: it says that no
    completion can be graded.
    """
    tally = Tally()
    for group in groups:
        outcomes = [_outcome(reward, group.prompt, completion) for completion in group.completions]
        tally.fill(group, {"reward": 1.0}, {"reward": outcomes})
    return tally.stats(max_failed_fraction)


def _outcome(reward: RewardFunction, prompt: Prompt, completion: Completion) -> Outcome:
    try:
        return outcome_of(reward(prompt, completion))
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit in a reward must not end the run
        return failure_of(error)


FIRST = 8
KIND = "another reward for the same completion"


class Repetition:
    """Counts gradings, and repeats some of them for one group."""

    def __init__(self) -> None:
        self._gradings = 0

    def differing(
        self, tasks: Mapping[str, Task], scoring: "Pool | InProcess", watch: Watch, inside: Inside
    ) -> Counter[str]:
        """The number of rewards that differ when the group whose ``tasks`` are done is graded
        again, by kind; nothing unless this grading is one to repeat. Failures are not compared.
        Raises as ``scoring`` does.
        """
        self._gradings += 1
        if self._gradings < FIRST or self._gradings.bit_count() > 1:
            return Counter()
        again = {name: Task(name, task.prompt, task.completions) for name, task in tasks.items()}
        for task in again.values():
            scoring.submit(task)
        scoring.wait(list(again.values()), watch, inside)
        differing = sum(
            isinstance(first, float) and isinstance(second, float) and first != second
            for name, task in tasks.items()
            for first, second in zip(task.outcomes, again[name].outcomes, strict=True)
        )
        return Counter({KIND: differing}) if differing else Counter()


ModelScores: TypeAlias = Mapping[str, Callable[[Sequence[tuple[Prompt, Completion]]], list[float]]]
"""The function that scores pairs of prompts and completions, for each part that is a model."""


class Graders:
    """All rewards of a configuration, until it is closed."""

    def __init__(self, config: RewardConfig) -> None:
        """Start loading the rewards. Raises RewardError if no process can be started, and with
        ``in_process`` what ``load_reward`` raises.
        """
        self._config, self._parts = config, config.named()
        functions = {
            name: (part.function, part.options)
            for name, part in self._parts.items()
            if part.function is not None
        }
        self._scoring: Pool | InProcess
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._scoring.close()

    def describe(self) -> list[str]:
        """A line for each reward with its form, and one on the processes; waits until they are
        loaded. Raises RewardError if one cannot be.
        """
        functions = self._scoring.describe()
        lines = []
        for name, part in self._parts.items():
            weight = "" if part.weight == 1 else f"{part.weight:g} x "
            lines.append(f"{_label(name)}: {weight}{functions.get(name, f'model {part.model}')}")
        if not functions:
            return lines
        if isinstance(self._scoring, Pool):
            count, config = self._scoring.size, self._config
            who = counted(count, "processes", "process")
            lines[-1] += f"; {who}, {config.deadline_s:g} s and {config.memory_mib:,} MiB each"
        else:
            lines[-1] += "; in the process of the run"
        return lines

    def check_columns(self, sets: Mapping[str, Sequence[Prompt]]) -> None:
        """See whether all prompts of the sets have the columns that the rewards take; waits until
        these are loaded. Raises RewardError where some have not.
        """
        for part, columns in self._scoring.columns().items():
            check_columns(self._parts[part].function or "", columns, sets)

    def submit(self, group: Group) -> None:
        """Start grading a group whose completions are all there. Raises as ``collect`` does."""
        tasks = {}
        for name, part in self._parts.items():
            if part.function is not None:
                tasks[name] = Task(name, group.prompt, list(group.completions))
        self._submitted[id(group)] = group, tasks
        for task in tasks.values():
            self._scoring.submit(task)

    def is_done(self, group: Group) -> bool:
        """Whether all that is graded of a group beside other work has been, or nothing is."""
        _, tasks = self._submitted.get(id(group), (group, {}))
        return isinstance(self._scoring, InProcess) or all(one.is_done for one in tasks.values())

    def poll(self) -> None:
        self._scoring.poll()

    def collect(
        self,
        groups: Sequence[Group],
        models: ModelScores | None = None,
        watch: Watch | None = None,
        inside: Inside = nullcontext,
    ) -> GradeStats:
        """``fill`` and ``stats`` of the groups. Raises RewardError as they do."""
        return self.stats(self.fill(groups, models, watch, inside))

    def fill(
        self,
        groups: Sequence[Group],
        models: ModelScores | None = None,
        watch: Watch | None = None,
        inside: Inside = nullcontext,
    ) -> list[Tally]:
        """Fill ``rewards`` and ``reward_parts`` of the groups; returns the counts of each.

        ``watch`` is called several times a second, or between two calls of rewards in this process;
        if it raises, no reward is filled. Each call of a reward in this process is in a block of
        ``inside``. Raises RewardError if a reward says that nothing can be graded, and if processes
        fail again and again.
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
            outcomes: dict[str, list[Outcome]] = {
                name: [outcome for outcome in task.outcomes if outcome is not None]
                for name, task in tasks[index].items()
            }
            tally = Tally()
            tally.fill(group, weights, outcomes | {n: of[index] for n, of in of_models.items()})
            for task in tasks[index].values():
                tally.counts.update(task.counts)
            tallies.append(tally)
        if tallies:
            tallies[0].counts.update(differing)
        return tallies

    def stats(self, tallies: Sequence[Tally]) -> GradeStats:
        """The counts of all groups of a grading, in their order. Raises RewardError if more than
        ``max_failed_fraction`` failed, or all did.
        """
        total = Tally()
        for tally in tallies:
            total.add(tally)
        return total.stats(self._config.max_failed_fraction)

    def _model_outcomes(
        self, groups: Sequence[Group], models: ModelScores
    ) -> dict[str, list[list[Outcome]]]:
        """The outcomes of each part that is a model, by group."""
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        outcomes: dict[str, list[list[Outcome]]] = {}
        for name, part in self._parts.items():
            if part.model is None:
                continue
            if name not in models:
                raise RewardError(f"{_label(name)} is the model {part.model}, which nothing scores")
            scores = iter(models[name](pairs))
            outcomes[name] = [
                [outcome_of(next(scores)) for _ in group.completions] for group in groups
            ]
        return outcomes


class InProcess:
    """Calls the rewards in this process; a fork of it that returns from a reward is ended."""

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._rewards, self._pid = rewards, os.getpid()

    def describe(self) -> Mapping[str, str]:
        return {name: reward.describe() for name, reward in self._rewards.items()}

    def columns(self) -> Mapping[str, Columns]:
        return {name: reward.columns() for name, reward in self._rewards.items()}

    def submit(self, task: Task) -> None:
        """Nothing is done before ``wait``."""

    def poll(self) -> None:
        """Nothing happens by itself."""

    def wait(self, tasks: Sequence[Task], watch: Watch, inside: Inside) -> None:
        """Do the tasks. Raises RewardError if a reward does, and what ``watch`` or a signal
        raises.
        """
        for task in tasks:
            if task.is_done:
                continue
            take()  # discards earlier counts of this process
            try:
                graded = self._rewards[task.part].grade(task.prompt, task.completions)
                while True:
                    with inside():
                        answered = next(graded, None)
                    if answered is None:
                        break
                    task.outcomes[answered[0]] = answered[1]
                    task.counts.update(take())
                    self._check_process()
                    watch()
            except BaseException:
                self._check_process()
                raise

    def close(self) -> None:
        pass

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            os._exit(1)


def _label(name: str) -> str:
    return WHOLE if name == WHOLE else f"{WHOLE} {name}"
