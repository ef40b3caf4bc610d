"""Which side computes now."""

from collections.abc import Callable
from typing import Any

import pytest

from isobit.rollout.native.engine import NativeEngine


@pytest.fixture
def in_rollout(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the engine computes now."""
    depth = [0]
    exact = NativeEngine.step

    def step(self: NativeEngine) -> Any:
        depth[0] += 1
        try:
            return exact(self)
        finally:
            depth[0] -= 1

    monkeypatch.setattr(NativeEngine, "step", step)
    return lambda: depth[0] > 0
