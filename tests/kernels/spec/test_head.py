"""The head: log-softmax, the noise, the filters against transformers' own warpers, draws against
the distribution that they come from, the head of one output, and lm_head in chunks.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from isobit.kernels.operands import HeadWeight
from isobit.kernels.spec import head as head_module
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
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format
from isobit.proof import cases
from isobit.proof.cases import splitmix64
from isobit.util.errors import NonFiniteError
from tests.kernels.comparison import relative_error


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_by_name(bad: float) -> None:
    logits = torch.randn(4, 128)
    logits[2, 3] = bad
    with pytest.raises(NonFiniteError, match="logits: 1 of 4 rows"):
        log_softmax(logits, torch.ones(4))


int64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(key=int64, position=st.integers(0, 1 << 20))
def test_uniforms_are_odd_multiples_of_2_to_the_minus_53(key: int, position: int):
    values = uniforms(torch.tensor([key]), torch.tensor([position]), 7)[0].tolist()
    seed = splitmix64(key, position)
    assert values == [((splitmix64(seed, entry) >> 11) | 1) / 2**53 for entry in range(7)]
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
    monkeypatch.setattr(head_module, "_NOISE_ELEMENTS", 1000)
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


def error(ours: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    """Root mean square, in parts of the sum of the terms' sizes: what cancels in a sum makes no
    error larger, and no row counts more than another.
    """
    return float(((ours.double() - exact) / size).square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 320, 5120])
def test_values_and_gradients_of_the_scalar_head(width: int, dtype: torch.dtype) -> None:
    case = cases.scalar_head(width, dtype)
    sizes = replace(case, inputs={n: x.abs() for n, x in case.inputs.items()}, dy=case.dy.abs())
    assert case.rows is not None and case.gradients is not None
    made = {"y": case.rows(torch.arange(cases.ROWS)), **case.gradients()}
    exact, size, theirs = (
        {"y": of.results(to), **of.exact_gradients(to)}
        for of, to in ((case, torch.float64), (sizes, torch.float64), (case, dtype))
    )
    assert (made["y"].dtype, made["hidden"].dtype) == (torch.float32, dtype)
    for name, ours in made.items():
        assert ours.shape == exact[name].shape
        ratio = error(ours, exact[name], size[name])
        assert ratio <= 1.5 * error(theirs[name], exact[name], size[name])
        assert name == "hidden" or ratio < 2e-7, "sums are FP32 whatever goes in"


def test_a_row_of_the_scalar_heads_gradient_does_not_depend_on_its_batch() -> None:
    (hidden, weight), d = inputs(130, 4096, torch.bfloat16), torch.randn(130)
    whole = scalar_head_backward(hidden, weight, d, torch.zeros(4096))
    alone = scalar_head_backward(hidden[3:4], weight, d[3:4], torch.zeros(4096))
    assert torch.equal(alone, whole[3:4])


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
Inputs = tuple[torch.Tensor, HeadWeight, torch.Tensor, torch.Tensor]
FORMATS: list[Format] = ["bf16", "int8"]


def head_site(format: Format) -> Site:
    return Site("lm_head", "head", format)


def inputs_token_log_probs(dtype: torch.dtype, format: Format = "bf16") -> Inputs:
    hidden, head = torch.randn(ROWS, WIDTH).to(dtype), (torch.randn(VOCAB, WIDTH) / 8).to(dtype)
    targets, temperatures = torch.randint(0, VOCAB, (ROWS,)), torch.linspace(0.5, 1.5, ROWS)
    return hidden, publish_head(head_site(format), head), targets, temperatures


@pytest.fixture(params=[1 << 22, 501 * 7], ids=["whole", "7 rows at a time"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk is short."""
    monkeypatch.setattr(head_module, "CHUNK", request.param)


@pytest.mark.few(23)
@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    "of", [(True, False), (False, True), (True, True)], ids=["log-probs", "entropies", "both"]
)
@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_and_gradients_in_chunks(
    dtype: torch.dtype, in_int8: bool, of: tuple[bool, bool]
) -> None:
    """In FP64, with autograd in FP32 as the yardstick."""
    case = cases.token_log_probs(dtype, *of, in_int8)
    assert case.rows is not None and case.gradients is not None
    values, exact = case.rows(torch.arange(cases.ROWS)), case.results()
    assert all(relative_error(values[:, i], exact[:, i]) < 1e-5 for i in (0, 1))
    wanted, theirs = case.exact_gradients(), case.exact_gradients(torch.float32)
    made, rounding = case.gradients(), 0.0 if dtype == torch.float32 else 2.0**-8
    errors = {name: relative_error(ours, wanted[name]) for name, ours in made.items()}
    assert made["hidden"].dtype == dtype
    assert errors["hidden"] <= 2 * relative_error(theirs["hidden"], wanted["hidden"]) + rounding
    assert errors["head"] <= 2 * relative_error(theirs["head"], wanted["head"])
    assert errors["head"] < 1e-5, "the head's gradient is FP32 in every flow"


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_are_those_of_the_logits_and_gradients_scale(
    dtype: torch.dtype, format: Format
) -> None:
    given = inputs_token_log_probs(dtype, format)
    hidden, head, targets, temperatures = given
    log_probs = log_softmax(head_logits(hidden, head), temperatures)
    assert torch.equal(token_log_probs(*given)[0], log_probs.gather(1, targets[:, None])[:, 0])
    d, d_entropies = torch.randn(ROWS), torch.randn(ROWS)
    once, twice = torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH)
    single = token_log_probs_backward(*given, d, once, d_entropies)
    double = token_log_probs_backward(*given, d + d, twice, d_entropies + d_entropies)
    assert torch.equal(double, single + single) and torch.equal(twice, once + once)


def test_without_gradients_of_entropies_the_bits_are_those_of_the_short_formula() -> None:
    hidden, head, targets, temperatures = inputs_token_log_probs(torch.bfloat16)
    d, grad = torch.randn(ROWS), torch.zeros(VOCAB, WIDTH)
    d_hidden = token_log_probs_backward(hidden, head, targets, temperatures, d, grad, None)
    scaled, wide = d[:, None] / temperatures[:, None], head.table.float()
    logits = hidden.float() @ wide.t() / temperatures[:, None]
    d_logits = torch.softmax(logits, -1) * -scaled
    d_logits.scatter_add_(1, targets[:, None], scaled)
    assert torch.equal(d_hidden, (d_logits @ wide).bfloat16())
    assert torch.equal(grad, torch.zeros(VOCAB, WIDTH).addmm_(d_logits.t(), hidden.float()))


@pytest.mark.parametrize("format", FORMATS)
def test_a_chunk_changes_no_bit_of_a_log_probability(
    format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs_token_log_probs(torch.bfloat16, format)
    whole = token_log_probs(*given)
    monkeypatch.setattr(head_module, "CHUNK", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, token_log_probs(*given), strict=True))


def test_no_tokens() -> None:
    head, grad = torch.randn(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH)
    nothing = (
        torch.randn(0, WIDTH),
        HeadWeight(head),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0),
    )
    picked, entropies = token_log_probs(*nothing)
    assert picked.shape == entropies.shape == (0,)
    assert token_log_probs_backward(*nothing, torch.empty(0), grad).shape == (0, WIDTH)
    assert not grad.any()
