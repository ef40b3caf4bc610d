"""Cards that nobody here has are planned by their data sheets, which is said."""

from dataclasses import replace

import pytest

from isobit.cli.options import GPU_NAMES
from isobit.config.base import BackEnd
from isobit.kernels.hopper import sizes as hopper_sizes
from isobit.kernels.triton import sizes as portable_sizes
from isobit.memory.cards import GPUS, Card, card_here, read_card, support_for
from isobit.memory.speed import SpeedShape, StepTime, StepWork, describe_step, estimate_step
from isobit.util.errors import ConfigError

STEP = StepWork(
    shape=SpeedShape.named("qwen3-8b", "int8"),
    sequences=32,
    length=2304,
    prompts=4,
    prompt_tokens=256,
    samples=8,
    new_tokens=2048,
)


def time(card: str | Card, precision: str = "int8") -> StepTime:
    shape = SpeedShape.named("qwen3-8b", precision)
    return estimate_step(
        replace(STEP, shape=shape), read_card(card) if isinstance(card, str) else card
    )


def test_the_help_names_every_card() -> None:
    named = GPU_NAMES.split(", or ")[0].split(", ")
    assert sorted(named) == sorted(GPUS)


def test_the_sheets_agree_with_what_is_known_of_their_kind() -> None:
    for name, card in GPUS.items():
        assert card.sheet is not None
        # dense INT8 is twice FP16, whose FP32 sums GeForce halves
        ratio = 4 if "GeForce" in card.sheet.device else 2
        assert card.sheet.int8 / card.sheet.fp16 == pytest.approx(ratio, rel=0.02), name
        assert (card.back_end == "hopper") == name.startswith("h")
        assert card.is_estimated == (name != "h200") == bool(card.note())


def test_a_plan_has_the_sizes_of_the_card_s_back_end() -> None:
    assert support_for("cuda", GPUS["h200"]).sizes is hopper_sizes
    assert support_for("cuda", GPUS["rtx4090"]).sizes is portable_sizes
    assert support_for("cuda", GPUS["h200"].by("triton")).sizes is portable_sizes
    assert GPUS["b200"].by("auto") == GPUS["b200"]
    with pytest.raises(ConfigError, match="--gpu B200 is another generation: leave back_end out"):
        GPUS["b200"].by("hopper")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_a_card_that_is_here_has_the_sheet_of_its_name_alone(device: str, name: str | None) -> None:
    expected = None if name is None else GPUS[name].sheet
    assert card_here(device, 1, "triton") == Card(device, 1, "triton", expected)


def test_a_step_is_scaled_by_the_sheets() -> None:
    assert time("h200") == time("141") == estimate_step(STEP)
    here, small = time("h200"), time("rtx4090")
    assert 1979 / 660.6 < small.training / here.training < 989.4 / 165.2
    assert 1 < small.rollout / here.rollout < 5.99 / 0.9
    narrow, wide = time("a100-40"), time("a100-80")  # of equal peaks, 1.555 and 1.935 TB/s
    assert narrow.training == wide.training and 1.02 < narrow.rollout / wide.rollout < 1.245
    fp8 = time("rtx4090", "fp8")
    assert fp8.training / time("h200", "fp8").training > 989.4 / 165.2, "E4M3 runs as FP16"
    assert fp8.training > 1.5 * small.training
    portable = time(GPUS["h200"].by("triton"))
    assert 0.55 < here.training / portable.training < 0.62
    assert 0.8 < here.rollout / portable.rollout < 0.98


@pytest.mark.parametrize(
    ("name", "back_end", "precision", "said"),
    [
        ("h200", "auto", "fp8", ""),
        ("rtx4090", "auto", "int8", "1.01 TB/s, 661 TOPS in INT8 and 165 TFLOPS in FP16"),
        ("rtx4090", "auto", "fp8", "E4M3 count as such of FP16"),
        ("b200", "auto", "int8", "products at 0.59 of the speed of Hopper's"),
        ("h200", "triton", "int8", "products at 0.59 of the speed of Hopper's"),
    ],
)
def test_what_a_time_was_scaled_by_is_said(
    name: str, back_end: BackEnd, precision: str, said: str
) -> None:
    card = GPUS[name].by(back_end)
    text = "\n".join(describe_step(time(card, precision), 10, card, 1))
    if said:
        assert said in text
    assert ("no row is of a card like this one" in text) == (name != "h200")
    assert ("such of FP16" in text) == (card.back_end == "triton" and precision == "fp8")


@pytest.mark.parametrize(
    "text", ["4090", "RTX4090", "rtx 4090", "RTX-4090", "GeForce RTX 4090", "NVIDIA_RTX_4090"]
)
def test_a_card_is_known_by_its_number_and_by_its_seller_s_name(text: str) -> None:
    assert read_card(text) is GPUS["rtx4090"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("200", "may be h200, b200 or a size of 200 GiB: write the name, or 200GiB"),
        ("100", "may be h100, a100-40, a100-80 or a size of 100 GiB"),
        ("4080", "no GPU has 4,080 GiB; name it as --gpu rtx4090 does, or give the GiB"),
        ("24564", "no GPU has 24,564 GiB"),
        ("1e300", "no GPU has 1e300 GiB"),
        ("rtx4080", "'rtx4080' is not known"),
        ("24GB", "'24GB' is not known"),
        ("nan", "'nan' is not known"),
        ("-80", "'-80' is not known"),
    ],
)
def test_a_number_that_may_be_another_card_is_no_size(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_card(text)
    assert said in str(raised.value)


def test_a_size_has_its_unit_or_none() -> None:
    for text in ("79.2", "79.2GiB", "79.2 gib"):
        assert read_card(text).total == int(79.2 * (1 << 30))
    assert read_card("200GiB").name == "200-GiB GPU"
