"""The plan of a GPU's memory against the tensors of the real passes, and what it refuses."""

import re
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any, Literal, get_args

import pytest
import torch

from benchmarks.common import read_rows
from benchmarks.memory import RESULTS
from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.kernels.hopper import sizes
from isobit.kernels.sizes import AttentionShape
from isobit.memory.activations import passing_bytes, saved_bytes
from isobit.memory.cache_size import RESERVE, cache_size_for
from isobit.memory.cards import GPUS, read_card
from isobit.memory.device import DevicePlan, DevicePlanner
from isobit.memory.host import attended_tokens, share_of
from isobit.models.config import Lora, ModelConfig
from isobit.models.decoder import decoder_shape, master_shapes, parameter_count
from isobit.models.policy import Policy
from isobit.models.published import SIDES
from isobit.models.shapes import model_shape
from isobit.precision.flow import Site, build_flow
from isobit.precision.quant_tensor import DTYPES, Format, Int8Rows
from isobit.util.errors import ConfigError
from tests.memory import meta_memory
from tests.models.policies import published_tensors, storage_bytes

GIB = 1 << 30
H200 = int(139.2 * GIB)
QWEN3_8B = model_shape("qwen3-8b")
MIXED = PrecisionConfig(
    preset="fp8", first_layers_bf16=1, wgrad="bf16", modules_bf16=("layers.2.down_proj",)
)
LEVELS: tuple[Recompute, ...] = get_args(Recompute)
SHAPES = ["qwen3-8b", "qwen3-0.6b", "qwen2.5-7b"]
HEADS = ["value_head", "score_head"]


def precision(name: str) -> PrecisionConfig:
    return MIXED if name == "mixed" else PrecisionConfig.model_validate(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "fp8-linear", "bf16", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pass_of_a_real_model_takes_what_is_planned(
    shape: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta_memory.without_launches(monkeypatch)
    check_passes(replace(model_shape(shape), num_layers=4), preset)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["int8", "fp8", "bf16"])
def test_so_does_that_of_the_portable_back_end(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta_memory.without_launches(monkeypatch, "triton")
    levels = ("none",) if preset == "int8" else LEVELS
    check_passes(replace(QWEN3_8B, num_layers=4), preset, levels)


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["fp8", "int8", "mixed"])
@pytest.mark.parametrize("shape", ["smollm2-135m", "smollm2-360m"])
def test_so_does_that_of_a_model_with_short_blocks(
    shape: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta_memory.without_launches(monkeypatch)
    check_passes(replace(model_shape(shape), num_layers=4), preset, ("none",))


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("targets", [LORA_TARGETS, ("q_proj", "v_proj")])
def test_so_does_that_of_adapters(
    targets: tuple[str, ...], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a layer's forward and backward the plan is up to some per cent above."""
    meta_memory.without_launches(monkeypatch)
    config = replace(QWEN3_8B, num_layers=4, lora=Lora(32, 64.0, targets))
    check_weights(config, preset)
    policy, share = meta_memory.meta_policy(config, precision(preset)), share_of(config, 1)
    assert share.numbers == sum(master.numel() for master in policy.parameters())
    for recompute in LEVELS:
        for lengths in ((4096,), (2048,) * 16):
            measured = meta_memory.micro_batch_bytes(policy, lengths, recompute)
            tokens, longest = sum(lengths), max(lengths)
            saved = saved_bytes(config, policy.flow, sizes, recompute, tokens)
            passing = passing_bytes(config, policy.flow, sizes, recompute, tokens, longest)
            beside = 4 * tokens * config.hidden_size
            assert saved + beside == pytest.approx(measured["saved"], rel=0.005)
            assert -0.005 < (saved + max(passing.values())) / measured["peak"] - 1 < 0.04


LLAMA_70B = ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192, 1e-5, 5e5, False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("config", "card", "recompute", "least"),
    [
        (QWEN3_8B, "h100", "mlp", 16384),
        (model_shape("qwen3-32b"), "h100", "full", 16384),
        (model_shape("qwen3-32b"), "h200", "mlp", 16384),
        (LLAMA_70B, "h200", "full", 16384),
    ],
)
def test_a_base_has_no_masters_gradients_and_moments_in_a_plan(
    config: ModelConfig, card: str, recompute: Recompute, least: int
) -> None:
    adapted, training = (
        replace(config, lora=Lora(32, 64.0, LORA_TARGETS)),
        TrainingConfig(recompute=recompute),
    )
    flow = build_flow(precision("fp8"), decoder_shape(adapted))
    planner = DevicePlanner(adapted, flow, sizes, read_card(card).total)
    numbers = sum(prod(shape) for shape in master_shapes(adapted).values())
    assert numbers < 0.011 * parameter_count(config)
    found = planner.training_bytes(training, least, 4096)
    assert found["masters"] == found["gradients"] == 4 * numbers
    assert found["optimiser moments"] == 8 * numbers
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    rest = found["published weights"] - (parameter_count(config) - tables / 2) - tables
    assert 0 < rest < 0.025 * found["published weights"], "a byte a number, and adapters in BF16"
    assert planner.largest_microbatch(training, 4096) >= least


@pytest.mark.parametrize("format", ["e4m3", "int8", "bf16"])
def test_attention_takes_in_its_backward_what_is_planned(
    format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence that is whole tiles, and of the bound on the padding of others."""
    meta_memory.without_launches(monkeypatch)
    from isobit.kernels.hopper.attention_backward import attention_backward
    from isobit.kernels.triton.attention import PackedKeys

    tokens, heads, kv_heads, dim = 1024, 8, 2, 128

    def empty(count: int, dtype: torch.dtype, *last: int) -> torch.Tensor:
        return torch.empty((tokens, count, *last), dtype=dtype, device=meta_memory.META)

    def scale(count: int) -> torch.Tensor | None:
        of_keys = torch.float32 if format == "int8" or count == heads else torch.uint8
        return None if format == "bf16" else empty(count, of_keys)

    dtype, wide = DTYPES[format], torch.bfloat16 if format == "bf16" else torch.float16
    keys, values = empty(kv_heads, dtype, dim), empty(kv_heads, wide, dim)
    packed = PackedKeys(keys, scale(kv_heads), values, scale(kv_heads))
    output, sums = empty(heads, torch.bfloat16, dim), empty(heads, torch.float32)
    starts, lengths = torch.zeros(2, 1, dtype=torch.int32, device=meta_memory.META)
    with meta_memory.LiveBytes() as live:
        made = attention_backward(
            empty(heads, dtype, dim), scale(heads), packed, output, sums, output, starts, lengths,
            tokens,
        )  # fmt: skip
    planned = sizes.attention_gradients(AttentionShape(heads, kv_heads, dim), format)
    queries = heads * tokens * dim * dtype.itemsize + 4 * heads * tokens * (format != "bf16")
    taken = live.peak - sum(x.nbytes for x in made) - queries
    assert abs(taken - (tokens + 128) * planned) < 1024


@pytest.mark.parametrize("back_end", ["hopper", "triton"])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (4096, 12288), (24576, 4096), (1000, 576)])
def test_split_products_are_within_what_is_planned(
    n: int, k: int, back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta_memory.without_launches(monkeypatch)
    int8, sizes = (import_module(f"isobit.kernels.{back_end}.{one}") for one in ("int8", "sizes"))
    weight, site = Int8Rows.empty(n, k, meta_memory.META), Site("x", "linear", "int8", parts=(n,))
    taken = dict[int, int]()
    for m in (1, 16, 33, 64, 65, 100, 200, 500, 1000, 2000, 5000):
        x = Int8Rows.empty(m, k, meta_memory.META)
        with meta_memory.LiveBytes() as live:
            made = int8.int8_gemm_nt(x, weight)
        taken[m] = live.peak - made.nbytes
        assert taken[m] <= sizes.product_sums(site, m) < 9e6
    assert taken[5000] == sizes.product_sums(site, 5000) == 0
    assert any(taken.values()) == (k >= 1024 and n < 16384)


@pytest.mark.few(1)
@pytest.mark.parametrize("head", HEADS)
def test_scalar_heads_are_within_what_is_planned(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a reward model learns from every token, which it never does."""
    meta_memory.without_launches(monkeypatch)
    check_passes(replace(QWEN3_8B, num_layers=4, **{head: True}), "fp8")


@pytest.mark.few(2)
@pytest.mark.parametrize("back_end", ["hopper", "triton"])
@pytest.mark.parametrize("recompute", LEVELS)
def test_experts_are_within_what_is_planned(
    recompute: Recompute,
    back_end: Literal["hopper", "triton"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they pad depends on the tokens, which no plan knows: an upper bound."""
    meta_memory.without_launches(monkeypatch, back_end)
    config = replace(model_shape("qwen3-30b-a3b"), num_layers=3)
    policy, share = meta_memory.meta_policy(config, precision("fp8")), share_of(config, 1)
    sizes = policy.backend.sizes
    for lengths in ((4096,), (2048,) * 16):
        measured = meta_memory.micro_batch_bytes(policy, lengths, recompute)
        tokens = sum(lengths)
        saved = saved_bytes(config, policy.flow, sizes, recompute, tokens)
        passing = passing_bytes(
            config, policy.flow, sizes, recompute, tokens, max(lengths), share.made_by_head
        )
        beside = 4 * tokens * config.hidden_size
        assert saved + beside == pytest.approx(measured["saved"], rel=0.005)
        assert -0.005 < (saved + share.made + max(passing.values())) / measured["peak"] - 1 < 0.13
        assert (saved + passing["a layer, forward"]) / measured["forward"] > 0.99


@pytest.mark.few(2)
@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(
    ("name", "kept", "most"), [("qwen3-8b", 0.005, 0.2), ("qwen3.5-9b", 0.05, 0.7)]
)
def test_rows_that_are_shared_are_within_what_is_planned(
    name: str, kept: float, most: float, preset: str, recompute: Recompute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An upper bound: attention is planned beside a layer of rows without sharing, and a delta
    rule's backward as if all that it makes were there at once.
    """
    meta_memory.without_launches(monkeypatch)
    config = model_shape(name)
    of_delta = tuple(layer for layer in config.delta_layers if layer < 4)
    config = replace(config, num_layers=4, delta_layers=of_delta, max_positions=16384)
    policy, share = meta_memory.meta_policy(config, precision(preset)), share_of(config, 1)
    for prompt, answers in ((2048, (1024,) * 8), (2048, (256,) * 6), (8192, (512,) * 5)):
        batch = meta_memory.shared_batch(prompt, answers)
        measured = meta_memory.micro_batch_bytes(policy, batch.lengths, recompute, batch)
        tokens, attended = batch.num_rows, sum(batch.lengths)
        saved = saved_bytes(config, policy.flow, sizes, recompute, tokens, attended)
        limits = tokens, max(batch.lengths), share.made_by_head, attended
        passing = passing_bytes(config, policy.flow, sizes, recompute, *limits)
        beside = 2 * (tokens + sum(answers)) * config.hidden_size
        assert -0.01 < (saved + beside) / measured["saved"] - 1 < kept  # less the rule's indices
        assert -0.005 < (saved + share.made + max(passing.values())) / measured["peak"] - 1 < most
        assert (saved + passing["a layer, forward"]) / measured["forward"] > 0.995


def test_attention_of_shared_rows_is_bounded_and_planned() -> None:
    """By the budget, and by what a step has; only with the key."""
    of_step = {"prompts_per_step": 2, "samples_per_prompt": 8, "recompute": "full"}
    plain = TrainingConfig.model_validate({"tokens_per_microbatch": 1000, **of_step})
    sharing = plain.model_copy(update={"shared_prefix": True})
    found = [attended_tokens(sharing, tokens, 200) for tokens in (500, 1000)]
    assert found == [2000, 3200] and attended_tokens(plain, 1000, 200) == 0
    needed = [sum(planner().training_bytes(one, 16384, 8000).values()) for one in (plain, sharing)]
    assert needed[0] < needed[1]


def test_a_mixture_is_planned() -> None:
    made = plan(model_shape("qwen3-30b-a3b"), moments="fp8", total=1 << 40)
    assert made.rollout["published weights"] == pytest.approx(30.5e9, rel=0.03)


def check_passes(config: ModelConfig, preset: str, levels: tuple[Recompute, ...] = LEVELS) -> None:
    """Of one policy, whose tables of positions are real and take their time."""
    policy = meta_memory.meta_policy(config, precision(preset))
    for recompute in levels:
        for lengths in ((4096,), (16384,), (2048,) * 16):
            check_pass(policy, recompute, lengths, of_one_format=preset != "mixed")


def check_pass(
    policy: Policy, recompute: Recompute, lengths: tuple[int, ...], of_one_format: bool
) -> None:
    config, share = policy.config, share_of(policy.config, 1)
    sizes = policy.backend.sizes
    measured = meta_memory.micro_batch_bytes(policy, lengths, recompute)
    tokens = sum(lengths)
    saved = saved_bytes(config, policy.flow, sizes, recompute, tokens)
    passing = passing_bytes(
        config, policy.flow, sizes, recompute, tokens, max(lengths), share.made_by_head
    )
    beside = 4 * tokens * config.hidden_size  # the last residual stream, and lm_head's input
    assert saved + beside == pytest.approx(measured["saved"], rel=0.005)
    assert -0.005 < (saved + share.made + max(passing.values())) / measured["peak"] - 1 < 0.02
    over = (saved + passing["a layer, forward"]) / measured["forward"] - 1
    assert over > -0.01
    if recompute == "full":  # both halves, which follow one another: never what decides
        assert 2 * passing["a layer, forward"] < 1.2 * max(passing.values())
    else:  # what passes is the largest layer's, beside all that is saved at the end
        assert over < (0.01 if of_one_format else 0.17)


@pytest.mark.parametrize("preset", ["fp8", "int8", "bf16", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_exact(shape: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta_memory.without_launches(monkeypatch)
    check_weights(replace(model_shape(shape), num_layers=4), preset)


@pytest.mark.parametrize("head", HEADS)
def test_weights_with_a_scalar_head_are_exact(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta_memory.without_launches(monkeypatch)
    check_weights(replace(QWEN3_8B, num_layers=4, **{head: True}), "fp8")


def check_weights(config: ModelConfig, preset: str) -> None:
    policy = meta_memory.meta_policy(config, precision(preset))
    weight_bytes = DevicePlanner(config, policy.flow, sizes, H200).weight_bytes
    planned = weight_bytes(TrainingConfig(moments="bf16"))
    assert planned["published weights"] == storage_bytes(published_tensors(policy, SIDES))
    assert planned["masters"] == sum(master.nbytes for master in policy.parameters())
    assert planned["optimiser moments"] == planned["masters"]
    assert weight_bytes(TrainingConfig())["optimiser moments"] == 2 * planned["masters"]
    groups = sum(-(-master.numel() // 128) for master in policy.parameters())
    assert (
        weight_bytes(TrainingConfig(moments="fp8"))["optimiser moments"]
        == planned["masters"] // 2 + 2 * groups
    )


def planner(preset: str = "fp8", shape: ModelConfig = QWEN3_8B, total: int = H200) -> DevicePlanner:
    return DevicePlanner(shape, build_flow(precision(preset), decoder_shape(shape)), sizes, total)


def plan(
    shape: ModelConfig = QWEN3_8B,
    preset: str = "fp8",
    longest: int = 4096,
    total: int = H200,
    rollout: Any = None,
    **training: Any,
) -> DevicePlan:
    settings = TrainingConfig.model_validate({"moments": "bf16", **training})
    wanted = RolloutConfig.model_validate(rollout or {})
    return planner(preset, shape, total).plan(wanted, settings, longest)


def largest(preset: str, **training: Any) -> int:
    settings = TrainingConfig.model_validate({"moments": "bf16", **training})
    return planner(preset).largest_microbatch(settings, longest=1)


def test_what_an_8b_policy_takes() -> None:
    """The issue's bars, as far as a plan can meet them: 16k tokens under 130 GiB; without
    recomputation 1.3 times the tokens of bf16.
    """
    made = plan(longest=16384, tokens_per_microbatch=16384, recompute="full")
    assert made.peaks["training"] < 130 * GIB
    assert made.training["masters"] == pytest.approx(30.5 * GIB, rel=0.01)
    assert made.training["published weights"] == pytest.approx(8.8 * GIB, rel=0.01)
    assert largest("fp8") >= 1.3 * largest("bf16")


def test_the_largest_micro_batch_is_the_largest() -> None:
    for recompute in LEVELS:
        most = largest("fp8", recompute=recompute)
        settings = TrainingConfig(moments="bf16", recompute=recompute)
        one, more = (
            sum(planner().training_bytes(settings, tokens, longest=1).values())
            for tokens in (most, most + 1)
        )
        assert one + RESERVE <= H200 < more + RESERVE


def test_the_cache_gets_what_is_left_as_far_as_it_can_use_it() -> None:
    made, offloaded = plan(), plan(offload_moments=True)
    for one in (made, offloaded):
        assert one.peaks["rollout"] + RESERVE <= H200
        assert one.pages * sizes.page_bytes(QWEN3_8B, planner().flow) == one.rollout["KV pages"]
    assert offloaded.rollout["KV pages"] - made.rollout["KV pages"] == pytest.approx(
        made.training["optimiser moments"], rel=0.001
    )
    moments = made.training["optimiser moments"]
    assert offloaded.host["optimiser moments"] == 32 * GIB > moments
    assert offloaded.training["optimiser moments"] == moments
    assert not made.host and "optimiser moments" not in offloaded.rollout
    small = plan(model_shape("qwen3-0.6b"), rollout={"max_sequences": 2})
    assert small.pages == 2 * 40960 // 128
    assert plan(rollout={"kv_pages": 77}).pages == 77
    assert plan(rollout={"kv_memory_gib": 1.0}).rollout["KV pages"] == pytest.approx(GIB, rel=0.01)


def test_the_advice_is_right() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(longest=1000, tokens_per_microbatch=100_000, prompts_per_step=64)
    advised = int(re.search(r"'bf16' is ([\d,]+)", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    assert plan(longest=1000, tokens_per_microbatch=advised, prompts_per_step=64).tokens == advised
    with pytest.raises(ConfigError):
        plan(longest=1000, tokens_per_microbatch=advised + 256, prompts_per_step=64)


def test_the_table_adds_up() -> None:
    made = plan(offload_moments=True)
    lines = made.describe()
    assert "139.2" not in lines[0] and "139 GiB" in lines[0]
    assert any(re.search(r"gradients +- +30\.5 GiB", line) for line in lines)
    assert any(re.search(r"optimiser moments +- +30\.5 GiB", line) for line in lines)
    assert lines[-1] == "  32 GiB of main memory hold the optimiser moments during rollout"


def test_without_an_engine_training_alone_is_planned() -> None:
    made = planner().plan(None, TrainingConfig(moments="bf16"), 4096)
    assert (made.rollout, made.pages, made.training) == ({}, 0, plan().training)
    assert made.peaks.keys() == {"training"}
    text = "\n".join(made.describe())
    assert re.search(r"gradients +30\.5 GiB$", text, re.MULTILINE)
    assert "rollout" not in text and "KV" not in text


def test_an_engine_stays_where_training_fits_beside_its_cache() -> None:
    training, rollout = TrainingConfig(moments="bf16"), RolloutConfig(kv_pages=2000)

    def made(total: int, **changes: Any) -> DevicePlan:
        return replace(planner(total=total), **changes).plan(rollout, training, 4096)

    alone = made(H200)
    cache = alone.rollout["KV pages"]
    enough = sum(alone.training.values()) + cache + RESERVE
    assert not alone.engine_stays and enough > H200, "by turns, as its own peak says"
    beside = made(enough)
    assert beside.engine_stays
    assert beside.training == {**alone.training, "KV pages": cache}
    assert beside.rollout == alone.rollout and beside.pages == alone.pages
    assert "the engine keeps its cache" in beside.describe()[-1]
    for by_turns in (made(enough - 1), made(enough, processes=2)):
        assert not by_turns.engine_stays
        assert "keeps" not in "\n".join(by_turns.describe())


def test_a_rollouter_has_weights_and_pages_alone() -> None:
    training = TrainingConfig(moments="bf16", offload_moments=True)
    trains, samples = planner(total=2 * H200), replace(planner(total=2 * H200), learns=False)
    rollout = RolloutConfig(max_sequences=4096)
    both = [one.plan(rollout, training, 40960) for one in (trains, samples)]
    assert both[1].pages > both[0].pages
    assert both[1].rollout.keys() == {"published weights", "forward and logits", "KV pages"}
    assert both[1].training.keys() == {"published weights", "a forward that scores", "KV pages"}
    assert not both[1].host
    beside = sum(both[1].training.values()) - both[1].training["KV pages"]
    assert not both[0].engine_stays and beside < sum(both[0].training.values()) / 4


def measured_rows() -> list[dict[str, Any]]:
    """Of runs and benchmarks on cards, with the peaks that were measured of both phases."""
    rows = read_rows(RESULTS / "memory") + read_rows(RESULTS / "end_to_end")
    rows += read_rows(RESULTS / "parallel")
    return [
        row
        for row in rows
        if row["engine"] in ("native", "ranks")
        and ("peak_gib" in row.get("memory", row).get("training", row))
        and ("kv_pages" in row or "memory" in row)
    ]


@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: f"{row['engine']}-{row['mode']}")
def test_a_plan_for_a_card_is_within_five_per_cent_of_what_was_measured(
    row: dict[str, Any],
) -> None:
    """Copy engines write arriving gradients outside of torch's allocator, which measured."""
    flow = build_flow(precision(row["mode"]), decoder_shape(QWEN3_8B))
    card, processes = read_card("h200"), row.get("ranks", 1)
    if "kv_pages" in row:  # today's plan is higher (docs/memory.md), so that some no longer fit
        card = read_card("145")
    planner = DevicePlanner(QWEN3_8B, flow, sizes, card.total, processes=processes)
    tokens = row.get("tokens_per_microbatch", row.get("length", 0) * row.get("sequences", 0))
    new = row.get("new_tokens", {"2k": 2048, "8k": 8192}.get(row.get("case", ""), 8))
    longest = row.get("length", 256 + new)
    training = TrainingConfig(
        moments="bf16",
        recompute=row["recompute"],
        tokens_per_microbatch=tokens,
        offload_moments=row.get("offload_moments", False),
    )
    rollout = RolloutConfig(max_new_tokens=new, kv_pages=row.get("kv_pages"))
    made = planner.plan(rollout, training, longest)
    measured = {phase: one["peak_gib"] for phase, one in row.get("memory", {}).items()}
    for phase, peak in (measured or row["peak_gib"]).items():
        planned = made.peaks[phase] / GIB
        if processes > 1:
            planned -= made.training["arriving gradients"] / GIB
        assert planned == pytest.approx(peak, rel=0.05), phase


def test_processes_that_share_an_engine_have_a_part_of_its_matrices_and_of_its_cache() -> None:
    """Of 8B's matrices in E4M3, and of lm_head in BF16, half each; and one layer whole."""
    flow = build_flow(precision("fp8"), decoder_shape(QWEN3_8B))
    training, rollout = TrainingConfig(moments="bf16"), RolloutConfig()
    alone, shared = (
        DevicePlanner(QWEN3_8B, flow, sizes, H200, processes=4, rollout_tp=ranks).plan(
            rollout, training, 2304
        )
        for ranks in (1, 2)
    )
    layer = (6144 + 4096) * 4096 + 3 * 12288 * 4096
    table = 2 * 151936 * 4096
    published = [one.training["published weights"] for one in (alone, shared)]
    assert published[0] - published[1] == pytest.approx(36 * layer / 2, rel=0.01)
    assert shared.training["matrices of a layer"] == pytest.approx(layer, rel=0.01)
    assert shared.rollout["the engine's own weights"] == table / 2
    assert "the engine's own weights" not in shared.training
    freed = published[0] - published[1] - shared.training["matrices of a layer"] - table / 2
    cache = shared.rollout["KV pages"] - alone.rollout["KV pages"]
    assert cache == pytest.approx(freed, abs=1 << 25)
    assert shared.pages > 2 * alone.pages


def test_a_card_is_named_or_measured_in_gib() -> None:
    assert read_card("H200") == read_card("h200") == GPUS["h200"]
    assert (GPUS["h200"].name, GPUS["h200"].total) == ("H200", 139 * GIB)
    assert read_card("79.2").total == int(79.2 * GIB)
    for wrong in ("tpu", "", "0", "-5", "nan", "inf"):
        with pytest.raises(
            ConfigError, match=r"is not known; known are h100, h200, .*b200, or name the GiB"
        ):
            read_card(wrong)


def test_carries_of_a_plan_are_for_the_longest_that_an_engine_is_asked_for() -> None:
    """They are what the engine makes of the plan's pages."""
    shape, found = replace(model_shape("qwen3.5-9b"), lora=Lora(8, 16.0, ("q_proj",))), list[int]()
    for longest in (512, 4096, None):
        asked = replace(planner("bf16", shape, 40 << 30), drawn=longest)
        made = asked.plan(RolloutConfig(), TrainingConfig(recompute="full"), 512)
        again = RolloutConfig(kv_pages=made.pages)
        size = cache_size_for(shape, asked.flow, again, sizes, longest)
        parts = size.parts(shape, asked.flow, sizes)
        assert {name: made.rollout[name] for name in parts} == parts
        found.append(size.carries)
    assert found[0] > found[1] == found[2]
