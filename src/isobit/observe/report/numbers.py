"""Numbers and long texts as they are shown, and the ticks and the range of an axis."""

import math
from itertools import product

MINUS = "\N{MINUS SIGN}"


def cut(text: str, most: int) -> str:
    """The text, or its first characters and how many more there are."""
    more = len(text) - most
    return text if more <= 0 else f"{text[:most]} [{more} more characters]"


def in_a_line(text: str, most: int) -> str:
    """The text without line ends and repeated spaces, with an ellipsis where it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}\N{HORIZONTAL ELLIPSIS}"


def round_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Ticks: at most ``most`` multiples of 1, 2 or 5 times a power of ten within ``low`` to
    ``high``; with ``whole``, whole numbers only.
    """
    if not high > low:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    power = max(power, 0) if whole else power
    for exponent, factor in product((power, power + 1, power + 2), (1, 2, 5)):
        step = factor * 10.0**exponent
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [index * step for index in range(first, last + 1)]
    raise AssertionError(f"no ticks between {low} and {high}")


def axis_range(low: float, high: float) -> tuple[float, float]:
    """The range of an axis that shows ``low`` to ``high``: a margin on both sides, but none below
    zero where nothing is negative.
    """
    if low == high == 0.0:
        return 0.0, 1.0
    margin = 0.06 * (high - low) or 0.1 * abs(high)
    bottom = low - margin
    return (0.0 if low >= 0.0 > bottom or 0.0 <= low < 0.4 * high else bottom), high + margin


def number_text(value: float | None, percent: bool = False) -> str:
    """Four significant digits, thousands separated; below 0.001 as 1e-4; a dash for none."""
    if value is None:
        return "\N{EN DASH}"
    if percent:
        return f"{100 * value:.1f}%".replace("-", MINUS)
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        text = f"{float(digits):g}e{int(exponent)}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", MINUS)


def tick_text(value: float, percent: bool = False) -> str:
    """A tick's number: 20k rather than 20,000."""
    value = float(f"{value:.10g}")  # the third tick of 0.1 is 0.30000000000000004
    if percent:
        return f"{100 * value:g}%".replace("-", MINUS)
    if abs(value) >= 10_000:
        scale, suffix = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / scale:g}{suffix}".replace("-", MINUS)
    return number_text(value)


def duration_text(seconds: float) -> str:
    """Seconds, minutes and seconds, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
