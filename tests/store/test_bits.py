"""Machines of one class of bits, and of others."""

import pytest
import torch

from isobit.config.run import RunConfig
from isobit.errors import ConfigError
from isobit.store import bits
from isobit.store.bits import class_of_bits, recorded_class
from isobit.store.checkpoint.recorded import Recorded, compare
from isobit.store.manifest import environment

CPU = torch.device("cpu")
CONFIG = RunConfig.model_validate(
    {"output": "run", "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl"}}}
)


def at(capability: str, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    return Recorded({}, environment(CPU))


def test_avx2_and_avx512_are_one_class_and_older_sets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found at 12131fc: the oldest instruction set gave other bits, AVX2 and AVX-512 the same."""
    old, oldest = at("AVX2", monkeypatch), at("DEFAULT", monkeypatch)
    now = at("AVX512", monkeypatch).environment
    assert compare(old, CONFIG, {}, now, ()) == {}
    with pytest.raises(ConfigError) as refused:
        compare(oldest, CONFIG, {}, now, ())
    assert "bits.instructions: 'x86_64 DEFAULT' in the run, 'x86_64 AVX2 or " in str(refused.value)
    assert "--allow-change bits.instructions" in str(refused.value)
    for name in ("bits", "bits.instructions"):
        assert list(compare(oldest, CONFIG, {}, now, [name])) == ["bits.instructions"]


def test_another_torch_and_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Recorded({}, environment(CPU))
    monkeypatch.setattr(bits, "kernels_sha256", lambda: "0" * 64)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(ConfigError) as refused:
        compare(old, CONFIG, {}, {"bits": class_of_bits(CPU, {})}, ())
    assert "bits.kernels: SHA-256" in str(refused.value)
    assert f"bits.torch: '{old.environment['bits']['torch']}' in the run, '1.0'" in str(
        refused.value
    )


def test_a_record_from_before_the_class_says_what_it_can() -> None:
    full = environment(CPU)
    assert recorded_class(full) == full["bits"]
    old = {name: full[name] for name in ("versions", "device")}
    known = recorded_class(old)
    assert known.keys() == {"device", "instructions", "torch"}
    assert known.items() <= full["bits"].items()
    assert recorded_class({}) == {}


def test_a_name_that_means_nothing_is_not_allowed() -> None:
    now = environment(CPU)
    with pytest.raises(ConfigError, match=r"--allow-change bits\.torhc: .* did you mean bits\.tor"):
        compare(Recorded({}, now), CONFIG, {}, now, ["bits.torhc"])
    compare(Recorded({}, now), CONFIG, {}, now, ["training", "seed", "bits.torch"])
