"""A text, a shape and a card that need no GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from isobit.models.config import ModelConfig

TINY = ModelConfig("qwen3", 128, 128, 256, 2, 4, 2, 32, 256, 1e-6, 1e4, tied_embeddings=False)
CARD = {"name": "a CPU", "uuid": "A", "copy_tb_per_s": 0.01}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Both files of a text, the same 60 sums in each."""
    for name in ("train", "held_out"):
        rows = [json.dumps({"prompt": f"{i} + {i} =", "completion": str(2 * i)}) for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


@pytest.fixture
def tiny() -> ModelConfig:
    return TINY


@pytest.fixture
def card() -> dict[str, Any]:
    return CARD
