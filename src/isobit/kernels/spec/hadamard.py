"""Q and K times a Hadamard matrix before they are rounded to E4M3, so that no channel stands out:

    q~ = H q / n      k~ = H k      q~ . k~ = q . k             H H = n, H symmetric

H has the entries +1 and -1 (Sylvester's construction), n is its size: the largest power of two that
divides the head size, whose blocks H is applied to.  E4M3's error is a share of each number, so
that of q . k has the variance of sum_i (q_i k_i)^2.  In a pretrained model Q and K are large in the
same few channels, whose products bring nearly all of it; behind H every number is a mixture of all,
and what is left is |q|^2 |k|^2 / n (FlashAttention-3, arXiv 2407.08608, section 3.3).  Division by
n instead of by sqrt(n) on both sides is exact.

The sums are FP32 and have one order, that of the fast transform: pairs of numbers 1, 2, 4, ...,
n / 2 apart, each time (a, b) -> (a + b, a - b).  So every back end has the same bits.
"""

import torch


def hadamard_size(head_dim: int) -> int:
    """The largest power of two that divides the head size."""
    return head_dim & -head_dim


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """FP32 [..., D] -> H x, of each block of ``hadamard_size(D)`` numbers."""
    size = hadamard_size(x.shape[-1])
    blocks = x.view(*x.shape[:-1], -1, size)
    for _ in range(size.bit_length() - 1):
        # Neighbours' sums in the first half, their differences in the second: the next neighbours
        # are twice as far apart in x, and after the last step all stand in order.
        a, b = blocks[..., ::2], blocks[..., 1::2]
        blocks = torch.cat([a + b, a - b], -1)
    return blocks.view(x.shape)
