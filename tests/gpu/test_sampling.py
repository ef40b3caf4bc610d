"""Sampling on the GPU: the distribution, the noise of the specification, greedy rows, and rows that
do not know their neighbours.
"""

import math

import pytest
import torch

from isobit.kernels.operands import LOGITS_CHUNK
from isobit.kernels.spec import head as specification
from isobit.kernels.spec.head import gumbel, log_softmax
from isobit.kernels.triton.sampling import sample_tokens, sample_truncated

VOCABULARY = 151936


def batch(samples: int, vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Logits, rows, temperatures (every fourth greedy), keys and positions."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = 3 * torch.randn(samples, vocab_size, device="cuda", generator=generator)
    temperatures = 0.5 + torch.rand(samples, device="cuda", generator=generator)
    temperatures[::4] = 0.0
    keys = torch.randint(-(2**63), 2**63 - 1, (samples,), device="cuda", generator=generator)
    return (
        logits,
        torch.arange(samples, dtype=torch.int32, device="cuda"),
        temperatures,
        keys,
        keys & 4095,
    )


def two_stage_draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The draw in FP64, as the module's docstring has it."""
    (rows, vocab_size), chunks = logits.shape, -(-logits.shape[1] // LOGITS_CHUNK)
    noise = gumbel(keys, positions, vocab_size + chunks)
    fill = (0, chunks * LOGITS_CHUNK - vocab_size)
    x = torch.nn.functional.pad(
        logits.double() / temperatures[:, None], fill, value=-torch.inf
    ).view(rows, chunks, LOGITS_CHUNK)
    chunk = (x.logsumexp(2) + noise[:, vocab_size:]).argmax(1)
    scores = x + torch.nn.functional.pad(noise[:, :vocab_size], fill).view(
        rows, chunks, LOGITS_CHUNK
    )
    return chunk * LOGITS_CHUNK + scores[torch.arange(rows, device="cuda"), chunk].argmax(1)


@pytest.mark.parametrize("vocab_size", [40, 8200, VOCABULARY])
def test_the_draw_of_the_specification_and_its_log_probability(vocab_size: int) -> None:
    logits, rows, temperatures, keys, positions = batch(64, vocab_size)
    tokens, log_probs = sample_tokens(logits, rows, temperatures, keys, positions)
    one = torch.where(temperatures > 0, temperatures, 1.0)
    assert torch.equal(
        tokens,
        torch.where(
            temperatures > 0, two_stage_draw(logits, one, keys, positions), logits.argmax(1)
        ),
    )
    exact = log_softmax(logits.cpu().double(), one.cpu().double()).gather(1, tokens[:, None].cpu())[
        :, 0
    ]
    assert (log_probs.cpu() - exact).abs().max() < 1e-5


def test_frequencies_are_the_probabilities() -> None:
    vocab_size, draws = 8200, 400_000  # three chunks, the last of 8 entries
    generator = torch.Generator().manual_seed(1)
    support = torch.cat([torch.randperm(8192, generator=generator)[:52], torch.arange(8192, 8200)])
    logits = torch.full((2, vocab_size), -60.0)
    logits[:, support] = torch.randn(2, 60, generator=generator)
    keys = torch.arange(draws, device="cuda")
    rows = (keys % 2).int()
    temperatures = torch.where(rows == 0, 1.0, 0.7)
    tokens, _ = sample_tokens(logits.cuda(), rows, temperatures, keys, torch.full_like(keys, 5))
    for row, temperature in ((0, 1.0), (1, 0.7)):
        expected = torch.softmax(logits[row].double() / temperature, 0)[support] * (draws / 2)
        counts = torch.bincount(tokens[rows == row].cpu(), minlength=vocab_size)[support]
        assert counts.sum() == draws / 2 and expected.min() > 20
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 59) < 4 * math.sqrt(2 * 59), float(chi_square)


def test_greedy_rows_take_the_lowest_of_the_largest() -> None:
    logits, rows, temperatures, keys, positions = batch(8, VOCABULARY)
    logits[0, [7, 8, 5000, 150_000]] = 60.0
    logits[4, [8191, 8192]] = 60.0
    tokens, log_probs = sample_tokens(logits, rows, temperatures, keys, positions)
    assert tokens[[0, 4]].tolist() == [7, 8191]
    assert torch.allclose(
        log_probs[[0, 4]].cpu(), torch.tensor([-math.log(4), -math.log(2)]), atol=1e-5
    )
    only_greedy = sample_tokens(logits, rows, torch.zeros_like(temperatures), keys, positions)
    assert torch.equal(only_greedy[0][::4], tokens[::4]) and torch.equal(
        only_greedy[1][::4], log_probs[::4]
    )


def test_a_sample_does_not_depend_on_its_neighbours_or_its_row() -> None:
    logits, rows, temperatures, keys, positions = batch(256, VOCABULARY)
    tokens, log_probs = sample_tokens(logits, rows, temperatures, keys, positions)
    for part in (slice(0, 1), slice(9, 10), slice(31, 38)):
        alone = sample_tokens(
            logits[part].clone(),
            rows[: part.stop - part.start],
            temperatures[part],
            keys[part],
            positions[part],
        )
        assert torch.equal(alone[0], tokens[part]) and torch.equal(alone[1], log_probs[part])
    order = torch.randperm(256, device="cuda")[:100]
    mixed = sample_tokens(logits, order.int(), temperatures[order], keys[order], positions[order])
    assert torch.equal(mixed[0], tokens[order]) and torch.equal(mixed[1], log_probs[order])


def test_a_graph_replays_it() -> None:
    inputs = batch(5, 9000)
    sample_tokens(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample_tokens(*inputs)
    for held, newer in zip(inputs, batch(5, 9000, seed=1), strict=True):
        held.copy_(newer)
    graph.replay()
    expected = sample_tokens(*inputs)
    assert torch.equal(captured[0], expected[0]) and torch.equal(captured[1], expected[1])


def test_rows_that_are_not_finite() -> None:
    logits, rows, temperatures, keys, positions = batch(20, 9000)
    expected = sample_tokens(logits, rows, temperatures, keys, positions)
    logits[2, 8999] = torch.nan
    logits[4, 0] = torch.inf
    logits[5, 5000] = -torch.inf
    logits[6] = torch.nan
    filters = (
        torch.full_like(keys, 50),
        torch.full((20,), 0.9, dtype=torch.float64).cuda(),
        torch.zeros(20, dtype=torch.float64).cuda(),
    )
    bad = torch.tensor([2, 4, 5, 6], device="cuda")
    good = torch.tensor([row for row in range(20) if row not in (2, 4, 5, 6)], device="cuda")
    tokens, log_probs = sample_tokens(logits, rows, temperatures, keys, positions)
    assert torch.equal(tokens[good], expected[0][good]) and torch.equal(
        log_probs[good], expected[1][good]
    )
    assert log_probs[bad].isnan().all() and (tokens[bad] == 0).all()
    tokens, log_probs, truncated = sample_truncated(
        logits, rows, temperatures, keys, positions, *filters
    )
    assert (
        log_probs[bad].isnan().all()
        and truncated[bad].isnan().all()
        and not log_probs[good].isnan().any()
    )
    assert ((tokens >= 0) & (tokens < 9000)).all()


def test_truncation() -> None:
    logits, rows, temperatures, keys, positions = batch(40, VOCABULARY)
    numbers = torch.arange(40, device="cuda")
    top_k = torch.where(numbers % 3 == 1, 20, 0)
    top_p = torch.where(numbers % 3 == 2, 0.8, 1.0).double()
    min_p = torch.where(numbers % 7 == 5, 0.05, 0.0).double()
    arguments = logits, rows, temperatures, keys, positions, top_k, top_p, min_p
    tokens, log_probs, truncated = sample_truncated(*arguments)

    plain, plain_log_probs = sample_tokens(logits, rows, temperatures, keys, positions)
    unfiltered = (temperatures == 0) | ((top_k == 0) & (top_p == 1) & (min_p == 0))
    assert 0 < unfiltered.sum() < 40
    assert torch.equal(tokens[unfiltered], plain[unfiltered]) and torch.equal(
        log_probs[unfiltered], plain_log_probs[unfiltered]
    )

    one = torch.where(temperatures > 0, temperatures, 1.0).cpu()
    full = log_softmax(logits.cpu(), one)
    cut = specification.truncate(full, top_k.cpu(), top_p.cpu(), min_p.cpu())
    chosen = cut.gather(1, tokens[:, None].cpu())[:, 0]
    filtered = ~unfiltered.cpu()
    assert (
        chosen[filtered].isfinite().all()
        and (truncated.cpu() - chosen)[filtered].abs().max() < 1e-5
    )
    assert (log_probs.cpu() - full.gather(1, tokens[:, None].cpu())[:, 0]).abs().max() < 1e-5

    for part in (slice(1, 2), slice(14, 20)):
        alone = sample_truncated(
            logits[part].clone(), rows[: part.stop - part.start], *(x[part] for x in arguments[2:])
        )
        assert all(
            torch.equal(x, y[part])
            for x, y in zip(alone, (tokens, log_probs, truncated), strict=True)
        )
