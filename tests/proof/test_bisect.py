"""A fault planted in one operation of one layer, on one side, is named: its site, its kind, its
side.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec import attention, head, linear, paged_attention, pointwise, qkv
from isobit.kernels.spec import paged_attention as paged_attention_module
from isobit.kernels.spec.attention import AttentionOutput
from isobit.kernels.spec.backend import SpecBackend
from isobit.kernels.spec.qkv import Heads
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.scorer import Scorer
from isobit.precision.quant_tensor import QuantisedWeight
from isobit.proof.bisect import Parting, operation_kind, trace_scenario
from isobit.proof.scenarios import Workload, build_workload, engine_scenarios
from isobit.rollout.runner import PolicyRunner
from tests.proof.faults import later_chunks_one_position_off
from tests.proof.where import Side, Where, followed

CONFIG = ModelConfig("qwen3", 128, 128, 128, 2, 2, 1, 64, 256, 1e-6, 10000.0, tied_embeddings=True)
"""Every linear fills FP8 blocks."""
LAYER = 1


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Where:
    return followed(monkeypatch)


def nudge(result: Any) -> Any:
    """Every third row, by the last bit of the format that it ends in."""
    if isinstance(result, QuantisedWeight | Heads):
        nudge(result.values)
    elif isinstance(result, AttentionOutput):
        nudge(result.output)
    else:
        bits = result.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[result.element_size()])
        bits[::3] ^= 1 << 16 if result.element_size() == 4 else 1
    return result


def plant(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_due: Callable[[], bool]
) -> None:
    exact = getattr(owner, name)

    def planted(*arguments: Any) -> Any:
        return nudge(exact(*arguments)) if is_due() else exact(*arguments)

    monkeypatch.setattr(owner, name, staticmethod(planted) if isinstance(owner, type) else planted)


def workload() -> Workload:
    return build_workload(
        128,
        256,
        prompts=2,
        samples=2,
        max_new_tokens=4,
        seed=0,
        page_tokens=paged_attention_module.PAGE_TOKENS,
    )


def part(
    preset: Preset = "fp8", scenario: str = "few pages, small chunks, temperature 0.7"
) -> Parting | None:
    scorer = Scorer(random_policy(CONFIG, PrecisionConfig(preset=preset), seed=0))
    (chosen,) = [one for one in engine_scenarios(workload()) if one.name == scenario]
    return trace_scenario(chosen, workload(), scorer, seed=0).parting


FAULTS = {
    "quantiser": (linear, "quantise_rows", 3, "layers.1.down_proj.input"),
    "GEMM": (linear, "fp8_gemm_nt", 1, "layers.1.o_proj.unrounded"),
    "norm": (pointwise, "rms_norm", 0, "layers.1.input_norm"),
    "RoPE": (qkv, "rotate", 0, "layers.1.rope.q.unrounded"),
    "Hadamard matrix": (qkv, "hadamard", 0, "layers.1.hadamard.q"),
    "attention": (
        {"rollout": paged_attention, "training": attention},
        "attend",
        0,
        "layers.1.attention.unrounded",
    ),
    "activation": (pointwise, "gated", None, "layers.1.activation.unrounded"),
    "embedding": (SpecBackend, "embedding", 0, "embed_tokens"),
    "head": (head, "grid_gemm_nt", 0, "lm_head"),
    "log-probability": ({"rollout": head, "training": head}, "log_softmax", 0, "log_prob"),
}
"""By kind: whose function (of each side, where they differ), which of its calls in the layer, and
the site it makes.
"""


IN_INT8 = {
    "quantiser": (linear, "quantise_int8", 3, "layers.1.down_proj.input"),
    "GEMM": (linear, "int8_gemm_nt", 1, "layers.1.o_proj.unrounded"),
    "Hadamard matrix": FAULTS["Hadamard matrix"],
    "attention": FAULTS["attention"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("side", ["rollout", "training"])
@pytest.mark.parametrize(
    ("preset", "kind"), [*(("fp8", kind) for kind in FAULTS), *(("int8", kind) for kind in IN_INT8)]
)
def test_the_operation_is_named(
    preset: Preset, kind: str, side: Side, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call, site = (FAULTS if preset == "fp8" else IN_INT8)[kind]
    layer = LAYER if site.startswith("layers") else None

    def is_due() -> bool:
        if (where.side, where.layer) != (side, layer):
            return False
        where.calls[name] += 1
        return layer is None or call is None or where.calls[name] == call + 1

    plant(monkeypatch, owner[side] if isinstance(owner, dict) else owner, name, is_due)
    assert_named(part(preset, "small chunks"), site, kind, side)


def assert_named(parting: Parting | None, site: str, kind: str, side: Side) -> None:
    assert parting is not None
    found = parting.difference
    assert (found.site, parting.kind) == (site, kind)
    assert 0 < found.differing.numel() <= found.tokens_compared
    assert parting.max_abs_diff is not None and parting.max_abs_diff > 0
    other: Side = "training" if side == "rollout" else "rollout"
    assert found.unstable[other] == 0, (
        "every third row: only the side at fault gives a token other bits in another batch"
    )
    if side == "training":
        assert found.unstable[side] > 0


def test_one_row_of_one_forward_is_one_token(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = pointwise.gated

    def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        y = exact(gate, up)
        if (where.side, where.layer) == ("rollout", LAYER) and gate.shape[0] > 60:
            y[-1, 0] += 1
        return y

    monkeypatch.setattr(pointwise, "gated", gated)
    parting = part(scenario="roomy")
    assert parting is not None and parting.difference.site == "layers.1.activation.unrounded"
    assert parting.difference.differing.numel() == 1, (
        "the prompts are one forward, and its last row the end of the last one"
    )
    first, last = parting.first_token, workload().prompts[-1]
    assert first is not None
    assert (first.prompt_id, first.sample, first.position) == (last.id, 0, len(last.token_ids) - 1)
    assert parting.max_abs_diff == pytest.approx(1, abs=0.01)


def test_the_cache_that_holds_something_else_than_was_written(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = paged_attention_module.SpecKvCache.write

    def write(
        self: paged_attention_module.SpecKvCache,
        layer: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fixed: torch.Tensor | None,
    ) -> None:
        exact(self, layer, slots, k, v, fixed)
        if layer == LAYER:
            page, offset = divmod(int(slots[0]), paged_attention_module.PAGE_TOKENS)
            self.layers[layer].scales[1, page, 0, offset] += 1

    monkeypatch.setattr(paged_attention_module.SpecKvCache, "write", write)
    assert_named(part(), "layers.1.kv_cache.v", "KV write", "rollout")


def test_keys_encoded_differently_in_training(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Heads.encode

    def encode(x: torch.Tensor, format: Any, fixed: torch.Tensor | None = None) -> Heads:
        heads = exact(x, format, fixed)
        if where.side == "training" and where.layer == LAYER:
            where.calls["encode"] += 1
            return nudge(heads) if where.calls["encode"] == 2 else heads  # q, k, v
        return heads

    monkeypatch.setattr(Heads, "encode", encode)
    assert_named(part(), "layers.1.kv_cache.k", "KV write", "training")


def test_a_page_that_is_not_copied_is_found_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PolicyRunner, "copy_pages", lambda self, sources, targets: None)
    parting = part(scenario="roomy")
    assert parting is not None and parting.difference.site == "layers.0.attention.unrounded"


def test_positions_that_are_one_off_are_found_at_the_first_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later_chunks_one_position_off(monkeypatch)
    parting = part(scenario="small chunks")
    assert parting is not None and parting.difference.site == "layers.0.rope.q.unrounded"


def test_a_side_that_is_wrong_in_the_same_way_every_time_repeats_itself(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = pointwise.rms_norm

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wrong = where.side == "training" and where.layer == LAYER
        return exact(x, weight, epsilon * 100 if wrong else epsilon)

    monkeypatch.setattr(pointwise, "rms_norm", rms_norm)
    parting = part("bf16")
    assert parting is not None and parting.difference.site == "layers.1.input_norm.unrounded"
    assert dict(parting.difference.unstable) == {"rollout": 0, "training": 0}


def test_formats_that_differ_are_named_before_anything_computed_from_them() -> None:
    parting = part("fp8-rollout")
    assert parting is not None and parting.kind == "quantiser"
    found = parting.difference
    assert (found.site, dict(found.formats)) == (
        "layers.0.qkv_proj.input",
        {"rollout": "E4M3", "training": "BF16"},
    )
    assert found.differing.numel() == found.tokens_compared
    first = parting.first_token
    assert first is not None
    assert (first.prompt_id, first.sample, first.position) == ("verify/0", 0, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8"])
def test_exact_flows_part_nowhere(preset: str) -> None:
    assert part(cast(Preset, preset)) is None


def test_residual_additions_have_a_kind_too() -> None:
    assert (
        operation_kind("layers.0.mlp_residual")
        == operation_kind("layers.12.attention_residual")
        == "residual"
    )
