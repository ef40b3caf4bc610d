"""The operations that a back end must offer, and the choice of a back end.

Everything above ``isobit.kernels`` computes through a ``Backend`` and names no device.  Each is a
folder beside this file and in ``_BACK_ENDS``: ``spec`` on a CPU, which defines every result, and
``triton`` on NVIDIA GPUs since Ampere, of which ``hopper`` is a faster one on its generation.

In the forward an output row's bits depend on that row's inputs alone, never on the number of rows,
its place among them, or the operation's form (paged or packed, captured or not).  The backward
repeats its bits for the same call.  Gradients of masters are FP32 and are added to: each call adds
one finished sum, started from zero, to every element.  Only lm_head's
(``token_log_probs_backward``, ``head_logits_backward``) may add the parts in which rows are taken
one by one: a caller whose gradient is not zero passes zeros, and adds the result.

Shapes: T tokens end to end, C hidden size, H query heads and G KV heads of D numbers, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from isobit.config.base import BackEnd, Device
from isobit.kernels.noise import AdamWFactors, Rows
from isobit.kernels.operands import (
    AdapterGradients,
    AdapterWeight,
    Attend,
    AttendWithBackward,
    DecodeBatch,
    Drawn,
    Draws,
    ExpertGradients,
    Gate,
    HeadWeight,
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
)
from isobit.kernels.routing import RouterLoss, Routing
from isobit.kernels.sizes import Sizes
from isobit.precision.flow import Graph, LinearShape, PrecisionFlow, Site
from isobit.precision.quant_tensor import QuantTensor, ScaleKind
from isobit.util.errors import ConfigError
from isobit.util.terminal import say_once


class HybridOperations(Protocol):
    """The operations of families with a gated delta rule, beside the rule itself, which is with
    attention (``DeltaRule``).  Gates are as wide as what they multiply, [T, N], but for that of a
    shared expert.
    """

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """RMSNorm of each head times silu of the gate; weight [dv]."""
        ...

    def gated_norm_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x and of the gate; adds to the weight's, FP32 [dv]."""
        ...

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x times sigmoid of the gate."""
        ...

    def sigmoid_gate_backward(
        self, dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x and of the gate."""
        ...

    def add_shared(
        self, routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """What the experts of a mixture make [T, C], and sigmoid of a gate, FP32 [T], times what an
        expert of all tokens makes [T, C].
        """
        ...

    def add_shared_backward(
        self, dy: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of ``shared`` and of its gate, FP32 [T]."""
        ...


class Backend(Protocol):
    """The operations of one device.  Tensors are on it unless a method says otherwise."""

    name: str
    device: torch.device
    is_asynchronous: bool
    """Whether calls return early; then the engine plans ahead and captures its decode steps."""
    rounds_alone: bool
    """Whether publishing a matrix that stays in BF16 or FP32 rounds each number by itself."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def hybrid(self) -> HybridOperations: ...

    # Weights

    def publish(self, site: Site, master: torch.Tensor) -> Operand:
        """The matrix that a linear reads, from FP32 [N, K] by way of BF16, except in FP32."""
        ...

    def republish(self, weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
        """Write newer values into the same tensors; -> how many numbers have changed, int64 on the
        device.  In E4M3 these are bytes, without scales.
        """
        ...

    def publish_head(
        self, site: Site, table: torch.Tensor, held: HeadWeight | None = None
    ) -> HeadWeight:
        """lm_head from its table [V, C] between operators, which it may hold itself; written into
        the tensors of ``held``, if it is given.
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
        ``save`` also as WGrad reads it.  Returns the norm itself with ``keep``, and without a site.
        """
        ...

    def linear_input(self, x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
        """x [T, K] as a linear reads it."""
        ...

    def joined_rows(self, values: torch.Tensor, scales: torch.Tensor) -> Operand:
        """Columns of ``linear_input`` that other ranks have made, as a linear reads them: E4M3
        values [T, K], and FP32 scales of their 1x128 groups, a row a group, [ceil(K / 128), T].
        """
        ...

    def swiglu(self, gate_up: torch.Tensor, gate: Gate = "silu") -> torch.Tensor:
        """[T, 2 I] -> silu(gate) * up, [T, I]; or with another function of the gate."""
        ...

    def swiglu_input(
        self, gate_up: torch.Tensor, site: Site, save: bool = False, gate: Gate = "silu"
    ) -> LinearInput:
        """``linear_input(swiglu(gate_up))``."""
        ...

    def swiglu_saved(self, gate_up: torch.Tensor, site: Site, gate: Gate = "silu") -> Operand:
        """``swiglu_input(..).saved`` alone."""
        ...

    def linear(self, x: Operand, weight: LinearWeight) -> torch.Tensor:
        """FProp, Y = X W^T: [T, K] -> [T, N], without the bias, which its reader adds."""
        ...

    def adapter_low(self, x: torch.Tensor, adapter: AdapterWeight) -> torch.Tensor:
        """t = x A^T, rounded, then times the scale, rounded: x [T, K] -> [T, R]."""
        ...

    def add_adapter(
        self, y: torch.Tensor, x: torch.Tensor, adapter: AdapterWeight, save: bool = False
    ) -> torch.Tensor | None:
        """y [T, N] += t B^T in the columns of each target, where t B^T is rounded before it is
        added; x [T, K].  With ``save`` -> t, which otherwise may not exist.
        """
        ...

    def route(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        top_k: int,
        renormalise: bool,
        bias: torch.Tensor | None = None,
    ) -> Routing:
        """The ``top_k`` experts of each token: x [T, C] and the published router [E, C] -> FP32
        logits x router^T + bias [E]; the weights are their softmax over all experts, divided by the
        sum over the chosen ones if ``renormalise``.
        """
        ...

    def experts(
        self,
        x: Operand,
        routing: Routing,
        gate_up: LinearWeight,
        down: LinearWeight,
        gate: Gate = "silu",
    ) -> torch.Tensor:
        """x [T, C] as ``gate_up`` reads it -> y [T, C]: the sum over the ranks j of a token, in
        FP32 and in their order, of weight_j * down_e(swiglu(gate_up_e(x))), e its expert; rounded
        once. The matrices are stacked: [E 2 I, C] and [E C, I].  An expert's output for a token has
        the bits of ``linear`` with its matrix alone; a bias is added to these, and rounded.
        """
        ...

    def experts_saving(
        self,
        x: LinearInput,
        routing: Routing,
        gate_up: LinearWeight,
        down: LinearWeight,
        gate: Gate = "silu",
    ) -> tuple[torch.Tensor, RoutedExperts]:
        """The same bits, and what ``experts_backward`` reads; ``x.saved`` is x itself, [T, C] in
        the format between operators, since each expert groups its own tokens for WGrad.
        """
        ...

    def head_logits(
        self, hidden: torch.Tensor, head: HeadWeight, drawn: int | None = None
    ) -> torch.Tensor:
        """hidden [N, C], published head [V, C] -> FP32 logits [N, V]; only of the first ``drawn``
        rows, if it is given, here and in the log-probabilities: then logits may be a view.
        """
        ...

    def token_log_probs(
        self,
        hidden: torch.Tensor,
        head: HeadWeight,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        drawn: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-softmax(logits / temperature) at the targets, int64 [N], and the entropies: FP32 [N]
        each.  Logits that are not finite give NaN, or raise NonFiniteError.
        """
        ...

    def log_softmax(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Every log-probability of FP32 logits [N, V] at temperatures FP32 [N]: FP32 [N, V], the
        bits of ``token_log_probs`` and ``draw``.  What is not finite does as there.
        """
        ...

    def scalar_head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A value or score for each hidden state: [N, C] and a published weight [C] -> FP32 [N]."""
        ...

    def packed_attention(
        self, graph: Graph, lengths: tuple[int, ...], positions: torch.Tensor
    ) -> AttendWithBackward:
        """Training's attention over whole sequences; positions int64 [T]; serves all layers."""
        ...

    # Rollout

    def kv_cache(
        self, shape: KvShape, flow: PrecisionFlow, num_pages: int, num_carries: int
    ) -> KvCache: ...

    def paged_attention(self, cache: KvCache, batch: PagedBatch, positions: torch.Tensor) -> Attend:
        """Attention of a ragged batch, which writes new K and V first; positions int64 [T]."""
        ...

    def decode_attention(self, cache: KvCache, batch: DecodeBatch) -> Attend:
        """``paged_attention`` of one token a sequence, without the host, so it can be captured."""
        ...

    def draw(self, logits: torch.Tensor, draws: Draws) -> Drawn:
        """The next token of N samples from FP32 logits [R, V], by Gumbel-max (``noise``)."""
        ...

    def capture(
        self, step: Callable[[], tuple[torch.Tensor, ...]], beside: "Captured | None" = None
    ) -> "Captured":
        """A step that can be launched again on the same tensors; ``step`` is called more than once.
        It shares the memory of ``beside``, so the outputs of one are read before the other is
        launched.
        """
        ...

    def reach(self, length: int, rows: int) -> int:
        """The longest sequence that a step serves which is captured for so many rows and sequences
        of ``length`` tokens.
        """
        ...

    # Backward

    def output_gradient(self, dy: torch.Tensor, site: Site) -> OutputGradient:
        """dY [T, N] as DGrad and WGrad read it."""
        ...

    def dgrad(self, dy: Operand, weight: LinearWeight) -> torch.Tensor:
        """dX = dY W, [T, K]."""
        ...

    def wgrad(self, dy: Operand, x: Operand, grad: torch.Tensor, site: Site) -> None:
        """grad [N, K] += dY^T X, from ``OutputGradient.tokens`` and ``LinearInput.saved``."""
        ...

    def adapter_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        low: torch.Tensor,
        dx: torch.Tensor,
        adapter: AdapterWeight,
        grads: AdapterGradients,
    ) -> None:
        """dY [T, N], x [T, K] and its t, ``low`` [T, R] -> dX [T, K] += the adapter's, in place."""
        ...

    def swiglu_backward(
        self,
        d_activation: torch.Tensor,
        gate_up: torch.Tensor,
        site: Site,
        gate: Gate = "silu",
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
        grads: ExpertGradients | None,
        gate: Gate = "silu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dy [T, C] -> dx [T, C], and the gradient of the routing's weights, FP32 [T, k]. None for
        frozen experts.
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
        grad: torch.Tensor | None,
        bias_grad: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradient of the weights FP32 [T, k], and of the router's own losses -> that of x [T,
        C]; grad [E, C] and bias_grad [E], None for a frozen router.  The choice of experts has no
        gradient.
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
        """The gradients of attention -> that of the projection's output, [T, (H + 2 G) D]."""
        ...

    def rms_norm_backward(
        self,
        dy: torch.Tensor,
        h: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        d_residual: torch.Tensor | None,
        grad: torch.Tensor | None,
    ) -> torch.Tensor:
        """d_residual + the gradient through the norm of h, [T, C]; grad [C] is the weight's, None
        for a frozen one.
        """
        ...

    def embedding_backward(
        self, d_hidden: torch.Tensor, token_ids: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """grad [V, C] += each token's row, rows of equal ids in the order of their tokens."""
        ...

    def token_log_probs_backward(
        self,
        hidden: torch.Tensor,
        head: HeadWeight,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        d_log_probs: torch.Tensor,
        grad: torch.Tensor | None,
        d_entropies: torch.Tensor | None = None,
        drawn: int | None = None,
    ) -> torch.Tensor:
        """The gradients of the log-probabilities and of the entropies, FP32 [N] each, None for
        zeros -> that of hidden [N, C]; grad [V, C], None for a frozen head.
        """
        ...

    def head_logits_backward(
        self,
        hidden: torch.Tensor,
        head: HeadWeight,
        d_logits: torch.Tensor,
        grad: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gradient of ``head_logits`` of the first V' rows, FP32 [N, V'] -> that of hidden [N,
        C]; adds the head's to ``grad`` [V, C], None for a frozen head, as
        ``token_log_probs_backward`` adds one of its parts, and with the same products.
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
        """Update a master and its moments in place (``isobit.kernels.spec.optimiser``).  A slice
        from ``first_element`` on, a multiple of 128, gets the bits that it has in the whole.
        """
        ...

    def gradient_squares(self, grads: Sequence[torch.Tensor]) -> list[float]:
        """The FP64 sum of squares of every 128 rows of each FP32 tensor, in the order of tensors
        and rows; a vector's rows are its elements, the last block may be short.  A sum depends on
        its own rows alone, so a slice at a multiple of 128 rows has the same.
        """
        ...

    def add_in_order(self, total: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
        """((total + a0) + a1) + .. of each element, in place: FP32, contiguous, of equal sizes."""
        ...

    # Memory and transfers

    @property
    def memory(self) -> "DeviceMemory | None":
        """The device's own memory, in which engine and trainer take turns
        (``isobit.memory.sharing``); None where it computes in the host's.
        """
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host's tensor, for which the host does not wait; or the tensor itself."""
        ...

    def to_host(self, tensors: Sequence[torch.Tensor]) -> "Arriving":
        """Copies on the host, made after everything that was launched before."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...

    # What it is

    def describe(self) -> Mapping[str, str]:
        """Operation -> the library that runs it and, where that is a fallback, why."""
        ...

    def fallbacks(self, flow: PrecisionFlow) -> Sequence[str]:
        """Lines to print once about what is slower here than it might be in this flow: libraries
        that stand in for others, and products in another format than the flow's.
        """
        ...

    # For proofs

    def checksum(self, rows: Sequence[Rows]) -> int:
        """The checksum (``noise``) of rows, from 0 to 2^64 - 1; the host waits once."""
        ...

    def quantise_rows(self, x: torch.Tensor, scales: ScaleKind) -> QuantTensor:
        """[M, K] in 1x128 groups and the specification's layout, with equal bytes everywhere."""
        ...


class DeviceMemory(Protocol):
    """Memory that a device has for itself, in bytes."""

    def available(self) -> int:
        """Bytes that this process holds or can still allocate."""
        ...

    def free(self) -> int:
        """Bytes that no process holds."""
        ...

    def release_cached(self) -> None: ...

    def peak(self) -> int:
        """The most in use since the last ``reset_peak``."""
        ...

    def reset_peak(self) -> None: ...

    def allocate_in_pages(self) -> None:
        """Let the allocator map single pages, for turns; called before anything is allocated."""
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """uint8 [size] of host memory with fast copies to and from the device."""
        ...


class Captured(Protocol):
    """A step that can be launched again."""

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Launch it; the next replay overwrites the outputs."""
        ...


class Arriving(Protocol):
    """Tensors that are being copied to the host."""

    def wait(self) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Needs of a model in a flow that a back end may not meet."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    preset: str
    linears: tuple[LinearShape, ...] = ()  # those that may be quantised, each shape once


class Support(Protocol):
    """A back end's description of itself, in a module that loads on every machine."""

    sizes: Sizes
    has_own_memory: bool  # whether its memory is separate from the host's
    libraries: tuple[str, ...]  # packages beside torch that its bits depend on
    extra: str | None  # the optional dependency group of Isobit with its packages
    remedy: str  # what a user does where the device or its libraries are not found

    def device_model(self, device: torch.device) -> str | None:
        """The device's name; None where that is the host's processor."""
        ...

    def figures(self, device: torch.device) -> Mapping[str, str | int]:
        """What a report says of the device; nothing of the host's processor."""
        ...

    def device_class(self, device: torch.device) -> str:
        """What names device and back end in a class of bits: cpu, cuda-sm90-hopper."""
        ...

    def is_preferred(self) -> bool:
        """Whether ``auto`` takes it on this machine, of the back ends of a device the first."""
        ...

    def is_present(self) -> bool:
        """Whether the machine has such a device, usable or not."""
        ...

    def state(self) -> tuple[str, bool]:
        """A line on the machine's devices, and whether the user should look into it."""
        ...

    def problem(self) -> str | None:
        """Why this machine cannot use it, or None."""
        ...

    def model_problem(self, needs: ModelNeeds) -> str | None:
        """Why it does not compute such a model, or None."""
        ...


_BACK_ENDS = {"cuda": ("hopper", "triton"), "cpu": ("spec",)}
"""torch's type of a device -> folders; the preferred comes first, of devices and of back ends."""
_SUPPORT = {"hopper": "hopper.support", "triton": "triton.support", "spec": "spec"}
_named: dict[str, BackEnd] = {}
"""torch's type of a device -> the back end that was named."""
_made: dict[torch.device, Backend] = {}


def use_back_end(name: BackEnd) -> None:
    """The back end of this process's GPUs; ``auto`` is Hopper's on Hopper, and elsewhere that of
    every card.  Raises ConfigError where the process computes by another already.
    """
    before = _named.get("cuda", "auto")
    _named["cuda"] = name
    others = {one.name for device, one in _made.items() if device.type == "cuda"}
    if others - {back_end_of("cuda")}:
        _named["cuda"] = before
        raise ConfigError(
            f"back_end = {name!r}, but this process computes by {others.pop()} already; start "
            "another process"
        )


def back_end_of(device_type: str) -> str:
    """The folder of a device's back end."""
    named = _named.get(device_type, "auto")
    if named != "auto":
        return named
    return next(one for one in _BACK_ENDS[device_type] if _support(one).is_preferred())


def support(device_type: str, back_end: str = "auto") -> Support:
    """The ``Support`` of a device, without its kernels; or of a back end, for plans alone."""
    return _support(back_end_of(device_type) if back_end == "auto" else back_end)


def _support(folder: str) -> Support:
    return import_module(f"isobit.kernels.{_SUPPORT[folder]}")  # pyright: ignore[reportReturnType]


def backend_of(device: torch.device) -> Backend:
    """The back end of a device, with its kernels."""
    if device not in _made:
        module = import_module(f"isobit.kernels.{back_end_of(device.type)}.backend")
        _made[device] = module.make(device)
    return _made[device]


def is_present(device_type: str) -> bool:
    return support(device_type).is_present()


def back_end_extras() -> set[str | None]:
    """The optional dependency groups of all back ends."""
    return {_support(folder).extra for folder in _SUPPORT}


def usable_devices() -> dict[str, str | None]:
    """Each type of device, the preferred first -> why this machine cannot use it, or None."""
    return {device: support(device).problem() for device in _BACK_ENDS}


def name_fallbacks(backend: Backend, flow: PrecisionFlow) -> None:
    """Once a process: what is slower here than it might be, and why."""
    for line in backend.fallbacks(flow):
        say_once(f"isobit: {line}")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device that a command computes on."""

    device: torch.device
    passed_over: tuple[str, ...] = ()  # why each preferred device of the machine was not chosen


def choose_device(wanted: Device, needs: ModelNeeds) -> DeviceChoice:
    """``auto`` is the first device of this machine that computes a model with these needs.

    Raises ConfigError for a named device that cannot be used, at all or for this model.
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
