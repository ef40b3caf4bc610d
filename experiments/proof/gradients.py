"""What E4M3 does to the gradient of a real update: the answers of one step are sampled, and their
policy gradient is computed several times over the same forward bits.

The terms of such an update nearly cancel: answers to one prompt are much alike, and their
advantages add up to zero.  Each term of a WGrad keeps its own rounding error, which does not.

    python -m experiments.proof.gradients MODEL RECIPE [--KEY VALUE ...]

For each of FLOWS one JSON object on standard output:

    own         the flow's gradient against the exact one: DGrad and WGrad of BF16 operands, in FP32
    wgrad_bf16  the same with WGrad in BF16, DGrad as in the flow
    norm        of the exact gradient

Of both ``cosine`` (all matrices as one vector), ``norm`` (a multiple of the exact one) and the
cosines of the matrices: the smallest, the mean, the worst ten.  The gradient is that of a first
update, -A log pi over the step's tokens, before clipping.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from experiments.exact_backward import cosine, exact_backward
from experiments.gradients import Gradients, summary, take_gradients
from experiments.proof.reward import correct
from experiments.proof.runs import words_of
from experiments.proof.suite import ARMS
from isobit import load_config
from isobit.algorithms.advantages import group_advantages
from isobit.config.recipes import RunConfig
from isobit.data.prompts import build_prompts
from isobit.models.folder import load_policy, load_sampling_model
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack, sequences_of
from isobit.records.text import Completion, Group, Prompt
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request

FLOWS = ("fp8", "fp8-fp32-scales", "fp8-linear")
"""Arms that train in FP8."""
Reward = Callable[[Prompt, Completion], float]


def sample(
    folder: Path, config: RunConfig, reward: Reward
) -> tuple[list[PackedBatch], torch.device]:
    """The micro-batches of a step, in the flow of the configuration, and where they were drawn."""
    model = load_sampling_model(folder, config.precision, config.device)
    engine = NativeEngine(model.policy, config.rollout, model.tokenizer, config.seed)
    prompts = build_prompts("train", config.data.train, model.tokenizer, config.data, model.context)
    sampling, training = model.sampling(config.rollout), config.training
    asked = [
        Request(prompt, 0, training.samples_per_prompt, sampling)
        for prompt in prompts[: training.prompts_per_step]
    ]
    made = generate(engine, asked)
    groups = [Group(one.prompt, 0, answers) for one, answers in zip(asked, made, strict=True)]
    advantages = [
        group_advantages([reward(group.prompt, one) for one in group.completions], True)
        for group in groups
    ]
    batches = pack(sequences_of(groups, advantages), training.tokens_per_microbatch)
    return batches, model.policy.device


def policy_gradient(policy: Policy, batches: Sequence[PackedBatch], exact: bool) -> Gradients:
    """The FP32 gradients by master, on the host."""
    tokens = sum(len(batch.rows) for batch in batches)
    with exact_backward(policy, compares=False) if exact else nullcontext():
        for batch in batches:
            scored = ScoredPass(policy, batch, "none")
            scored.forward()
            scored.backward(-batch.advantages / tokens)
    return {name: one.cpu() for name, one in take_gradients(policy).items()}


def of_matrices(gradients: Gradients) -> Gradients:
    return {name: one for name, one in gradients.items() if one.ndim == 2}


def compare(ours: Gradients, exact: Gradients) -> dict[str, Any]:
    ours, exact = of_matrices(ours), of_matrices(exact)
    together = joined(ours), joined(exact)
    norm = float(together[0].norm() / together[1].norm())
    return {"cosine": cosine(*together), "norm": norm, **summary(ours, exact)}


def joined(gradients: Gradients) -> torch.Tensor:
    """One vector, FP64."""
    return torch.cat([one.double().flatten() for one in gradients.values()])


def measure(folder: Path, config: RunConfig, reward: Reward = correct) -> dict[str, Any]:
    batches, device = sample(folder, config, reward)
    with_wgrad = config.precision.model_copy(update={"wgrad": "bf16"})
    policy = load_policy(folder, config.precision, device)
    exact = policy_gradient(policy, batches, exact=True)
    own = policy_gradient(policy, batches, exact=False)
    del policy
    other = policy_gradient(load_policy(folder, with_wgrad, device), batches, exact=False)
    return {
        "tokens": sum(len(batch.rows) for batch in batches),
        "norm": float(joined(of_matrices(exact)).norm()),
        "own": compare(own, exact),
        "wgrad_bf16": compare(other, exact),
    }


def main() -> None:
    folder, recipe, words = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    for name in FLOWS:
        flow = words_of(ARMS[name])
        given = ["--model", str(folder), "--output", "nowhere", *words, *flow]
        print(json.dumps({"flow": name, **measure(folder, load_config(recipe, given))}), flush=True)


if __name__ == "__main__":
    main()
