"""The FP8 backward of the starter model against the exact backward of the same forward bits, and
against a plain FP32 model.

The exact backward is that of the mathematics: dX = dY Wq and dW = dY^T X, with the quantised
weights that the forward multiplied with and the BF16 activations as they were before quantisation.
A site whose DGrad and WGrad are not E4M3 computes just this.

The cosine depends on the batch too: each term of a WGrad carries its own rounding error of a few
percent, and where terms cancel (like tokens with opposite advantages, or a model at its optimum)
the sum shrinks and the errors do not.  Hence batches of the size that a step has, not a handful of
answers.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from isobit.algorithms.advantages import group_advantages
from isobit.algorithms.objective import Objective
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.data.tokenizer import load_tokenizer
from isobit.models.folder import load_policy
from isobit.models.policy import Policy
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack, sequences_of
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.starter import starter_folder
from isobit.starter.tasks import correct_answer, pretraining_answer, problems, question
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer
from tools.starter.tokenizer import EOS_ID

GradientsOf = Callable[..., dict[str, torch.Tensor]]
SMALLEST_COSINE = 0.998
GRPO = build_algorithm(GrpoConfig())


def pretraining_batches() -> list[PackedBatch]:
    """Problems with answers in the two styles of the pretraining text."""
    tokenizer, random = load_tokenizer(starter_folder()), Random(0)
    pairs = []
    for problem in problems(held_out=False)[:192]:
        answer = tokenizer(pretraining_answer(problem, random), add_special_tokens=False)[
            "input_ids"
        ]
        pairs.append((tokenizer(question(problem))["input_ids"], [*answer, EOS_ID]))
    return pack_pairs(pairs, 4096)


def sampled_batches() -> list[PackedBatch]:
    """What the model itself answers, with GRPO's advantages."""
    tokenizer = load_tokenizer(starter_folder())
    prompts = [
        Prompt(
            question(problem),
            question(problem),
            tuple(tokenizer(question(problem))["input_ids"]),
            {"answer": str(sum(problem))},
        )
        for problem in problems(held_out=False)[:8]
    ]
    sampling = SamplingParams(max_new_tokens=16, stop_token_ids=(EOS_ID,))
    engine = NativeEngine(starter("fp8"), RolloutConfig(), tokenizer, seed=0)
    completions = generate(engine, [Request(prompt, 0, 16, sampling) for prompt in prompts])
    groups = [
        Group(prompt, 0, answers) for prompt, answers in zip(prompts, completions, strict=True)
    ]
    rewards = [
        [correct_answer(group.prompt, completion) for completion in group.completions]
        for group in groups
    ]
    return pack(sequences_of(groups, [group_advantages(group, True) for group in rewards]), 4096)


def starter(preset: Preset) -> Policy:
    return load_policy(starter_folder(), PrecisionConfig(preset=preset))


def with_exact_backward(policy: Policy) -> Policy:
    """The same forward, bit for bit, with DGrad and WGrad that quantise nothing."""
    linears = policy.weights("training").linears
    for name, weight in linears.items():
        linears[name] = replace(weight, site=replace(weight.site, dgrad="bf16", wgrad="bf16"))
    return policy


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("objective", "make_batches"),
    [(SupervisedObjective(), pretraining_batches), (GRPO, sampled_batches)],
    ids=["supervised", "grpo"],
)
def test_fp8_backward_against_the_exact_one(
    objective: Objective,
    make_batches: Callable[[], list[PackedBatch]],
    gradients_of: GradientsOf,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = make_batches()
    policies = {
        "fp8": starter("fp8"),
        "exact": with_exact_backward(starter("fp8")),
        "fp32": starter("fp32"),
    }
    trainers = {name: Trainer(policy, TrainingConfig(), 1) for name, policy in policies.items()}
    assert all(
        torch.equal(
            trainers["fp8"].scorer.score(batch).log_probs,
            trainers["exact"].scorer.score(batch).log_probs,
        )
        for batch in batches
    )
    gradients = {
        name: gradients_of(trainer, batches, objective) for name, trainer in trainers.items()
    }
    matrices = [name for name, master in policies["fp8"].masters.items() if master.dim() == 2]
    exact = {name: cosine(gradients["fp8"][name], gradients["exact"][name]) for name in matrices}
    fp32 = {name: cosine(gradients["fp8"][name], gradients["fp32"][name]) for name in matrices}
    worst, furthest = (
        min(exact, key=lambda name: exact[name]),
        min(fp32, key=lambda name: fp32[name]),
    )
    with capsys.disabled():
        print(
            f"\n{type(objective).__name__}: smallest cosine of the fp8 gradients "
            f"{exact[worst]:.5f} ({worst}) against the exact backward, "
            f"{fp32[furthest]:.3f} ({furthest}) against an FP32 model"
        )
    assert exact[worst] >= SMALLEST_COSINE
    assert all(exact[name] < 1.0 - 1e-6 for name in matrices), "the exact backward was not in use"
