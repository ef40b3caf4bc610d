"""The gated delta rule of one layer in flash-linear-attention at BF16, a native chunked kernel.

``benchmarks.delta_rule --beside-native`` times it beside this project's.  The package is imported
when it is asked for and is no dependency: fla-core and einops on PYTHONPATH are enough.  A layer
does what that of Qwen3.5 in transformers does between its projections: one convolution of all
channels with SiLU, of which q, k and v are copied, then the rule with the norms of q and k in it.
``GATES`` says where decay and beta are made: in the package's kernels, as its own layers do, or in
torch, as transformers does.  The package chooses forms of its kernels when it first runs them,
by the sizes of heads and not by tokens.

Shapes: T tokens of all sequences, N sequences, H value heads.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from benchmarks.common import Row, kernel_times
from isobit.kernels.operands import DeltaInputs, DeltaShape, DeltaWeights

GATES = "kernel", "torch"
WARM_UP = 3
STATES = 1 << 28  # bytes of the states of layers that take turns, more than the L2 cache has
Work = Callable[[int], object]
"""Of a layer."""


def version() -> Row:
    """The package and its version."""
    return {"native": "flash-linear-attention", "native_version": import_module("fla").__version__}


def lift_refusal(shape: DeltaShape) -> bool:
    """Let the package compute the backward where it refuses to; -> whether it refused.

    Triton 3.4 to 3.7.0 compiles one of its kernels wrongly for Hopper, in blocks of 64 numbers of a
    key (issue 640 of the package, pull request 1010 of unsloth-zoo), and the package refuses any
    size.  Keys of 128 are one block there, so it is lifted for them alone; whether gradients are
    right is in ``native_error``.
    """
    module: Any = import_module("fla.ops.common.chunk_o")
    refuses = module.IS_NVIDIA_HOPPER and module.TRITON_ABOVE_3_4_0
    refuses = refuses and not module.TRITON_ABOVE_3_7_1
    if refuses and shape.key_dim == 128:
        module.TRITON_ABOVE_3_7_1 = True
        return True
    return False


def _heads(mixed: torch.Tensor, shape: DeltaShape) -> list[torch.Tensor]:
    """[.., channels] -> q, k and v [.., heads, size]."""
    keys = shape.key_heads * shape.key_dim
    parts = mixed.split([keys, keys, shape.values], -1)
    sizes = shape.key_dim, shape.key_dim, shape.value_dim
    return [part.unflatten(-1, (-1, n)) for part, n in zip(parts, sizes, strict=True)]


def _gates(a: torch.Tensor, b: torch.Tensor, weights: DeltaWeights, gates: str) -> Row:
    """What the rule is told of decay and beta, of a and b [.., .., H]."""
    if gates == "kernel":
        made = {"g": a, "beta": b, "A_log": weights.a_log, "dt_bias": weights.dt_bias}
        return made | {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    decay = -weights.a_log.float().exp() * functional.softplus(a.float() + weights.dt_bias)
    return {"g": decay, "beta": b.sigmoid()}


def packed(
    inputs: DeltaInputs, weights: DeltaWeights, starts: torch.Tensor, gates: str, keep: bool
) -> list[torch.Tensor]:
    """Sequences from their starts, int64 [N + 1] with the end -> o [T, H DV]; and, if they are to
    be kept, the last inputs [N, channels, width] and the states, FP32 [N, H, DK, DV].
    """
    mixed, last = import_module("fla.modules.causal_conv1d").causal_conv1d(
        inputs.x[None], weights.convolution, activation="silu", output_final_state=keep,
        cu_seqlens=starts,
    )  # fmt: skip
    q, k, v = _heads(mixed, weights.shape)
    output, states = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule(
        q, k, v, output_final_state=keep, use_qk_l2norm_in_kernel=True, cu_seqlens=starts,
        **_gates(inputs.a[None], inputs.b[None], weights, gates),
    )  # fmt: skip
    return [output[0].flatten(1), last, states] if keep else [output[0].flatten(1)]


def decoded(
    inputs: DeltaInputs, weights: DeltaWeights, last: torch.Tensor, states: torch.Tensor, gates: str
) -> list[torch.Tensor]:
    """One token of each sequence -> o [N, H DV] and the next states; ``last`` and ``states`` are
    those of ``packed``, of which the former is written.
    """
    mixed, _ = import_module("fla.modules.causal_conv1d").causal_conv1d_update(
        inputs.x[:, None], last, weight=weights.convolution, activation="silu"
    )
    q, k, v = _heads(mixed, weights.shape)
    output, states = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule(
        q, k, v, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True,
        **_gates(inputs.a[:, None], inputs.b[:, None], weights, gates),
    )  # fmt: skip
    return [output.flatten(1), states]


def starts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where sequences begin, and the end, int64 [N + 1]."""
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def leaves_of(
    inputs: DeltaInputs, weights: DeltaWeights, dtype: torch.dtype
) -> tuple[DeltaInputs, DeltaWeights, list[torch.Tensor]]:
    """Copies that have gradients, and a list of them: x, a, b, then the weights."""
    held = inputs.x, inputs.a, inputs.b, weights.convolution, weights.a_log, weights.dt_bias
    leaves = [one.detach().to(dtype, copy=True).requires_grad_() for one in held]
    return DeltaInputs(*leaves[:3]), DeltaWeights(weights.shape, *leaves[3:]), leaves


def prefill_work(
    inputs: DeltaInputs, weights: DeltaWeights, lengths: Sequence[int], gates: str
) -> tuple[int, Work]:
    """Whole prompts, whose states are kept."""
    starts = starts_of(lengths, inputs.x.device)

    def work(_: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return packed(inputs, weights, starts, gates, keep=True)

    return 1, work


def forward_work(
    inputs: DeltaInputs, weights: DeltaWeights, lengths: Sequence[int], gates: str
) -> tuple[int, Work]:
    """The forward of training, which saves what the backward needs."""
    starts = starts_of(lengths, inputs.x.device)
    own, learnt, _ = leaves_of(inputs, weights, inputs.x.dtype)
    return 1, lambda _: packed(own, learnt, starts, gates, keep=False)


def backward_work(
    inputs: DeltaInputs, weights: DeltaWeights, lengths: Sequence[int], gates: str
) -> tuple[int, Work]:
    """The backward of one forward, again and again."""
    starts = starts_of(lengths, inputs.x.device)
    own, learnt, leaves = leaves_of(inputs, weights, inputs.x.dtype)
    (output,) = packed(own, learnt, starts, gates, keep=False)
    d_output = torch.randn(output.shape, device=output.device).to(output.dtype)
    return 1, lambda _: torch.autograd.grad(output, leaves, d_output, retain_graph=True)


def decode_work(inputs: DeltaInputs, weights: DeltaWeights, gates: str) -> tuple[int, Work]:
    """Steps of layers that take turns, a token of each sequence; states are FP32."""
    shape, x = weights.shape, inputs.x
    sizes = len(x), shape.value_heads, shape.key_dim, shape.value_dim
    layers = min(128, max(3, -(-STATES // (4 * len(x) * shape.values * shape.key_dim))))
    states = [0.1 * torch.randn(sizes, device=x.device) for _ in range(layers)]
    last = [x[..., None].repeat(1, 1, shape.width) for _ in range(layers)]

    def work(layer: int) -> list[torch.Tensor]:
        with torch.no_grad():
            made = decoded(inputs, weights, last[layer], states[layer], gates)
        states[layer] = made[1]
        return made

    return layers, work


def work_of(case: Row, inputs: DeltaInputs, weights: DeltaWeights, gates: str) -> tuple[int, Work]:
    """The work of a case of ``benchmarks.delta_rule``, and of how many layers it is."""
    if case["case"] == "decode":
        return decode_work(inputs, weights, gates)
    of = {"forward": forward_work, "backward": backward_work, "prefill": prefill_work}
    return of[case["case"]](inputs, weights, case["lengths"], gates)


def timed(layers: int, work: Work, repeats: int) -> Row:
    """Microseconds of a layer, and of each kernel, after forms have been chosen."""

    def all_layers() -> None:
        for layer in range(layers):
            work(layer)

    for _ in range(WARM_UP):
        all_layers()
    times = kernel_times(all_layers, repeats)
    of_kernels = {name: time / layers for name, (time, _) in times.items()}
    return {"native_us": sum(of_kernels.values()), "native_kernels": of_kernels}


def caught(make: Callable[[], Row]) -> Row:
    """A row, or what went wrong with it."""
    try:
        return make()
    except Exception as error:
        return {"native_error_text": f"{type(error).__name__}: {error}"[:2000]}


def recurrence(
    inputs: DeltaInputs, weights: DeltaWeights, lengths: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rule token by token in FP64, of sequences one behind another -> o [T, H DV] and its
    leaves, in the order of ``leaves_of``.
    """
    own, learnt, leaves = leaves_of(inputs, weights, torch.float64)
    shape, kernel = weights.shape, learnt.convolution[:, None]
    repeat = shape.value_heads // shape.key_heads
    made = list[torch.Tensor]()
    parts = (one.split(list(lengths)) for one in (own.x, own.a, own.b))
    for x, a, b in zip(*parts, strict=True):
        before = functional.pad(x.t(), (shape.width - 1, 0))
        mixed = functional.silu(functional.conv1d(before, kernel, groups=shape.channels))
        q, k, v = _heads(mixed.t(), shape)
        q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
        q, k = (one.repeat_interleave(repeat, 1) for one in (q / shape.key_dim**0.5, k))
        decay = (-learnt.a_log.exp() * functional.softplus(a + learnt.dt_bias)).exp()
        beta = b.sigmoid()
        state = x.new_zeros(shape.value_heads, shape.key_dim, shape.value_dim)
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            update = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * update[:, None]
            made.append(torch.einsum("hkv,hk->hv", state, q[t]).flatten())
    return torch.stack(made), leaves


def outputs_of(
    inputs: DeltaInputs, weights: DeltaWeights, lengths: Sequence[int], gates: str,
    d_output: torch.Tensor | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """o [T, H DV]; or, of its gradient, those of x, a and b."""
    own, learnt, leaves = leaves_of(inputs, weights, inputs.x.dtype)
    (output,) = packed(own, learnt, starts_of(lengths, inputs.x.device), gates, keep=False)
    if d_output is None:
        return {"o": output.detach()}
    found = torch.autograd.grad(output, leaves[:3], d_output)
    return dict(zip("xab", found, strict=True))
