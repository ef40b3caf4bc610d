"""From final hidden states to tokens, log-probabilities and scores.

**Log-probability**: log-softmax(logits / temperature) over the full vocabulary, in FP32 and in one
order.  Rollout, loss and reference all call this file.

    log p_v = x_v - (M + log sum_v exp(x_v - M)),    x = logits / temperature,    M = max x

The sum runs over chunks of 4096 entries of the vocabulary, each summed in one piece, added in
ascending order.

**Sampling** is the Gumbel-max draw from a row of log-probabilities, every row by itself.  The noise
of vocabulary entry v at position p of a sample is output v + 1 of the splitmix64 generator whose
seed is output p + 1 of the one seeded with the sample's key (``isobit.kernels.noise``), so a whole
[N, V] block is a dozen elementwise integer operations.  Each filter keeps a prefix of the tokens in
descending order of probability, so the kept tokens are the shortest of three prefixes, as in
transformers' warpers applied one after another:

    top-k   the k most likely tokens
    top-p   the fewest of those tokens whose probabilities, renormalised after top-k, reach p
    min-p   the tokens at least min-p times as likely as the most likely one

Equal log-probabilities are ordered by token id.  Masses are cumulative sums in FP64, which run
through a row in one order whatever the batch or the number of threads.

**lm_head with log-probability** is one operation, in chunks of at most ``CHUNK`` logits: the logits
of a batch never exist all at once.  The backward recomputes a chunk's logits with a plain FP32
GEMM, of an INT8 head exactly.  With g and e the gradients of log p and of the entropy:

    logits  = H W^T                                   exact GEMM, FP32
    log p   = log_softmax(logits / temperature)       at the target tokens
    entropy = -sum p log p
    d logits = (g (onehot(target) - p) - e p (log p + entropy)) / temperature
    dH = d logits W      dW = d logits^T H

In INT8 (``precision.head``) H and W are rotated and rounded by row, as those of a linear are
(``isobit.kernels.spec.linear``), and the FP32 logits are not rounded to BF16.  The backward
computes the same logits again, since p has to be what was sampled from, and multiplies by W in
BF16.

**A scalar head** gives one number per hidden state, a value or a score:

    y_n   = sum_c h_nc w_c                     FP32
    dh_n  = d_n w                              in the dtype of h
    dw   += sum over n of d_n h_n              FP32

A row's products are summed as in a norm (``isobit.kernels.spec.pointwise.row_sum``), in an order
that depends on the width alone; a GEMM with one column would choose its order by the number of
rows.  The weight's gradient repeats its bits at a fixed number of threads.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from isobit.kernels.noise import logical_shift_right, splitmix64
from isobit.kernels.observing import observe
from isobit.kernels.operands import Drawn, Draws, HeadWeight
from isobit.kernels.spec.linear import grid_gemm_nt, int8_gemm_nt
from isobit.kernels.spec.pointwise import row_sum
from isobit.kernels.spec.quantise import quantise_int8, snap_rows
from isobit.util.errors import NonFiniteError


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """FP32 logits [N, V], FP32 temperatures [N] (above 0) -> FP32 log-probabilities [N, V].

    Raises NonFiniteError where a row's logits are not finite.
    """
    scaled = logits / temperatures[:, None]
    maximum = scaled.amax(-1, keepdim=True)
    log_sum = maximum + row_sum(torch.exp(scaled - maximum)).log()
    finite = torch.isfinite(log_sum)
    if not bool(finite.all()):
        raise NonFiniteError(
            f"logits: {int((~finite).sum())} of {finite.numel()} rows hold a NaN or an infinity"
        )
    return scaled - log_sum


def uniforms(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """FP64 [N, V] uniforms in the open interval (0, 1), for int64 keys [N] and positions [N].

    They are odd multiples of 2^-53: neither 0 nor 1 occurs, so both logarithms of the Gumbel
    transform are finite.
    """
    seeds = splitmix64(keys, positions)
    entries = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = splitmix64(seeds.unsqueeze(1), entries.unsqueeze(0))
    return logical_shift_right(bits, 11).bitwise_or_(1).double().mul_(2.0**-53)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """FP64 [N, V] standard Gumbel noise: argmax(log-probability + noise) is a draw from the
    distribution.
    """
    return uniforms(keys, positions, vocab_size).log_().neg_().log_().neg_()


_NOISE_ELEMENTS = 1 << 20
"""The amount of noise that is drawn at once: bounds the FP64 temporaries of large vocabularies, and
keeps those of small ones in cache.
"""


def truncate(log_probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Log-probabilities under the truncated, renormalised distribution; -inf for tokens that were
    cut.

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
    """Draw one token per row from ``exp(log_probs)``: FP32 [N, V], int64 keys [N] and positions [N]
    -> int64 [N].

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

    All samples of one row have the same temperature.  Raises NonFiniteError where a row's logits
    are not finite.
    """
    temperatures = torch.where(draws.temperatures > 0, draws.temperatures, 1.0)
    of_row = torch.ones(logits.shape[0], dtype=torch.float32).index_copy_(
        0, draws.rows.long(), temperatures
    )
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


def scalar_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [N, C], weight [C] -> FP32 [N]."""
    return row_sum(hidden.float() * weight.float())[:, 0]


def scalar_head_backward(
    hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """The gradient of the outputs, FP32 [N] -> that of hidden [N, C]; adds the weight's to
    ``grad``, FP32 [C].
    """
    grad.add_((d[:, None] * hidden.float()).sum(0))
    return (d[:, None] * weight.float()).to(hidden.dtype)


CHUNK = 1 << 22


def head_logits(hidden: torch.Tensor, head: HeadWeight, drawn: int | None = None) -> torch.Tensor:
    """hidden [N, C], published head [V, C] -> FP32 logits [N, V] of its first ``drawn`` rows."""
    head = head.first(drawn)
    if head.int8 is not None:
        x = quantise_int8(hidden)
        observe(x.values, "lm_head", "input", scales=x.scales)
        return observe(int8_gemm_nt(x, head.int8), "lm_head")
    return observe(grid_gemm_nt(snap_rows(hidden), head.table), "lm_head")


def token_log_probs(
    hidden: torch.Tensor,
    head: HeadWeight,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    drawn: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, C], published head [V, C], targets int64 [N], temperatures FP32 [N] -> FP32
    log-probabilities [N] and entropies [N] of the distribution over the first ``drawn`` rows.

    Raises NonFiniteError where logits are not finite.
    """
    head = head.first(drawn)
    rows = _chunk_rows(head.table)
    picked = [hidden.new_empty(0, dtype=torch.float32)]
    entropies = [hidden.new_empty(0, dtype=torch.float32)]
    parts = (x.split(rows) for x in (hidden, targets, temperatures))
    for h, target, temperature in zip(*parts, strict=True):
        log_probs = log_softmax(head_logits(h, head), temperature)
        picked.append(log_probs.gather(1, target[:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(picked), torch.cat(entropies)


def token_log_probs_backward(
    hidden: torch.Tensor,
    head: HeadWeight,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    grad: torch.Tensor | None,
    d_entropies: torch.Tensor | None = None,
    drawn: int | None = None,
) -> torch.Tensor:
    """The gradients of the log-probabilities and of the entropies, FP32 [N] each (None for zeros)
    -> that of hidden [N, C]; adds the head's to ``grad``, FP32 [V, C], if it is given.
    """
    head = head.first(drawn)
    wide = head.table.float()
    d_hidden = torch.empty_like(hidden)
    d_head = None if grad is None else torch.zeros_like(wide)
    rows = _chunk_rows(head.table)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        h, temperature = hidden[part].float(), temperatures[part, None]
        logits = h @ wide.t() if head.int8 is None else head_logits(hidden[part], head)
        d_logits = _scaled_gradients(
            logits / temperature,
            targets[part, None],
            d_log_probs[part, None] / temperature,
            None if d_entropies is None else d_entropies[part, None] / temperature,
        )
        d_hidden[part] = (d_logits @ wide).to(hidden.dtype)
        if d_head is not None:
            d_head.addmm_(d_logits.t(), h)
    if grad is not None and d_head is not None:
        grad[:drawn].add_(d_head)
    return d_hidden


def head_logits_backward(
    hidden: torch.Tensor, head: HeadWeight, d_logits: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of the logits of the head's first V' rows, FP32 [N, V'] -> that of hidden [N,
    C]; adds the head's to ``grad``, FP32 [V, C], if it is given.
    """
    rows = d_logits.shape[1]
    if grad is not None:
        grad[:rows].addmm_(d_logits.t(), hidden.float())
    return (d_logits @ head.table[:rows].float()).to(hidden.dtype)


def _scaled_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    d_log_probs: torch.Tensor,
    d_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """d logits [N, V], from logits and gradients [N, 1] that are already divided by the
    temperature.
    """
    p = torch.softmax(logits, -1)
    if d_entropies is None:
        d_logits = p.mul_(-d_log_probs)
    else:
        log_p = torch.log_softmax(logits, -1)
        entropies = -(p * log_p).sum(-1, keepdim=True)
        d_logits = p.mul_(log_p.add_(entropies).mul_(-d_entropies).sub_(d_log_probs))
    return d_logits.scatter_add_(1, targets, d_log_probs)


def _chunk_rows(head: torch.Tensor) -> int:
    return max(1, CHUNK // head.shape[0])
