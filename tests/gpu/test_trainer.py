"""Steps of reinforcement learning on a GPU: what the engine recorded is what the trainer computes,
after every update, to the last bit.
"""

from collections.abc import Callable

import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.models.policy import Policy
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.training.step import StepMetrics, train_on_groups
from isobit.training.trainer import Trainer

MakePolicy = Callable[..., Policy]
STEPS, PROMPTS, SAMPLES = 3, 6, 4


def learn(
    policy: Policy, config: TrainingConfig, steps: int = STEPS
) -> tuple[Trainer, list[StepMetrics]]:
    """A reward with spread: the share of even tokens."""
    trainer = Trainer(policy, config, total_updates=steps)
    engine = NativeEngine(policy, RolloutConfig(max_sequences=16, kv_pages=256), None, seed=0)
    found = []
    for step in range(steps):
        prompts = [Prompt(f"p{i}", "", tuple(range(7 * i + 1, 7 * i + 30))) for i in range(PROMPTS)]
        requests = [Request(prompt, step, SAMPLES, SamplingParams(60)) for prompt in prompts]
        completions = generate(engine, requests)
        groups = [
            Group(
                r.prompt,
                r.visit,
                samples,
                [share_of_even(completion.token_ids) for completion in samples],
            )
            for r, samples in zip(requests, completions, strict=True)
        ]
        algorithm = build_algorithm(GrpoConfig())
        found.append(train_on_groups(trainer, groups, algorithm, policy.flow.exact))
    return trainer, found


def share_of_even(token_ids: tuple[int, ...]) -> float:
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def config(**settings: object) -> TrainingConfig:
    return TrainingConfig(
        learning_rate=1e-3,
        tokens_per_microbatch=700,
        samples_per_prompt=SAMPLES,
        **settings,  # pyright: ignore[reportArgumentType]
    )  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("preset", ["fp8", "fp8-linear", "bf16"])
def test_no_recorded_log_probability_differs_after_updates(
    shape: str, preset: Preset, make_policy: MakePolicy
) -> None:
    policy = make_policy(shape, preset)
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    _, steps = learn(policy, config(moments="bf16"))
    assert [step.comparison.tokens_differing for step in steps] == [0] * STEPS
    assert all(step.comparison.tokens_compared == PROMPTS * SAMPLES * 60 for step in steps)
    assert all(not torch.equal(before[name], master) for name, master in policy.masters.items())


def test_what_was_recorded_before_an_update_differs_after_it(make_policy: MakePolicy) -> None:
    """The control: the count above can be something else than 0."""
    policy = make_policy("qwen3", "fp8")
    trainer = Trainer(policy, config(), total_updates=2)
    engine = NativeEngine(policy, RolloutConfig(max_sequences=16, kv_pages=256), None, seed=0)
    (samples,) = generate(
        engine, [Request(Prompt("p", "", (1, 2, 3)), 0, SAMPLES, SamplingParams(60))]
    )
    groups = [
        Group(
            Prompt("p", "", (1, 2, 3)),
            0,
            samples,
            [share_of_even(completion.token_ids) for completion in samples],
        )
    ]
    algorithm = build_algorithm(GrpoConfig())
    first, second = (train_on_groups(trainer, groups, algorithm, True) for _ in range(2))
    assert first.comparison.tokens_differing == 0
    assert second.comparison.tokens_differing > 0


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_two_runs_and_all_recomputations_give_the_same_bytes(
    moments: str, make_policy: MakePolicy
) -> None:
    first, *others = (
        learn(make_policy("qwen3", "fp8"), config(moments=moments, recompute=level))[0]
        for level in ("none", "none", "mlp", "full")
    )
    for other in others:
        assert all(
            torch.equal(master, other.policy.masters[name])
            for name, master in first.policy.masters.items()
        )
        assert all(
            torch.equal(value.cpu(), other.moments()[name].cpu())
            for name, value in first.moments().items()
        )


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_a_restored_trainer_goes_on_with_the_same_bytes(
    moments: str, make_policy: MakePolicy
) -> None:
    whole, _ = learn(make_policy("qwen3", "fp8"), config(moments=moments))
    begun, _ = learn(make_policy("qwen3", "fp8"), config(moments=moments))
    resumed = Trainer(make_policy("qwen3", "fp8"), config(moments=moments), total_updates=STEPS)
    resumed.policy.restore(
        {name: master.detach().cpu() for name, master in begun.policy.masters.items()},
        begun.policy.version,
    )
    resumed.restore(
        begun.counters(), {name: value.cpu() for name, value in begun.moments().items()}
    )
    for trainer in (whole, resumed):
        samples = generate(
            NativeEngine(
                trainer.policy, RolloutConfig(max_sequences=16, kv_pages=256), None, seed=0
            ),
            [Request(Prompt("p", "", (1, 2, 3)), 9, SAMPLES, SamplingParams(60))],
        )[0]
        group = Group(
            Prompt("p", "", (1, 2, 3)),
            9,
            samples,
            [share_of_even(completion.token_ids) for completion in samples],
        )
        train_on_groups(trainer, [group], build_algorithm(GrpoConfig()), True)
    assert all(
        torch.equal(master, resumed.policy.masters[name])
        for name, master in whole.policy.masters.items()
    )
    assert all(
        torch.equal(value.cpu(), resumed.moments()[name].cpu())
        for name, value in whole.moments().items()
    )
