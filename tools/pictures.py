"""The pictures of docs/architecture.md as SVG: ``python -m tools.pictures`` (or ``make figures``)
writes docs/pictures/{loop,layers,weight}.svg.

A picture is read on GitHub and on the site, in light and in dark, so it has its own background.
Coordinates are pixels from the upper left corner.  Words are set in the reader's own sans-serif
font, so a box is made wide enough for a wider one.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["plain", "blue", "green", "amber", "violet"]
Point: TypeAlias = tuple[float, float]

FILL: dict[Kind, tuple[str, str]] = {
    "plain": ("#f3f4f6", "#9ca3af"),
    "blue": ("#e0ecff", "#3b6fc4"),
    "green": ("#ddf4e4", "#2f855a"),
    "amber": ("#fdf0d5", "#b7791f"),
    "violet": ("#ece4fb", "#7c5cc4"),
}
"""Background and border of a box."""
FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
INK, SOFT = "#1f2937", "#4b5563"
LINE_HEIGHT = 17


@dataclass(slots=True)
class Canvas:
    """A picture that is being drawn."""

    width: int
    height: int
    title: str
    """What a screen reader says."""
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, w: float, h: float, title: str, *lines: str, kind: Kind = "plain"
    ) -> None:
        """A box with a title and lines below it, from its upper left corner."""
        fill, border = FILL[kind]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.3"/>'
        )
        top = y + h / 2 - (len(lines) * LINE_HEIGHT) / 2 + 5
        self.text(x + w / 2, top, title, weight=600)
        for number, line in enumerate(lines, 1):
            self.text(x + w / 2, top + number * LINE_HEIGHT, line, size=12, colour=SOFT)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        weight: int = 400,
        colour: str = INK,
        anchor: Literal["start", "middle", "end"] = "middle",
    ) -> None:
        """One line of words whose base line is at ``y``."""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(self, *points: Point, colour: str = SOFT, dashed: bool = False) -> None:
        """A line through the points, with a head at the last one."""
        path = "M" + " L".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash} '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{SOFT}"/></marker>'
            "</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff" '
            'stroke="#d1d5db"/>\n'
            f"{body}\n</svg>\n"
        )


STEP: tuple[tuple[str, str, str, Kind], ...] = (
    ("prompts", "data/: a sampler by seed", "makes Requests", "plain"),
    ("roll out", "rollout/: prefill, decode", "makes Completions", "blue"),
    ("grade", "rewards/: in processes", "fills rewards of Groups", "plain"),
    ("judge", "training/, algorithms/:", "fills columns, advantages", "green"),
    ("learn", "training/: pack, forward,", "loss, backward, AdamW", "green"),
    ("log, evaluate, save", "observe/, store/:", "when they are due", "plain"),
)
"""A step of reinforcement learning: title, two lines below it, and colour."""


def loop() -> Canvas:
    """A step from left to right; below it the weights that its parts share, and what it leaves."""
    canvas = Canvas(1120, 356, "One step of reinforcement learning, and who shares the weights")
    w, gap, top, low = 164, 18, 76, 236
    x = [24 + number * (w + gap) for number in range(len(STEP))]
    middle = [left + w / 2 for left in x]
    for left, (title, *lines, kind) in zip(x, STEP, strict=True):
        canvas.box(left, top, w, 74, title, *lines, kind=kind)
        if left != x[0]:
            canvas.arrow((left - gap + 1, top + 37), (left - 1, top + 37))
    canvas.arrow((middle[5], top - 2), (middle[5], 40), (middle[0], 40), (middle[0], top - 3))
    canvas.text(560, 32, "the next step, with weights one version newer", size=12, colour=SOFT)
    canvas.box(
        x[1],
        low,
        x[3] + w - x[1],
        80,
        "published weights",
        "FP8 blocks of 128 x 128 with a scale each; one copy, which the rollout,",
        "the scoring forward and the training forward all read",
        kind="amber",
    )
    canvas.box(x[4], low, w, 80, "master weights", "FP32, with AdamW's", "moments", kind="violet")
    canvas.box(x[5], low, w, 80, "run directory", "metrics, completions,", "rewards, checkpoints")
    canvas.arrow((middle[1], low - 2), (middle[1], top + 77))
    canvas.arrow((middle[3] - 20, low - 2), (middle[3] - 20, top + 77))
    canvas.arrow(
        (middle[3] + 30, low - 2),
        (middle[3] + 30, 186),
        (middle[4] - 40, 186),
        (middle[4] - 40, top + 77),
    )
    canvas.arrow((middle[4] + 30, top + 76), (middle[4] + 30, low - 3))
    canvas.text(middle[4] + 36, 200, "gradients", size=12, colour=SOFT, anchor="start")
    canvas.arrow((x[4] - 1, low + 40), (x[3] + w + 2, low + 40))
    canvas.text(x[4] - 9, low + 98, "publish: round, quantise once", size=12, colour=SOFT)
    canvas.arrow((middle[5] + 30, top + 76), (middle[5] + 30, low - 3))
    canvas.text(middle[2] - 60, 186, "each complete group is graded at once,", size=12, colour=SOFT)
    canvas.text(middle[2] - 60, 203, "while others are sampled", size=12, colour=SOFT)
    return canvas


LAYERS: tuple[tuple[str, tuple[tuple[str, str, Kind], ...]], ...] = (
    (
        "applications",
        (
            ("cli, api", "commands; Python", "plain"),
            ("run", "the loop, its parts", "plain"),
            ("proof", "verify, bisect, doctor", "plain"),
            ("observe", "metrics, report", "plain"),
        ),
    ),
    (
        "engines",
        (
            ("rollout", "prompts to completions", "blue"),
            ("training", "groups to new weights", "green"),
            ("store", "run directory", "plain"),
            ("memory", "plans of memory", "plain"),
        ),
    ),
    (
        "parts",
        (
            ("models", "layers, decoder", "violet"),
            ("algorithms", "advantages, losses", "plain"),
            ("rewards", "graders", "plain"),
            ("data, starter", "prompts; a small model", "plain"),
        ),
    ),
    (
        "ground",
        (
            ("kernels", "spec, hopper", "amber"),
            ("precision", "formats, flows", "plain"),
            ("records", "sequences, batches", "plain"),
            ("parallel", "processes", "plain"),
            ("config, util", "keys; errors, files", "plain"),
        ),
    ),
)


def layers() -> Canvas:
    """A row a layer; imports go down only."""
    canvas = Canvas(1000, 350, "The four layers of Isobit; imports go down only")
    left, width, gap = 150, 826, 14
    for row, (layer, packages) in enumerate(LAYERS):
        y = 24 + row * 80
        canvas.text(24, y + 35, layer, weight=600, anchor="start")
        w = (width - gap * (len(packages) - 1)) / len(packages)
        for place, (name, words, kind) in enumerate(packages):
            canvas.box(
                round(left + place * (w + gap), 1), y, round(w, 1), 60, name, words, kind=kind
            )
        if row:
            canvas.arrow((70, y - 36), (70, y + 16))
    return canvas


def weight() -> Canvas:
    """From a checkpoint to the products, left to right, and below them back into the master."""
    canvas = Canvas(1012, 400, "A weight from safetensors to a GEMM and back")
    canvas.text(24, 34, "A weight, from safetensors to a GEMM and back", weight=600, anchor="start")
    canvas.box(24, 76, 160, 74, "model folder", "safetensors, read one", "tensor at a time")
    canvas.box(246, 76, 178, 74, "master", "FP32, the optimiser's;", "q, k, v fused", kind="violet")
    canvas.box(
        486,
        76,
        190,
        74,
        "publish",
        "rounded to BF16 once,",
        "quantised once, in place",
        kind="amber",
    )
    lines = ("E4M3, 128 x 128 blocks,", "a scale each;", "one tensor for both sides")
    canvas.box(760, 60, 228, 106, "published weight", *lines, kind="amber")
    canvas.arrow((186, 113), (243, 113))
    canvas.arrow((426, 113), (483, 113))
    canvas.arrow((678, 113), (757, 113))
    canvas.box(640, 226, 160, 60, "rollout", "Y = X W^T", kind="blue")
    canvas.box(828, 226, 160, 60, "training", "Y = X W^T, the same", kind="green")
    canvas.arrow((780, 168), (780, 223))
    canvas.arrow((908, 168), (908, 223))
    canvas.text(844, 190, "same kernels,", size=12, colour=SOFT)
    canvas.text(844, 206, "same bits", size=12, colour=SOFT)
    canvas.box(640, 322, 348, 54, "backward", "dX = dY W,  then dW += dY^T X", kind="green")
    canvas.arrow((908, 288), (908, 319))
    canvas.box(378, 322, 190, 54, "gradient", "FP32, one sum a micro-batch", kind="violet")
    canvas.arrow((637, 349), (571, 349))
    canvas.box(246, 226, 178, 54, "AdamW", "an update, clipped", kind="green")
    canvas.arrow((401, 320), (401, 283))
    canvas.arrow((335, 223), (335, 153))
    canvas.box(24, 226, 160, 54, "checkpoint", "FP32 masters, moments")
    canvas.box(24, 322, 160, 54, "trained model", "BF16 safetensors")
    canvas.arrow((262, 153), (262, 192), (104, 192), (104, 223), dashed=True)
    canvas.arrow((212, 192), (212, 349), (187, 349), dashed=True)
    return canvas


PICTURES = {"loop": loop, "layers": layers, "weight": weight}


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
