"""A real pretrained checkpoint through everything that a user does with one: SmolLM2-135M-Instruct,
whose hidden size of 576 and heads (9 and 3 of 64) are no multiples of 128.

    tools/smollm2.sh ~/smollm2; ISOBIT_SMOLLM2=~/smollm2 pytest tests/pretrained

On a machine with a GPU that can be used, everything but ``fp32`` runs there; minutes on a CPU.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import isobit
from benchmarks.real_checkpoint import (
    QUESTIONS,
    compare_answers,
    linear_formats,
    of_transformers,
    ours,
    windows_of_docs,
)
from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import ModelNeeds, choose_device
from isobit.models.folder import load_policy

pytestmark = pytest.mark.pretrained
NEEDS = ModelNeeds(num_heads=9, num_kv_heads=3, head_dim=64, preset="fp8")
TRAINING = {"steps": 1, "tokens_per_microbatch": 1024, "learning_rate": 1e-6}


@pytest.fixture(scope="module")
def folder() -> Path:
    """Made by ``tools/smollm2.sh``."""
    given = os.environ.get("ISOBIT_SMOLLM2")
    if given is None:
        pytest.skip("ISOBIT_SMOLLM2 names no folder; tools/smollm2.sh makes one")
    return Path(given)


def device() -> torch.device:
    return choose_device("auto", NEEDS).device


def test_greedy_answers_are_those_of_transformers(folder: Path) -> None:
    compared = compare_answers(folder, QUESTIONS[:4], 8)
    assert all(one.equal for one in compared), compared


def test_perplexity_and_no_linear_in_another_format(folder: Path) -> None:
    windows = windows_of_docs(folder, 2, 256)
    policy = load_policy(folder, PrecisionConfig(preset="fp8"), device(), trainable=False)
    assert linear_formats(policy) == {"e4m3": 4 * 30}
    theirs = of_transformers(folder, windows, torch.bfloat16, device().type)
    # over 51,100 tokens it is 3.6% above (docs/models.md); BF16 shows that nothing else is wrong
    assert ours(policy, windows) == pytest.approx(theirs, rel=0.05)
    policy = load_policy(folder, PrecisionConfig(preset="bf16"), device(), trainable=False)
    assert ours(policy, windows) == pytest.approx(theirs, rel=0.005)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_nothing_differs(folder: Path, precision: str) -> None:
    result = isobit.verify(folder, precision=precision)
    assert result.comparison.tokens_compared > 1000 and result.exit_code == 0, result


def test_fine_tuned_trained_exported_and_loaded_elsewhere(folder: Path, tmp_path: Path) -> None:
    examples = {"type": "jsonl", "path": "recipes/fine_tune.jsonl"}
    tuned = isobit.sft(
        {
            "model": str(folder),
            "output": str(tmp_path / "sft"),
            "precision": "fp8",
            "data": {"train": examples, "chat": True},
            "training": TRAINING | {"prompts_per_step": 4},
        }
    )
    assert tuned.tokens_trained > 0 and tuned.skipped_updates == 0
    task = {"type": "reasoning_gym", "task": "chain_sum", "size": 8, "seed": 1}
    trained = isobit.train(
        {
            "model": str(tmp_path / "sft" / "model"),
            "output": str(tmp_path / "rl"),
            "precision": "fp8",
            "data": {"train": task, "chat": True},
            "rollout": {"max_new_tokens": 12, "kv_memory_gib": 1.0},
            "training": TRAINING | {"prompts_per_step": 2, "samples_per_prompt": 2},
        }
    )
    assert trained.tokens_compared > 20 and trained.tokens_differing == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rl" / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([windows_of_docs(folder, 1, 64)[0]])
    with torch.no_grad():
        moved = (model(ids).logits - before(ids).logits).abs().max()
    assert 0 < moved < 1
