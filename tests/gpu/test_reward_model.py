"""Reward models on a GPU: scores that do not depend on what else is scored, near those of the
specification, and a training from pairs that repeats its bits.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import TrainingConfig
from isobit.data.tokenizer import load_tokenizer
from isobit.models.config import ModelConfig
from isobit.models.frozen import FrozenPolicy, RewardModel
from isobit.models.policy import Policy, random_masters
from isobit.starter import starter_folder
from isobit.training.supervised import PreferenceObjective, measure_pairs, pack_preferences
from isobit.training.trainer import Trainer
from tests.gpu.conftest import RANKING

LENGTHS = (5, 300, 1, 33, 128, 129, 700, 17)
Shapes = Mapping[str, ModelConfig]
FLOWS: list[Preset] = ["fp8", "bf16"]
of_dense_families = pytest.mark.parametrize("shape", RANKING)


def drawn(config: ModelConfig) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A reward model of that shape and its masters, drawn on the CPU; scores about 1 apart."""
    config = replace(config, score_head=True, pad_token_id=0)
    masters = dict(random_masters(config, seed=0))
    masters["score.weight"] *= 50 / config.hidden_size**0.5
    return config, masters


def reward_model(config: ModelConfig, preset: Preset, device: str = "cuda") -> RewardModel:
    config, masters = drawn(config)
    frozen = FrozenPolicy.publish(config, PrecisionConfig(preset=preset), masters, device)
    return RewardModel(frozen, load_tokenizer(starter_folder()))


def sequences(vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@of_dense_families
@pytest.mark.parametrize("preset", FLOWS)
def test_a_score_does_not_depend_on_neighbours_order_or_packing(
    shape: str, shapes: Shapes, preset: Preset
) -> None:
    model = reward_model(shapes[shape], preset)
    given = sequences(model.policy.config.vocab_size)
    together = torch.tensor(model.score(given, 16384))
    assert torch.isfinite(together).all() and len(set(together.tolist())) == len(given)
    others = sequences(model.policy.config.vocab_size, 1)
    for scores in (
        [model.score([ids], 16384)[0] for ids in given],
        model.score(given, 400),
        model.score(given[::-1], 16384)[::-1],
        model.score([*others, *given], 16384)[len(others) :],
    ):
        assert torch.equal(torch.tensor(scores), together)


@of_dense_families
@pytest.mark.parametrize("preset", FLOWS)
def test_scores_are_near_those_of_the_specification_in_fp32(
    shape: str, shapes: Shapes, preset: Preset
) -> None:
    config = shapes[shape]
    given = sequences(config.vocab_size)
    exact = torch.tensor(reward_model(config, "fp32", "cpu").score(given, 16384))
    scores = torch.tensor(reward_model(config, preset).score(given, 16384))
    error = (scores - exact).square().mean().sqrt() / exact.std()
    assert 0 < float(error) < (0.05 if preset == "bf16" else 0.3)


@pytest.mark.parametrize("preset", FLOWS)
def test_training_from_pairs_ranks_them_and_repeats_its_bits(
    shapes: Shapes, preset: Preset
) -> None:
    given = sequences(shapes["qwen3"].vocab_size)
    pairs = list(zip(given[0::2], given[1::2], strict=True))
    batches = pack_preferences(pairs, 700, pad_token_id=0)
    config = TrainingConfig.model_validate({"learning_rate": 1e-3, "tokens_per_microbatch": 700})
    heads, figures = [], []
    for _ in range(2):
        shape, masters = drawn(shapes["qwen3"])
        policy = Policy(shape, PrecisionConfig(preset=preset), masters, "cuda")
        trainer = Trainer(policy, config, 10)
        before = measure_pairs(trainer.scorer, batches)
        for _ in range(6):
            assert trainer.update(batches, PreferenceObjective()).skipped is None
        figures.append(measure_pairs(trainer.scorer, batches))
        heads.append(trainer.policy.masters["score.weight"].detach().cpu())
        assert figures[-1].loss < before.loss / 2 and figures[-1].accuracy == 1.0
    assert torch.equal(*heads) and figures[0] == figures[1]
