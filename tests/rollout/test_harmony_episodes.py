"""Episodes of gpt-oss: each result stands behind the name of its tool, and all turns are exact."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from isobit.config.data import ChatConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.data.continuation import Continuation
from isobit.data.tool_calls import MalformedCall, Parsed, ToolCall
from isobit.environments.pool import Result, TurnAnswer
from isobit.models.policy import random_policy
from isobit.parallel.world import ALONE
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout import episodes
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.store.reward_record import AnswerRecord
from tests.data.test_chat_templates import tokenizer_of
from tests.data.test_continuation import stops_of
from tests.data.test_harmony import SUB, TOOLS
from tests.models.policies import disturbed
from tests.models.test_stacked import CONFIG
from tests.rollout.test_episodes import SIZES, Told, differing
from tests.run import acting

NAMES = ("add", "sub")


def parse(text: str) -> list[Parsed]:
    """Calls of two tools, the second unreadable, or of one that no tokenizer can write, whatever a
    random model writes.
    """
    size = len(text)
    if size % 7 == 0:
        return []
    if size % 3 == 0:
        return [ToolCall("\ud800", {})]
    return [ToolCall("add", {"a": size}) if size % 2 else MalformedCall("no JSON", "sub")]


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["int8", "bf16"])
def test_results_name_their_tools_and_all_turns_are_exact(
    preset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of("gpt_oss")
    monkeypatch.setattr(episodes, "read_turn", acting.reading(parse))
    config = replace(CONFIG, vocab_size=len(tokenizer), max_positions=1024)
    policy = disturbed(random_policy(config, PrecisionConfig(preset=preset), 0))
    policy.publish()
    stops = (*stops_of(tokenizer), *range(60, 80))
    chat = ChatConfig(date=datetime(2025, 3, 7))
    made = Continuation(tokenizer, chat, "harmony", [*TOOLS, SUB], stops_of(tokenizer))
    told: Any = Told(lambda key, turn: TurnAnswer((Result("ok", "11"),)), lambda _: 0)
    tools = Tools([*TOOLS, SUB], "harmony", made)
    settings = EnvironmentConfig.model_validate({"class": "a:B", "max_turns": 5})
    engine = NativeEngine(policy, RolloutConfig(**SIZES), tokenizer, seed=0)
    record = AnswerRecord(lambda _: None)
    sampler = Episodes(settings, tools, told, record, tokenizer, 1024, engine)
    prompt = Prompt("p/0", "3+8", tuple(tokenizer("3+8")["input_ids"]), {"n": 0})
    asked = Request(prompt, 0, 4, SamplingParams(600, stop_token_ids=tuple(sorted(stops))))
    (group,), *_ = sampler.generate(ALONE, policy.version, [asked])
    seen = set[str]()
    for one in group:
        assert one.episode is not None
        begin = int(np.flatnonzero(one.sequence.loss_mask)[0])
        spans = one.sequence.given_from(begin)
        for turn, (first, last) in zip(one.episode.turns, spans, strict=False):
            (call,) = parse(turn)
            given = str(tokenizer.decode(one.sequence.token_ids[first:last].tolist()))
            name = call.name if call.name in NAMES else "isobit"
            start = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
            assert start in given
            assert given.endswith("<|end|><|start|>assistant")
            seen.add(call.name)
    assert seen == {*NAMES, "\ud800"}
    drawn = [one.sequence for one in group]
    assert differing(policy, drawn) == (0, sum(one.length for one in group))
