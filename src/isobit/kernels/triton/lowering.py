"""How kernels become a card's machine code: by one lowering for every card.

Triton chooses layouts and instructions by the card's generation, and so the order in which a
product is added up.  Here all its stages down to PTX are those of sm_80, whatever the card; only
the assembler, which must keep the PTX's operations, works for the card at hand.  So what is proven
of a kernel's PTX on one card holds for the PTX of all, and a Hopper card runs what an A100 does.
"""

from typing import Any

from triton import knobs

GENERATION = 80
_NAME = f"ptx of sm_{GENERATION}"


def lower_for_sm_80() -> None:
    """Kernels of this process that are compiled from now on, those of other packages too, are
    lowered for sm_80; kernels that it has compiled stay as they are, so this comes before any of
    them.  Triton's cache on the disk keeps both kinds apart, since the generation belongs to a
    kernel's options.
    """
    # Stored as the attribute is: assigning it would set TRITON_OVERRIDE_ARCH for child processes.
    knobs.runtime.__dict__["override_arch"] = f"sm{GENERATION}"
    knobs.runtime.add_stages_inspection_hook = _with_ptx_of_sm_80  # pyright: ignore


def _with_ptx_of_sm_80(
    compiler: Any = None,
    stages: dict[str, Any] | None = None,
    options: Any = None,
    language: Any = None,
    capability: int | None = None,
) -> tuple[str, str] | None:
    """Triton's hook between its stages, of which ``override_arch`` leaves PTX to the card.  Without
    arguments it is asked for its part of a kernel's keys in memory and on the disk (Triton 3.7).
    """
    if stages is None:
        return _NAME, _NAME
    stages["ptx"] = lambda source, metadata: compiler.make_ptx(
        source, metadata, options, GENERATION
    )
    return None
