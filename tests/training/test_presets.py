"""Each preset trains: the supervised loss falls, reinforcement learning raises the rewarded tokens,
and the bits agree before each step.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from isobit.algorithms.advantages import group_advantages
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import Preset
from isobit.records.text import Group
from isobit.training.step import train_on_groups
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer

PRESETS = get_args(Preset)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", PRESETS)
def test_supervised_loss_falls(preset: str, make_trainer: Callable[..., Trainer]) -> None:
    random = Random(0)
    prompts = [[random.randrange(128) for _ in range(random.randint(2, 9))] for _ in range(16)]
    batches = pack_pairs([(prompt, [7, 8, prompt[-1], 9]) for prompt in prompts], 64)
    trainer = make_trainer(preset)
    losses = [trainer.update(batches, SupervisedObjective()).metrics["loss"] for _ in range(12)]
    assert 4.5 < losses[0] < 5.2, "a random model is almost uniform over 128 tokens"
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", PRESETS)
def test_reinforcement_learning_raises_what_is_rewarded(
    preset: str, make_trainer: Callable[..., Trainer], make_groups: Callable[..., list[Group]]
) -> None:
    """The reward is the share of even tokens; the same completions are learnt from several times,
    re-recorded each time.
    """
    algorithm = build_algorithm(GrpoConfig())
    trainer = make_trainer(preset)

    def graded() -> list[Group]:
        groups = make_groups(
            trainer
        )  # the same tokens each time, log-probabilities under the present weights
        return [
            replace(
                group,
                rewards=[
                    sum(t % 2 == 0 for t in c.token_ids) / len(c.token_ids)
                    for c in group.completions
                ],
            )
            for group in groups
        ]

    def advantage_weighted(groups: list[Group]) -> float:
        return sum(
            advantage * sum(completion.log_probs) / len(completion.log_probs)
            for group in groups
            for completion, advantage in zip(
                group.completions, group_advantages(group.rewards, True), strict=True
            )
            if advantage is not None
        )

    before = advantage_weighted(graded())
    for _ in range(4):
        metrics = train_on_groups(trainer, graded(), algorithm, trainer.policy.flow.exact)
        assert metrics.metrics["updates/skipped"] == 0
        assert metrics.comparison.tokens_compared > 0
        assert metrics.comparison.tokens_differing == 0
    assert advantage_weighted(graded()) > before + 1.0
