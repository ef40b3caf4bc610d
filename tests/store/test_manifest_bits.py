"""Machines of one class of bits and of others, and what the digest of the kernels covers."""

import pytest
import torch

from isobit.config.base import BackEnd
from isobit.config.recipes import RunConfig
from isobit.kernels import backend
from isobit.store import class_of_bits as class_of_bits_module
from isobit.store.class_of_bits import arithmetic_sha256, class_of_bits
from isobit.store.compatible import Recorded, compare
from isobit.store.kernels_digest import definitions_sha256, kernels_sha256
from isobit.store.manifest import environment
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
    arithmetic_sha256.cache_clear()
    now = environment(CPU)
    arithmetic_sha256.cache_clear()
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
        arithmetic_sha256.cache_clear()
        found.add(arithmetic_sha256())
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    assert len(found) == 1


def test_another_torch_and_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Recorded({}, environment(CPU))
    monkeypatch.setattr(class_of_bits_module, "kernels_sha256", lambda: "0" * 64)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(ConfigError) as refused:
        compare(old, CONFIG, {}, {"bits": class_of_bits(CPU, {})}, ())
    assert "bits.kernels: SHA-256" in str(refused.value)
    assert f"bits.torch: '{old.environment['bits']['torch']}' in the run, '1.0'" in str(
        refused.value
    )


@pytest.mark.parametrize("recorded", ["cuda", "cuda-sm90-hopper"])
def test_another_back_end_or_generation_is_refused_by_name(
    recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cuda`` is what runs recorded when Hopper's back end was the only one."""
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "_named", {})

    def now(capability: tuple[int, int], name: BackEnd) -> dict[str, dict[str, str]]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        backend.use_back_end(name)
        return {"bits": class_of_bits(card, {})}

    same = now((9, 0), "auto")
    assert same["bits"]["device"] == "cuda-sm90-hopper"
    old = Recorded({}, {"bits": same["bits"] | {"device": recorded}})
    assert compare(old, CONFIG, {}, same, ()) == {}
    for found in (now((9, 0), "triton"), now((8, 0), "auto")):
        wanted = found["bits"]["device"]
        assert wanted in ("cuda-sm90-triton", "cuda-sm80-triton")
        with pytest.raises(ConfigError) as refused:
            compare(old, CONFIG, {}, found, ())
        line = f"bits.device: 'cuda-sm90-hopper' in the run, '{wanted}' now"
        assert line in str(refused.value)
        changes = compare(old, CONFIG, {}, found, ["bits.device"])
        assert changes == {"bits.device": ("cuda-sm90-hopper", wanted)}


def test_a_name_that_means_nothing_is_not_allowed() -> None:
    now = environment(CPU)
    with pytest.raises(ConfigError, match=r"--allow-change bits\.torhc: .* did you mean bits\.tor"):
        compare(Recorded({}, now), CONFIG, {}, now, ["bits.torhc"])
    known = ["training", "seed", "bits.torch", "reward.parts.gone.weight"]
    compare(Recorded({}, now), CONFIG, {}, now, known, ["reward.parts.gone.weight"])


SOURCES = {
    "isobit.kernels.norm": '''
"""What the module is about."""
import torch
from isobit.kernels import sums
from isobit.kernels.sums import PART as SIZE

def norm(x):
    """Of rows."""
    return x / sums.row_sum(x, SIZE)  # in order
''',
    "isobit.kernels.sums": '''
from torch import Tensor as T

PART = 4096
"""Numbers of a sum."""

def row_sum(x: T, part: int) -> T:
    return sum((one.sum(-1) for one in x.split(part, -1)), 0.0)

def spread(x): return x
''',
    "isobit.kernels.other": "def spread(x): return -x",
}
"""Three modules; two define ``spread``."""


def edited(*edits: tuple[str, str], sources: dict[str, str] = SOURCES) -> str:
    """The digest after replacing text, which must be there."""
    for old, new in edits:
        assert any(old in source for source in sources.values())
        sources = {module: source.replace(old, new) for module, source in sources.items()}
    return definitions_sha256(sources)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Of rows."""', '"""Of rows: each by itself."""'),
        ('    """Of rows."""\n', ""),
        ('"""What the module is about."""', ""),
        ('"""Numbers of a sum."""', ""),
        ("  # in order", "\n\n\n"),
        ("x / sums.row_sum(x, SIZE)", "(x / sums.row_sum(\n        x,\n        SIZE,\n    ))"),
        ("import torch\n", "import math\nimport torch\n"),
    ],
)
def test_words_and_layout_do_not_change_the_kernels(old: str, new: str) -> None:
    assert edited((old, new)) == edited()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("PART = 4096", "PART = 2048"),
        ("0.0)", "-0.0)"),
        ("x / sums", "x * sums"),
        ("-x", "+x"),
        ("import PART as SIZE", "import HALF as SIZE"),
        ("x.split(part, -1)", "x.split(part, 1)"),
        ("def spread(x): return -x", "def spread(x): return x"),
        ('"""What the module is about."""', "torch.use_deterministic_algorithms(True)"),
        ("import Tensor as T", "import Size as T"),
        ("row_sum", "sum_of_row"),
    ],
)
def test_what_is_computed_changes_the_kernels(old: str, new: str) -> None:
    assert edited((old, new)) != edited()


def test_a_definition_may_move_to_another_module() -> None:
    norm, sums = SOURCES["isobit.kernels.norm"], SOURCES["isobit.kernels.sums"]
    constant = 'PART = 4096\n"""Numbers of a sum."""\n'
    spread = "def spread(x): return x\n"
    moved = {
        "isobit.kernels.spec.norm": norm.replace("sums.row_sum", "row_sum").replace(
            "from isobit.kernels import sums", "from isobit.kernels.tiles import row_sum"
        ),
        "isobit.kernels.tiles": sums.replace(constant, "").replace(spread, ""),
        "isobit.kernels.sums": constant + SOURCES["isobit.kernels.other"],
        "isobit.precision.other": spread,
    }
    assert definitions_sha256(moved) == edited()
    moved["isobit.kernels.sums"] = moved["isobit.kernels.sums"].replace("4096", "4095")
    assert definitions_sha256(moved) != edited()


def test_definitions_of_one_name_are_told_apart() -> None:
    two = {f"isobit.kernels.{name}": "def scale(x): return x * SIZE" for name in "ab"}
    calls = {"isobit.kernels.c": "from isobit.kernels.a import scale\ndef run(x): return scale(x)"}
    here = definitions_sha256(two | calls)
    assert edited(("kernels.a import", "kernels.b import"), sources=two | calls) != here
    two["isobit.kernels.b"] += " + 1"
    assert edited(("kernels.a import", "kernels.b import"), sources=two | calls) != (
        definitions_sha256(two | calls)
    )


def test_the_kernels_of_this_package_are_digested() -> None:
    assert len(kernels_sha256()) == 64
