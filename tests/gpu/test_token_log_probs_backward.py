"""The backward of lm_head and log-probability on the GPU: near FP64, repeatable, in parts, and
added to what is there.
"""

from typing import Any

import pytest
import torch

from isobit.kernels.operands import HeadWeight
from isobit.kernels.triton import sizes
from isobit.kernels.triton.head import log_sum_exp, logit_gradients
from tests.gpu.kernels import GPU
from tests.kernels.comparison import relative_error

VOCABULARIES = [1000, 5001, 151936]
WIDTH = 512

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def token_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return GPU.token_log_probs(hidden, HeadWeight(weight), *given)


def token_log_probs_backward(
    hidden: torch.Tensor, weight: torch.Tensor, *given: Any
) -> torch.Tensor:
    return GPU.token_log_probs_backward(hidden, HeadWeight(weight), *given)


def some_inputs(rows: int, vocab_size: int, size: float = 1.0) -> Inputs:
    """Hidden, weight, targets (half of them likely ones), temperatures (0 and 1 among them) and the
    gradients of magnitude ``size``.
    """
    generator = torch.Generator("cuda").manual_seed(vocab_size)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    hidden, weight = randn(rows, WIDTH).bfloat16(), (randn(vocab_size, WIDTH) / 8).bfloat16()
    targets = torch.randint(vocab_size, (rows,), device="cuda", generator=generator)
    likely = (hidden.float() @ weight.float().t()).argmax(1)
    targets = torch.where(torch.arange(rows, device="cuda") % 2 == 0, targets, likely)
    temperatures = 0.5 + torch.rand(rows, device="cuda", generator=generator)
    temperatures[::5], temperatures[1::5] = 0.0, 1.0
    return hidden, weight, targets, temperatures, size * randn(rows)


def exact_gradients(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP64: by the logits, by hidden and by the weight."""
    hidden, weight, targets, temperatures, d_log_probs = inputs
    logits = hidden.double() @ weight.double().t()
    scale = temperatures.double().masked_fill(temperatures == 0, 1.0)[:, None]
    d_logits = -torch.softmax(logits / scale, 1)
    d_logits[torch.arange(len(targets)), targets] += 1
    d_logits *= d_log_probs.double()[:, None] / scale
    return d_logits, d_logits @ weight.double(), d_logits.t() @ hidden.double()


@pytest.mark.parametrize("size", [1.0, 1e-12])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_values_against_fp64(vocab_size: int, size: float) -> None:
    inputs = some_inputs(300, vocab_size, size)
    hidden, weight, targets, temperatures, d_log_probs = inputs
    d_logits, d_hidden, d_weight = exact_gradients(inputs)
    logits = hidden.float() @ weight.float().t()
    ours = logit_gradients(
        logits, targets, temperatures, log_sum_exp(logits, temperatures), d_log_probs
    )
    row = (d_log_probs / temperatures.masked_fill(temperatures == 0, 1.0)).abs().double()[:, None]
    # half a unit in BF16's last place; the logits themselves are rounded to FP32, and 1 - p carries
    # the error of p in full
    onehot = torch.zeros_like(d_logits).scatter_(1, targets[:, None], 1.0)
    assert (
        (ours.double() - d_logits).abs()
        <= (2.0**-8 + 5e-5) * d_logits.abs() + row * (5e-5 * onehot + 1e-12)
    ).all()
    grad = torch.zeros_like(weight, dtype=torch.float32)
    assert relative_error(token_log_probs_backward(*inputs, grad), d_hidden) < 4e-3
    assert relative_error(grad, d_weight) < 4e-3


@pytest.mark.parametrize("drawn", [5001, 5056, 5100])  # what fills a tile, none and less
def test_rows_beyond_the_distribution_have_no_part_in_it(drawn: int) -> None:
    """Even where they are infinite in the forward; a backward multiplies them by zeros."""
    hidden, weight, targets, temperatures, d_log_probs = some_inputs(300, 5100)
    given = targets % drawn, temperatures
    exact = exact_gradients((hidden, weight[:drawn], *given, d_log_probs))
    grad = torch.zeros_like(weight, dtype=torch.float32)
    d_hidden = token_log_probs_backward(
        hidden, weight, *given, d_log_probs, grad, torch.ones_like(d_log_probs) * 0, drawn
    )
    assert relative_error(d_hidden, exact[1]) < 4e-3
    assert relative_error(grad[:drawn], exact[2]) < 4e-3 and not grad[drawn:].any()
    alone = token_log_probs(hidden, weight[:drawn].contiguous(), *given)
    weight[drawn:] = torch.inf
    for whole, mine in zip(alone, token_log_probs(hidden, weight, *given, drawn), strict=True):
        assert torch.equal(whole, mine) and mine.isfinite().all()


def test_a_loss_falls_along_the_gradient() -> None:
    """The direction is that of the forward: a step along the gradient raises the log-probabilities
    by what the gradient says.
    """
    hidden, weight, targets, temperatures, _ = some_inputs(256, 5001)
    ones = torch.ones_like(temperatures)
    grad = torch.zeros_like(weight, dtype=torch.float32)
    token_log_probs_backward(hidden, weight, targets, temperatures, ones, grad)
    rate = 1e-3
    after = (weight.float() + rate * grad).bfloat16()
    gain = (
        token_log_probs(hidden, after, targets, temperatures)[0]
        - token_log_probs(hidden, weight, targets, temperatures)[0]
    ).sum()
    predicted = (grad.double() * (after.double() - weight.double())).sum()
    assert gain.item() == pytest.approx(predicted.item(), rel=0.2) and gain > 0


@pytest.mark.parametrize("of_log_probs", [True, False])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_gradients_of_entropies_against_fp64(vocab_size: int, of_log_probs: bool) -> None:
    hidden, weight, targets, temperatures, d_log_probs = some_inputs(300, vocab_size)
    d_log_probs = of_log_probs * d_log_probs
    d_entropies = torch.randn_like(d_log_probs)
    inputs = hidden, weight, targets, temperatures, d_log_probs
    d_logits, _, _ = exact_gradients(inputs)
    scale = temperatures.double().masked_fill(temperatures == 0, 1.0)[:, None]
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / scale, 1)
    p = log_p.exp()
    entropies = -(p * log_p).sum(1, keepdim=True)
    d_logits -= p * (log_p + entropies) * d_entropies.double()[:, None] / scale
    grad = torch.zeros_like(weight, dtype=torch.float32)
    d_hidden = token_log_probs_backward(*inputs, grad, d_entropies)
    assert relative_error(d_hidden, d_logits @ weight.double()) < 4e-3
    assert relative_error(grad, d_logits.t() @ hidden.double()) < 4e-3
    again = torch.zeros_like(grad)
    assert torch.equal(token_log_probs_backward(*inputs, again, d_entropies), d_hidden)
    assert torch.equal(again, grad)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_gradients_of_zero_by_the_entropies_are_no_gradients(vocab_size: int) -> None:
    """Number for number; None leaves the term out of the kernel."""
    inputs = some_inputs(300, vocab_size)
    without, with_zeros = (torch.zeros_like(inputs[1], dtype=torch.float32) for _ in range(2))
    d_hidden = token_log_probs_backward(*inputs, without)
    zeros = torch.zeros_like(inputs[4])
    assert torch.equal(token_log_probs_backward(*inputs, with_zeros, zeros), d_hidden)
    assert torch.equal(with_zeros, without)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_rows_of_the_logits_gradient_do_not_depend_on_the_batch(vocab_size: int) -> None:
    hidden, weight, targets, temperatures, d_log_probs = some_inputs(300, vocab_size)
    logits = hidden.float() @ weight.float().t()
    log_sums = log_sum_exp(logits, temperatures)
    of_entropies = torch.rand_like(log_sums), torch.randn_like(log_sums)
    for entropies in (None, of_entropies):
        given = logits, targets, temperatures, log_sums, d_log_probs
        whole = logit_gradients(*given, entropies)
        for part in (slice(0, 1), slice(7, 8), slice(44, 300)):
            logit, target, temperature, log_sum, d = (x[part].clone() for x in given)
            own = entropies and (entropies[0][part].clone(), entropies[1][part].clone())
            alone = logit_gradients(logit, target, temperature, log_sum, d, own)
            assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_same_bits_every_time_in_parts_or_not(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = some_inputs(700, vocab_size)
    start = torch.randn(
        vocab_size, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        grad = start.clone()
        return token_log_probs_backward(*inputs, grad), grad

    whole = backward()
    monkeypatch.setattr(sizes, "BACKWARD_BYTES", 6 * vocab_size * 256)
    parts = backward()
    assert all(torch.equal(a, b) for a, b in zip(parts, backward(), strict=True))
    assert (
        relative_error(parts[0], whole[0]) < 4e-3
        and relative_error(parts[1] - start, whole[1] - start) < 1e-4
    )
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(whole, backward(), strict=True))


def test_what_is_not_finite_is_not_hidden() -> None:
    inputs = some_inputs(40, 1000)
    inputs[0][3, 5] = torch.inf
    grad = torch.zeros_like(inputs[1], dtype=torch.float32)
    d_hidden = token_log_probs_backward(*inputs, grad)
    assert d_hidden.isnan().any(1).tolist() == [row == 3 for row in range(40)]
    assert grad.isnan().any()
