"""Which side and which layer compute now, for faults that are planted in one of each."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from isobit.models.attention import Attention
from isobit.models.mlp import Mlp
from isobit.models.scorer import Scorer
from isobit.rollout.native import NativeEngine

Side = Literal["rollout", "training"]


@dataclass
class Where:
    """Which side and layer runs now, and how often each planted function was called in that
    layer.
    """

    side: Side | None = None
    layer: int | None = None
    calls: Counter[str] = field(default_factory=Counter)


def followed(monkeypatch: pytest.MonkeyPatch) -> Where:
    """What engine, scorer and layers keep up to date from now on."""
    now = Where()

    @contextmanager
    def at(**place: Any) -> Iterator[None]:
        before = now.side, now.layer
        now.side, now.layer = place.get("side", now.side), place.get("layer", now.layer)
        yield
        now.side, now.layer = before

    def wrap(owner: type, name: str, place: Callable[[Any], dict[str, Any]]) -> None:
        exact = getattr(owner, name)

        def wrapped(self: Any, *arguments: Any) -> Any:
            if owner is not Mlp:
                now.calls.clear()
            with at(**place(self)):
                return exact(self, *arguments)

        monkeypatch.setattr(owner, name, wrapped)

    wrap(NativeEngine, "step", lambda _: {"side": "rollout"})
    wrap(Scorer, "score", lambda _: {"side": "training"})
    wrap(Attention, "forward", lambda unit: {"layer": unit._layer})
    wrap(Mlp, "forward", lambda unit: {"layer": int(unit._path.removeprefix("layers."))})
    return now
