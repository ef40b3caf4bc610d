"""Results of the measurements on a checkpoint: one JSON file each."""

import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def write_result(out: Path, name: str, result: dict[str, Any]) -> None:
    """Write, and print in a line, a result with the versions that it was measured with."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result | {"versions": versions})
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)
