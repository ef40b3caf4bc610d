"""Pages of the KV cache: as configured, or what there is room for."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.spec import sizes as spec_sizes
from isobit.kernels.triton import sizes as gpu_sizes
from isobit.memory.cache_size import (
    SPECULATED_ROWS,
    CacheSize,
    cache_size_for,
    cache_size_within,
    choose_cache_size,
    forward_bytes,
    reserve_of,
    with_carries,
)
from isobit.models.decoder import decoder_shape
from isobit.models.policy import Policy, random_policy
from isobit.models.shapes import model_shape
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.util.errors import ConfigError
from tests.tiny import tiny_model

TINY = tiny_model(vocab_size=96, num_layers=2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy(TINY, PrecisionConfig(preset="fp8"), seed=0)


def test_the_number_of_pages_is_as_configured_or_what_full_length_needs_within_memory(
    policy: Policy,
):
    assert choose_cache_size(policy, RolloutConfig(kv_pages=7, kv_memory_gib=1e-9)) == CacheSize(7)
    assert choose_cache_size(policy, RolloutConfig(max_sequences=10)) == CacheSize(10 * 4)
    page_bytes = 2 * 64 * 2 * (32 + 1) * 2  # K and V, tokens, KV heads, values and scale, layers
    within = RolloutConfig(kv_memory_gib=page_bytes * 5.5 / 2**30)
    assert choose_cache_size(policy, within) == CacheSize(5)
    with pytest.raises(ConfigError, match="holds no page"):
        choose_cache_size(policy, RolloutConfig(kv_memory_gib=1e-9))
    with pytest.raises(ConfigError, match=r"kv_pages = 1000000000 asks .* this machine has"):
        choose_cache_size(policy, RolloutConfig(kv_pages=10**9))


def test_a_device_without_room_for_a_page_is_told_with_what_takes_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
):
    device = SimpleNamespace(
        release_cached=lambda: None, free=lambda: 3 << 30, available=lambda: 80 << 30
    )
    monkeypatch.setattr(type(policy.backend), "memory", device)
    with pytest.raises(ConfigError, match=r"3 GiB of .* free, .* \(4 GiB\): end what else runs"):
        choose_cache_size(policy, RolloutConfig())
    device.free = lambda: 8 << 30
    assert choose_cache_size(policy, RolloutConfig(max_sequences=10)) == CacheSize(10 * 4)


def test_a_device_keeps_a_tenth_free_within_bounds() -> None:
    sizes = {8: 2.0, 22.5: 2.25, 38.5: 3.85, 78: 4.0, 139: 4.0}
    found = {total: reserve_of(int(total * (1 << 30))) / (1 << 30) for total in sizes}
    assert found == pytest.approx(sizes)


HYBRID = model_shape("qwen3.5-9b")
MIB = 1 << 20


def hybrid_flow(preset: Preset) -> PrecisionFlow:
    return build_flow(PrecisionConfig(preset=preset), decoder_shape(HYBRID))


@pytest.mark.parametrize(("preset", "page"), [("bf16", 2 * MIB + 4096), ("int8", MIB + 16384)])
def test_a_page_of_a_hybrid_has_attention_layers_alone(preset: Preset, page: int) -> None:
    """A byte or four of scale for each of 2 x 64 x 4 vectors of 256 numbers, in 8 layers."""
    flow = hybrid_flow(preset)
    assert spec_sizes.page_bytes(HYBRID, flow) == page
    assert gpu_sizes.carry_bytes(HYBRID, flow) == spec_sizes.carry_bytes(HYBRID, flow)
    inputs, heads = 67 * 8192 * 2, 32 * 4 * (64 * (128 + 128 + 1) + 128 * 128)
    assert spec_sizes.carry_bytes(HYBRID, flow) == 24 * (inputs + heads)


def test_carries_are_for_the_sequences_that_run_and_within_two_thirds_of_the_memory() -> None:
    flow, found = hybrid_flow("bf16"), list[tuple[int, int]]()
    page, carry = spec_sizes.page_bytes(HYBRID, flow), spec_sizes.carry_bytes(HYBRID, flow)
    for gib, most in ((60, 256), (60, 16), (6, 256), (0.3, 256)):
        config, memory = RolloutConfig(max_sequences=most), int(gib * (1 << 30))
        size = cache_size_within(HYBRID, flow, config, spec_sizes, memory)
        assert size == with_carries(HYBRID, flow, config, spec_sizes, size.pages)
        again = config.model_copy(update={"kv_pages": size.pages})
        assert cache_size_for(HYBRID, flow, again, spec_sizes) == size
        taken = size.pages * page + size.carries * carry
        assert taken == size.bytes(HYBRID, flow, spec_sizes) <= memory
        assert memory - taken < page + carry
        assert size.carries * carry <= 2 * size.pages * page or size.carries == 2
        found.append((size.pages, size.carries))
    assert found == [(13104, 290), (29449, 20), (1029, 33), (32, 2)]


@pytest.mark.parametrize("gib", [0.4, 0.5, 1, 2, 6])
def test_shorter_sequences_have_more_carries_and_the_longest_its_pages(gib: float) -> None:
    flow, found = hybrid_flow("bf16"), dict[int, CacheSize]()
    config, memory = RolloutConfig(), int(gib * (1 << 30))
    of_context = cache_size_within(HYBRID, flow, config, spec_sizes, memory)
    for longest in (*range(64, 10240, 64), HYBRID.max_positions):
        size = cache_size_within(HYBRID, flow, config, spec_sizes, memory, longest)
        assert size.bytes(HYBRID, flow, spec_sizes) <= memory and size.carries >= 2
        per = longest // 64
        assert size.pages >= min(per, of_context.pages), "whatever the model's context leaves room"
        held = size.pages // per
        assert size.carries > min(held, config.max_sequences)
        again = RolloutConfig(kv_pages=size.pages)
        assert cache_size_for(HYBRID, flow, again, spec_sizes, longest) == size
        found[longest] = size
    assert found[HYBRID.max_positions] == of_context
    carries = [size.carries for size in found.values()]
    assert carries == sorted(carries, reverse=True)
    if gib == 2:
        lengths = 128, 512, 1024, HYBRID.max_positions
        assert [found[length].carries for length in lengths] == [16, 15, 13, 11]


def test_a_hybrid_without_room_for_a_page_beside_what_a_sequence_carries_is_told() -> None:
    flow, config = hybrid_flow("bf16"), RolloutConfig(kv_memory_gib=0.2)
    told = r"0.2 holds no page .*, and the two states of a sequence 0.2"
    with pytest.raises(ConfigError, match=told):
        cache_size_for(HYBRID, flow, config, spec_sizes)


@pytest.mark.parametrize("part", [256, 1024, gpu_sizes.PART_TOKENS])
def test_the_parts_of_keys_that_decoding_joins_are_planned(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part that has programs of its own leaves a vector in FP32 with two numbers a head."""
    monkeypatch.setattr(gpu_sizes, "PART_TOKENS", part)
    flow = build_flow(PrecisionConfig(preset="bf16"), decoder_shape(TINY))
    for longest in (part, part + 1, 131072):
        parts = -(-longest // part) if longest > part else 0
        fit = gpu_sizes.MOST_APART // max(1, parts)  # sequences, with parts of their own
        for sequences, guesses in product((3, fit, fit + 1, 1000), (0, 4)):
            config = RolloutConfig(max_sequences=sequences, speculation=guesses)
            planned, others = (
                forward_bytes(replace(TINY, max_positions=tokens), flow, config, gpu_sizes)
                for tokens in (longest, part)
            )
            keys = 4 * TINY.num_kv_heads * TINY.head_dim * (longest - part)
            rows = max(sequences, SPECULATED_ROWS) if guesses else sequences
            vectors = min(rows * parts, gpu_sizes.MOST_APART) * TINY.num_heads
            assert planned - others - keys == 4 * vectors * (TINY.head_dim + 2)
