"""The colours of the page: text and curves stand out from what is behind them, in light and in dark
mode (WCAG 2.2, 1.4.3 and 1.4.11).
"""

import re
from importlib.resources import files

import pytest

TEMPLATE = "".join(
    files("isobit.observe.report").joinpath(name).read_text(encoding="utf-8")
    for name in ("chart_style.html", "style.html")
)
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): #(\w{6})", block))
    for block in re.findall(r":root \{(.*?)\}", TEMPLATE, re.DOTALL)
)
BACKGROUNDS = ("page", "card", "grid", "warn", "e4m3", "bf16", "fp32", "s1", "s2", "s3", "s4", "s5")


def luminance(code: str) -> float:
    channels = [int(code[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_curves_stand_out(colours: dict[str, str]) -> None:
    pairs = [("text", behind) for behind in BACKGROUNDS] + [
        (text, behind) for text in ("soft", "accent") for behind in ("page", "card")
    ]
    for text, behind in [*pairs, ("tip-text", "tip"), ("good", "card")]:
        assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    for curve in ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "warn-line"):
        assert contrast(colours[curve], colours["card"]) >= 3.0, curve


def test_both_modes_have_every_colour() -> None:
    assert LIGHT.keys() == DARK.keys() and len(LIGHT) > 20
    assert set(re.findall(r"var\(--([\w-]+)\)", TEMPLATE)) - {"k"} <= LIGHT.keys()
