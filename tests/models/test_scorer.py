"""What a forward says of the tokens through each head, and the way back: values and entropies
beside log-probabilities, and a reward model's scores without either.
"""

from typing import get_args

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec.backend import SpecBackend
from isobit.models.frozen import last_tokens_batch
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch
from tests.models.test_packed_pass import (
    FLOWS,
    LENGTHS,
    LEVELS,
    Gradients,
    OtherGradients,
    PlainDecoder,
    ScalarHead,
    error,
    gradients,
    make,
    make_batch,
)


def some_others() -> OtherGradients:
    """The gradients by entropies and values."""
    generator = torch.Generator().manual_seed(2)
    count = make_batch(64)[0].rows.numel()
    return OtherGradients(*(torch.randn(2, count, generator=generator) / count))


def exact(policy: Policy, dtype: torch.dtype, others: OtherGradients) -> Gradients:
    return PlainDecoder(policy, dtype).gradients(*make_batch(64), others)[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_values_and_all_gradients_are_those_of_autograd(tied: bool) -> None:
    """Against FP64, with the same decoder in FP32 as the yardstick."""
    policy, others = make("qwen3", FLOWS["fp32"], tied, head="value"), some_others()
    wanted, yardstick = (exact(policy, dtype, others) for dtype in (torch.float64, torch.float32))
    ours, scores = gradients(policy, others=others), Scorer(policy).score(make_batch(64)[0])
    plain = PlainDecoder(policy, torch.float64).scores(make_batch(64)[0])
    assert scores.values is not None
    for name, found in {"values": scores.values, "entropies": scores.entropies}.items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), plain[name].detach(), rtol=0, atol=5e-6)
    assert list(ours) == list(wanted) and list(ours)[-1] == "value_head.weight"
    for name, gradient in wanted.items():
        assert error(ours[name], gradient) < 3 * error(yardstick[name], gradient) + 1e-6, name


@pytest.mark.few(2)
@pytest.mark.parametrize("flow", ["bf16", "fp8", "int8", "mixed"])
def test_gradients_in_lower_precision_are_near_those(flow: str) -> None:
    policy, others = make("qwen3", FLOWS[flow], head="value"), some_others()
    wanted = exact(policy, torch.float64, others)
    for name, ours in gradients(policy, others=others).items():
        cosine = torch.cosine_similarity(ours.flatten().double(), wanted[name].flatten(), 0)
        assert cosine > (0.999 if flow == "bf16" else 0.95), (name, float(cosine))


@pytest.mark.few(1)
@pytest.mark.parametrize("flow", FLOWS)
def test_computing_again_changes_no_bit(flow: str) -> None:
    policy, others = make("qwen3", FLOWS[flow], head="value"), some_others()
    saved, *again = (gradients(policy, level, others=others) for level in LEVELS)
    for other in again:
        assert all(torch.equal(saved[name], other[name]) for name in saved)


@pytest.mark.few(1)
@pytest.mark.parametrize("flow", FLOWS)
def test_a_value_head_changes_nothing_else(flow: str) -> None:
    """Scores and gradients of the loss by the log-probabilities alone."""
    without, policy = make("qwen3", FLOWS[flow]), make("qwen3", FLOWS[flow], head="value")
    batch, d_log_probs = make_batch(64)
    expected, scores = Scorer(without).score(batch), Scorer(policy).score(batch)
    assert expected.values is None and scores.values is not None
    assert torch.equal(scores.log_probs, expected.log_probs)
    assert torch.equal(scores.entropies, expected.entropies)
    scored = ScoredPass(policy, batch, "none")
    passed = scored.forward()
    assert passed.values is not None and torch.equal(passed.values, scores.values)
    scored.backward(d_log_probs)
    for name, gradient in gradients(without).items():
        found = policy.masters[name].grad
        assert found is not None and torch.equal(found, gradient)
    assert policy.masters["value_head.weight"].grad is None


def test_a_loss_by_the_values_alone_leaves_lm_head_alone() -> None:
    policy, others = make("qwen3", FLOWS["fp32"], head="value"), some_others()
    batch, _ = make_batch(64)
    scored = ScoredPass(policy, batch, "none")
    scored.forward()
    scored.backward(None, d_values=others.values)
    nothing = torch.zeros_like(others.entropies)
    plain = PlainDecoder(policy, torch.float64)
    _, wanted = plain.gradients(batch, nothing, OtherGradients(nothing, others.values))
    assert policy.masters["lm_head.weight"].grad is None
    for name in ("value_head.weight", "layers.0.qkv_proj.weight", "embed_tokens.weight"):
        found = policy.masters[name].grad
        assert found is not None and error(found, wanted[name]) < 1e-5


def test_one_number_spread_reaches_the_device_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's gradient of a mean has a stride of 0, and kernels read one number after the
    other.
    """
    policy, given = make("qwen3", FLOWS["bf16"], head="value"), []

    def to_device(self: SpecBackend, tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor)
        return tensor

    monkeypatch.setattr(SpecBackend, "to_device", to_device)
    spread = torch.tensor(0.1).expand(make_batch(64)[0].rows.shape)
    gradients(policy, others=OtherGradients(spread, spread))
    assert sum(torch.equal(tensor, spread) for tensor in given) == 2
    assert all(tensor.is_contiguous() for tensor in given)


def of_last_tokens(batch: PackedBatch) -> PackedBatch:
    """A reward model's batch."""
    return last_tokens_batch([ids.tolist() for ids in batch.token_ids.split(LENGTHS)])


def test_a_reward_models_scores_and_gradients_are_those_of_autograd() -> None:
    policy = make("qwen2", PrecisionConfig(preset="fp32"), head="score")
    assert policy.decoder.head is None and "lm_head.weight" not in policy.masters
    batch, d = of_last_tokens(make_batch(64)[0]), torch.linspace(-1, 1, len(LENGTHS))
    found = {}
    for dtype in (torch.float64, torch.float32):
        plain = PlainDecoder(policy, dtype)
        scores = plain.scores(batch)["values"]
        gradient = torch.autograd.grad(scores, list(plain.masters.values()), d.to(dtype))
        found[dtype] = scores.detach(), dict(zip(plain.masters, gradient, strict=True))
    (values, wanted), (_, yardstick) = found[torch.float64], found[torch.float32]
    scored = ScoredPass(policy, batch, "none")
    scores = scored.forward()
    assert scores.log_probs.shape == scores.entropies.shape == (0,)
    assert scores.values is not None and error(scores.values, values) < 1e-5
    scored.backward(None, d_values=d)
    for name, master in policy.masters.items():
        assert master.grad is not None
        limit = 3 * error(yardstick[name], wanted[name]) + 1e-6
        assert error(master.grad, wanted[name]) < limit, name


@pytest.mark.few(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("head", get_args(ScalarHead))
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_a_sequence_has_no_say_in_the_values_of_another(
    preset: Preset, head: ScalarHead, threads: int
) -> None:
    policy = make("qwen3", PrecisionConfig(preset=preset), head=head)
    batch = of_last_tokens(make_batch(64)[0])
    whole = Scorer(policy).score(batch).values
    torch.set_num_threads(threads)
    assert whole is not None
    for index, ids in enumerate(batch.token_ids.split(LENGTHS)):
        values = Scorer(policy).score(last_tokens_batch([ids.tolist()])).values
        assert values is not None and torch.equal(values, whole[index : index + 1])
