"""Log-probabilities on the GPU: near FP64, free of the batch, and the same bits in the sampler and
in training's forward.
"""

import pytest
import torch

from isobit.kernels.hopper import gemm
from isobit.kernels.hopper.gemm import deep_gemm_or_triton
from isobit.kernels.operands import HeadWeight
from isobit.kernels.triton import sizes
from isobit.kernels.triton.head import log_probs_at, log_sum_exp, log_sums_and_entropies
from isobit.kernels.triton.sampling import sample_tokens
from tests.gpu.kernels import GPU, bf16_gemm_nt

VOCABULARY = 151936


def some_logits(rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    logits = 4 * torch.randn(rows, vocab_size, device="cuda", generator=generator)
    return logits, 0.3 + 1.4 * torch.rand(rows, device="cuda", generator=generator)


@pytest.mark.parametrize("vocab_size", [40, 4096, 5001, VOCABULARY])
def test_values_against_fp64(vocab_size: int) -> None:
    logits, temperatures = some_logits(33, vocab_size)
    log_sums, entropies = log_sums_and_entropies(logits, temperatures)
    exact = torch.log_softmax(logits.double() / temperatures.double()[:, None], 1)
    exact_sums = torch.logsumexp(logits.double() / temperatures.double()[:, None], 1)
    assert ((log_sums - exact_sums).abs() <= 3e-7 * exact_sums.abs() + 1e-6).all()
    assert ((entropies + (exact.exp() * exact).sum(1)).abs() < 1e-5).all()
    tokens = logits.argmax(1)
    ours = log_probs_at(logits, tokens, temperatures, log_sums)
    assert ((ours - exact.gather(1, tokens[:, None])[:, 0]).abs() < 1e-5).all()


@pytest.mark.parametrize("vocab_size", [40, 5001, VOCABULARY])
def test_rows_do_not_depend_on_the_batch(vocab_size: int) -> None:
    logits, temperatures = some_logits(300, vocab_size)
    whole, whole_entropies = log_sums_and_entropies(logits, temperatures)
    assert torch.equal(log_sum_exp(logits, temperatures), whole)
    for part in (slice(0, 1), slice(7, 8), slice(13, 20), slice(44, 300)):
        log_sums, entropies = log_sums_and_entropies(logits[part].clone(), temperatures[part])
        assert torch.equal(log_sums, whole[part]) and torch.equal(entropies, whole_entropies[part])


def test_rows_that_are_not_finite_give_nan() -> None:
    logits, temperatures = some_logits(6, 9000)
    logits[1, 8999] = torch.nan
    logits[2, 0] = torch.inf
    logits[3, 5000] = -torch.inf
    logits[4] = torch.nan
    log_sums, entropies = log_sums_and_entropies(logits, temperatures)
    assert (
        log_sums.isnan().tolist()
        == entropies.isnan().tolist()
        == [False, True, True, True, True, False]
    )


@pytest.mark.parametrize("back_end", sorted({"triton", deep_gemm_or_triton()}))
def test_sampler_and_training_give_the_same_bits(
    back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "deep_gemm_or_triton", lambda: back_end)
    hidden = torch.randn(1024, 1024, device="cuda").bfloat16()
    weight = (torch.randn(VOCABULARY, 1024, device="cuda") / 8).bfloat16()
    temperatures = (0.5 + torch.rand(1024, device="cuda")).masked_fill_(
        torch.arange(1024, device="cuda") % 5 == 0, 0.0
    )
    temperatures[1::5] = 1.0
    keys = torch.randint(-(2**62), 2**62, (1024,), device="cuda")
    tokens = torch.empty(1024, dtype=torch.int64, device="cuda")
    sampled = torch.empty(1024, device="cuda")
    done = 0
    for batch in (1, 7, 256, 760):
        part = slice(done, done + batch)
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        logits = bf16_gemm_nt(hidden[part], weight, torch.float32)
        tokens[part], sampled[part] = sample_tokens(
            logits, rows, temperatures[part], keys[part], keys[part] & 1023
        )
        done += batch
    for logits_at_once in (1 << 28, 1 << 26):
        monkeypatch.setattr(sizes, "FORWARD_LOGITS", logits_at_once)
        log_probs, entropies = GPU.token_log_probs(hidden, HeadWeight(weight), tokens, temperatures)
        assert torch.equal(log_probs, sampled) and entropies.isfinite().all()
    assert 0 < entropies.mean() < 12 and (log_probs <= 0).all()
