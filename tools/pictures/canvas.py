"""Boxes, arrows and words as SVG, on a light ground.

Coordinates are pixels from the upper left corner.  Words are set in the reader's own sans-serif
font, so a box is made wide enough for a wider one.
"""

from dataclasses import dataclass, field
from html import escape
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
"""Ground and border of a box."""
INK, SOFT = "#1f2937", "#4b5563"
LINE_HEIGHT = 17


@dataclass(slots=True)
class Canvas:
    """A picture in the making."""

    width: int
    height: int
    title: str
    """For those who hear it read."""
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
        """One line of words on the base line ``y``."""
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
