"""One AdamW update of one tensor, in place: decoupled weight decay, bias correction and the clip of the gradient in one pass.

    g  = clip * grad
    m  = beta1 m + (1 - beta1) g                v = beta2 v + (1 - beta2) g^2
    master -= rate * weight_decay * master  +  rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)

All in FP32, every operation rounded by itself and to nearest, so CPU and GPU give the same bits.  Decay and step are added before they are
subtracted: at a learning rate of 1e-6 a factor 1 - rate * weight_decay of its own would be rounded to 1.

The moments are FP32, or BF16 to halve their memory.  Rounding v to the nearest BF16 would freeze it: with beta2 = 0.999 it decays by a
thousandth a step, and half a unit in BF16's last place is two to four thousandths.  So BF16 moments are rounded stochastically: up with
the probability that makes the mean right,

    stored = the upper 16 bits of (bits of the FP32 number + noise),    noise uniform in 0 .. 65535

The noise is counter-based (``isobit.kernels.noise``): element e takes output e + 1 of splitmix64 seeded with a key of (seed, step, tensor),
its lowest 16 bits for m and the next 16 for v.  So it needs no state, a resumed run draws it again, and no other tensor shares it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.noise import splitmix64

BF16_NAN = 0x7FC0

_PIECE = 1 << 17  # elements that a CPU takes at once, so that what lies between the operations stays in its cache


@dataclass(frozen=True, slots=True)
class Factors:
    """What the elements of a tensor have in common; every figure is rounded to FP32 where it is used."""

    clip: float
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float  # 1 - beta2
    root: float  # 1 / sqrt(1 - beta2^t)
    epsilon: float
    size: float  # rate / (1 - beta1^t)
    decay: float  # rate * weight_decay

    @classmethod
    def of(cls, rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, step: int, clip: float) -> "Factors":
        """The factors of step 1, 2, .."""
        assert step >= 1
        root = 1 / math.sqrt(1 - beta2**step)
        return cls(clip, beta1, 1 - beta1, beta2, 1 - beta2, root, epsilon, rate / (1 - beta1**step), rate * weight_decay)


@torch.no_grad()
def adamw_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    step: int,
    clip: float,
    noise: tuple[int, int] | None = None,
) -> None:
    """Move a master and its moments by one step, in place; the gradient stays as it is.

    Args:
        master: FP32, contiguous, of any shape, like the three others.
        grad: FP32.
        exp_avg: m, FP32 or BF16; zeros before the first step.
        exp_avg_sq: v, in the same format.
        rate: learning rate.
        beta1: decay of m.
        beta2: decay of v.
        epsilon: what keeps the quotient finite.
        weight_decay: share of the master that a learning rate of 1 would take away in a step.
        step: 1 for the first one.
        clip: factor of the gradient; 1 leaves it as it is.
        noise: for BF16 moments alone, and for them always: (seed, number of the tensor), int64 both.
    """
    tensors = (master, grad, exp_avg, exp_avg_sq)
    assert all(x.is_contiguous() and x.shape == master.shape and x.device == master.device for x in tensors)
    assert master.dtype == grad.dtype == torch.float32
    assert exp_avg.dtype == exp_avg_sq.dtype == (torch.float32 if noise is None else torch.bfloat16)
    factors = Factors.of(rate, beta1, beta2, epsilon, weight_decay, step, clip)
    key = None if noise is None else noise_key(noise[0], step, noise[1])
    if master.is_cuda:
        from isobit.kernels.hopper.adamw import adamw_step as on_gpu

        on_gpu(master, grad, exp_avg, exp_avg_sq, factors, key)
        return
    flat = [x.view(-1).split(_PIECE) for x in tensors]
    for number, (w, g, m, v) in enumerate(zip(*flat, strict=True)):
        _update(w, g, m, v, factors, None if key is None else _noise(key, number * _PIECE, w.numel()))


def noise_key(seed: int, step: int, tensor: int) -> int:
    """The seed of one tensor's noise in one step: a signed 64-bit integer."""
    seeds, steps, tensors = torch.tensor([[seed], [step], [tensor]], dtype=torch.int64)
    return int(splitmix64(splitmix64(seeds, steps), tensors))


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """FP32 -> BF16, up or down by int32 noise in 0 .. 65535; a NaN stays one, and so does an infinity."""
    bits = (x.view(torch.int32) + noise) >> 16
    return bits.masked_fill_(x.isnan(), BF16_NAN).to(torch.int16).view(torch.bfloat16)


def _noise(key: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Noise of the elements from ``first`` on, for m and for v: int32 in 0 .. 65535."""
    bits = splitmix64(torch.tensor([key]), torch.arange(first, first + count))
    return (bits & 0xFFFF).int(), (bits >> 16 & 0xFFFF).int()


def _update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, f: Factors, noise: tuple[Tensor, Tensor] | None) -> None:
    """One operation at a time: torch's combined ones (addcmul, lerp) round otherwise from one processor to the next."""
    g = g * f.clip
    first = (m.float() * f.beta1).add_(g * f.rest1)
    second = (v.float() * f.beta2).add_((g * g).mul_(f.rest2))
    root = second.double().sqrt_().float()  # torch's FP32 root on a CPU can be a unit in the last place off
    quotient = first / root.mul_(f.root).add_(f.epsilon)
    w.sub_((w * f.decay).add_(quotient.mul_(f.size)))
    m.copy_(first if noise is None else round_stochastically(first, noise[0]))
    v.copy_(second if noise is None else round_stochastically(second, noise[1]))
