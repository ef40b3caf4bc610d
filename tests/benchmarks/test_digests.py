"""What digests cost is measured for every part of a state."""

import re

import pytest

from benchmarks import digests
from tests.conftest import TINY


def test_every_part_has_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digests, "model_shape", lambda name: TINY)
    monkeypatch.setattr("sys.argv", ["digests", "--device", "cpu", "--moments", "fp32"])
    digests.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "masters", "moments", "all"]
    times = [float(match[1]) for line in lines if (match := re.search(r"([\d.]+) ms", line))]
    assert sum(times[:3]) == pytest.approx(times[3], abs=0.2)
