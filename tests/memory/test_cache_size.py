"""Pages of the KV cache: as configured, or what there is room for."""

from types import SimpleNamespace

import pytest

from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import choose_num_pages, reserve_of
from isobit.models.policy import Policy, random_policy
from isobit.util.errors import ConfigError
from tests.tiny import tiny_model

TINY = tiny_model(vocab_size=96, num_layers=2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy(TINY, PrecisionConfig(preset="fp8"), seed=0)


def test_the_number_of_pages_is_as_configured_or_what_full_length_needs_within_memory(
    policy: Policy,
):
    assert choose_num_pages(policy, RolloutConfig(kv_pages=7, kv_memory_gib=1e-9)) == 7
    assert choose_num_pages(policy, RolloutConfig(max_sequences=10)) == 10 * 4
    page_bytes = 2 * 64 * 2 * (32 + 1) * 2  # K and V, tokens, KV heads, values and scale, layers
    assert choose_num_pages(policy, RolloutConfig(kv_memory_gib=page_bytes * 5.5 / 2**30)) == 5
    with pytest.raises(ConfigError, match="holds no page"):
        choose_num_pages(policy, RolloutConfig(kv_memory_gib=1e-9))
    with pytest.raises(ConfigError, match=r"kv_pages = 1000000000 asks .* this machine has"):
        choose_num_pages(policy, RolloutConfig(kv_pages=10**9))


def test_a_device_without_room_for_a_page_is_told_with_what_takes_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
):
    device = SimpleNamespace(
        release_cached=lambda: None, free=lambda: 3 << 30, available=lambda: 80 << 30
    )
    monkeypatch.setattr(type(policy.backend), "memory", device)
    with pytest.raises(ConfigError, match=r"3 GiB of .* free, .* \(4 GiB\): end what else runs"):
        choose_num_pages(policy, RolloutConfig())
    device.free = lambda: 8 << 30
    assert choose_num_pages(policy, RolloutConfig(max_sequences=10)) == 10 * 4


def test_a_device_keeps_a_tenth_free_within_bounds() -> None:
    sizes = {8: 2.0, 22.5: 2.25, 38.5: 3.85, 78: 4.0, 139: 4.0}
    found = {total: reserve_of(int(total * (1 << 30))) / (1 << 30) for total in sizes}
    assert found == pytest.approx(sizes)
