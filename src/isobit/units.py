"""Bytes for a reader."""

GIB = 1 << 30


def gib(size: float) -> str:
    """``1.23 GiB``, ``45.6 MiB`` or ``789 KiB``."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return (
                f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
            )
    return f"{size / 1024:.3g} KiB"
