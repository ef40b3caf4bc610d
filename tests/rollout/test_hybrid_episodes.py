"""Episodes of a hybrid that calls a tool in each of twenty turns, as it has been taught to: its
calls run in processes, and all that it draws is what training computes of the whole episode.

Its delta rules go on over parked turns, results that cross the ends of chunks, prompts that samples
share, and tokens that are computed again because the cache had no room for them.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from isobit.config.data import ChatConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.data.continuation import Continuation
from isobit.data.tool_calls import ToolCall, read_turn
from isobit.environments.pool import Environments
from isobit.kernels.operands import DeltaShape
from isobit.memory.cache_size import CacheSize, Parked
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import Scorer
from isobit.parallel.world import ALONE
from isobit.records.packing import lay_end_to_end, pack
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.sequence import Sample
from isobit.run.acting import read_tools
from isobit.store.reward_record import AnswerRecord
from isobit.training.supervised import SupervisedObjective
from isobit.training.trainer import Trainer
from tests.data.test_chat_templates import tokenizer_of
from tests.data.test_continuation import stops_of
from tests.rollout.test_drafts import delayed
from tests.rollout.test_hybrid_shapes import trained
from tests.tiny import tiny_model

pytestmark = pytest.mark.exhaustive
TURNS, CONTEXT = 20, 2048
MARKS = "<tool_call>", "<function=", "<parameter=", "<tool_response>"
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
    },
}
SIZES: dict[str, tuple[RolloutConfig, CacheSize]] = {
    "room for all": (RolloutConfig(max_batched_tokens=400), CacheSize(200, 40)),
    "room for one and a half": (RolloutConfig(max_batched_tokens=90), CacheSize(26, 20)),
}
"""Pages and carries: an episode has some 22 pages, and needs two carries while it goes on."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Qwen3.5's template over a token a byte, and one for each mark of a call, so that turns are
    short.
    """
    made = copy.deepcopy(tokenizer_of("qwen3_5"))
    ends = [f"</{mark.strip('<=>')}>" for mark in MARKS]
    made.add_tokens([*MARKS, *ends])
    return made


def tokens_of(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def prompt_of(times: int) -> Prompt:
    said = [{"role": "user", "content": "Go on. " * times}]
    text = tokenizer().apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return Prompt(f"p/{times}", str(text), tuple(tokens_of(str(text))), {})


def turn_of(count: int) -> list[int]:
    call = f"<function=add>\n<parameter=count>\n{count}\n</parameter>\n</function>"
    text = f"\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    return [*tokens_of(text), stops_of(tokenizer())[0]]


def episode(random: Random, made: Continuation) -> TokenSequence:
    """What is learnt: three turns that call the tool, with its results between them."""
    prompt = prompt_of(random.randint(1, 12)).token_ids
    answer, given, total = list[int](), list[tuple[int, int]](), 0
    for turn in range(3):
        if turn:
            results = made.token_ids([f"total {total}"], answer[-1])
            begin = len(prompt) + len(answer)
            given.append((begin, begin + len(results)))
            answer += results
        # without zeros, which it would also write at the beginning, as no number of JSON may have
        count = int("".join(random.choices("123456789", k=random.randint(1, 3))))
        total += count
        answer += turn_of(count)
    return TokenSequence.of_answer(prompt, answer, given=given)


@pytest.fixture(scope="module")
def taught() -> Policy:
    """A hybrid of random weights that has learnt to call, within half a minute."""
    torch.set_num_threads(1)
    rule = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=24, width=4)
    config = tiny_model(
        family="qwen3_5_text", vocab_size=320, hidden_size=64, num_layers=2, max_positions=CONTEXT,
        delta=rule, delta_layers=(0,),
    )  # fmt: skip
    steps, random = 70, Random(0)
    settings = TrainingConfig(learning_rate=1e-2, warmup_updates=5, schedule="cosine")
    policy = random_policy(config, PrecisionConfig(preset="bf16"), 0)
    with torch.no_grad():
        # those of a fresh model forget within a chunk, so that no state would matter
        policy.masters["layers.0.a_log"].copy_(torch.linspace(-7, -1, rule.value_heads))
    policy.publish()
    trainer = Trainer(policy, settings, steps)
    stops = stops_of(tokenizer())
    made = Continuation(tokenizer(), ChatConfig(), "qwen3_coder", [SCHEMA], stops)
    losses = list[float]()
    for _ in range(steps):
        batches = pack([episode(random, made) for _ in range(4)], 1024)
        losses.append(trainer.update(batches, SupervisedObjective()).metrics["loss"])
    assert losses[-1] < 0.3, "of a call's 28 tokens only its number cannot be known"
    return policy


@pytest.fixture(scope="module")
def counting() -> Iterator[tuple[EnvironmentConfig, Environments[Handle], Tools]]:
    config = EnvironmentConfig.model_validate({"class": "tests.environments.tools:Counter"})
    environments = Environments[Handle](config, 4 * CONTEXT)
    try:
        stops = stops_of(tokenizer())
        tools = read_tools(environments, config, ChatConfig(), tokenizer(), stops)
        assert tools.form == "qwen3_coder"
        yield config, environments, tools
    finally:
        environments.close()


Counting = tuple[EnvironmentConfig, Environments[Handle], Tools]


def requests() -> list[Request]:
    """A sample of a prompt within a chunk, and two of one over three chunks."""
    stops = tuple(stops_of(tokenizer()))
    sampling = SamplingParams(1400, min_p=0.1, stop_token_ids=stops)
    return [Request(prompt_of(times), 0, count, sampling) for times, count in ((1, 1), (14, 2))]


def held(
    policy: Policy, counting: Counting, size: str, pipelined: bool = False, turns: int = TURNS
) -> tuple[list[Completion], EngineStats]:
    """The episodes, in the order of the samples, of so many turns whose calls are run, and one."""
    config, environments, tools = counting
    config = config.model_copy(update={"max_turns": turns + 1})
    rollout, cache_size = SIZES[size]
    make = delayed if pipelined else None
    engine = NativeEngine(policy, rollout, tokenizer(), 0, make, size=cache_size)
    record = AnswerRecord(lambda _: None)
    episodes = Episodes(config, tools, environments, record, tokenizer(), CONTEXT, engine)
    made, _, stats = episodes.generate(ALONE, policy.version, requests())
    return [one for group in made for one in group], stats


def check_calls(one: Completion, parameters: Mapping[str, Any]) -> None:
    """Each turn but the last has one call of the tool, and the result of that call behind it."""
    assert one.episode is not None and one.finish_reason == "turns"
    said = [
        read_turn(turn, "qwen3_coder", parameters, is_thinking=True) for turn in one.episode.turns
    ]
    calls = [call for turn in said for call in turn.calls]
    assert len(said) == len(calls) == TURNS + 1
    counts = [call.arguments["count"] for call in calls if isinstance(call, ToolCall)]
    assert len(counts) == len(calls) and len(set(counts)) > 10
    totals = [(("ok", f"total {total}"),) for total in accumulate(counts[:-1])]
    assert [*one.episode.results] == totals
    begin = int(np.flatnonzero(one.sequence.loss_mask)[0])
    assert len(one.sequence.given_from(begin)) == TURNS


def recorded(made: Sequence[Completion]) -> torch.Tensor:
    return lay_end_to_end([one.sequence for one in made]).recorded_log_probs


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_twenty_turns_with_calls_are_what_training_computes(
    preset: Preset, taught: Policy, counting: Counting
) -> None:
    policy = Policy(taught.config, PrecisionConfig(preset=preset), taught.masters)
    made, roomy = held(policy, counting, "room for all")
    for one in made:
        check_calls(one, counting[2].parameters)
    assert len({one.sequence.token_ids.tobytes() for one in made}) == len(made) == 3
    drawn = [one.sequence for one in made]
    assert recorded(made).std() > 0.5
    assert torch.equal(recorded(made), trained(policy, drawn))
    for batch in pack(drawn, 4096, shared_prefix=True):
        assert torch.equal(batch.recorded_log_probs, Scorer(policy).score(batch).log_probs)
    assert roomy.kept_tokens > 800 * TURNS and roomy.shared_pages > 0
    assert roomy.preemptions == roomy.recomputed_tokens == 0
    again, short = held(policy, counting, "room for one and a half", pipelined=preset == "bf16")
    assert short.preemptions > 0 and short.recomputed_tokens > 0 and short.chunks > 0
    assert short.kept_tokens < roomy.kept_tokens
    assert torch.equal(recorded(again), recorded(made))
    assert again == made


def test_a_state_that_is_not_carried_over_a_parked_turn_is_caught(
    taught: Policy, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: K and V of a parked turn are there when it goes on, and the states of the delta
    rules are empty.
    """
    engines = list[NativeEngine]()
    make, exact = NativeEngine.__init__, Sample.resume

    def noting(self: NativeEngine, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        engines.append(self)

    def resume(self: Sample, parked: Parked) -> None:
        exact(self, parked)
        runner: Any = engines[-1]._executor.runner
        for carries in runner._cache.delta.values():
            carries.states[self.carry] = 0

    monkeypatch.setattr(NativeEngine, "__init__", noting)
    monkeypatch.setattr(Sample, "resume", resume)
    made, stats = held(taught, counting, "room for all", turns=4)
    assert stats.kept_tokens > 0
    drawn = [one.sequence for one in made]
    assert (recorded(made) != trained(taught, drawn)).float().mean() > 0.1
