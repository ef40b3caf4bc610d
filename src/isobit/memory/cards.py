"""GPUs that a plan can be made for without having them (``--gpu``), by their data sheets.

``bandwidth`` is that of the card's memory, ``int8`` and ``fp16`` are peaks of dense products: with
INT32 sums, and of FP16 or BF16 with FP32 sums, which GeForce cards run at half of the rate of FP16
sums, a quarter of INT8's. ``total`` is what a process finds free on a card that nobody else uses.
That of an H200 is measured (docs/memory.md: 138.7 to 139.3 of 139.8 GiB); all others are what the
card has, less about as much as the driver, a CUDA context and, on GeForce, a screen keep of it.
Isobit has been measured on H200s alone: every other figure is an estimate, and is printed as one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from isobit.config.base import BackEnd
from isobit.kernels.backend import Support, support
from isobit.util.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Peaks of a card."""

    bandwidth: float  # bytes a second
    int8: float  # operations a second
    fp16: float
    device: str  # a pattern of the name that its driver gives it
    by_warp_groups: bool = False
    """Whether the products reach these peaks only by instructions of several warps, which the
    portable kernels have not.
    """


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that is planned for, and need not be there."""

    name: str
    total: int  # bytes that a process can have
    back_end: str = "auto"  # whose sizes a plan has; auto is that of this process
    sheet: DataSheet | None = None

    def by(self, wanted: BackEnd) -> "Card":
        """The card with the back end that a recipe names.  Raises ConfigError for one that it does
        not run.
        """
        if wanted == "hopper" and self.back_end == "triton":
            raise ConfigError(
                f"back_end = 'hopper', and --gpu {self.name} is another generation: leave back_end "
                "out, or set it to 'triton'"
            )
        return self if wanted == "auto" else replace(self, back_end=wanted)

    @property
    def is_estimated(self) -> bool:
        """Whether its figures are those of a data sheet alone."""
        return self.sheet is not None and self.sheet != MEASURED.sheet

    @property
    def has_slower_products(self) -> bool:
        """Whether the back end's instructions do not reach the peaks of the data sheet."""
        by_warp_groups = self.sheet is not None and self.sheet.by_warp_groups
        return by_warp_groups and self.back_end == "triton"

    @property
    def e4m3_as_fp16(self) -> bool:
        """Whether products in E4M3 run as such of FP16."""
        return self.back_end == "triton"

    @property
    def article(self) -> str:
        return "an" if self.name[0] in "HRAL" else "a"

    def note(self) -> str:
        """What stands behind the card's name where its figures are a data sheet's."""
        if not self.is_estimated:
            return ""
        return f" (back end {self.back_end}; its memory and speed are estimates by data sheet)"


def _card(name: str, gib: float, tb: float, tops: float, tflops: float, device: str) -> Card:
    """A card by GiB, TB/s, and peaks in INT8 and FP16 in 10^12 operations a second."""
    is_hopper, by_warp_groups = name[0] == "h", name[0] in "hb"
    sheet = DataSheet(tb * 1e12, tops * 1e12, tflops * 1e12, device, by_warp_groups)
    return Card(name.upper(), int(gib * _GIB), "hopper" if is_hopper else "triton", sheet)


GPUS: Mapping[str, Card] = {
    card.name.lower(): card
    for card in (
        _card("h100", 78, 3.35, 1979, 989.4, "NVIDIA H100 80GB HBM3"),
        _card("h200", 139, 4.8, 1979, 989.4, "NVIDIA H200"),
        _card("rtx3090", 22.5, 0.936, 284, 71, "NVIDIA GeForce RTX 3090"),
        _card("rtx4090", 22.5, 1.008, 660.6, 165.2, "NVIDIA GeForce RTX 4090"),
        _card("rtx5090", 30.5, 1.792, 838, 209.5, "NVIDIA GeForce RTX 5090"),
        _card("a100-40", 38.5, 1.555, 624, 312, "NVIDIA A100.*40GB"),
        _card("l40s", 43.5, 0.864, 733, 362, "NVIDIA L40S"),
        _card("a100-80", 78, 1.935, 624, 312, "NVIDIA A100.*80GB.*"),
        _card("b200", 177, 7.7, 4500, 2250, "NVIDIA B200"),
    )
}
"""Cards under the names that ``--gpu`` takes."""
MEASURED = GPUS["h200"]
"""The card of all measured rows."""


_MOST_GIB = 1024
_SIZE = re.compile(r"(\d+\.?\d*(?:e\d+)?) ?(gib)?", re.ASCII)


def read_card(text: str) -> Card:
    """A name of ``GPUS``, with or without its maker's words, or the GiB that a process has.  Raises
    ConfigError for another word, and for a number that may be another card's.
    """
    word = text.strip().lower()
    if (card := _named(word)) is not None:
        return card
    size = _SIZE.fullmatch(word)
    if size is None or not float(size[1]):
        raise ConfigError(
            f"the GPU {text!r} is not known; known are {', '.join(GPUS)}, or name the GiB that a "
            "process has of it, for example 79.2"
        )
    number, unit = size.groups()
    if float(number) > _MOST_GIB:
        shown = f"{float(number):,.0f}" if len(number) < 10 and "e" not in number else number[:40]
        raise ConfigError(
            f"no GPU has {shown} GiB; name it as --gpu rtx4090 does, or give the GiB that a "
            f"process has of it, as --gpu 22.5 does; known are {', '.join(GPUS)}"
        )
    cards = [name for name in GPUS if unit is None and number in re.findall(r"\d{3,}", name)]
    if cards:
        raise ConfigError(
            f"--gpu {text} may be {', '.join(cards)} or a size of {number} GiB: write the name, or "
            f"{number}GiB"
        )
    return Card(f"{float(number):g}-GiB GPU", int(float(number) * _GIB))


def _named(word: str) -> Card | None:
    """The card of a name as sellers write it, or of a number that is that of one card alone."""
    plain = re.sub(r"nvidia|geforce|[\s_-]", "", word)
    names = {name.replace("-", ""): card for name, card in GPUS.items()}
    if (card := names.get(plain) or names.get(plain.removesuffix("gb"))) is not None:
        return card
    return names.get(f"rtx{plain}")


def card_here(device: str, total: int, back_end: str) -> Card:
    """A card of this machine by the name that its driver gives it, with the data sheet of a known
    one.
    """
    sheets = (card.sheet for card in GPUS.values() if card.sheet is not None)
    found = (sheet for sheet in sheets if re.fullmatch(sheet.device, device))
    return Card(device, total, back_end, next(found, None))


def support_for(device_type: str, card: Card | None) -> Support:
    """The ``Support`` of a device of this machine, or of a card that need not be here."""
    return support(device_type, "auto" if card is None else card.back_end)
