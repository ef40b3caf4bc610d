"""Machines of one class of bits, and of others."""

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.store import manifest
from isobit.store.compatible import Recorded, compare
from isobit.store.manifest import class_of_bits, environment
from isobit.util.errors import ConfigError

CPU = torch.device("cpu")
CONFIG = RunConfig.model_validate(
    {"output": "run", "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}}
)


def test_the_arithmetic_of_another_instruction_set_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found at 12131fc: the oldest instruction set gave other bits, and resume did not notice."""
    old = Recorded({}, environment(CPU))
    assert compare(old, CONFIG, {}, environment(CPU), ()) == {}
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: softmax(x, dim).nextafter(x))
    manifest.arithmetic_sha256.cache_clear()
    now = environment(CPU)
    manifest.arithmetic_sha256.cache_clear()
    with pytest.raises(ConfigError) as refused:
        compare(old, CONFIG, {}, now, ())
    assert "bits.arithmetic: SHA-256 " in str(refused.value)
    assert "--allow-change bits.arithmetic" in str(refused.value)
    for name in ("bits", "bits.arithmetic"):
        assert list(compare(old, CONFIG, {}, now, [name])) == ["bits.arithmetic"]


def test_the_arithmetic_does_not_depend_on_the_threads() -> None:
    threads, found = torch.get_num_threads(), set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        manifest.arithmetic_sha256.cache_clear()
        found.add(manifest.arithmetic_sha256())
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    assert len(found) == 1


def test_another_torch_and_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Recorded({}, environment(CPU))
    monkeypatch.setattr(manifest, "kernels_sha256", lambda: "0" * 64)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(ConfigError) as refused:
        compare(old, CONFIG, {}, {"bits": class_of_bits(CPU, {})}, ())
    assert "bits.kernels: SHA-256" in str(refused.value)
    assert f"bits.torch: '{old.environment['bits']['torch']}' in the run, '1.0'" in str(
        refused.value
    )


def test_a_name_that_means_nothing_is_not_allowed() -> None:
    now = environment(CPU)
    with pytest.raises(ConfigError, match=r"--allow-change bits\.torhc: .* did you mean bits\.tor"):
        compare(Recorded({}, now), CONFIG, {}, now, ["bits.torhc"])
    known = ["training", "seed", "bits.torch", "reward.parts.gone.weight"]
    compare(Recorded({}, now), CONFIG, {}, now, known, ["reward.parts.gone.weight"])
