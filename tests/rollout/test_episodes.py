"""Episodes: what is recorded of each turn is what training computes of the whole sequence, whatever
an environment says, and whenever.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.data.continuation import Continuation
from isobit.data.tool_calls import MalformedCall, Parsed, Said, ToolCall
from isobit.environments.pool import Environments, Result, TurnAnswer
from isobit.kernels.spec.attention import PackedAttention
from isobit.models.policy import Policy, random_policy
from isobit.parallel.world import ALONE
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import COLUMNS, GIVEN, TokenSequence
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rewards.grade import Failure
from isobit.rollout import episodes
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.starter import starter_folder
from isobit.store.reward_record import AnswerRecord
from tests.environments.servers import Count, serving
from tests.run import acting
from tests.tiny import tiny_model

CONTEXT = 256
SIZES: dict[str, Any] = {"kv_pages": 12}
TIGHT: dict[str, Any] = {"kv_pages": 4, "max_batched_tokens": 37}
"""Room for one sequence and a bit: samples lose their pages, and prompts come in chunks."""
ENDS = tuple(range(40, 75))
"""Tokens that end a turn: every fourth, so that turns of a random model are short."""


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(starter_folder()))


@cache
def policy_of(preset: Preset) -> Policy:
    """Sharper than a fresh model, so that tokens and neighbours matter."""
    policy = random_policy(tiny_model(), PrecisionConfig(preset=preset), 0)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith("proj.weight") or name == "embed_tokens.weight":
                master.mul_(6)
    policy.publish()
    return policy


def requests(samples: int = 3, new: int = 100, **sampling: Any) -> list[Request]:
    params = SamplingParams(new, stop_token_ids=ENDS, **sampling)
    texts = ("3+8+2+9=", "What is the sum of these numbers, please? " * 2, "1")
    return [
        Request(
            Prompt(f"p/{n}", text, tuple(tokenizer()(text)["input_ids"]), {"n": n}),
            0,
            samples,
            params,
        )
        for n, text in enumerate(texts)
    ]


class Told:
    """An environment in this process, which answers after some polls and out of order."""

    has_reward = has_turn_reward = leads = False

    def __init__(
        self,
        say: Callable[[Handle, int], TurnAnswer],
        delay: Callable[[Handle], int],
        opens: bool = False,
    ) -> None:
        self._say, self._delay, self.opens = say, delay, opens
        self._waiting: list[list[Any]] = []
        self.asked: list[tuple[Handle, int]] = []

    def ask(
        self, key: Handle, columns: Any, turns: Sequence[Any], wants_reward: bool = False
    ) -> None:
        self.asked.append((key, len(turns)))
        assert columns == {"n": int(key.prompt_id[2:])}
        turn = sum(one == key for one, _ in self.asked)
        self._waiting.append([self._delay(key), key, self._say(key, turn)])

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Handle, TurnAnswer]]:
        for one in self._waiting:
            one[0] -= 1
        ready = [one for one in self._waiting if one[0] < 0]
        self._waiting = [one for one in self._waiting if one[0] >= 0]
        return [(key, answer) for _, key, answer in reversed(ready)]

    def end(self, key: Handle) -> None:
        self._waiting = [one for one in self._waiting if one[1] != key]


def said(key: Handle, turn: int) -> TurnAnswer:
    return TurnAnswer((Result("ok", f"{key.prompt_id} {key.sample} {turn}<eos>" * (1 + turn % 3)),))


@pytest.fixture(autouse=True)
def every_turn_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model calls nothing; here each turn but those of one length is a call."""

    def parse(text: str) -> list[Parsed]:
        return [] if len(text) == 8 else [ToolCall("add", {"count": len(text)})]

    monkeypatch.setattr(episodes, "read_turn", acting.reading(parse))


Made = tuple[list[list[Completion]], EngineStats, Told]


def play(
    policy: Policy,
    wanted: Sequence[Request],
    say: Callable[[Handle, int], TurnAnswer] = said,
    delay: Callable[[Handle], int] = lambda _: 0,
    record: AnswerRecord | None = None,
    kind: type[Episodes] = Episodes,
    sizes: dict[str, Any] = SIZES,
    opens: bool = False,
    **settings: Any,
) -> Made:
    config = EnvironmentConfig.model_validate({"class": "a:B", "max_turns": 20, **settings})
    continuation = Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS)
    told: Any = Told(say, delay, opens)
    tools = Tools([], "plain", continuation)
    record = record or AnswerRecord(lambda _: None)
    engine = NativeEngine(policy, RolloutConfig(**sizes), tokenizer(), seed=0)
    episodes = kind(config, tools, told, record, tokenizer(), CONTEXT, engine)
    made, _, stats = episodes.generate(ALONE, policy.version, wanted)
    return made, stats, told


def sequences(made: list[list[Completion]]) -> list[TokenSequence]:
    return [one.sequence for group in made for one in group]


def differing(policy: Policy, drawn: Sequence[TokenSequence]) -> tuple[int, int]:
    """The drawn tokens whose recorded log-probability is not the training forward's, and all."""
    batch = lay_end_to_end(drawn)
    with torch.no_grad():
        weights = policy.weights("training")
        attend = PackedAttention(policy.flow.training, batch.lengths, batch.positions)
        hidden = policy.decoder.hidden_states(weights, batch.token_ids, attend)
        trained, *_ = policy.decoder.lm_head.token_log_probs(
            weights, hidden[batch.rows], batch.targets, batch.temperatures
        )
    differs = batch.recorded_log_probs.view(torch.int32) != trained.view(torch.int32)
    return int(differs.sum()), len(differs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16"])
def test_log_probabilities_of_all_turns_are_those_of_the_training_forward(preset: Preset) -> None:
    policy = policy_of(preset)
    short = lambda key, turn: TurnAnswer((Result("ok", str(turn)),))  # noqa: E731
    made, stats, _ = play(policy, requests(samples=2, new=200), short, sizes=TIGHT)
    turns = [len(one.episode.turns) for group in made for one in group if one.episode]
    assert max(turns) == 20
    assert stats.chunks > 0
    assert stats.prompt_tokens > 3 * sum(len(one.prompt.token_ids) for one in requests())
    assert differing(policy, sequences(made)) == (
        0,
        sum(one.length for group in made for one in group),
    )


def test_what_was_drawn_is_kept_and_what_was_said_is_no_part_of_the_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = ToolCall("add", {})
    monkeypatch.setattr(
        episodes, "read_turn", acting.reading(lambda text: [] if len(text) == 4 else [call])
    )
    made, _, told = play(policy_of("fp8"), requests())
    ends = set[str]()
    for group in made:
        for one in group:
            assert one.episode is not None
            sequence, (begin, *_) = one.sequence, np.flatnonzero(one.sequence.loss_mask)
            spans = sequence.given_from(int(begin))
            results = [text for behind in one.episode.results for _, text in behind]
            given = [sequence.token_ids[first:last].tolist() for first, last in spans]
            # the last result has no tokens where no room was left for it
            assert [tokenizer().decode(ids) for ids in given] == [
                f"[{text}]" for text in results[: len(given)]
            ]
            assert len(results) - len(given) == (
                one.finish_reason == "length" and len(results) == len(one.episode.turns)
            )
            assert (sequence.weights_versions[~sequence.loss_mask] == GIVEN).all()
            assert all(sequence.token_ids[first - 1] in ENDS for first, _ in spans)
            assert tokenizer().eos_token_id not in {token for ids in given for token in ids}
            ends.add(one.finish_reason)
    assert {"stop", "length"} <= ends
    assert len(told.asked) > 10


def delays(seed: int) -> Callable[[Handle], int]:
    generator = np.random.default_rng(seed)
    return lambda _: int(generator.integers(0, 9))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_neither_time_nor_order_nor_memory_changes_a_bit(seed: int) -> None:
    policy = policy_of("fp8")
    at_once, *_ = play(policy, requests())
    late, *_ = play(policy, requests()[::-1], delay=delays(seed), sizes=TIGHT)
    assert sequences(late[::-1]) == sequences(at_once)
    assert late[::-1] == at_once


def test_an_environment_that_is_slow_does_not_hold_up_other_episodes() -> None:
    slow = {Handle("p/0", 0, 0)}
    ended: list[int] = []
    config = EnvironmentConfig.model_validate({"class": "a:B", "max_turns": 20})
    tools = Tools([], "plain", Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS))
    told: Any = Told(said, lambda key: 300 if key in slow else 0)
    record = AnswerRecord(lambda _: None)
    engine = NativeEngine(policy_of("fp8"), RolloutConfig(**SIZES), tokenizer(), seed=0)
    episodes = Episodes(config, tools, told, record, tokenizer(), CONTEXT, engine)
    episodes.generate(ALONE, 1, requests(), complete=lambda place, _: ended.append(place))
    assert ended[-1] == 0
    assert sorted(ended) == [0, 1, 2]


def test_episodes_go_on_elsewhere_until_their_environment_has_been_asked() -> None:
    policy, wanted = policy_of("fp8"), requests()
    engines = [NativeEngine(policy, RolloutConfig(**SIZES), tokenizer(), seed=0) for _ in "ab"]
    config = EnvironmentConfig.model_validate({"class": "a:B", "max_turns": 20})
    tools = Tools([], "plain", Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS))
    told: list[Any] = [Told(said, delays(seed)) for seed in (1, 2)]
    first, second = (
        Episodes(config, tools, one, AnswerRecord(print), tokenizer(), CONTEXT, engine)
        for one, engine in zip(told, engines, strict=True)
    )
    handles = [one for group in first.submit(wanted) for one in group]
    while len({key for key, _ in told[0].asked}) < 4:
        first.step()
    stay = {key for key, _ in told[0].asked}
    assert all(first.num_drawn(one) > 0 for one in handles)
    moved = first.withdraw(handles)
    assert moved.keys() == set(handles) - stay
    second.admit(wanted, moved)
    ended: dict[Handle, Completion] = {}
    while first.num_live or second.num_live:
        events = [*first.step(), *second.step()]
        ended |= {one.handle: one.completion for one in events if one.completion is not None}
    expected, stats, _ = play(policy, wanted)
    assert [ended[one] for one in handles] == [one for group in expected for one in group]
    assert first.stats.generated_tokens + second.stats.generated_tokens == stats.generated_tokens
    assert first.withdraw(handles) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [SIZES, TIGHT])
def test_each_sample_draws_behind_its_own_opening(sizes: dict[str, Any]) -> None:
    policy, record = policy_of("fp8"), AnswerRecord(lambda _: None)

    def say(key: Handle, turn: int) -> TurnAnswer:
        opening = f" {key.sample}<eos>" * key.sample
        return said(key, turn) if turn > 1 else TurnAnswer(opening=opening or None)

    made, _, told = play(policy, requests(), say, delays(3), record, sizes=sizes, opens=True)
    for request, group in zip(requests(), made, strict=True):
        assert len({one.sequence.token_ids.tobytes() for one in group}) == len(group)
        for sample, one in enumerate(group):
            opened = request.prompt.text + f" {sample}<eos>" * sample
            begin = int(np.flatnonzero(one.sequence.loss_mask)[0])
            text = str(tokenizer().decode(one.sequence.token_ids[:begin]))
            assert text.removeprefix("<bos>") == opened
            assert tokenizer().eos_token_id not in one.sequence.token_ids[:begin]
            assert one.episode is not None
            assert one.episode.prompt == (opened if sample else "")
            assert one.sequence.length <= request.max_length(CONTEXT)
    assert {turns for _, turns in told.asked} == {0, 1}
    drawn = sequences(made)
    assert differing(policy, drawn) == (0, sum(one.response_length for one in drawn))
    lines = AnswerRecord(print, list(record._unwritten))
    again, _, asked = play(policy, requests(), record=lines, opens=True)
    assert sequences(again) == drawn
    assert not asked.asked


def test_an_episode_that_fails_before_its_first_turn_has_no_rewards_of_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Told, "has_turn_reward", True)
    failed = TurnAnswer(failure=Failure("reset", "no luck"))

    def say(key: Handle, turn: int) -> TurnAnswer:
        if key.sample == 0:
            return failed
        return replace(said(key, turn), turn_reward=0.5) if turn > 1 else TurnAnswer()

    made, _, _ = play(policy_of("fp8"), requests(), say, opens=True)
    for first, *others in made:
        assert (first.finish_reason, first.length) == ("failed", 0)
        assert first.sequence.rewards_of_turns == ()
        for one in others:
            assert one.episode is not None
            given = one.sequence.rewards_of_turns
            assert given is not None and set(given[:-1]) <= {0.5}
            assert len(given) == len(one.episode.turns)
    assert max(len(one.episode.turns) for group in made for one in group if one.episode) > 2


class Leads(Told):
    """Answers each turn as the user, and ends the episode at its fourth turn or when it is told to;
    the reward tells which turns it has seen.
    """

    has_reward = leads = True

    def ask(
        self, key: Handle, columns: Any, turns: Sequence[Any], wants_reward: bool = False
    ) -> None:
        assert [one["role"] for one in columns.pop("prompt")] == ["user"]
        super().ask(key, columns, turns, wants_reward)
        seen = sum(count for one, count in self.asked if one == key)
        reward = float(10 * seen + wants_reward)
        answer = TurnAnswer((Result("user", f"{key.sample} {seen}<eos>"),))
        if seen == 4 or turns[-1:] == [] or wants_reward:
            answer = TurnAnswer(reward=reward, is_over=seen == 4)
        self._waiting[-1][2] = answer


@pytest.mark.exhaustive
@pytest.mark.parametrize(("limit", "ends"), [(20, {"stop"}), (4, {"stop"}), (2, {"turns"})])
def test_an_environment_may_lead_the_conversation(limit: int, ends: set[str]) -> None:
    policy = policy_of("fp8")
    config = EnvironmentConfig.model_validate({"verifiers": "game", "max_turns": limit})
    tools = Tools([], "plain", Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS))
    told: Any = Leads(said, delays(5))
    record = AnswerRecord(lambda _: None)
    engine = NativeEngine(policy, RolloutConfig(**TIGHT), tokenizer(), seed=0)
    episodes = Episodes(config, tools, told, record, tokenizer(), CONTEXT, engine)
    made, *_ = episodes.generate(ALONE, policy.version, requests(samples=2, new=120))
    found = [one for group in made for one in group]
    assert ends <= {one.finish_reason for one in found} <= {*ends, "length"}
    for one in found:
        assert one.episode is not None
        turns, over = len(one.episode.turns), one.finish_reason == "stop"
        assert one.episode.reward == 10 * turns + (not over or turns == limit)
        assert [kind for ((kind, _),) in one.episode.results] == ["user"] * len(one.episode.results)
        assert {line["role"] for line in one.episode.messages[1::2]} <= {"user"}
    drawn = sequences(made)
    assert differing(policy, drawn) == (0, sum(one.response_length for one in drawn))
    lines = AnswerRecord(print, list(record._unwritten))
    again = Episodes(config, tools, told, lines, tokenizer(), CONTEXT, engine)
    told.asked.clear()
    repeated, *_ = again.generate(ALONE, policy.version, requests(samples=2, new=120))
    assert repeated == made
    assert not told.asked


class Retokenising(Episodes):
    """A mutant: what was drawn goes through text before the model goes on, which loses the tokens
    that have no text, as another tokenizer would merge some.
    """

    def _go_on(self, handle: Handle, answer: TurnAnswer) -> None:
        sequence = self._open[handle].sequence
        seen = sequence.token_ids < len(tokenizer())
        text = tokenizer().decode(sequence.token_ids)
        again = tokenizer()(text, add_special_tokens=False)["input_ids"]
        assert again == sequence.token_ids[seen].tolist()
        columns: dict[str, Any] = {
            one.name: None if (found := getattr(sequence, one.name)) is None else found[seen]
            for one in COLUMNS
        }
        mask = sequence.loss_mask[seen]
        self._open[handle].sequence = TokenSequence(sequence.token_ids[seen], mask, **columns)
        super()._go_on(handle, answer)


@pytest.mark.exhaustive
def test_a_mutant_that_tokenises_again_is_caught() -> None:
    policy = policy_of("fp8")
    short = lambda key, turn: TurnAnswer((Result("ok", str(turn)),))  # noqa: E731
    made, *_ = play(policy, requests(), short, kind=Retokenising)
    count, _ = differing(policy, sequences(made))
    assert count > 0


def test_failures_and_limits_end_episodes_by_kind() -> None:
    def say(key: Handle, turn: int) -> TurnAnswer:
        kinds = {0: "deadline", 1: "crash"}
        if turn == 2 and key.sample in kinds:
            return TurnAnswer(failure=Failure(kinds[key.sample], "so it is"))
        return said(key, turn)

    made, *_ = play(policy_of("fp8"), requests(samples=4), say, max_turns=4)
    found = [
        (one.finish_reason, one.episode and one.episode.failure) for group in made for one in group
    ]
    assert ("time", "deadline") in found
    assert ("failed", "crash") in found
    assert ("turns", "") in found
    assert all(one.is_cut == (one.finish_reason != "stop") for group in made for one in group)
    assert differing(policy_of("fp8"), sequences(made))[0] == 0


def test_all_calls_of_an_episode_have_a_limit_of_time() -> None:
    slow = lambda key, turn: TurnAnswer(said(key, turn).results, seconds=0.4)  # noqa: E731
    made, *_ = play(policy_of("fp8"), requests(), slow, episode_s=1.0)
    cut = [one for group in made for one in group if one.finish_reason == "time"]
    assert cut
    assert all(one.episode is not None and len(one.episode.results) == 2 for one in cut)


def test_long_results_are_cut_to_their_limit() -> None:
    long = lambda key, turn: TurnAnswer((Result("ok", "x" * 500),))  # noqa: E731
    made, *_ = play(policy_of("fp8"), requests(), long, max_result_tokens=10)
    results = {
        text
        for group in made
        for one in group
        if one.episode
        for behind in one.episode.results
        for _, text in behind
    }
    assert results == {"x" * 10 + " [cut]"}


def test_each_turn_is_read_as_what_stands_ahead_of_it_has_begun_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt of the first turn, and the results of the others."""
    ahead: list[str] = []
    read: list[bool] = []

    def begins(text: str) -> bool:
        ahead.append(text)
        return len(text) % 2 == 0

    def reading(turn: str, form: str, tools: Sequence[str], is_thinking: bool, *_: bool) -> Said:
        read.append(is_thinking)
        return Said(turn, [] if len(turn) == 8 else [ToolCall("add", {})])

    monkeypatch.setattr(episodes, "ends_in_thinking", begins)
    monkeypatch.setattr(episodes, "read_turn", reading)
    play(policy_of("fp8"), requests(samples=2)[:1])
    assert ahead[0] == "<bos>3+8+2+9="
    assert any("p/0 0 1" in text for text in ahead)
    assert read == [len(text) % 2 == 0 for text in ahead][: len(read)] and len(set(read)) == 2


def test_a_malformed_call_is_answered_without_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episodes, "read_turn", acting.reading(lambda _: [MalformedCall("no call")]))
    made, _, told = play(policy_of("fp8"), requests())
    assert not told.asked
    results = [
        behind for group in made for one in group if one.episode for behind in one.episode.results
    ]
    assert results
    assert set(results) == {(("malformed", "error: no call"),)}


def test_a_stop_string_that_ends_a_call_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def parse(text: str) -> list[Parsed]:
        seen.append(text)
        return []

    monkeypatch.setattr(episodes, "read_turn", acting.reading(parse))
    free, _, _ = play(policy_of("fp8"), requests(8))
    stops = tuple({one.text[-1:] for group in free for one in group} - {""})
    made, _, _ = play(policy_of("fp8"), requests(8, stop_strings=stops))
    ended = [one for group in made for one in group if one.stop_string]
    assert ended and all(one.stop_string in stops for one in ended)
    assert all(one.episode is not None and one.episode.turns[-1] in seen for one in ended)
    assert all(one.episode.turns[-1].endswith(stops) for one in ended if one.episode)


def test_turns_have_their_rewards_at_their_last_tokens_and_nan_where_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def say(key: Handle, turn: int) -> TurnAnswer:
        if key.sample == 1 and turn == 2:
            return TurnAnswer(failure=Failure("ValueError", "no reward"))
        return TurnAnswer(said(key, turn).results, turn_reward=turn / 8)

    monkeypatch.setattr(Told, "has_turn_reward", True)
    made, *_ = play(policy_of("fp8"), requests(), say, max_turns=4)
    failed = 0
    for one in (one for group in made for one in group):
        assert one.episode is not None
        sequence, answered = one.sequence, len(one.episode.results)
        is_last = sequence.loss_mask & ~np.append(sequence.loss_mask[1:], False)
        (places,) = np.nonzero(is_last)
        column = np.zeros(sequence.length)
        column[places[:answered]] = np.arange(1, answered + 1) / 8
        if one.finish_reason == "failed":
            column[places[answered]] = np.nan
            failed += 1
        assert len(places) == len(one.episode.turns)
        assert sequence.turn_rewards is not None
        assert np.array_equal(sequence.turn_rewards, column, equal_nan=True)
    assert failed


@pytest.mark.exhaustive
def test_recorded_answers_are_given_again_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Told, "has_turn_reward", True)
    policy, record = policy_of("fp8"), AnswerRecord(lambda _: None)
    numbers = iter(range(10**6))

    def random(key: Handle, turn: int) -> TurnAnswer:
        number = next(numbers)
        return TurnAnswer((Result("ok", str(number)),), turn_reward=number / 7)

    first, *_ = play(policy, requests(), random, delays(3), record)
    lines = list(record._unwritten)
    assert len(lines) == 1
    again, _, told = play(policy, requests(), random, delays(4), AnswerRecord(print, lines))
    assert not told.asked
    assert again == first
    # where the record lacks a turn, the environment is asked, and told of the turns before
    content = lines[0].replace(b'[["p/0", 0, 0, 3, ', b'[["p/0", 0, 0, 99, ')
    assert content != lines[0]
    said: list[str] = []
    _, _, told = play(policy, requests(), random, delays(4), AnswerRecord(said.append, [content]))
    assert told.asked[0] == (Handle("p/0", 0, 0), 3)
    assert len(said) == 1


def test_a_server_ends_its_episodes_and_is_not_asked_again_for_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def steps(text: str) -> list[Parsed]:
        return [] if len(text) == 8 else [ToolCall("step", {"by": len(text) % 5})]

    monkeypatch.setattr(episodes, "read_turn", acting.reading(steps))
    policy, wanted = policy_of("fp8"), requests(samples=2, new=100)[::2]
    tools = Tools([], "plain", Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS))
    record = AnswerRecord(lambda _: None)
    with serving(Count) as (address, server, _):
        config = EnvironmentConfig.model_validate(
            {"openenv": address, "options": {"goal": 4}, "max_turns": 20, "at_once": 3}
        )
        environments = Environments[Handle](config, 400)
        environments.tools()

        def generate(answers: AnswerRecord) -> list[list[Completion]]:
            engine = NativeEngine(policy, RolloutConfig(**SIZES), tokenizer(), seed=0)
            episodes = Episodes(config, tools, environments, answers, tokenizer(), CONTEXT, engine)
            return episodes.generate(ALONE, policy.version, wanted)[0]

        try:
            made = generate(record)
            assert server.most_open == 3
            server.asked.clear()
            again = generate(AnswerRecord(print, list(record._unwritten)))
            assert sequences(again) == sequences(made)
            assert not server.asked
        finally:
            environments.close()
    over = 0
    for one in (one for group in made for one in group):
        assert one.episode is not None
        assert one.episode.prompt.endswith('{"total": 0, "seed": null}')
        gains = [len(text) % 5 / 4 for text in one.episode.turns]
        told = len(one.episode.results)
        assert one.sequence.rewards_of_turns == (*gains[:told], *[0.0] * (len(gains) - told))
        if sum(gains) >= 1 and one.finish_reason == "stop":
            assert (one.episode.reward, told) == (gains[-1], len(gains) - 1)
            over += 1
        else:
            assert one.episode.reward is None
    assert over > 1
    drawn = sequences(made)
    assert differing(policy, drawn) == (0, sum(one.response_length for one in drawn))


def test_an_error_leaves_engine_and_environment_free() -> None:
    def fail(key: Handle, turn: int) -> TurnAnswer:
        raise RuntimeError("stop here")

    policy = policy_of("fp8")
    config = EnvironmentConfig.model_validate({"class": "a:B"})
    tools = Tools([], "plain", Continuation(tokenizer(), ChatConfig(), "plain", [], ENDS))
    told: Any = Told(fail, lambda _: 0)
    record = AnswerRecord(lambda _: None)
    engine = NativeEngine(policy, RolloutConfig(**SIZES), tokenizer(), seed=0)
    episodes = Episodes(config, tools, told, record, tokenizer(), CONTEXT, engine)
    with pytest.raises(RuntimeError, match="stop here"):
        episodes.generate(ALONE, 1, requests())
    assert engine.num_live == 0
    told._say, told.asked = said, []
    made, *_ = episodes.generate(ALONE, 1, requests())
    assert sequences(made) == sequences(play(policy, requests(), max_turns=8)[0])
