"""A fault planted in one GPU kernel, on one side, is named by ``verify --bisect``: its layer and
its operation.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isobit.kernels.triton import attend, pointwise, sampling
from isobit.kernels.triton import linear as operands
from isobit.kernels.triton.attention import PagedKeys
from isobit.kernels.triton.qkv import Queries
from isobit.kernels.triton.quantise import QuantRows
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.proof.bisect import trace_scenario
from isobit.proof.scenarios import build_workload, engine_scenarios
from tests.gpu.kernels import PRODUCTS
from tests.proof.where import Side, Where, followed

MakePolicy = Callable[..., Policy]
LAYER = 1


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Where:
    return followed(monkeypatch)


def nudge(tensor: torch.Tensor) -> None:
    """Every third row, by the last bit; an E4M3 number of the largest magnitude stays, since its
    neighbour is a NaN.
    """
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])[::3]
    if tensor.element_size() == 1:
        bits ^= ((bits & 0x7F) < 0x7E).to(torch.uint8)
    else:
        bits ^= 1 << 16 if tensor.element_size() == 4 and tensor.ndim == 2 else 1


def first(result: Any) -> torch.Tensor:
    return result[0]


def quantised_norm(result: tuple[Any, Any, QuantRows]) -> torch.Tensor:
    return result[2].values


def queries(result: Any) -> torch.Tensor:
    found = result if isinstance(result, Queries) else result[0]
    return found.values


def itself(result: Any) -> torch.Tensor:
    return result.values if isinstance(result, QuantRows) else result


PAIR = {"rollout": attend, "training": attend}
FAULTS: dict[str, tuple[Any, Any, int, Callable[[Any], torch.Tensor], str, str]] = {
    "norm and quantise": (
        pointwise,
        "rms_norm_quantise",
        0,
        quantised_norm,
        "layers.1.qkv_proj.input",
        "quantiser",
    ),
    "GEMM": (PRODUCTS, "fp8_gemm_nt", 1, itself, "layers.1.o_proj", "GEMM"),
    "quantise": (operands, "quantise_rows", 0, itself, "layers.1.o_proj.input", "quantiser"),
    "SwiGLU": (pointwise, "swiglu_quantise", 0, itself, "layers.1.down_proj.input", "quantiser"),
    "encode": (
        PAIR,
        {"rollout": "encode_paged", "training": "encode_packed"},
        0,
        queries,
        "layers.1.attention.q",
        "quantiser",
    ),
    "prefill": (PRODUCTS, "prefill_attention", 0, first, "layers.1.attention", "attention"),
    "head": (PRODUCTS, "bf16_gemm_nt", 0, itself, "lm_head", "head"),
}
"""By kernel: whose function (of each side), which of its calls in the layer, what of its result,
the site, and the kind of operation.
"""


def trace(make_policy: MakePolicy, scenario: str) -> Any:
    scorer = Scorer(make_policy("qwen3", "fp8"))
    workload = build_workload(
        1000, 1024, prompts=5, samples=2, max_new_tokens=6, seed=0, page_tokens=128
    )
    (chosen,) = [one for one in engine_scenarios(workload) if one.name == scenario]
    return trace_scenario(chosen, workload, scorer, seed=0).parting


@pytest.mark.parametrize("side", ["rollout", "training"])
@pytest.mark.parametrize("kernel", FAULTS)
def test_the_kernel_is_named(
    kernel: str, side: Side, where: Where, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call, part, site, kind = FAULTS[kernel]
    layer = LAYER if site.startswith("layers") else None
    owner = owner[side] if isinstance(owner, dict) else owner
    name = name[side] if isinstance(name, dict) else name
    exact = getattr(owner, name)

    def planted(*arguments: Any, **options: Any) -> Any:
        result = exact(*arguments, **options)
        if (where.side, where.layer) == (side, layer):
            if layer is None or where.calls[kernel] == call:
                nudge(part(result))
            where.calls[kernel] += 1
        return result

    monkeypatch.setattr(owner, name, planted)
    parting = trace(make_policy, "few pages, small chunks, temperature 0.7")
    assert parting is not None and (parting.difference.site, parting.kind) == (site, kind)


def test_decode_attention_is_named(
    where: Where, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = PRODUCTS.decode_attention

    def planted(*arguments: Any) -> Any:
        result = exact(*arguments)
        if where.layer == LAYER:
            nudge(result[0])
        return result

    monkeypatch.setattr(PRODUCTS, "decode_attention", planted)
    parting = trace(make_policy, "roomy")
    assert parting is not None and parting.difference.site == "layers.1.attention"


def test_a_page_write_is_named(
    where: Where, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = attend.encode_paged

    def planted(
        qkv: Any, transform: Any, positions: Any, slots: torch.Tensor, pages: PagedKeys, *more: Any
    ) -> Any:
        result = exact(qkv, transform, positions, slots, pages, *more)
        if where.layer == LAYER:
            page, offset = divmod(int(slots[0]), 128)
            assert pages.value_scales is not None
            pages.value_scales[page, 0, offset] += 1
        return result

    monkeypatch.setattr(attend, "encode_paged", planted)
    parting = trace(make_policy, "roomy")
    assert parting is not None and (parting.difference.site, parting.kind) == (
        "layers.1.kv_cache.v",
        "KV write",
    )


def test_the_sampler_is_named(
    where: Where, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = sampling.sample_tokens

    def planted(*arguments: Any) -> Any:
        tokens, log_probs = exact(*arguments)
        log_probs[0] += 1e-3
        return tokens, log_probs

    monkeypatch.setattr(sampling, "sample_tokens", planted)
    parting = trace(make_policy, "roomy")
    assert parting is not None and parting.difference.site == "log_prob"


def test_nothing_parts_without_a_fault(make_policy: MakePolicy) -> None:
    assert trace(make_policy, "roomy") is None
