"""Drawing a token from a row of log-probabilities: the filters and the Gumbel-max draw.  Every row
is computed on its own.

In the order of falling probability each filter keeps a prefix, so the kept tokens are the shortest
of three prefixes:

    top-k   the k most likely tokens
    top-p   the fewest of those tokens whose probabilities, renormalised after top-k, reach p
    min-p   the tokens at least min-p times as likely as the most likely one

This is what transformers' warpers do one after another.  Equal log-probabilities are ordered by
token id.  Masses are cumulative sums in FP64, which run through a row in one order whatever the
batch or the number of threads.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from isobit.kernels.operands import Drawn, Draws
from isobit.kernels.spec.log_prob import log_softmax
from isobit.kernels.spec.noise import gumbel

_NOISE_ELEMENTS = 1 << 20
"""Noise drawn at once: bounds the FP64 temporaries for large vocabularies, and keeps them in cache
for small ones.
"""


def truncate(log_probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Log-probabilities under the truncated, renormalised distribution; -inf for the tokens that
    were cut.

    Args:
        log_probs: FP32 [N, V], normalised.
        top_k: int64 [N]; 0 is off.
        top_p: FP64 [N] in (0, 1]; 1 is off.
        min_p: FP64 [N] in [0, 1); 0 is off.

    Returns:
        FP32 [N, V].
    """
    vocab_size = log_probs.shape[1]
    ranked, order = log_probs.sort(dim=1, descending=True, stable=True)
    probs = ranked.double().exp_()
    mass = probs.cumsum(1)
    mass_before = pad(mass[:, :-1], (1, 0))

    k = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size).unsqueeze(1)
    ranks = torch.arange(vocab_size, device=log_probs.device)
    keep = ranks < k
    keep &= (mass_before < top_p.unsqueeze(1) * mass.gather(1, k - 1)) | (top_p >= 1).unsqueeze(1)
    keep &= probs >= min_p.unsqueeze(1) * probs[:, :1]

    kept_mass = mass.gather(1, keep.sum(1, keepdim=True) - 1)
    renormalised = (ranked - kept_mass.log()).float().masked_fill_(~keep, -torch.inf)
    return torch.empty_like(log_probs).scatter_(1, order, renormalised)


def draw(log_probs: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """One token a row, drawn from ``exp(log_probs)``: int64 [N] from FP32 [N, V], int64 keys [N]
    and positions [N].

    The draw is a function of the row, its key and its position alone (Gumbel-max, in FP64).
    """
    num_rows, vocab_size = log_probs.shape
    rows_at_once = max(1, _NOISE_ELEMENTS // vocab_size)
    parts = [
        gumbel(keys[rows], positions[rows], vocab_size).add_(log_probs[rows]).argmax(1)
        for rows in (
            slice(first, first + rows_at_once) for first in range(0, num_rows, rows_at_once)
        )
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def draw_tokens(logits: Tensor, draws: Draws) -> Drawn:
    """The next token of N samples, each from its row of the logits FP32 [R, V].

    The samples of one row have one temperature.  Raises NonFiniteError where a row's logits are not
    finite.
    """
    temperatures = torch.where(draws.temperatures > 0, draws.temperatures, 1.0)
    of_row = torch.ones(logits.shape[0]).index_copy_(0, draws.rows.long(), temperatures)
    log_probs = log_softmax(logits, of_row)
    if draws.rows.numel() != logits.shape[0]:
        log_probs, logits = (x.index_select(0, draws.rows) for x in (log_probs, logits))
    truncated = None if draws.filters is None else truncate(log_probs, *draws.filters)
    tokens = _draw(logits, log_probs if truncated is None else truncated, draws)[:, None]
    chosen = None if truncated is None else truncated.gather(1, tokens).squeeze(1)
    return Drawn(tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1), chosen)


def _draw(logits: Tensor, log_probs: Tensor, draws: Draws) -> Tensor:
    greedy = draws.temperatures == 0
    if bool(greedy.all()):
        return logits.argmax(1)
    drawn = draw(log_probs, draws.keys, draws.positions)
    return torch.where(greedy, logits.argmax(1), drawn) if bool(greedy.any()) else drawn
