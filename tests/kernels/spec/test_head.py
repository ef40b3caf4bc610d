"""log-softmax in one order, and what it refuses.

Noise as a pure function of key, position and vocabulary entry.

The filters against transformers' own warpers, and draws against the distribution they come
from.

The head of one output: values and the explicit backward against FP64, with torch's product of
the same dtype as the yardstick, and a row's bits in every batch.

lm_head and log-probability in chunks: the bits of the whole, and the explicit backward against
FP64 autograd.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from isobit.kernels.spec import head
from isobit.kernels.spec import head as module
from isobit.kernels.spec.head import (
    draw,
    gumbel,
    head_logits,
    log_softmax,
    scalar_head,
    scalar_head_backward,
    token_log_probs,
    token_log_probs_backward,
    truncate,
    uniforms,
)
from isobit.kernels.spec.quantise import publish_head
from isobit.util.errors import NonFiniteError


def test_values_against_fp64_with_torch_as_the_yardstick() -> None:
    logits, temperature = 5 * torch.randn(40, 10_000), torch.linspace(0.5, 2, 40)
    exact = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
    ours, yardstick = (
        log_softmax(logits, temperature),
        torch.log_softmax(logits / temperature[:, None], -1),
    )
    assert (ours - exact).abs().max() <= 2 * (yardstick - exact).abs().max()


@pytest.mark.parametrize("width", [128, 320, 4096, 10_000])
def test_rows_do_not_depend_on_their_place(width: int) -> None:
    logits, temperatures = 5 * torch.randn(70, width), torch.full((70,), 0.7)
    whole = log_softmax(logits, temperatures)
    for rows in [slice(i, i + n) for i, n in ((0, 1), (1, 1), (3, 2), (10, 7), (33, 37), (69, 1))]:
        assert torch.equal(log_softmax(logits[rows], temperatures[rows]), whole[rows])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_by_name(bad: float) -> None:
    logits = torch.randn(4, 128)
    logits[2, 3] = bad
    with pytest.raises(NonFiniteError, match="logits: 1 of 4 rows"):
        log_softmax(logits, torch.ones(4))


MASK = (1 << 64) - 1
int64 = st.integers(-(1 << 63), (1 << 63) - 1)


def splitmix64_of_integers(seed: int, index: int) -> int:
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


@given(key=int64, position=st.integers(0, 1 << 20))
def test_uniforms_are_odd_multiples_of_2_to_the_minus_53(key: int, position: int):
    values = uniforms(torch.tensor([key]), torch.tensor([position]), 7)[0].tolist()
    seed = splitmix64_of_integers(key, position)
    assert values == [
        ((splitmix64_of_integers(seed, entry) >> 11) | 1) / 2**53 for entry in range(7)
    ]
    assert all(0 < value < 1 for value in values)


def test_the_smallest_and_the_largest_uniform_have_finite_noise():
    extremes = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert torch.isfinite(-(-extremes.log()).log()).all()


def test_gumbel_noise_has_the_mean_and_variance_of_its_distribution():
    noise = gumbel(torch.tensor([11, 12]), torch.tensor([0, 5]), 100_000)
    assert abs(noise.mean().item() - 0.5772156649) < 0.012
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.04


@given(
    st.lists(st.tuples(int64, st.integers(0, 1 << 20)), min_size=1, max_size=70),
    st.integers(1, 130),
)
def test_a_row_of_noise_is_the_same_in_every_batch_and_a_prefix_of_any_larger_vocabulary(
    rows: list[tuple[int, int]], vocab_size: int
):
    keys, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    noise = gumbel(keys, positions, vocab_size)
    for row in {0, len(rows) // 2, len(rows) - 1}:
        alone = gumbel(keys[row : row + 1], positions[row : row + 1], vocab_size + 37)
        assert torch.equal(noise[row], alone[0, :vocab_size])


filters = st.tuples(
    st.integers(0, 60),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)


def random_log_probs(
    num_rows: int, vocab_size: int, seed: int, spread: float = 3.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(spread * torch.randn(num_rows, vocab_size, generator=generator), 1)


def truncate_rows(
    log_probs: torch.Tensor, settings: list[tuple[int, float, float]]
) -> torch.Tensor:
    top_k, top_p, min_p = zip(*settings, strict=True)
    return truncate(
        log_probs,
        torch.tensor(top_k),
        *(torch.tensor(p, dtype=torch.float64) for p in (top_p, min_p)),
    )


def warp(log_probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """transformers' answer in FP64, renormalised."""
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    prompt: Any = torch.zeros(1, 1, dtype=torch.int64)
    return torch.log_softmax(LogitsProcessorList(warpers)(prompt, log_probs.double()), 1)


@given(setting=filters, vocab_size=st.integers(1, 300), seed=st.integers(0, 10_000))
def test_filters_keep_what_transformers_keeps(
    setting: tuple[int, float, float], vocab_size: int, seed: int
):
    log_probs = random_log_probs(1, vocab_size, seed)
    ours, theirs = truncate_rows(log_probs, [setting]), warp(log_probs, *setting)
    assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))
    torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=2e-6)


@given(st.lists(filters, min_size=1, max_size=40), st.integers(0, 10_000), st.data())
def test_a_filtered_row_does_not_depend_on_the_batch(
    settings: list[tuple[int, float, float]], seed: int, data: st.DataObject
):
    log_probs = random_log_probs(len(settings), 97, seed)
    together = truncate_rows(log_probs, settings)
    row = data.draw(st.integers(0, len(settings) - 1))
    assert torch.equal(together[row], truncate_rows(log_probs[row : row + 1], [settings[row]])[0])


def test_equal_log_probabilities_are_kept_in_the_order_of_their_ids():
    log_probs = torch.log_softmax(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), 1)
    kept = torch.isfinite(truncate_rows(log_probs, [(3, 1.0, 0.0)]))
    assert kept.tolist() == [[True, True, False, True, False]]


def test_the_most_likely_token_always_stays():
    log_probs = random_log_probs(1, 50, seed=1)
    truncated = truncate_rows(log_probs, [(0, 1e-9, 0.0)])
    assert torch.isfinite(truncated).sum() == 1
    assert truncated[0, log_probs.argmax()] == 0


@pytest.mark.parametrize(
    "setting", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (4, 0.8, 0.05)]
)
def test_draws_follow_the_distribution(setting: tuple[int, float, float]):
    num_draws, vocab_size = 40_000, 8
    log_probs = truncate_rows(random_log_probs(1, vocab_size, seed=2, spread=1.5), [setting])
    tokens = draw(
        log_probs.expand(num_draws, -1),
        torch.arange(num_draws) * 7919,
        torch.arange(num_draws) % 13,
    )
    probs = log_probs[0].double().exp()
    frequencies = torch.bincount(tokens, minlength=vocab_size).double() / num_draws
    deviations = (frequencies - probs).abs() / (probs * (1 - probs) / num_draws).sqrt().clamp(
        min=1e-12
    )
    assert (deviations < 4.5).all()
    assert (frequencies[probs == 0] == 0).all()


def test_a_drawn_token_does_not_depend_on_the_batch_nor_on_the_size_of_the_parts(
    monkeypatch: pytest.MonkeyPatch,
):
    log_probs = random_log_probs(53, 201, seed=3)
    keys, positions = torch.arange(53) * 1_000_003, torch.arange(53) % 5
    tokens = draw(log_probs, keys, positions)
    alone = [
        draw(log_probs[row : row + 1], keys[row : row + 1], positions[row : row + 1])
        for row in range(53)
    ]
    assert torch.equal(tokens, torch.cat(alone))
    monkeypatch.setattr(head, "_NOISE_ELEMENTS", 1000)
    assert torch.equal(tokens, draw(log_probs, keys, positions))
    assert len(tokens.unique()) > 10


def test_keys_and_positions_change_the_draw():
    log_probs = torch.full((200, 64), -4.158883)
    same_key = draw(log_probs, torch.zeros(200, dtype=torch.int64), torch.arange(200))
    same_position = draw(log_probs, torch.arange(200), torch.zeros(200, dtype=torch.int64))
    assert len(same_key.unique()) > 50
    assert len(same_position.unique()) > 50


DTYPES = [torch.float32, torch.bfloat16]


def inputs(count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states over a wide range, and a weight."""
    sizes = torch.exp(2 * torch.randn(count, 1))
    return (sizes * torch.randn(count, width)).to(dtype), torch.randn(width).to(dtype)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, d_hidden and dw by autograd of torch's product, in the dtype of the arguments."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    y = hidden @ weight
    d_hidden, dw = torch.autograd.grad(y, (hidden, weight), d.to(y.dtype))
    return y.detach(), d_hidden, dw


def error(ours: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    """Root mean square, in parts of the sum of the terms' sizes: what cancels in a sum makes no
    error larger, and no row counts more than another.
    """
    return float(((ours.double() - exact) / size).square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 320, 5120])
def test_values_and_gradients(width: int, dtype: torch.dtype) -> None:
    (hidden, weight), d = inputs(50, width, dtype), torch.randn(50)
    exact = plain(hidden.double(), weight.double(), d)
    sizes = plain(hidden.double().abs(), weight.double().abs(), d.abs())
    yardstick = plain(hidden, weight, d)
    dw = torch.zeros(width)
    y, d_hidden = scalar_head(hidden, weight), scalar_head_backward(hidden, weight, d, dw)
    assert (y.dtype, d_hidden.dtype) == (torch.float32, dtype)
    errors: list[float] = []
    for ours, wanted, size, theirs in zip((y, d_hidden, dw), exact, sizes, yardstick, strict=True):
        assert ours.shape == wanted.shape
        errors.append(error(ours, wanted, size))
        assert errors[-1] <= 1.5 * error(theirs, wanted, size)
    assert max(errors[0], errors[2]) < 2e-7, "sums are FP32 whatever goes in"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 4096, 5120])
def test_a_row_does_not_depend_on_its_batch(width: int, dtype: torch.dtype, threads: int) -> None:
    hidden, weight = inputs(130, width, dtype)
    whole, d = scalar_head(hidden, weight), torch.randn(130)
    d_hidden = scalar_head_backward(hidden, weight, d, torch.zeros(width))
    torch.set_num_threads(threads)
    for count in range(1, 131):
        for first in {0, (130 - count) // 2, 130 - count}:
            part = slice(first, first + count)
            assert torch.equal(scalar_head(hidden[part].clone(), weight), whole[part])
    reverse = scalar_head(hidden.flip(0).contiguous(), weight)
    assert torch.equal(reverse.flip(0), whole)
    alone = scalar_head_backward(hidden[3:4], weight, d[3:4], torch.zeros(width))
    assert torch.equal(alone, d_hidden[3:4])


def test_gradients_are_added_as_one_sum_and_repeat_their_bits() -> None:
    (hidden, weight), d = inputs(70, 256, torch.bfloat16), torch.randn(70)
    once, before = torch.zeros(256), torch.randn(256)
    added = before.clone()
    first = scalar_head_backward(hidden, weight, d, once)
    again = scalar_head_backward(hidden, weight, d, added)
    assert torch.equal(first, again) and torch.equal(added, before + once)


def test_what_is_not_finite_stays_in_its_row() -> None:
    hidden, weight = inputs(9, 128, torch.bfloat16)
    hidden[4, 7] = torch.nan
    assert scalar_head(hidden, weight).isnan().tolist() == [row == 4 for row in range(9)]


def test_no_rows() -> None:
    nothing, weight, grad = torch.empty(0, 128), torch.randn(128), torch.zeros(128)
    assert scalar_head(nothing, weight).shape == (0,)
    assert scalar_head_backward(nothing, weight, torch.empty(0), grad).shape == (0, 128)
    assert not grad.any()


ROWS, WIDTH, VOCAB = 30, 128, 200
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs_token_log_probs(dtype: torch.dtype) -> Inputs:
    hidden, head = torch.randn(ROWS, WIDTH).to(dtype), (torch.randn(VOCAB, WIDTH) / 8).to(dtype)
    targets, temperatures = torch.randint(0, VOCAB, (ROWS,)), torch.linspace(0.5, 1.5, ROWS)
    return hidden, publish_head(head), targets, temperatures


def plain_token_log_probs(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(hidden @ head.t() / temperatures[:, None], -1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def error_token_log_probs(ours: torch.Tensor, exact: torch.Tensor) -> float:
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
    hidden, head, targets, temperatures = inputs_token_log_probs(dtype)
    picked, entropy = token_log_probs(hidden, head, targets, temperatures)
    log_probs = log_softmax(head_logits(hidden, head), temperatures)
    assert torch.equal(picked, log_probs.gather(1, targets[:, None])[:, 0])
    wide = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact, exact_entropy = plain_token_log_probs(*wide, targets, temperatures.double())
    assert (
        error_token_log_probs(picked, exact.detach()) < 1e-5
        and error_token_log_probs(entropy, exact_entropy.detach()) < 1e-5
    )
    d, grad = torch.randn(ROWS), torch.zeros(VOCAB, WIDTH)
    d_hidden = token_log_probs_backward(hidden, head, targets, temperatures, d, grad)
    exact_hidden, exact_head = torch.autograd.grad(exact, wide, d.double())
    assert d_hidden.dtype == dtype
    assert error_token_log_probs(d_hidden, exact_hidden) < (
        1e-5 if dtype == torch.float32 else 2**-8
    )
    assert error_token_log_probs(grad, exact_head) < 1e-5, (
        "the head's gradient is FP32 in every flow"
    )


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("of_log_probs", [True, False], ids=["and log-probabilities", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_entropies_are_those_of_autograd(
    dtype: torch.dtype, of_log_probs: bool
) -> None:
    """In FP64, with autograd in FP32 as the yardstick; one row is nearly certain."""
    hidden, head, targets, temperatures = inputs_token_log_probs(dtype)
    hidden[3] = 40 * head[7]
    d, d_entropies = of_log_probs * torch.randn(ROWS), torch.randn(ROWS)
    found = []
    for to in (torch.float64, torch.float32):
        wide = hidden.detach().to(to).requires_grad_(), head.detach().to(to).requires_grad_()
        scores = plain_token_log_probs(*wide, targets, temperatures.to(to))
        found.append(torch.autograd.grad(scores, wide, (d.to(to), d_entropies.to(to))))
    exact, yardstick = found
    grad = torch.zeros(VOCAB, WIDTH)
    given = hidden, head, targets, temperatures
    d_hidden = token_log_probs_backward(*given, d, grad, d_entropies)
    rounding = 0.0 if dtype == torch.float32 else 2.0**-8
    assert d_hidden.dtype == dtype
    assert (
        error_token_log_probs(d_hidden, exact[0])
        <= 2 * error_token_log_probs(yardstick[0], exact[0]) + rounding
    )
    assert error_token_log_probs(grad, exact[1]) <= 2 * error_token_log_probs(
        yardstick[1], exact[1]
    )
    again, twice = torch.zeros(VOCAB, WIDTH), d_entropies + d_entropies
    doubled = token_log_probs_backward(*given, d + d, again, twice)
    assert torch.equal(doubled, d_hidden + d_hidden) and torch.equal(again, grad + grad)


def test_without_gradients_of_entropies_the_bits_are_those_of_the_short_formula() -> None:
    hidden, head, targets, temperatures = inputs_token_log_probs(torch.bfloat16)
    d, grad = torch.randn(ROWS), torch.zeros(VOCAB, WIDTH)
    d_hidden = token_log_probs_backward(hidden, head, targets, temperatures, d, grad, None)
    scaled, wide = d[:, None] / temperatures[:, None], head.float()
    logits = hidden.float() @ wide.t() / temperatures[:, None]
    d_logits = torch.softmax(logits, -1) * -scaled
    d_logits.scatter_add_(1, targets[:, None], scaled)
    assert torch.equal(d_hidden, (d_logits @ wide).bfloat16())
    assert torch.equal(grad, torch.zeros(VOCAB, WIDTH).addmm_(d_logits.t(), hidden.float()))


def test_gradients_are_added_as_one_sum_and_repeat_their_bits_token_log_probs() -> None:
    hidden, head, targets, temperatures = inputs_token_log_probs(torch.bfloat16)
    d, before = torch.randn(ROWS), torch.randn(VOCAB, WIDTH)
    once, added = torch.zeros(VOCAB, WIDTH), before.clone()
    first = token_log_probs_backward(hidden, head, targets, temperatures, d, once)
    again = token_log_probs_backward(hidden, head, targets, temperatures, d, added)
    assert torch.equal(first, again) and torch.equal(added, before + once)


def test_a_chunk_changes_no_bit_of_a_log_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs_token_log_probs(torch.bfloat16)
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
