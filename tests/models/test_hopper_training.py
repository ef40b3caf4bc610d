"""The GPU's backward pass, put together from plain torch operations in the place of its kernels:
the way gradients go, on a CPU.

What the kernels compute is tested on a GPU (tests/gpu); here every one of them is a few lines of
torch, and the gradients must be those of the CPU's decoder.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the modules that import the kernels need Triton")

from isobit.kernels.spec.rms_norm import rms_norm_forward

from isobit.config.precision import PrecisionConfig
from isobit.config.training import Recompute
from isobit.kernels.hopper import attention_backward as attention_kernel
from isobit.kernels.hopper import packed_attention
from isobit.kernels.hopper.attention import PackedKeys
from isobit.kernels.hopper.qkv import QkvTransform, Queries
from isobit.kernels.hopper.quantise import QuantRows
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.e4m3 import decode_e4m3
from isobit.kernels.spec.packed_attention import PackedAttention
from isobit.kernels.spec.rope import RopeTable, rotate
from isobit.kernels.spec.swiglu import swiglu_forward
from isobit.models import decoder, head, hopper_decoder, hopper_saving, hopper_training
from isobit.models.config import Family, ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.precision.formats import ScaleKind
from isobit.precision.quant_tensor import QuantTensor

LENGTHS = (5, 17, 1, 40)


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def through(
    function: Any, inputs: tuple[torch.Tensor, ...], d_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of a differentiable function, in FP32."""
    wide = [x.detach().float().requires_grad_() for x in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*wide), wide, d_output.float())


def in_rows(x: torch.Tensor, scales: ScaleKind) -> QuantRows:
    made = specification.quantise_rows(x, scales)
    return QuantRows(made.values, made.scales)


def in_tokens(x: torch.Tensor, scales: ScaleKind) -> QuantRows:
    made = specification.quantise_tokens(x, scales)
    return QuantRows(made.values.t(), made.scales.t())


def in_both(x: torch.Tensor, scales: ScaleKind) -> tuple[QuantRows, QuantRows]:
    return in_rows(x, scales), in_tokens(x, scales)


def numbers(x: QuantRows | QuantTensor) -> torch.Tensor:
    """FP32, of groups along the last dimension or of blocks."""
    scales = x.scales.repeat_interleave(128, 1)
    if isinstance(x, QuantTensor):
        scales = scales.repeat_interleave(128, 0)
    return decode_e4m3(x.values.contiguous()) * scales[:, : x.values.shape[1]]


def add_norm(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scales: ScaleKind | None,
    keep: bool,
) -> Any:
    h = h if x is None else h + x
    normed = rms_norm_forward(h, weight, epsilon)[0]
    return h, normed if keep else None, None if scales is None else in_rows(normed, scales)


def heads(qkv: torch.Tensor, t: QkvTransform, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Q, K and V after bias, norms and rotation, in the dtype of qkv."""
    if t.bias is not None:
        qkv = qkv + t.bias.to(qkv.dtype)
    q, k, v = qkv.view(qkv.shape[0], -1, t.head_dim).split(
        [t.num_heads, t.num_kv_heads, t.num_kv_heads], 1
    )
    if t.q_norm is not None and t.k_norm is not None:
        q, k = norm(q, t.q_norm.to(q.dtype), t.epsilon), norm(k, t.k_norm.to(k.dtype), t.epsilon)
    table = RopeTable(t.cos, t.sin).rows(positions)
    return rotate(q, table), rotate(k, table), v


def encode(qkv: torch.Tensor, transform: QkvTransform, positions: torch.Tensor, format: str) -> Any:
    q, k, v = (x.bfloat16() for x in heads(qkv.float(), transform, positions))
    return Queries(q, None), PackedKeys(k, None, v, None)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    outputs = []
    for a, b, c in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), c)
        )
    return torch.cat(outputs)


def prefill(
    q: torch.Tensor, _: Any, keys: PackedKeys, *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(q.float(), keys.keys.float(), keys.values.float()).bfloat16(), torch.zeros(
        q.shape[:2]
    )


def attention_backward(
    q: torch.Tensor,
    _: Any,
    keys: PackedKeys,
    output: Any,
    lse: Any,
    d_output: torch.Tensor,
    *more: Any,
) -> Any:
    return tuple(d.bfloat16() for d in through(attention, (q, keys.keys, keys.values), d_output))


def qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    t: QkvTransform,
    positions: torch.Tensor,
    *grads: Any,
) -> torch.Tensor:
    masters = [x for x in (t.q_norm, t.k_norm, t.bias) if x is not None]

    def forward(qkv: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        rest = list(found)
        q_norm, k_norm, bias = (
            rest.pop(0) if x is not None else None for x in (t.q_norm, t.k_norm, t.bias)
        )
        one = QkvTransform(
            t.num_heads, t.num_kv_heads, t.head_dim, t.cos, t.sin, t.epsilon, q_norm, k_norm, bias
        )
        return torch.cat(heads(qkv, one, positions), 1)

    d_qkv, *d_masters = through(forward, (qkv, *masters), torch.cat([dq, dk, dv], 1))
    for grad, d in zip([g for g in grads if g is not None], d_masters, strict=True):
        grad += d
    return d_qkv.bfloat16()


def norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    d_residual: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    dh, dw = through(lambda h, w: norm(h, w, epsilon), (h, weight), dy)
    grad += dw
    return (dh if d_residual is None else dh + d_residual.float()).bfloat16()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float().t()).bfloat16()


def wgrad(dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
    grad += dy.float().t() @ x.float()


def swiglu_backward(d: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return through(plain_swiglu, (gate_up,), d)[0].bfloat16()


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, plain in (
        (hopper_decoder, "rms_norm_quantise", add_norm),
        (hopper_decoder, "gemm_bf16", product),
        (hopper_decoder, "swiglu", swiglu_forward),
        (hopper_decoder, "quantise_rows", in_rows),
        (
            hopper_decoder,
            "swiglu_quantise",
            lambda gate_up, scales: in_rows(swiglu_forward(gate_up), scales),
        ),
        (hopper_decoder, "gemm_e4m3", lambda a, b, scales: product(numbers(a), numbers(b))),
        (hopper_saving, "swiglu", swiglu_forward),
        (hopper_saving, "quantise_tokens", in_tokens),
        (hopper_saving, "quantise_both", in_both),
        (
            hopper_saving,
            "swiglu_tokens",
            lambda gate_up, scales: in_tokens(swiglu_forward(gate_up), scales),
        ),
        (
            hopper_saving,
            "swiglu_both",
            lambda gate_up, scales: in_both(swiglu_forward(gate_up), scales),
        ),
        (packed_attention, "encode_packed", encode),
        (packed_attention, "prefill_attention", prefill),
        (attention_kernel, "attention_backward", attention_backward),
        (hopper_training, "qkv_backward", qkv_backward),
        (hopper_training, "rms_norm_backward", norm_backward),
        (hopper_training, "quantise_rows", in_rows),
        (hopper_training, "quantise_both", in_both),
        (hopper_training, "swiglu_backward", swiglu_backward),
        (
            hopper_training,
            "swiglu_backward_quantise",
            lambda d, gate_up, scales: in_both(swiglu_backward(d, gate_up), scales),
        ),
        (hopper_training, "dgrad", lambda dy, w, scales: product(numbers(dy), numbers(w).t())),
        (hopper_training, "dgrad_bf16", lambda dy, w: product(dy, w.t())),
        (
            hopper_training,
            "wgrad",
            lambda dy, x, grad: wgrad(numbers(dy).t(), numbers(x).t(), grad),
        ),
        (hopper_training, "wgrad_bf16", wgrad),
        (
            hopper_training,
            "embedding_backward",
            lambda d, ids, grad: grad.index_add_(0, ids, d.float()),
        ),
    ):
        monkeypatch.setattr(owner, name, plain)


def plain_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


BF16 = PrecisionConfig(preset="bf16")
FP8 = PrecisionConfig(preset="fp8-linear")  # attention is a stand-in in BF16
MIXED = PrecisionConfig(
    preset="fp8-linear", wgrad="bf16", first_layers_bf16=1, modules_bf16=("layers.2.o_proj",)
)


def make(
    family: Family, precision: PrecisionConfig = BF16
) -> tuple[Policy, torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads, intermediate = (2, 192) if precision is BF16 else (4, 256)  # whole blocks
    config = ModelConfig(
        family, 64, 128, intermediate, 3, 4, kv_heads, 32, 64, 1e-6, 1e4, tied_embeddings=False
    )
    policy = random_policy(config, precision, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for master in policy.parameters():
            master += (
                0.1
                * torch.randn(master.shape, generator=generator)
                * (1 if master.ndim == 1 else 0.5)
            )
    policy.publish()
    ids = torch.randint(64, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return policy, ids, positions, torch.randn(sum(LENGTHS), 128, generator=generator).bfloat16()


def gradients(
    policy: Policy, hidden: torch.Tensor, d_hidden: torch.Tensor
) -> dict[str, torch.Tensor]:
    hidden.backward(d_hidden)
    found = {
        name: master.grad for name, master in policy.masters.items() if master.grad is not None
    }
    for master in policy.parameters():
        master.grad = None
    return found


@pytest.mark.parametrize("precision", [BF16, FP8, MIXED], ids=["bf16", "fp8", "mixed"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
def test_gradients_are_those_of_the_cpus_decoder(
    family: Family, recompute: Recompute, precision: PrecisionConfig
) -> None:
    policy, ids, positions, d_hidden = make(family, precision)
    least, slack = (
        (0.999, 0.03) if precision is BF16 else (0.98, 0.06)
    )  # E4M3 makes more of another rounding in BF16
    exact = gradients(
        policy,
        decoder.hidden_states(
            policy, "training", ids, positions, PackedAttention(policy.flow, LENGTHS)
        ),
        d_hidden,
    )
    ours = gradients(
        policy,
        hopper_training.packed_hidden_states(policy, ids, positions, LENGTHS, recompute),
        d_hidden,
    )
    assert ours.keys() == exact.keys() == policy.masters.keys() - {"lm_head.weight"}
    for name, gradient in exact.items():
        cosine = float(
            torch.cosine_similarity(ours[name].flatten().double(), gradient.flatten().double(), 0)
        )
        assert cosine > least, (name, cosine)
        assert float(ours[name].norm() / gradient.norm()) == pytest.approx(1, abs=slack), name


@pytest.mark.parametrize("precision", [BF16, FP8, MIXED], ids=["bf16", "fp8", "mixed"])
def test_recomputing_changes_no_bit_and_gradients_add_up(precision: PrecisionConfig) -> None:
    policy, ids, positions, d_hidden = make("qwen3", precision)
    levels: tuple[Recompute, ...] = ("none", "mlp", "full")
    saved, *again = (
        gradients(
            policy,
            hopper_training.packed_hidden_states(policy, ids, positions, LENGTHS, level),
            d_hidden,
        )
        for level in levels
    )
    assert all(torch.equal(saved[name], one[name]) for one in again for name in saved)
    for _ in range(2):
        hopper_training.packed_hidden_states(policy, ids, positions, LENGTHS, "none").backward(
            d_hidden
        )
    twice = {
        name: master.grad for name, master in policy.masters.items() if master.grad is not None
    }
    assert all(torch.equal(twice[name], saved[name] + saved[name]) for name in saved)


@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_gradient_goes_to_its_master_and_to_the_hidden_states(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig("qwen3", 64, 128, 192, 1, 4, 2, 32, 64, 1e-6, 1e4, tied_embeddings=tied)
    policy = random_policy(config, PrecisionConfig(preset="bf16"), seed=0)
    hidden, targets, temperatures = (
        torch.randn(30, 128).bfloat16(),
        torch.randint(64, (30,)),
        torch.full((30,), 0.7),
    )

    def forward(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> Any:
        log_probs = (hidden.float() @ weight.float().t() / temperatures[:, None]).log_softmax(-1)
        return log_probs.gather(1, targets[:, None])[:, 0], torch.zeros(30)

    def backward(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        d: torch.Tensor,
        grad: torch.Tensor,
    ) -> torch.Tensor:
        d_hidden, d_weight = through(
            lambda h, w: forward(h, w, targets, temperatures)[0], (hidden, weight), d
        )
        grad += d_weight
        return d_hidden.bfloat16()

    monkeypatch.setattr(hopper_training.head, "token_log_probs", forward)
    monkeypatch.setattr(hopper_training.head, "token_log_probs_backward", backward)
    found = []
    for log_probs_of in (
        lambda h: hopper_training.token_log_probs(policy, h, targets, temperatures),
        None,
    ):
        h = hidden.clone().requires_grad_()
        log_probs = (
            log_probs_of(h)[0]
            if log_probs_of
            else head.token_log_probs(policy, "training", h, targets, temperatures)[0]
        )
        (log_probs * torch.linspace(-1, 1, 30)).sum().backward()
        master = policy.masters[policy.head_name]
        assert h.grad is not None and master.grad is not None
        found.append((h.grad.double().flatten(), master.grad.double().flatten()))
        master.grad = None
    for ours, exact in zip(*found, strict=True):
        assert torch.cosine_similarity(ours, exact, 0) > 0.9999
