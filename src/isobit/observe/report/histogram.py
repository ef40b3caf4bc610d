"""The rewards of a step as a histogram, in the form of a chart."""

from collections.abc import Sequence

import numpy as np

from isobit.observe.report.chart import BOTTOM, Chart, Frame, Mark, Panel
from isobit.observe.report.numbers import number_text, round_ticks, tick_text

BINS = 20


def draw_histogram(title: str, values: Sequence[float]) -> Chart | None:
    """Finite values in ``BINS`` bins of equal width; None without any."""
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        return None
    counts, edges = np.histogram(finite, BINS)
    frame = Frame((float(edges[0]), float(edges[-1])), (0.0, 1.06 * float(counts.max())))
    bins = [
        (float(low), float(high), int(count))
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    bars = [
        f"M{frame.x(low)} {BOTTOM}V{frame.y(count)}H{frame.x(high)}V{BOTTOM}"
        for low, high, count in bins
    ]
    rows = tuple(
        (f"{number_text(low)} to {number_text(high)}", f"{count:,}") for low, high, count in bins
    )
    failed = len(values) - len(finite)
    note = f"{failed:,} failed" if failed else ""
    return Chart(
        panel=Panel(title, "completions", (), note, axis="reward", compared=True),
        marks=(Mark("rewards", 1, line="".join(bars), band="".join(f"{bar}Z" for bar in bars)),),
        x_ticks=tuple((frame.x(x), tick_text(x)) for x in round_ticks(*frame.steps, most=6)),
        y_ticks=tuple(
            (frame.y(y), tick_text(y)) for y in round_ticks(*frame.values, most=5, whole=True)
        ),
        hits=tuple(
            (f"{bar}Z", f"reward {span}, completions {count}")
            for bar, (span, count) in zip(bars, rows, strict=True)
        ),
        columns=("reward", "completions"),
        rows=rows,
        latest="",
        description=f"{title}: {len(finite):,} rewards, mean {number_text(float(np.mean(finite)))}",
        points_note=f"Mean {number_text(float(np.mean(finite)))} of {len(finite):,} rewards.",
        constant="",
    )
