"""AdamW over the FP32 masters, the clip of the gradient's norm, and the learning rate of each
update.

AdamW is ``isobit.kernels.spec.optimiser`` (decoupled weight decay, arXiv 1711.05101), in every
format
of the moments.  An element's bits are its own, so a rank moves its rows of a master as one process
moves the whole; in torch's fused form they depend on where a tensor begins.  Only matrices decay:
norms and biases have no scale to be held down.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import get_args

import torch

from isobit.config.training import Moments, TrainingConfig
from isobit.kernels.backend import Backend
from isobit.kernels.noise import FIRST, SECOND, AdamWFactors, noise_key, num_groups
from isobit.precision.quant_tensor import DTYPES


def learning_rate(update: int, config: TrainingConfig, total_updates: int) -> float:
    """The learning rate of update 0, 1, .. ``total_updates`` - 1.

    It rises linearly over the updates of the warmup, never from 0, and has its full value at the
    update after them.  From there it is constant, or falls along a line or half a cosine that would
    reach ``min_learning_rate`` at ``total_updates``, as in ``transformers.get_scheduler``, which
    begins its warmup at 0.
    """
    warmup = config.warmup_updates or math.ceil(config.warmup_ratio * total_updates)
    if update < warmup:
        return config.learning_rate * (update + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    least = config.min_learning_rate
    height = config.learning_rate - least
    if config.schedule == "linear":
        return least + height * (1.0 - progress)
    return least + height * 0.5 * (1.0 + math.cos(math.pi * progress))


def smaller_moments(moments: Moments) -> Sequence[Moments]:
    """The formats of moments that take less memory."""
    formats: Sequence[Moments] = get_args(Moments)
    return formats[formats.index(moments) + 1 :]


def advise_smaller_moments(moments: Moments) -> str:
    """What a user can set to need less memory; empty where nothing is smaller."""
    smaller = smaller_moments(moments)
    return f"set training.moments = {' or '.join(map(repr, smaller))}" if smaller else ""


def moment_bytes(sizes: Iterable[int], moments: Moments) -> int:
    """The bytes of the moments of masters with so many elements each."""
    if moments == "fp8":
        return sum(2 * (size + num_groups(size)) for size in sizes)
    return 2 * DTYPES[moments].itemsize * sum(sizes)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Masters that learn alike."""

    masters: Sequence[torch.nn.Parameter]
    weight_decay: float
    rate: float = 1.0
    """Their learning rate as a multiple of the run's."""


class AdamW:
    """AdamW over the rows that one rank owns of each master.

    Noise, which rounds moments of 16 and 8 bits, is keyed by (seed, step, number of the master,
    element of the whole master).  The state is laid out as torch's, ``step`` on the host; of 8-bit
    moments it has the scales, too.  The class is not ``torch.optim.Optimizer``'s: the first of
    those in a process imports the compiler of torch, a second and 140 MB of every start.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        first_elements: Mapping[torch.nn.Parameter, int],
        config: TrainingConfig,
        seed: int,
        backend: Backend,
    ) -> None:
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        """State of each master that has moved, by kind."""
        self.learning_rate = config.learning_rate
        """The learning rate of the next steps."""
        self.clip = 1.0
        """The factor of the gradients of the next step."""
        self._groups = groups
        self._first_elements = first_elements
        self._config = config
        self._seed = seed
        self._backend = backend

    @torch.no_grad()
    def step(self) -> None:
        """One update of every master that has a gradient; one without rows counts its steps."""
        numbered = enumerate((group, master) for group in self._groups for master in group.masters)
        for number, (group, master) in numbered:
            if master.grad is None:
                continue
            if master not in self.state:
                self.state[master] = self._zeros(master)
            self.state[master]["step"] += 1
            if master.numel():
                self._update(master, number, group, self.state[master])
        self.clip = 1.0

    def drop_gradients(self) -> None:
        """Remove the gradients of all masters."""
        for group in self._groups:
            for master in group.masters:
                master.grad = None

    def _update(
        self,
        master: torch.nn.Parameter,
        number: int,
        group: ParameterGroup,
        state: Mapping[str, torch.Tensor],
    ) -> None:
        assert master.grad is not None
        config = self._config
        step = int(state["step"])
        key = None
        scales = None
        if config.moments != "fp32":
            key = noise_key(self._seed, step, number)
        if config.moments == "fp8":
            scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
        factors = AdamWFactors.of(
            self.learning_rate * group.rate,
            config.beta1,
            config.beta2,
            config.adam_epsilon,
            group.weight_decay,
            step,
            self.clip,
        )
        moments, first = (state["exp_avg"], state["exp_avg_sq"]), self._first_elements[master]
        self._backend.adamw_step(master, master.grad, *moments, factors, key, scales, first)

    def _zeros(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state before the first step."""
        moments = self._config.moments
        first, second = (FIRST, SECOND) if moments == "fp8" else (DTYPES[moments],) * 2
        state = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(master, dtype=first),
            "exp_avg_sq": torch.zeros_like(master, dtype=second),
        }
        if moments == "fp8":
            for name in ("exp_avg_scale", "exp_avg_sq_scale"):
                state[name] = torch.zeros(
                    num_groups(master.numel()), dtype=torch.uint8, device=master.device
                )
        return state


def build_optimiser(
    masters: Mapping[str, torch.nn.Parameter],
    config: TrainingConfig,
    backend: Backend,
    seed: int = 0,
    head: str | None = None,
    head_rate: float = 1.0,
    first_rows: Mapping[str, int] | None = None,
) -> AdamW:
    """AdamW over masters on a back end; the trainer sets the learning rate before each update.

    Args:
        masters: all of the policy's by name, each with the rows that this rank owns, perhaps none.
        config: of the training.
        backend: that of the masters.
        seed: of the rounding of moments.
        head: the name of a value head, which learns ``head_rate`` times as fast as the others.
        head_rate: see ``head``.
        first_rows: where the rows begin in each whole master; None, at its first row.
    """
    others = [master for name, master in masters.items() if name != head]
    heads = [master for name, master in masters.items() if name == head]
    matrices = [master for master in others if master.dim() >= 2]
    vectors = [master for master in others if master.dim() < 2]
    groups = [
        ParameterGroup(matrices, config.weight_decay),
        ParameterGroup(vectors, 0.0),
        ParameterGroup(heads, 0.0, head_rate),
    ]
    first_elements = {
        master: (first_rows or {}).get(name, 0) * prod(master.shape[1:])
        for name, master in masters.items()
    }
    return AdamW(groups, first_elements, config, seed, backend)


def gradient_norm(squares: Iterable[float]) -> float:
    """The 2-norm of all gradients together, before clipping, of their sums of squares
    (``Backend.gradient_squares``) in any order: they are added exactly and rounded once.
    """
    return math.sqrt(math.fsum(squares))


def clip_gradients(optimiser: AdamW, norm: float, max_norm: float) -> None:
    """Let the next step scale all gradients down together so that their norm, given as ``norm``,
    becomes at most ``max_norm``.  It does so in its pass; the gradients stay as they are.
    """
    # as torch.nn.utils.clip_grads_with_norm_ has it
    optimiser.clip = float(
        (max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).clamp(max=1.0)
    )
