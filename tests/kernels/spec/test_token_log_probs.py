"""lm_head and log-probability in chunks: the bits of the whole, and the explicit backward against
FP64 autograd.
"""

import pytest
import torch

from isobit.kernels.spec import token_log_probs as module
from isobit.kernels.spec.log_prob import log_softmax
from isobit.kernels.spec.publish import publish_head
from isobit.kernels.spec.token_log_probs import (
    head_logits,
    token_log_probs,
    token_log_probs_backward,
)

ROWS, WIDTH, VOCAB = 30, 128, 200
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype) -> Inputs:
    hidden, head = torch.randn(ROWS, WIDTH).to(dtype), (torch.randn(VOCAB, WIDTH) / 8).to(dtype)
    targets, temperatures = torch.randint(0, VOCAB, (ROWS,)), torch.linspace(0.5, 1.5, ROWS)
    return hidden, publish_head(head), targets, temperatures


def plain(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(hidden @ head.t() / temperatures[:, None], -1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.fixture(params=[1 << 22, VOCAB * 7], ids=["whole", "7 rows at a time"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of five chunks is short."""
    monkeypatch.setattr(module, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_logits_and_gradients_those_of_autograd(
    dtype: torch.dtype,
) -> None:
    hidden, head, targets, temperatures = inputs(dtype)
    picked, entropy = token_log_probs(hidden, head, targets, temperatures)
    log_probs = log_softmax(head_logits(hidden, head), temperatures)
    assert torch.equal(picked, log_probs.gather(1, targets[:, None])[:, 0])
    wide = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact, exact_entropy = plain(*wide, targets, temperatures.double())
    assert error(picked, exact.detach()) < 1e-5 and error(entropy, exact_entropy.detach()) < 1e-5
    d, grad = torch.randn(ROWS), torch.zeros(VOCAB, WIDTH)
    d_hidden = token_log_probs_backward(hidden, head, targets, temperatures, d, grad)
    exact_hidden, exact_head = torch.autograd.grad(exact, wide, d.double())
    assert d_hidden.dtype == dtype
    assert error(d_hidden, exact_hidden) < (1e-5 if dtype == torch.float32 else 2**-8)
    assert error(grad, exact_head) < 1e-5, "the head's gradient is FP32 in every flow"


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("of_log_probs", [True, False], ids=["and log-probabilities", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_entropies_are_those_of_autograd(
    dtype: torch.dtype, of_log_probs: bool
) -> None:
    """In FP64, with autograd in FP32 as the yardstick; one row is nearly certain."""
    hidden, head, targets, temperatures = inputs(dtype)
    hidden[3] = 40 * head[7]
    d, d_entropies = of_log_probs * torch.randn(ROWS), torch.randn(ROWS)
    found = []
    for to in (torch.float64, torch.float32):
        wide = hidden.detach().to(to).requires_grad_(), head.detach().to(to).requires_grad_()
        scores = plain(*wide, targets, temperatures.to(to))
        found.append(torch.autograd.grad(scores, wide, (d.to(to), d_entropies.to(to))))
    exact, yardstick = found
    grad = torch.zeros(VOCAB, WIDTH)
    given = hidden, head, targets, temperatures
    d_hidden = token_log_probs_backward(*given, d, grad, d_entropies)
    rounding = 0.0 if dtype == torch.float32 else 2.0**-8
    assert d_hidden.dtype == dtype
    assert error(d_hidden, exact[0]) <= 2 * error(yardstick[0], exact[0]) + rounding
    assert error(grad, exact[1]) <= 2 * error(yardstick[1], exact[1])
    again, twice = torch.zeros(VOCAB, WIDTH), d_entropies + d_entropies
    doubled = token_log_probs_backward(*given, d + d, again, twice)
    assert torch.equal(doubled, d_hidden + d_hidden) and torch.equal(again, grad + grad)


def test_without_gradients_of_entropies_the_bits_are_those_of_the_short_formula() -> None:
    hidden, head, targets, temperatures = inputs(torch.bfloat16)
    d, grad = torch.randn(ROWS), torch.zeros(VOCAB, WIDTH)
    d_hidden = token_log_probs_backward(hidden, head, targets, temperatures, d, grad, None)
    scaled, wide = d[:, None] / temperatures[:, None], head.float()
    logits = hidden.float() @ wide.t() / temperatures[:, None]
    d_logits = torch.softmax(logits, -1) * -scaled
    d_logits.scatter_add_(1, targets[:, None], scaled)
    assert torch.equal(d_hidden, (d_logits @ wide).bfloat16())
    assert torch.equal(grad, torch.zeros(VOCAB, WIDTH).addmm_(d_logits.t(), hidden.float()))


def test_gradients_are_added_as_one_sum_and_repeat_their_bits() -> None:
    hidden, head, targets, temperatures = inputs(torch.bfloat16)
    d, before = torch.randn(ROWS), torch.randn(VOCAB, WIDTH)
    once, added = torch.zeros(VOCAB, WIDTH), before.clone()
    first = token_log_probs_backward(hidden, head, targets, temperatures, d, once)
    again = token_log_probs_backward(hidden, head, targets, temperatures, d, added)
    assert torch.equal(first, again) and torch.equal(added, before + once)


def test_a_chunk_changes_no_bit_of_a_log_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(torch.bfloat16)
    whole = token_log_probs(*given)
    monkeypatch.setattr(module, "CHUNK", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, token_log_probs(*given), strict=True))


def test_no_tokens() -> None:
    head, grad = torch.randn(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH)
    nothing = torch.randn(0, WIDTH), head, torch.empty(0, dtype=torch.int64), torch.empty(0)
    picked, entropies = token_log_probs(*nothing)
    assert picked.shape == entropies.shape == (0,)
    assert token_log_probs_backward(*nothing, torch.empty(0), grad).shape == (0, WIDTH)
    assert not grad.any()
