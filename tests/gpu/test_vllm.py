"""Runs that sample with vLLM (docs/engines.md), each in a process of its own."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny import json_lines

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
RECIPE = """
model = "starter"
[data]
train = { type = "jsonl", path = "starter:train.jsonl" }
eval.held_out = { type = "jsonl", path = "starter:held_out.jsonl", limit = 16 }
[reward]
function = "isobit.starter.tasks:correct_answer"
in_process = true
[rollout]
engine = "vllm"
engine_options = { enforce_eager = true }
max_new_tokens = 16
max_sequences = 64
[training]
steps = 2
prompts_per_step = 16
samples_per_prompt = 4
learning_rate = 1e-4
"""
UPDATE = re.compile(r"(?:weights|written) in ([\d.]+) s.*?compared in ([\d.]+) s")
"""In a line on an update, by vLLM in the process or by servers."""
NEAR = {"bf16": 0.1, "fp8-rollout": 0.3}
"""Above the mean differences of SmolLM2 (docs/engines.md), 0.04 and 0.18."""
FIGURES = (
    *("time/update_s", "time/rollout_s", "tokens_per_s/rollout"),
    *("log_prob_diff/mean", "mismatch/k3", "mismatch/effective_sample_size"),
)


def run(*words: str | Path) -> str:
    """What a Python process prints, which must end well."""
    made = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=230, check=False
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return made.stdout


def check_updates(said: str, output: Path, steps: int, preset: str) -> None:
    """Each step's weights have arrived, with scales made where the cache has some, and
    log-probabilities are near those of the trainer.  Seconds are printed as JSON lines.
    """
    for sent, compared in UPDATE.findall(said):
        print(json.dumps({"preset": preset, "sent_s": float(sent), "compared_s": float(compared)}))
    lines = [line for line in json_lines(output / "metrics.jsonl") if "mismatch/k3" in line]
    for line in lines:
        found = {name: line[name] for name in FIGURES if name in line}
        print(json.dumps({"preset": preset, "step": line["step"], **found}))
    assert said.count("equal to what is published") >= steps
    assert said.count("has new scales in") >= (steps if preset != "bf16" else 0)
    manifest = json.loads((output / "run.json").read_text())
    assert manifest["engine"]["engine"].startswith("vllm ")
    assert len(lines) == steps
    assert all(0 < line["log_prob_diff/mean"] < NEAR[preset] for line in lines)


@pytest.mark.parametrize("preset", ["bf16", "fp8-rollout"])
def test_each_update_of_a_run_arrives(tmp_path: Path, preset: str) -> None:
    """By vLLM's own tensors, and by log-probabilities near those of the trainer."""
    recipe, output = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    changes = ("--output", output, "--precision.preset", preset)
    said = run("-m", "isobit.cli.main", "train", recipe, *changes)
    check_updates(said, output, 2, preset)


def test_it_sleeps_and_wakes_with_new_weights() -> None:
    """With matrices and cache in E4M3; its cache and weights leave the device meanwhile."""
    figures = json.loads(run("-m", "tests.gpu.test_vllm").splitlines()[-1])
    assert figures["freed_gib"] > 0.9 * CACHE_GIB
    assert figures["updates"] == figures["scales"] == 3  # and all scales are finite
    assert max(figures["apart"]) < 0.1


CACHE_GIB = 4


def main() -> None:
    """Sample, sleep, change the weights, sample twice; print what happened as JSON."""
    import torch

    from isobit.config.precision import PrecisionConfig
    from isobit.config.rollout import RunRolloutConfig
    from isobit.memory.sharing import allocate_in_pages
    from isobit.models.policy import random_policy
    from isobit.models.scorer import Scorer
    from isobit.rollout.engine import generate
    from isobit.rollout.vllm_engine import VllmEngine
    from isobit.training.advantage_estimator import score_sequences
    from tests.gpu.conftest import QWEN3
    from tests.rollout.test_exactness import recorded_log_probs, requests

    allocate_in_pages(torch.device("cuda"))
    policy = random_policy(QWEN3, PrecisionConfig(preset="fp8-rollout"), 1, "cuda")
    page = policy.backend.sizes.page_bytes(policy.config, policy.flow)
    config = RunRolloutConfig(engine="vllm", engine_options={"enforce_eager": True})
    engine = VllmEngine(policy, config, None, 0, pages=(CACHE_GIB << 30) // page)
    figures: dict[str, list[float]] = {"apart": []}
    freed, updates, scales, wanted = 0.0, 0, 0, requests()
    for turn in range(3):
        groups = generate(engine, wanted)
        sequences = [one.sequence for group in groups for one in group]
        scores = score_sequences(Scorer(policy), sequences, 4096)
        ours = torch.cat([score.log_probs for score in scores]).cpu()
        figures["apart"].append(float((ours - recorded_log_probs(groups)).abs().mean()))
        if turn == 0:
            before = torch.cuda.mem_get_info()[0]
            engine.release()
            freed = (torch.cuda.mem_get_info()[0] - before) / (1 << 30)
        with torch.no_grad():
            for name, master in policy.masters.items():
                if name.endswith("proj.weight"):
                    master.mul_(1.1)
        policy.publish()
        notes = engine.notes()
        updates += sum("equal to what is published" in line for line in notes)
        scales += sum("has new scales in" in line for line in notes)
    print(json.dumps({**figures, "freed_gib": freed, "updates": updates, "scales": scales}))


if __name__ == "__main__":
    main()
