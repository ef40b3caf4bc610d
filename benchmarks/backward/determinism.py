"""Two backward passes with the same bytes, and the price of that against the fastest backward that
need not repeat its bits.

The operations where PyTorch has a faster form that adds in any order are attention (cuDNN's and
flash's) and the embedding (atomics). The price of a pass is what it would save with those in the
place of ours:

    price = [layers * (ours - fastest attention) + (ours - atomic embedding)] / (pass - that)

Everything else of the backward has one form, whose order is fixed anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_backward import DIM, HEADS, KV_HEADS, backward_row, seconds
from benchmarks.comparison.rows import Row
from benchmarks.passes.cases import Case
from benchmarks.passes.native import add_gradients, make_pass
from benchmarks.passes.timing import free_memory, measured, time_pass
from isobit.config.tables import PrecisionConfig
from isobit.kernels.hopper.pointwise import embedding_backward
from isobit.models.policy import random_policy

SHAPE = "qwen3-8b"
CASES = (Case("fp8", 4096, 2, "none", SHAPE), Case("fp8", 16384, 1, "mlp", SHAPE))
BYTES_LENGTH = 4096
_BACK_ENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def measure_determinism() -> dict[str, Any]:
    """Everything, as it goes to a file."""
    return {
        "bytes": measured(same_bytes),
        "price": [measured(lambda case=case: price(case)) for case in CASES],
    }


def same_bytes() -> Row:
    """Gradients of the whole model, twice, and what differs."""
    policy = random_policy(
        Case("fp8", BYTES_LENGTH, 1, "none", SHAPE).config,
        PrecisionConfig(preset="fp8"),
        seed=0,
        device="cuda",
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(policy.config.vocab_size, (BYTES_LENGTH,), generator=generator).cuda()
    weights = torch.randn(BYTES_LENGTH - 1, generator=generator).cuda() / BYTES_LENGTH

    def gradients() -> dict[str, torch.Tensor]:
        add_gradients(policy, ids[None], weights, "none")
        found = {
            name: master.grad for name, master in policy.masters.items() if master.grad is not None
        }
        for master in policy.parameters():
            master.grad = None
        return found

    first, second = gradients(), gradients()
    differing = sum(
        int((first[name].view(torch.int32) != second[name].view(torch.int32)).sum())
        for name in policy.masters
    )
    return {"numbers": sum(gradient.numel() for gradient in first.values()), "differing": differing}


def price(case: Case) -> Row:
    """The pass, the operations that could be faster, and what they would save."""
    whole = time_pass(case, make_pass(case))["seconds"]
    free_memory()
    ours = float(str(backward_row("fp8", case.sequences, case.length)["ms"]))
    others = {
        name: _try(lambda backend=backend: sdpa_ms(backend, case))
        for name, backend in _BACK_ENDS.items()
    }
    known = [ms for ms in others.values() if isinstance(ms, float)]
    ours_embedding, atomic_embedding = embedding_ms(case)
    saved = (
        (case.config.num_layers * (ours - min(known)) + ours_embedding - atomic_embedding) * 1e-3
        if known
        else None
    )
    return {
        "length": case.length,
        "sequences": case.sequences,
        "recompute": case.recompute,
        "pass_s": whole,
        "attention_ms": {"ours": ours, **others},
        "embedding_ms": {"ours": ours_embedding, "atomic": atomic_embedding},
        "price": None if saved is None else saved / (whole - saved),
    }


def sdpa_ms(backend: SDPBackend, case: Case) -> float:
    """PyTorch's backward of causal attention in BF16: the faster of KV heads as they are and
    repeated beforehand.
    """
    found = [
        _try(lambda repeated=repeated: _sdpa_ms(backend, case, repeated))
        for repeated in (False, True)
    ]
    times = [ms for ms in found if isinstance(ms, float)]
    if not times:
        raise RuntimeError(found[0])
    return min(times)


def _sdpa_ms(backend: SDPBackend, case: Case, repeated: bool) -> float:
    def heads(count: int) -> torch.Tensor:
        return torch.randn(
            case.sequences,
            count,
            case.length,
            DIM,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=True,
        )

    q, k, v = heads(HEADS), *(heads(HEADS if repeated else KV_HEADS) for _ in range(2))
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)
        d_output = torch.randn_like(output)
        return (
            seconds(lambda: torch.autograd.grad(output, (q, k, v), d_output, retain_graph=True))
            * 1e3
        )


def embedding_ms(case: Case) -> tuple[float, float]:
    """Ours, and FP32 atomics."""
    config = case.config
    ids = case.token_ids().view(-1).cuda()
    d = torch.randn(case.tokens, config.hidden_size, device="cuda").bfloat16()
    grad = torch.zeros(config.vocab_size, config.hidden_size, device="cuda")
    return seconds(lambda: embedding_backward(d, ids, grad)) * 1e3, seconds(
        lambda: grad.index_add_(0, ids, d.float())
    ) * 1e3


def _try(work: Callable[[], float]) -> float | str:
    """The figure, or why there is none."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
