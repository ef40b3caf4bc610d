"""On a GPU too, guesses change the number of steps and nothing that is drawn; their rows are in
captured steps, which the memory plan has.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import SPECULATED_ROWS, forward_bytes
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from tests.gpu.conftest import SHAPES
from tests.gpu.test_memory import MIB, WIDE
from tests.rollout.test_drafts import Knowing, check_equal, guess, known_of
from tests.rollout.test_exactness import recorded_log_probs
from tests.rollout.test_open_engine import check_empty

MakePolicy = Callable[..., Policy]


def requests(
    lengths: tuple[int, ...] = (5, 130, 300, 64), samples: int = 3, new: int = 40, **sampling: Any
) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(128, (n,), generator=generator).tolist()) for n in lengths]
    params = SamplingParams(new, **sampling)
    return [Request(Prompt(f"p{i}", "", ids), 0, samples, params) for i, ids in enumerate(prompts)]


def runner_of(engine: NativeEngine) -> GraphRunner:
    runner = engine._executor.runner
    assert isinstance(runner, GraphRunner)
    return runner


def drawn(policy: Policy, wanted: list[Request]) -> list[list[Completion]]:
    return generate(NativeEngine(policy, RolloutConfig(speculation=0), None, seed=0), wanted)


def check_guesses(
    policy: Policy,
    wanted: list[Request],
    expected: list[list[Completion]],
    right: float = 0.85,
    **sizes: Any,
) -> NativeEngine:
    """Guesses that are right at a rate, by an engine that does not look at times."""
    engine = NativeEngine(policy, RolloutConfig(**sizes), None, seed=0)
    guess(engine, Knowing(known_of(wanted, expected), right, policy.config.vocab_size))
    check_equal(generate(engine, wanted), expected)
    check_empty(engine)
    stats = engine.stats
    assert stats.drafted_tokens > stats.accepted_tokens > stats.generated_tokens // 4
    assert any(key.verifies for key in runner_of(engine)._steps)
    return engine


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_completions_do_not_depend_on_what_is_guessed(
    shape: str, preset: Preset, make_policy: MakePolicy
) -> None:
    policy, wanted = make_policy(shape, preset, trainable=False), requests()
    expected = drawn(policy, wanted)
    check_guesses(policy, wanted, expected)
    if shape == "moe":
        assert all(one.routings is not None for group in expected for one in group)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"stop_token_ids": tuple(range(0, 1000, 40))},
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"kv_pages": 9, "max_batched_tokens": 70}])
def test_every_sampling_and_every_size(
    sampling: dict[str, Any], sizes: dict[str, Any], make_policy: MakePolicy
) -> None:
    policy, wanted = make_policy("qwen3", "fp8", trainable=False), requests(**sampling)
    engine = check_guesses(policy, wanted, drawn(policy, wanted), **sizes)
    assert (engine.stats.chunks > 0) == bool(sizes)


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_rows_of_one_sequence_on_both_sides_of_a_part_of_the_keys(preset: Preset) -> None:
    """At 8,192 tokens attention begins another part, and a step of one with more parts."""
    config = replace(SHAPES["qwen3"], max_positions=16384)
    policy = random_policy(config, PrecisionConfig(preset=preset), 0, "cuda", trainable=False)
    wanted = requests((8180, 8120, 20), samples=2, new=30)
    check_guesses(policy, wanted, drawn(policy, wanted), right=0.95, kv_pages=600)


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_a_guess_that_makes_a_nan_leaves_none_behind(
    preset: Preset, make_policy: MakePolicy
) -> None:
    """The embedding of one token is a NaN; no sample draws it, and many are guessed to."""
    policy, wanted = make_policy("qwen3", preset), requests(new=24)
    expected = drawn(policy, wanted)
    known = known_of(wanted, expected)
    bad = next(token for token in range(1000) if all(token not in one for one in known.values()))
    with torch.no_grad():
        policy.masters["embed_tokens.weight"][bad] = torch.nan
    policy.publish()
    guesses = {
        handle: [bad if place % 7 == 3 else token for place, token in enumerate(tokens)]
        for handle, tokens in known.items()
    }
    engine = NativeEngine(policy, RolloutConfig(kv_pages=24, max_sequences=4), None, seed=0)
    made = generate(guess(engine, Knowing(guesses, 1.0, 1000)), wanted)
    assert torch.equal(recorded_log_probs(made), recorded_log_probs(expected))
    assert engine.stats.recomputed_tokens > 0
    engine._drafter = engine._scheduler._drafter = None
    again = generate(engine, wanted)
    assert torch.equal(recorded_log_probs(again), recorded_log_probs(expected))


@pytest.mark.parametrize("shape", ["qwen3", "moe"])
def test_the_engines_own_guesses_are_accepted_where_answers_repeat(
    shape: str, make_policy: MakePolicy
) -> None:
    """By measured times, and as if nothing had to be waited for, as in a model that is not tiny."""
    policy, wanted = make_policy(shape, "fp8", trainable=False), requests(new=100, temperature=0.0)
    later = [replace(one, visit=1) for one in wanted]
    expected = drawn(policy, wanted), drawn(policy, later)
    engine = NativeEngine(policy, RolloutConfig(speculation=7), None, seed=0)
    engine._executor.wait_s = engine._executor.host_s = 0.0
    assert generate(engine, wanted) == expected[0]
    assert generate(engine, later) == expected[1]
    stats = engine.stats
    print(shape, stats.forwards, stats.accepted_tokens, stats.drafted_tokens)
    assert stats.accepted_tokens > stats.generated_tokens // 2 and stats.forwards < 60
    seconds = runner_of(engine)._seconds
    print({size: (f"{a:.2e}", f"{b:.2e}") for size, (a, b) in seconds.items()})
    assert all(0 < short < 1 and per_token >= 0 for short, per_token in seconds.values())


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_steps_with_guesses_take_no_more_than_is_planned(preset: Preset) -> None:
    """Beside what an engine without any takes; torch rounds each block up, to 2 MiB or 20."""
    policy = random_policy(WIDE, PrecisionConfig(preset=preset), 0, "cuda", trainable=False)
    wanted = requests(samples=16, new=24)
    expected = drawn(policy, wanted)
    taken, planned = dict[int, int](), dict[int, int]()
    for most in (0, 7):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        config = RolloutConfig(speculation=most, kv_pages=600, max_sequences=64)
        engine = NativeEngine(policy, config, None, seed=0)
        if most:
            guess(engine, Knowing(known_of(wanted, expected), 0.9, WIDE.vocab_size))
        assert generate(engine, wanted) == expected
        torch.cuda.empty_cache()
        taken[most] = torch.cuda.memory_reserved() - before
        planned[most] = forward_bytes(WIDE, policy.flow, config, policy.backend.sizes)
        if most:
            assert max(key.size for key in runner_of(engine)._steps) == SPECULATED_ROWS
        engine.release()
    print(preset, {most: (taken[most] // MIB, planned[most] // MIB) for most in taken})
    assert taken[7] - taken[0] <= planned[7] - planned[0] + 64 * MIB
