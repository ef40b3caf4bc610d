"""From hidden states to tokens and their log-probabilities.

Rows and samples are not one to one: the samples of a prompt draw their first tokens from one row,
each with its own noise.  Every step works row by row, so a token and its log-probability do not
depend on what else is drawn with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.errors import NonFiniteError
from isobit.kernels.spec.log_prob import log_softmax
from isobit.kernels.spec.sampling import draw, truncate
from isobit.records.text import SamplingParams
from isobit.rollout.native.sequence import Sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a sample, its log-probability over the full vocabulary, and that under the
    truncated distribution.

    ``truncated_log_probs`` is None where no sample of the batch has a filter on; a sample without
    one has no use for its entry.
    """

    token_ids: list[int]
    log_probs: list[float]
    truncated_log_probs: list[float] | None


def sample_tokens(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> Drawn:
    """Draw the next token of each sample.

    Args:
        logits: FP32 [R, V].
        rows: for each of the N samples, the row of ``logits`` that its token comes from; every row
        is used.
        samples: N of them; the samples of one row belong to one request.

    Raises:
        NonFiniteError: naming the prompt and the position of the first row that holds a NaN or an
        infinity.
    """
    _check_finite(logits, rows, samples)
    if logits.is_cuda:
        return _sample_on_gpu(logits, rows, samples)
    sampling = [sample.prompt.request.sampling for sample in samples]
    temperature_of_row = {
        row: params.log_prob_temperature for row, params in zip(rows, sampling, strict=True)
    }
    temperatures = torch.tensor(
        [temperature_of_row[row] for row in range(logits.shape[0])], dtype=torch.float32
    )
    log_probs = log_softmax(logits, temperatures)
    if len(samples) != logits.shape[0]:
        index = torch.tensor(rows)
        log_probs, logits = log_probs.index_select(0, index), logits.index_select(0, index)

    truncated = (
        _truncate(log_probs, sampling) if any(params.truncates for params in sampling) else None
    )
    token_ids = _draw(
        logits, log_probs if truncated is None else truncated, samples, sampling
    ).unsqueeze(1)
    return Drawn(
        token_ids=token_ids.squeeze(1).tolist(),
        log_probs=log_probs.gather(1, token_ids).squeeze(1).tolist(),
        truncated_log_probs=None
        if truncated is None
        else truncated.gather(1, token_ids).squeeze(1).tolist(),
    )


def _sample_on_gpu(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> Drawn:
    from isobit.rollout.native.gpu_sampling import draw

    drawn = draw(logits, rows, samples)
    return Drawn(
        drawn.tokens.tolist(),
        drawn.log_probs.tolist(),
        None if drawn.truncated is None else drawn.truncated.tolist(),
    )


def _truncate(log_probs: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    top_k = torch.tensor([params.top_k for params in sampling])
    top_p = torch.tensor([params.top_p for params in sampling], dtype=torch.float64)
    min_p = torch.tensor([params.min_p for params in sampling], dtype=torch.float64)
    return truncate(log_probs, top_k, top_p, min_p)


def _draw(
    logits: Tensor, log_probs: Tensor, samples: Sequence[Sample], sampling: Sequence[SamplingParams]
) -> Tensor:
    greedy = [params.temperature == 0 for params in sampling]
    if all(greedy):
        return logits.argmax(1)
    keys = torch.tensor([sample.key for sample in samples])
    positions = torch.tensor([sample.length for sample in samples])
    drawn = draw(log_probs, keys, positions)
    return torch.where(torch.tensor(greedy), logits.argmax(1), drawn) if any(greedy) else drawn


def _check_finite(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> None:
    finite = torch.isfinite(logits)
    if bool(finite.all()):
        return
    row = int((~finite.all(1)).nonzero()[0])
    sample = samples[rows.index(row)]
    raise NonFiniteError(
        f"logits of prompt {sample.prompt.request.prompt.id!r} at position {sample.length - 1}: "
        f"{int((~finite[row]).sum())} of {logits.shape[1]} are NaN or infinite"
    )
