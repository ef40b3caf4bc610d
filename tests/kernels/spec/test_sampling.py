"""The filters against transformers' own warpers, and draws against the distribution they come
from.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from isobit.kernels.spec import sampling
from isobit.kernels.spec.sampling import draw, truncate

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
    monkeypatch.setattr(sampling, "_NOISE_ELEMENTS", 1000)
    assert torch.equal(tokens, draw(log_probs, keys, positions))
    assert len(tokens.unique()) > 10


def test_keys_and_positions_change_the_draw():
    log_probs = torch.full((200, 64), -4.158883)
    same_key = draw(log_probs, torch.zeros(200, dtype=torch.int64), torch.arange(200))
    same_position = draw(log_probs, torch.arange(200), torch.zeros(200, dtype=torch.int64))
    assert len(same_key.unique()) > 50
    assert len(same_position.unique()) > 50
