"""RMSNorm, SwiGLU, RoPE, the embedding and the log-probability: values against torch, gradients,
and rows free of their place.
"""

import pytest
import torch
from isobit.kernels.spec.rms_norm import rms_norm, rms_norm_forward, row_sum

from isobit.errors import NonFiniteError
from isobit.kernels.spec.embedding import embedding
from isobit.kernels.spec.log_prob import log_softmax
from isobit.kernels.spec.rope import RopeTable, rope
from isobit.kernels.spec.swiglu import swiglu, swiglu_forward
from isobit.kernels.spec.token_log_probs import head_logits, token_log_probs


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def test_rms_norm_values_and_gradients() -> None:
    x, w = torch.randn(20, 128, requires_grad=True), torch.randn(128, requires_grad=True)
    y = rms_norm(x, w.detach(), w, 1e-6)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, w), dy)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    reference = torch.nn.functional.rms_norm(x64, (128,), w64, 1e-6)
    exact = torch.autograd.grad(reference, (x64, w64), dy.double())
    assert error(y, reference.detach()) <= 2 * error(
        torch.nn.functional.rms_norm(x, (128,), w, 1e-6).detach(), reference.detach()
    )
    assert all(error(a, b) < 1e-6 for a, b in zip(ours, exact, strict=True))


def test_swiglu_values_and_gradients() -> None:
    x = (3 * torch.randn(20, 256)).requires_grad_()
    y = swiglu(x)
    dy = torch.randn_like(y)
    (ours,) = torch.autograd.grad(y, x, dy)
    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, -1)
    reference = torch.nn.functional.silu(gate) * up
    (exact,) = torch.autograd.grad(reference, x64, dy.double())
    assert error(y, reference.detach()) < 2e-7 and error(ours, exact) < 3e-7


def test_rope_turns_back_with_its_gradient() -> None:
    table = RopeTable.build(torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64), 50)
    positions = torch.tensor([0, 3, 49])
    x = torch.randn(3, 2, 8, requires_grad=True)
    y = rope(x, table.rows(positions))
    (back,) = torch.autograd.grad(y, x, y.detach())
    torch.testing.assert_close(back, x.detach())  # a rotation is orthogonal
    assert torch.equal(y[0], x[0])
    a, b = x[1, 0, 0].item(), x[1, 0, 4].item()
    angle = torch.tensor(3.0, dtype=torch.float64)
    assert abs(y[1, 0, 0].item() - (a * angle.cos() - b * angle.sin()).item()) < 1e-6


def test_embedding_gradient_repeats_its_bits() -> None:
    master = torch.nn.Parameter(torch.randn(32, 64))
    ids = torch.randint(0, 32, (5000,))
    dy = torch.randn(5000, 64)
    grads = [
        torch.autograd.grad(embedding(ids, master.detach(), master), master, dy)[0]
        for _ in range(5)
    ]
    assert all(torch.equal(grads[0], g) for g in grads[1:])
    exact = torch.zeros(32, 64, dtype=torch.float64).index_add_(0, ids, dy.double())
    assert error(grads[0], exact) < 1e-6


@pytest.mark.parametrize("width", [128, 320, 4096, 5120])
def test_rows_do_not_depend_on_their_place(width: int) -> None:
    x = (torch.randn(70, width) * torch.exp(2 * torch.randn(70, width))).bfloat16()
    w = torch.randn(width)
    norm, act = rms_norm_forward(x, w, 1e-6)[0], swiglu_forward(x)
    log_probs = log_softmax(x.float(), torch.full((70,), 0.7))
    for rows in [slice(i, i + n) for i, n in ((0, 1), (1, 1), (3, 2), (10, 7), (33, 37), (69, 1))]:
        assert torch.equal(rms_norm_forward(x[rows], w, 1e-6)[0], norm[rows])
        assert torch.equal(swiglu_forward(x[rows]), act[rows])
        assert torch.equal(
            log_softmax(x[rows].float(), torch.full((70,), 0.7)[rows]), log_probs[rows]
        )


def test_row_sum_of_a_wide_row_is_cut_the_same_way_for_any_batch() -> None:
    x = torch.randn(3, 151_936)
    whole = row_sum(x)
    assert all(torch.equal(row_sum(x[i : i + 1]), whole[i : i + 1]) for i in range(3))
    assert error(whole, x.double().sum(-1, keepdim=True)) < 1e-5


def test_log_softmax_against_fp64_with_torch_as_the_yardstick() -> None:
    logits, temperature = 5 * torch.randn(40, 10_000), torch.linspace(0.5, 2, 40)
    exact = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
    ours, yardstick = (
        log_softmax(logits, temperature),
        torch.log_softmax(logits / temperature[:, None], -1),
    )
    assert (ours - exact).abs().max() <= 2 * (yardstick - exact).abs().max()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_by_name(bad: float) -> None:
    logits = torch.randn(4, 128)
    logits[2, 3] = bad
    with pytest.raises(NonFiniteError, match="logits: 1 of 4 rows"):
        log_softmax(logits, torch.ones(4))


def test_token_log_probs_equal_the_logits_and_their_gradients_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "isobit.kernels.spec.token_log_probs._CHUNK", 128 * 7
    )  # 7 rows at a time: the last chunk is short
    hidden, head = (
        torch.randn(30, 128, requires_grad=True),
        torch.nn.Parameter(torch.randn(128, 128) / 8),
    )
    targets, temperatures = torch.randint(0, 128, (30,)), torch.linspace(0.5, 1.5, 30)
    picked, entropy = token_log_probs(hidden, head, head.detach(), targets, temperatures)
    log_probs = log_softmax(head_logits(hidden.detach(), head.detach()), temperatures)
    assert torch.equal(picked, log_probs.gather(1, targets[:, None])[:, 0])
    assert not entropy.requires_grad
    h64, w64 = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    reference = torch.log_softmax(h64 @ w64.t() / temperatures.double()[:, None], -1)
    assert error(entropy, -(reference.exp() * reference).sum(-1).detach()) < 1e-5
    g = torch.randn(30)
    ours = torch.autograd.grad(picked, (hidden, head), g)
    exact = torch.autograd.grad(reference.gather(1, targets[:, None])[:, 0], (h64, w64), g.double())
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, exact, strict=True))


def test_token_log_probs_of_no_tokens() -> None:
    head = torch.nn.Parameter(torch.randn(128, 128))
    picked, _ = token_log_probs(
        torch.randn(0, 128), head, head.detach(), torch.empty(0, dtype=torch.int64), torch.empty(0)
    )
    picked.sum().backward()
    assert picked.shape == (0,) and torch.equal(head.grad, torch.zeros(128, 128))  # type: ignore[arg-type]
