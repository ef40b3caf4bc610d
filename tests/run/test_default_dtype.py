"""The default dtype of the caller's process (``torch.set_default_dtype``) changes no bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.default_dtype_probe import found_in

ROOT = Path(__file__).parents[2]


def found_under(dtype: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.run.default_dtype_probe", dtype, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_engine_and_trainer_have_dtypes_of_their_own(tmp_path: Path) -> None:
    expected = found_in(tmp_path / "float32")
    assert expected["grpo, differing"] == expected["ppo, differing"] == 0
    for dtype in ("float64", "bfloat16"):
        assert found_under(dtype, tmp_path / dtype) == expected, dtype
