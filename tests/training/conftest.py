"""A tiny model, and groups as an exact engine would hand them over: recorded log-probabilities are
those of the training forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from isobit.algorithms.objective import Objective
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import TrainingConfig
from isobit.models.policy import Policy, random_policy
from isobit.records.batch import PackedBatch
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.training.trainer import Trainer
from tests.tiny import tiny_model

TINY = tiny_model(
    intermediate_size=256, num_heads=2, num_kv_heads=1, head_dim=64, max_positions=512
)
Keys = Mapping[str, str]
"""The table ``precision``."""
INT8_BEFORE: Keys = {"preset": "int8", "dgrad": "fp8", "wgrad": "bf16"}
"""The backward that ``int8`` had in earlier versions."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    def make(preset: Preset | Keys = "fp32", seed: int = 0) -> Policy:
        return random_policy(TINY, PrecisionConfig.model_validate(preset), seed)

    return make


@pytest.fixture
def make_trainer(make_policy: Callable[..., Policy]) -> Callable[..., Trainer]:
    def make(preset: Preset | Keys = "fp32", **settings: float | str) -> Trainer:
        config = TrainingConfig.model_validate(
            {"tokens_per_microbatch": 128, "learning_rate": 1e-3, **settings}
        )
        return Trainer(make_policy(preset), config, total_updates=10)

    return make


@pytest.fixture
def make_groups() -> Callable[..., list[Group]]:
    """Random completions with random 0/1 rewards, both kinds in every group; log-probabilities
    recorded from ``trainer``.
    """

    def make(trainer: Trainer, num_groups: int = 4, samples: int = 4, seed: int = 0) -> list[Group]:
        random = Random(seed)

        def tokens(low: int, high: int) -> tuple[int, ...]:
            return tuple(
                random.randrange(TINY.vocab_size) for _ in range(random.randint(low, high))
            )

        groups = []
        for index in range(num_groups):
            prompt = Prompt(f"test/{index}", "", tokens(2, 12))
            completions = [
                Completion(TokenSequence.of_answer(prompt.token_ids, ids), "", "stop")
                for ids in (tokens(1, 24) for _ in range(samples))
            ]
            rewards: list[float | None] = [float(random.random() < 0.5) for _ in completions]
            rewards[0], rewards[1] = 0.0, 1.0
            groups.append(record(trainer, Group(prompt, 0, completions, rewards)))
        return groups

    return make


def record(trainer: Trainer, group: Group) -> Group:
    """The group with each completion's log-probabilities computed by itself, in a batch of one."""
    return replace(
        group, completions=[_recorded(trainer, completion) for completion in group.completions]
    )


def _recorded(trainer: Trainer, completion: Completion) -> Completion:
    sequence = completion.sequence
    log_probs = sequence.spread(trainer.scorer.score(lay_end_to_end([sequence])).log_probs.tolist())
    return replace(completion, sequence=replace(sequence, log_probs=log_probs))


@pytest.fixture
def snapshot() -> Callable[[Policy], dict[str, torch.Tensor]]:
    """Copies of the masters, by name."""
    return lambda policy: {name: master.detach().clone() for name, master in policy.masters.items()}


@pytest.fixture
def gradients_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, torch.Tensor]]:
    """The gradients that one update on-policy would hand to the optimiser, before clipping, by
    master; no weight moves.
    """

    def gradients(
        trainer: Trainer, batches: Sequence[PackedBatch], objective: Objective
    ) -> dict[str, torch.Tensor]:
        caught: dict[str, torch.Tensor] = {}

        def catch(norm: float, rate: float) -> None:
            caught.update(
                {
                    name: master.grad.clone()
                    for name, master in trainer.policy.masters.items()
                    if master.grad is not None
                }
            )

        monkeypatch.setattr(trainer, "_step", catch)
        trainer.update(
            [
                replace(batch, old_log_probs=trainer.scorer.score(batch).log_probs)
                for batch in batches
            ],
            objective,
        )
        return caught

    return gradients
