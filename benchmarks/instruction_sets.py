"""Whether instruction sets of a processor compute the same bits: the same short training, each in a
process of its own that is kept from newer instructions.

    python benchmarks/instruction_sets.py

prints the class of bits (``isobit.store.class_of_bits``) and a
digest of the trained weights and completions
by instruction set and flow: where the first differs, the second may.  Run it on a machine with
AVX-512.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SETS = {
    "again": {},
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "oldest": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
PRESETS = ("fp32", "bf16", "fp8")
PROGRAM = """
import sys, isobit
output, preset = sys.argv[1:]
isobit.train({
    "output": output, "threads": 1, "precision": {"preset": preset},
    "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl"}},
    "reward": {"function": "isobit.starter.tasks:correct_answer", "workers": 1},
    "rollout": {"max_new_tokens": 8},
    "training": {"steps": 3, "prompts_per_step": 8, "samples_per_prompt": 4},
})
"""


def outcome(preset: str, environment: dict[str, str]) -> str:
    """A digest of what a training leaves."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-c", PROGRAM, str(output), preset]
        shown = subprocess.run(  # noqa: S603 (ourselves)
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if shown.returncode:
            raise SystemExit(shown.stderr)
        digest = hashlib.sha256((output / "model" / "model.safetensors").read_bytes())
        digest.update((output / "completions.jsonl").read_bytes())
        arithmetic = json.loads((output / "run.json").read_text())["bits"]["arithmetic"]
        return f"class {arithmetic[:12]}  outcome {digest.hexdigest()[:12]}"


for preset in PRESETS:
    for name, environment in SETS.items():
        print(f"{preset:5} {name:8} {outcome(preset, environment)}", flush=True)
