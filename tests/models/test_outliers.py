"""Channels of a norm that stand out, planted in models that compute the same function: they are
moved into the matrices behind it before INT8 has one scale for all channels of a token.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.models.config import Experts, ModelConfig
from isobit.models.master_values import MasterValues
from isobit.models.outliers import fold_norms, outstanding
from isobit.models.policy import Policy, random_masters
from isobit.models.scorer import Scorer
from isobit.proof.verify import VerifyOptions, verify_policy
from tests.models.policies import whole_batch

DENSE = ModelConfig("qwen3", 300, 128, 256, 2, 4, 2, 32, 512, 1e-6, 1e6, tied_embeddings=True)
SHAPES = {
    "dense": DENSE,
    "experts": replace(DENSE, family="qwen3_moe", experts=Experts(4, 2, 64, True)),
}
CHANNELS = [3, 17, 64, 65, 100, 127]


def masters(name: str, factor: float) -> dict[str, torch.Tensor]:
    """Random weights; ``CHANNELS`` of each layer's norms times ``factor``, undone behind them."""
    made = dict(random_masters(SHAPES[name], 0))
    for path, values in made.items():
        own = path.removesuffix(".weight").rpartition(".")[2]
        if path.startswith("layers."):
            if own in ("input_norm", "post_attention_norm"):
                values[CHANNELS] *= factor
            elif own in ("qkv_proj", "gate_up_proj", "router"):
                values[:, CHANNELS] /= factor
    return made


def log_probs(config: ModelConfig, preset: Preset, of: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = torch.arange(200) * 37 % config.vocab_size
    policy = Policy(config, PrecisionConfig(preset=preset), of, trainable=False)
    return Scorer(policy).score(whole_batch(ids, (120, 80), ids.flip(0))).log_probs


@pytest.mark.parametrize("factor", [16.0, 2.0**14])
def test_what_stands_out_of_a_norm_around_zero_is_moved_as_of_one_around_one(factor: float) -> None:
    """Its weights are its published numbers less 1, which rounds nothing here."""
    config = replace(DENSE, family="gemma3_text")
    given = dict(random_masters(config, 0))
    norms = {name for name in given if name.endswith("norm.weight")}
    plain = {name: values + (name in norms) for name, values in given.items()}
    for name in norms:
        if len(given[name]) > max(CHANNELS):
            given[name][CHANNELS] = factor - 1
            plain[name][CHANNELS] = factor
    moved = dict(fold_norms(given.items(), lambda path: True, lambda channels: None, 1.0))
    expected = dict(fold_norms(plain.items(), lambda path: True, lambda channels: None))
    for name, values in moved.items():
        other = expected[name]
        assert isinstance(values, torch.Tensor) and isinstance(other, torch.Tensor)
        assert torch.equal(values + (name in norms), other), name
        assert not name.endswith("input_norm.weight") or not torch.equal(values, given[name])


def test_norms_behind_blocks_stay_as_they_are() -> None:
    config = replace(DENSE, family="olmo2")
    of = dict(random_masters(config, 0))
    for name, values in of.items():
        if "output_norm" in name:
            values[CHANNELS] *= 100
    made = dict(fold_norms(of.items(), lambda path: True, lambda channels: None))
    assert made.keys() == of.keys()
    for name, values in made.items():
        assert isinstance(values, torch.Tensor) and torch.equal(values, of[name]), name


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).double().square().mean().sqrt())


def folded(of: dict[str, torch.Tensor]) -> Iterator[tuple[str, MasterValues]]:
    return fold_norms(of.items(), lambda path: path.startswith("layers."), lambda _: None)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("factor", [16.0, 300.0, 2.0**14])
def test_a_folded_model_is_the_same_function(name: str, factor: float) -> None:
    """By powers of two, which round nothing."""
    given = masters(name, factor)
    moved = {path: values for path, values in folded(given) if isinstance(values, torch.Tensor)}
    for layer in (0, 1):
        norm, matrix = (f"layers.{layer}.{n}.weight" for n in ("input_norm", "qkv_proj"))
        times = given[norm] / moved[norm]
        assert (times[CHANNELS] > 1).all() and (times > 1).sum() == len(CHANNELS)
        assert torch.equal(times.log2(), times.log2().round())
        assert torch.equal(moved[norm].bfloat16() * times, given[norm].bfloat16().float())
        assert torch.equal(moved[matrix] / times, given[matrix])
    exact = log_probs(SHAPES[name], "fp32", masters(name, 1.0))
    assert distance(log_probs(SHAPES[name], "fp32", moved), exact) < 2e-6


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("factor", [2.0**4, 2.0**8, 2.0**14])
def test_int8_loses_no_more_than_without_outliers(
    name: str, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log-probabilities are as far from BF16's, within a half."""
    lost = []
    for planted in (1.0, factor):
        given = masters(name, planted)
        lost.append(
            distance(log_probs(SHAPES[name], "int8", given), log_probs(SHAPES[name], "bf16", given))
        )
    assert lost[1] < 1.5 * lost[0]
    told = capsys.readouterr()
    assert "24 channels of 4 norms" in told.out + told.err


@pytest.mark.exhaustive
def test_rollout_and_training_have_the_same_bits() -> None:
    policy = Policy(DENSE, PrecisionConfig(preset="int8"), masters("dense", 2.0**8))
    result = verify_policy(policy, VerifyOptions(5, 2, 6))
    assert result.comparison.tokens_differing == 0 < result.comparison.tokens_compared


@pytest.mark.parametrize("preset", ["fp8", "bf16", "fp32"])
def test_flows_without_int8_keep_their_masters(preset: Preset) -> None:
    given = masters("dense", 2.0**8)
    policy = Policy(DENSE, PrecisionConfig(preset=preset), given)
    assert all(torch.equal(policy.masters[name], values) for name, values in given.items())


def test_what_stands_out_is_beyond_twice_the_median_and_moves_by_powers_of_two() -> None:
    norm = torch.tensor([1.0, -1.0, 1.0, 1.0, 2.0, -2.5, 100.0, 0.0, torch.inf])
    assert outstanding(norm).tolist() == [1, 1, 1, 1, 1, 4, 128, 1, 1]
    assert torch.equal(outstanding(torch.zeros(5)), torch.ones(5))
    assert torch.equal(outstanding(torch.full((5,), torch.nan)), torch.ones(5))


def test_a_norm_that_was_divided_stays_as_it_is() -> None:
    """Also where what moved lowers the median, and another channel then stands out."""
    broad = torch.randn(999).double().mul(3).exp().float()
    for norm in (torch.tensor([1.0, 1.0, 2.0, 2.3, 2.3, 0.1]), broad, broad.bfloat16()):
        factor = outstanding(norm)
        assert (factor > 1).any() and torch.equal(factor.log2(), factor.log2().round())
        again = norm.float() / factor
        assert again.abs().max() <= 2 * again.abs().median()
        assert torch.equal(outstanding(again), torch.ones_like(factor))
