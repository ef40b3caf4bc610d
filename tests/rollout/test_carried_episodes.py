"""Episodes that leave the engine at any moment and come back have the bits of ``Episodes``."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from isobit.config.data import ChatConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.rollout import RolloutConfig
from isobit.data.continuation import Continuation
from isobit.environments.pool import Result, TurnAnswer
from isobit.parallel.world import ALONE
from isobit.records.text import Completion
from isobit.records.wire import completions_of, completions_value
from isobit.rollout import episodes
from isobit.rollout.carried_episodes import CarriedEpisodes
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.native import NativeEngine
from isobit.rollout.open_groups import OpenGroup, OpenGroups
from isobit.rollout.requests import Handle, Request
from isobit.store.reward_record import AnswerRecord, LineRecord, SentAnswers
from tests.rollout.test_episodes import CONTEXT, ENDS, SIZES, TIGHT, policy_of, requests, tokenizer
from tests.run import acting


class Process:
    """All environments in this process; each says something of the turns that it was told of, after
    some polls.
    """

    def __init__(self, delays: random.Random, kind: str) -> None:
        self._delays, self.opens = delays, kind == "opens"
        self.leads = kind == "leads"
        self.has_reward, self.has_turn_reward = kind in ("opens", "rewards"), kind == "rewards"
        self.told = Counter[Handle]()
        self.ended = 0
        self.asked: list[Handle] = []
        self._waiting: list[list[Any]] = []
        self.spare = set[Handle]()
        self.unclaimed: list[Any] = []

    def ask(
        self, key: Handle, columns: Any, turns: Sequence[Any], wants_reward: bool = False
    ) -> None:
        self.asked.append(key)
        is_new = key not in self.told
        self.told[key] += len(turns)
        number = self.told[key]
        text = f"{key.prompt_id} {key.sample} {number}" * (1 + number % 3)
        answer = TurnAnswer(
            tuple(Result("ok", text) for _ in turns[-1:]),
            opening=f" {key.sample}!" if is_new and self.opens else None,
            reward=float(number) if wants_reward else None,
            turn_reward=number / 2 if turns and self.has_turn_reward else None,
            is_over=self.leads and number > 2 + key.sample,
        )
        self._waiting.append([self._delays.randrange(4), key, answer])

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Handle, TurnAnswer]]:
        for one in self._waiting:
            one[0] -= 1
        ready = [one for one in self._waiting if one[0] < 0]
        self._waiting = [one for one in self._waiting if one[0] >= 0]
        return [(key, answer) for _, key, answer in ready]

    def has(self, key: Handle) -> bool:
        return key in self.told

    def end_spare(self) -> None:
        """End the episodes that nobody goes on with and that are asked nothing."""
        asked = {key for _, key, _ in self._waiting}
        for key in {*self.told} & self.spare - asked:
            self.end(key)

    def poll_by_others(self) -> None:
        """As an evaluation does."""
        self.unclaimed += self.poll()

    def end(self, key: Handle) -> None:
        self.spare.discard(key)
        self.told.pop(key, None)
        self._waiting = [one for one in self._waiting if one[1] != key]


@pytest.fixture(autouse=True)
def most_turns_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "read_turn", acting.reading(acting.parse))


def made(kind: type[Episodes], process: Process, record: AnswerRecord, sizes: Any) -> Any:
    config = EnvironmentConfig.model_validate({"class": "a:B", "max_turns": 6})
    continuation = Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS)
    tools, told = Tools([], "plain", continuation), process
    engine = NativeEngine(policy_of("fp8"), RolloutConfig(**sizes), tokenizer(), seed=0)
    environments: Any = told
    return kind(config, tools, environments, record, tokenizer(), CONTEXT, engine)


class Run:
    """Open groups that are paused by chance; every pause is a step, after which the run may be
    killed, or others poll the environments or need their room, and ``between`` is called.
    """

    def __init__(
        self,
        chance: random.Random,
        kind: str,
        sizes: Any,
        between: Callable[[Process], None] = lambda _: None,
    ) -> None:
        self._chance, self._kind, self._sizes, self._between = chance, kind, sizes, between
        self.lines: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self.process = Process(self._chance, self._kind)
        record = AnswerRecord(lambda _: None)
        record.end = lambda answers: self.lines.append(list(answers))  # type: ignore[method-assign]
        self.episodes = made(CarriedEpisodes, self.process, record, self._sizes)
        self.open = OpenGroups(self.episodes, lambda: None, lambda _: None)

    def _killed(self) -> None:
        kept = [self.episodes.kept(group) for group in self.open.groups]
        value = self.episodes.value(kept)
        self._begin()
        self.episodes.restore(value)
        for group in kept:
            samples = [group.samples[sample] for sample in sorted(group.samples)]
            again = completions_of(completions_value(samples))
            group = OpenGroup(group.request, 0, dict(enumerate(again)))
            group.close_if_whole()
            self.open.groups.append(group)

    def complete(self, wanted: Sequence[Request]) -> list[list[Completion]]:
        self.open.groups += [OpenGroup(request, 0) for request in wanted]
        pauses = 0
        while not pauses or any(group.group is None for group in self.open.groups):
            self.episodes.begin_step(1, [(str(pauses), 0)])
            if pauses:
                self.open.resume()
            else:
                for group in self.open.groups:
                    self.open._submit(group)
            for _ in range(self._chance.randrange(12)):
                self.open.turn()
            self.open.pause()
            pauses += 1
            done = [p for p, group in enumerate(self.open.groups) if group.group is not None]
            if len(done) == len(self.open.groups):
                break
            self.episodes.end_step(ALONE, self.open.groups, [])
            what = self._chance.randrange(4)
            if what == 0:
                self._killed()
            if what == 1:
                self.process.end_spare()
            if what == 2:
                self.process.poll_by_others()
            self._between(self.process)
        assert pauses > 5
        self.episodes.end_step(ALONE, self.open.groups, range(len(self.open.groups)))
        return [
            [group.samples[sample] for sample in sorted(group.samples)]
            for group in self.open.groups
        ]


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [SIZES, TIGHT], ids=["wide", "tight"])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "opens", "rewards", "leads"])
def test_they_have_the_bits_of_episodes_that_stay(kind: str, seed: int, sizes: Any) -> None:
    chance, wanted, lines = random.Random(seed), requests(), list[Any]()
    record = AnswerRecord(lambda _: None)
    record.end = lambda answers: lines.append(list(answers))  # type: ignore[method-assign]
    stays = made(Episodes, Process(chance, kind), record, sizes)
    expected, _, _ = stays.generate(ALONE, 1, wanted)
    run = Run(chance, kind, sizes)
    found = run.complete(wanted)
    assert found == expected
    several = [one.sequence.turn_lengths for group in found for one in group]
    assert max(map(len, several)) > 2
    answers = [list(answer) for line in run.lines for answer in line]
    assert sorted(answers, key=lambda one: one[0]) == sorted(lines[0], key=lambda one: one[0])
    assert not run.episodes._known
    assert not run.episodes._stopped


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("kind", ["plain", "opens", "rewards", "leads"])
def test_an_evaluation_of_the_same_prompts_meets_none_of_them(kind: str, seed: int) -> None:
    chance, wanted = random.Random(seed), requests()
    unwritten = AnswerRecord(lambda _: None)
    expected, _, _ = made(Episodes, Process(chance, kind), unwritten, SIZES).generate(
        ALONE, 1, wanted
    )
    evaluations = Counter[bool]()

    def evaluate(process: Process) -> None:
        found, _, _ = made(Episodes, process, unwritten, SIZES).generate(ALONE, 1, wanted)
        evaluations[found == expected] += 1

    run = Run(chance, kind, SIZES, evaluate)
    assert run.complete(wanted) == expected
    assert evaluations.keys() == {True}


@pytest.mark.few(1)
@pytest.mark.parametrize("taken", ["before the step", "before the first token", "in the middle"])
@pytest.mark.parametrize("kind", ["plain", "opens", "leads"])
def test_a_record_that_is_taken_in_a_step_has_the_answers_of_the_step(
    kind: str, taken: str
) -> None:
    """As a rollouter gets one with each question: nothing that it has is asked again."""
    wanted = requests()
    names = [(request.prompt.id, request.visit) for request in wanted]

    def of_the_step(record: LineRecord) -> SentAnswers:
        return SentAnswers(lambda _: None, record.lines_ahead)

    def drawn(process: Process, record: SentAnswers) -> SentAnswers:
        """A whole step, from what a record has.  -> The last record that is taken in it."""
        carried = made(CarriedEpisodes, process, record, SIZES)
        if taken == "before the step":
            carried.take_log(record := of_the_step(record))
        carried.begin_step(1, names)
        if taken == "before the first token":
            carried.take_log(record := of_the_step(record))
        opened = OpenGroups(carried, lambda: None, lambda _: None)
        opened.groups += [OpenGroup(request, 0) for request in wanted]
        for group in opened.groups:
            opened._submit(group)
        for turn in range(2000):
            if taken == "in the middle" and turn == 6:
                carried.take_log(record := of_the_step(record))
            if not opened.num_live:
                break
            opened.turn()
        opened.pause()
        carried.end_step(ALONE, opened.groups, range(len(wanted)))
        return record

    asked = Process(random.Random(1), kind)
    first = drawn(asked, SentAnswers(lambda _: None, []))
    again = Process(random.Random(2), kind)
    second = drawn(again, SentAnswers(lambda _: None, first.sent))
    assert len(asked.asked) > 5
    assert again.asked == []
    assert second.sent == first.sent
