"""All tests here need Triton, which compiles or interprets kernels."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(params=["CARDS", pytest.param("TWINS", marks=pytest.mark.exhaustive)])
def generations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX is assembled for a card of each kind, and with ``--rest`` for the others."""
    from tests.kernels.triton import assembled

    monkeypatch.setattr(assembled, "GENERATIONS", getattr(assembled, request.param))
