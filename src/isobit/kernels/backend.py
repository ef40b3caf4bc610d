"""The seam between the layers and a device: the operations that a back end must offer.

Everything above ``isobit.kernels`` computes through a ``Backend`` and names no device.  Two exist,
folders beside this file with the same file names:

    spec      the CPU specification: torch alone, exact; the fused operations are composed of single
              ones, and what they give defines what every other back end has to give
    hopper    NVIDIA GPUs of the Hopper generation: Triton, Gluon and DeepGEMM

Another device is another folder and a line of ``_BACK_ENDS``.

The rule of exactness holds in the forward: an output row's bits depend on that row's inputs alone,
never on the number of rows, its place among them, or the operation's form (paged or packed,
captured or not).  The backward repeats its bits for the same call.  Gradients of masters are FP32
and are added to: each call adds one finished sum, started from zero, to every element.  Only
``token_log_probs_backward`` may add the parts that it takes rows in one by one: who has a sum
already gives it zeros, and adds those.

Shapes: T tokens end to end, C hidden size, H query heads and G KV heads of D numbers, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

import torch

from isobit.config.base import Device
from isobit.kernels.noise import AdamWFactors, Rows
from isobit.kernels.operands import (
    Attend,
    AttendWithBackward,
    DecodeBatch,
    Drawn,
    Draws,
    ExpertGradients,
    KvCache,
    KvShape,
    LinearInput,
    LinearWeight,
    Normed,
    Operand,
    OutputGradient,
    PagedBatch,
    QkvGradients,
    QkvTransform,
    RoutedExperts,
    RouterLoss,
    Routing,
)
from isobit.kernels.sizes import Sizes
from isobit.precision.flow import Graph, LinearShape, PrecisionFlow, Site
from isobit.precision.quant_tensor import QuantTensor, ScaleKind
from isobit.util.errors import ConfigError


class Backend(Protocol):
    """The operations of one device.  Tensors are on it unless a method says otherwise."""

    @property
    def name(self) -> str:
        """Its folder."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def sizes(self) -> Sizes:
        """What its operands and caches take, in bytes, without computing anything."""
        ...

    # Weights

    def publish(self, site: Site, master: torch.Tensor) -> Operand:
        """The matrix that a linear multiplies with, of its FP32 master [N, K]: from the BF16
        rounding, except in FP32.
        """
        ...

    def republish(self, weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
        """Write newer values into the same tensors; -> how many numbers are others now, int64 on
        the device.  In E4M3 a number is its byte, and scales do not count.
        """
        ...

    def publish_head(self, table: torch.Tensor) -> torch.Tensor:
        """What ``logits`` multiplies with, of lm_head's [V, C] in the format between operators: the
        same tensor where that will do.
        """
        ...

    # Forward

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the published table: int64 [T] -> [T, C]."""
        ...

    def add_rms_norm(
        self,
        h: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        site: Site | None,
        save: bool = False,
        keep: bool = False,
    ) -> Normed:
        """h + x (None adds nothing), its RMSNorm, and that as the linear ``site`` reads it; with
        ``save`` also as WGrad will.  The norm itself with ``keep``, and without a site.
        """
        ...

    def linear_input(self, x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
        """x [T, K] as a linear reads it."""
        ...

    def joined_rows(self, values: torch.Tensor, scales: torch.Tensor) -> Operand:
        """Columns of ``linear_input``'s that other ranks have made, as a linear reads them: E4M3
        values [T, K], and FP32 scales of their 1x128 groups, a row a group, [ceil(K / 128), T].
        """
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] -> silu(gate) * up, [T, I]."""
        ...

    def swiglu_input(self, gate_up: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
        """``linear_input(swiglu(gate_up))``."""
        ...

    def swiglu_saved(self, gate_up: torch.Tensor, site: Site) -> Operand:
        """``swiglu_input(..).saved`` alone."""
        ...

    def linear(self, x: Operand, weight: LinearWeight) -> torch.Tensor:
        """FProp, Y = X W^T: [T, K] -> [T, N], without the bias, which ``QkvTransform`` adds."""
        ...

    def route(
        self, x: torch.Tensor, router: torch.Tensor, top_k: int, renormalise: bool
    ) -> Routing:
        """The ``top_k`` experts of each token: x [T, C] and the published router [E, C] -> logits
        x router^T in FP32, whose softmax over all experts gives the weights, divided by their sum
        over the chosen ones where ``renormalise``.
        """
        ...

    def experts(
        self, x: Operand, routing: Routing, gate_up: LinearWeight, down: LinearWeight
    ) -> torch.Tensor:
        """x [T, C] as ``gate_up`` reads it -> y [T, C]: the sum over the ranks j of a token, in
        FP32 and in their order, of weight_j * down_e(swiglu(gate_up_e(x))), e its expert; rounded
        once.  Matrices stand one below the other: [E 2 I, C] and [E C, I].  An expert's output for
        a token has the bits of ``linear`` with its matrix alone.
        """
        ...

    def experts_saving(
        self, x: LinearInput, routing: Routing, gate_up: LinearWeight, down: LinearWeight
    ) -> tuple[torch.Tensor, RoutedExperts]:
        """The same bits, and what ``experts_backward`` reads; ``x.saved`` is x itself, [T, C] in
        the format between operators: each expert groups its own tokens for WGrad.
        """
        ...

    def head_logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """hidden [N, C], published head [V, C] -> FP32 logits [N, V]."""
        ...

    def token_log_probs(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-softmax(logits / temperature) at the targets, int64 [N], and the entropies of the
        distributions: FP32 [N] each.  Logits that are not finite give NaN, or raise NonFiniteError.
        """
        ...

    def scalar_head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A number for each hidden state, a value or a score: [N, C] and a published weight [C] ->
        FP32 [N].
        """
        ...

    def packed_attention(
        self, graph: Graph, lengths: tuple[int, ...], positions: torch.Tensor
    ) -> AttendWithBackward:
        """Attention of the training forward over whole sequences of these lengths; positions int64
        [T].  The same object serves all layers.
        """
        ...

    # Rollout

    @property
    def is_asynchronous(self) -> bool:
        """Whether calls return before the device has computed: then the engine keeps it busy by
        planning a step ahead, and captures its decode steps.
        """
        ...

    def kv_cache(self, shape: KvShape, flow: PrecisionFlow, num_pages: int) -> KvCache:
        """Empty pages."""
        ...

    def paged_attention(self, cache: KvCache, batch: PagedBatch, positions: torch.Tensor) -> Attend:
        """Attention of a ragged batch over the pages of ``cache``; new K and V are written first.
        positions int64 [T].
        """
        ...

    def decode_attention(self, cache: KvCache, batch: DecodeBatch) -> Attend:
        """``paged_attention`` of one new token a sequence, without reading anything from the host:
        it can be captured.
        """
        ...

    def draw(self, logits: torch.Tensor, draws: Draws) -> Drawn:
        """The next token of N samples from FP32 logits [R, V]: Gumbel-max with noise that is keyed
        by (key, position, entry).
        """
        ...

    def capture(
        self, step: Callable[[], tuple[torch.Tensor, ...]], beside: "Captured | None" = None
    ) -> "Captured":
        """A step whose operations can be launched again at once, on the same tensors.  ``step`` is
        called meanwhile, more than once.  It shares the memory of a step captured before,
        ``beside``: the outputs of one are read before the other is launched.
        """
        ...

    def reach(self, length: int) -> int:
        """The longest sequence that a step captured for sequences of ``length`` tokens serves."""
        ...

    # Backward

    def output_gradient(self, dy: torch.Tensor, site: Site) -> OutputGradient:
        """dY [T, N] as DGrad and WGrad read it."""
        ...

    def dgrad(self, dy: Operand, weight: LinearWeight) -> torch.Tensor:
        """dX = dY W, [T, K]."""
        ...

    def wgrad(self, dy: Operand, x: Operand, grad: torch.Tensor) -> None:
        """grad [N, K] += dY^T X, from ``OutputGradient.tokens`` and ``LinearInput.saved``."""
        ...

    def swiglu_backward(
        self, d_activation: torch.Tensor, gate_up: torch.Tensor, site: Site
    ) -> OutputGradient:
        """The gradient of [T, I] -> that of gate and up [T, 2 I], dY of the linear ``site``."""
        ...

    def experts_backward(
        self,
        dy: torch.Tensor,
        saved: RoutedExperts,
        routing: Routing,
        gate_up: LinearWeight,
        down: LinearWeight,
        grads: ExpertGradients,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dy [T, C] -> dx [T, C] through the experts, and the gradient of the routing's weights,
        FP32 [T, k].
        """
        ...

    def route_backward(
        self,
        d_weights: torch.Tensor,
        x: torch.Tensor,
        routing: Routing,
        router: torch.Tensor,
        renormalise: bool,
        loss: RouterLoss | None,
        grad: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the weights FP32 [T, k], and of the router's own losses -> that of x
        [T, C]; grad [E, C].  The choice of experts has no gradient.
        """
        ...

    def qkv_backward(
        self,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        qkv: torch.Tensor,
        transform: QkvTransform,
        positions: torch.Tensor,
        grads: QkvGradients,
    ) -> torch.Tensor:
        """From the gradients of attention to that of the projection's output, [T, (H + 2 G) D]."""
        ...

    def rms_norm_backward(
        self,
        dy: torch.Tensor,
        h: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        d_residual: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> torch.Tensor:
        """d_residual + the gradient through the norm of h, [T, C]; grad [C] is the weight's."""
        ...

    def embedding_backward(
        self, d_hidden: torch.Tensor, token_ids: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """grad [V, C] += each token's row, rows of equal ids in the order of their tokens."""
        ...

    def token_log_probs_backward(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        d_log_probs: torch.Tensor,
        grad: torch.Tensor,
        d_entropies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradients of the log-probabilities and of the entropies, FP32 [N] each, None for
        zeros -> that of hidden [N, C]; grad [V, C].
        """
        ...

    def scalar_head_backward(
        self, hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the numbers FP32 [N] -> that of hidden [N, C]; grad [C]."""
        ...

    # Optimiser

    def adamw_step(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        factors: AdamWFactors,
        key: int | None = None,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        first_element: int = 0,
    ) -> None:
        """One update of a master and its moments in place (``isobit.kernels.spec.optimiser``); of a
        slice from ``first_element`` on, a multiple of 128, to the bits that it has in the whole.
        """
        ...

    def gradient_squares(self, grads: Sequence[torch.Tensor]) -> list[float]:
        """The sum of squares, in FP64, of every 128 rows of each FP32 tensor, from its first row,
        in the order of tensors and rows; a vector's rows are its elements, the last may be fewer.
        A sum depends on its own rows alone: a slice at a multiple of 128 rows has the same.
        """
        ...

    def add_in_order(self, total: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
        """((total + a0) + a1) + .., element by element, in place: FP32, contiguous, of as many
        elements each.
        """
        ...

    # Memory and transfers

    @property
    def memory(self) -> "DeviceMemory | None":
        """The device's own memory, in which engine and trainer take turns
        (``isobit.memory.turns``); None where it computes in the host's.
        """
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host's tensor, which the host does not wait for; or the tensor itself."""
        ...

    def to_host(self, tensors: Sequence[torch.Tensor]) -> "Arriving":
        """Copies on the host, on their way behind everything that was launched before."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...

    # What it is

    def describe(self) -> Mapping[str, str]:
        """Operation -> the library that runs it and, where that is a fallback, why."""
        ...

    def fallbacks(self) -> Sequence[str]:
        """Lines to be said once: where a slower library stands in for the one that is meant."""
        ...

    # For proofs

    def checksum(self, rows: Sequence[Rows]) -> int:
        """The checksum (``isobit.kernels.noise``) of rows of one tensor or more, from 0 to
        2^64 - 1; waits for the device, once.
        """
        ...

    def quantise_rows(self, x: torch.Tensor, scales: ScaleKind) -> QuantTensor:
        """[M, K] in 1x128 groups, in the specification's layout: bytes are the same everywhere."""
        ...


class DeviceMemory(Protocol):
    """Memory that a device has for itself."""

    def available(self) -> int:
        """Bytes that this process has or could have now."""
        ...

    def free(self) -> int:
        """Bytes that nobody holds."""
        ...

    def release_cached(self) -> None:
        """Give back what is cached and not in use."""
        ...

    def peak(self) -> int:
        """The most bytes in use since the last ``reset_peak``."""
        ...

    def reset_peak(self) -> None:
        """Begin to measure anew."""
        ...

    def allocate_in_pages(self) -> None:
        """Let the allocator map single pages, so that engine and trainer can take turns.  Called
        before anything is on the device.
        """
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """uint8 [size] of main memory that copies to and from the device are fast with."""
        ...


class Captured(Protocol):
    """A step that can be launched again."""

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Launch it; the outputs are overwritten by the next replay."""
        ...


class Arriving(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Those tensors, once they have arrived."""
        ...


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model in a flow asks of a back end, as far as one may not have it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    preset: str
    linears: tuple[LinearShape, ...] = ()
    """Each shape once."""


class Support(Protocol):
    """What a back end says of itself before anything of it is made (its ``support.py``): it loads
    on every machine.
    """

    @property
    def sizes(self) -> Sizes:
        """What its operands take, in bytes."""
        ...

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is apart from the host's."""
        ...

    @property
    def libraries(self) -> tuple[str, ...]:
        """Packages beside torch that its bits depend on."""
        ...

    @property
    def extra(self) -> str | None:
        """The optional part of Isobit with the packages that it is meant to have."""
        ...

    @property
    def remedy(self) -> str:
        """What a user does where the device or its libraries are not found."""
        ...

    def device_model(self, device: torch.device) -> str | None:
        """Which of its devices this is; None where that is the host's processor."""
        ...

    def is_present(self) -> bool:
        """Whether the machine has such a device, usable or not."""
        ...

    def state(self) -> tuple[str, bool]:
        """What the machine has of such devices, in a line; and whether a user should look into
        it.
        """
        ...

    def problem(self) -> str | None:
        """Why this machine cannot use it, or None."""
        ...

    def model_problem(self, needs: ModelNeeds) -> str | None:
        """Why it does not compute such a model, or None."""
        ...


_BACK_ENDS = {"cuda": "hopper", "cpu": "spec"}
"""torch's type of a device -> folder; the one to be preferred comes first."""


def support(device_type: str) -> Support:
    """What the back end of a device offers, without loading its kernels."""
    return import_module(f"isobit.kernels.{_BACK_ENDS[device_type]}.support")  # pyright: ignore[reportReturnType]


@cache
def backend_of(device: torch.device) -> Backend:
    """The back end of a device; loads its kernels."""
    module = import_module(f"isobit.kernels.{_BACK_ENDS[device.type]}.backend")
    return module.make(device)


def is_present(device_type: str) -> bool:
    """Whether the machine has such a device, usable or not."""
    return support(device_type).is_present()


def usable_devices() -> dict[str, str | None]:
    """Each type of device, the preferred first -> why this machine cannot use it, or None."""
    return {device: support(device).problem() for device in _BACK_ENDS}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device that a command computes on, and why not on one that would have been preferred."""

    device: torch.device
    passed_over: tuple[str, ...] = ()
    """Why each device that the machine has was not taken."""


def choose_device(wanted: Device, needs: ModelNeeds) -> DeviceChoice:
    """``auto`` is the first device of this machine that computes a model with these needs.

    Raises ConfigError for a device asked for by name that cannot be used, or not for this.
    """
    passed_over: list[str] = []
    for kind, why_not in usable_devices().items():
        if wanted not in ("auto", kind):
            continue
        problem = why_not or support(kind).model_problem(needs)
        if problem is None:
            return DeviceChoice(torch.device(kind), tuple(passed_over))
        if wanted == kind:
            raise ConfigError(f"device = {wanted!r}, but {problem}; use device 'cpu'")
        if support(kind).is_present():
            passed_over.append(problem)
    raise AssertionError("the specification computes everything")
