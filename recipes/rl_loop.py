"""GRPO in one file, on isobit's public API: the loop of ``isobit train`` without its run directory,
checkpoints, several GPUs and everything else that a long run needs.

    python recipes/rl_loop.py                              # on a CPU, in less than a minute
    python recipes/rl_loop.py --precision fp8-rollout      # sample in FP8, train in BF16

The shipped starter model is asked for sums of four digits.  It answers ``3+8+2+9=`` either at once
(``22``: a guess, mostly wrong) or step by step (``11,13,22``: mostly right).  The reward looks at
the last number alone, and the model finds out that writing the steps pays.

Each step of the loop has six stages:

    rollout      the engine draws G completions of each of P prompts and records the
                 log-probability of every token that it draws
    grade        the reward function gives each completion a number
    advantages   how much better a completion did than the others of its group
    pack         sequences of all lengths, end to end and without padding, in micro-batches
    update       forward, clipped policy gradient, backward, AdamW; then the new weights are
                 quantised once and published: engine and trainer read the same bytes
    compare      the log-probabilities of that forward beside the recorded ones, bit for bit

With the precisions ``int8``, ``fp8``, ``bf16`` and ``fp32``, engine and trainer are one function of
the weights: not one bit differs, and the importance ratio is exactly 1 at the first update.  With
``fp8-rollout`` they are two functions, and most log-probabilities differ.

Names end in the axes of what they hold, outermost first:

    _P   the prompts of a step
    _G   the completions of one prompt, which are its group
    _M   the micro-batches of an update
"""

import argparse
from itertools import product
from random import Random
from statistics import fmean, stdev
from time import perf_counter

import isobit

NEW_TOKENS = 32
TOKENS_PER_MICROBATCH = 3072
HELD_OUT = 100


def make_prompts(model: isobit.LoadedModel) -> list[isobit.Prompt]:
    """All 10,000 sums of four digits in a random order.  ``row`` holds what a reward may read."""
    sums = list(product(range(10), repeat=4))
    Random(0).shuffle(sums)
    prompts = []
    for digits in sums:
        text = "+".join(map(str, digits)) + "="
        token_ids = tuple(model.tokenizer(text)["input_ids"])
        prompts.append(isobit.Prompt(text, text, token_ids, {"answer": str(sum(digits))}))
    return prompts


def reward(prompt: isobit.Prompt, completion: isobit.Completion) -> float:
    """1 for the right number behind the last comma; the steps before it are not graded."""
    return float(completion.text.rpartition(",")[2] == prompt.row["answer"])


def rollout(
    engine: isobit.NativeEngine,
    prompts_P: list[isobit.Prompt],
    samples: int,
    sampling: isobit.SamplingParams,
    visit: int = 0,
) -> list[isobit.Group]:
    """Draw ``samples`` completions of each prompt.  Sequences join and leave the running batch as
    pages of the KV cache come free; what is drawn does not depend on it (batch invariance), since
    the noise is keyed by prompt, visit, sample and position.
    """
    requests_P = [isobit.Request(prompt, visit, samples, sampling) for prompt in prompts_P]
    handles_P_G = engine.submit(requests_P)
    completions = {}
    while engine.num_live:
        for event in engine.step():
            if event.completion is not None:
                completions[event.handle] = event.completion
    return [
        isobit.Group(prompt, visit, [completions[handle] for handle in handles_G])
        for prompt, handles_G in zip(prompts_P, handles_P_G, strict=True)
    ]


def advantages(group: isobit.Group) -> list[float | None]:
    """GRPO: (reward - mean) / standard deviation, over the group.  A zero-variance group, all right
    or all wrong, teaches nothing: None leaves its completions out.
    """
    rewards_G = [0.0 if one is None else one for one in group.rewards]
    if min(rewards_G) == max(rewards_G):
        return [None for _ in rewards_G]
    mean, std = fmean(rewards_G), stdev(rewards_G)
    return [(one - mean) / std for one in rewards_G]


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on the starter model, in one file.")
    parser.add_argument("--precision", default="int8", help="int8, fp8, bf16, fp32 or fp8-rollout")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=16, help="completions of each prompt")
    args = parser.parse_args()

    model = isobit.load_model("starter", args.precision)
    drawn = isobit.RolloutConfig(max_new_tokens=NEW_TOKENS, temperature=1.0)
    greedy = isobit.RolloutConfig(max_new_tokens=NEW_TOKENS, temperature=0.0)
    engine = isobit.NativeEngine(model.policy, drawn, model.tokenizer, seed=0)
    training = isobit.TrainingConfig(learning_rate=1e-4)
    trainer = isobit.Trainer(model.policy, training, total_updates=args.steps)
    grpo = isobit.Grpo(isobit.GrpoConfig())
    prompts = make_prompts(model)
    held_out, prompts = prompts[:HELD_OUT], prompts[HELD_OUT:]

    def accuracy(visit: int) -> float:
        groups_P = rollout(engine, held_out, 1, model.sampling(greedy), visit)
        return fmean(reward(group.prompt, group.completions[0]) for group in groups_P)

    print(f"before: {accuracy(visit=0):.0%} of {HELD_OUT} held-out sums are right")
    for step in range(1, args.steps + 1):
        started_at = perf_counter()
        prompts_P = [prompts.pop() for _ in range(args.prompts)]

        groups_P = rollout(engine, prompts_P, args.samples, model.sampling(drawn))
        isobit.grade(groups_P, reward)
        advantages_P_G = [advantages(group) for group in groups_P]
        sequences = isobit.sequences_of(groups_P, advantages_P_G)
        if not sequences:
            raise SystemExit("every group has zero variance: ask for more prompts or samples")
        batches_M = isobit.pack(sequences, TOKENS_PER_MICROBATCH)
        update = trainer.update(batches_M, grpo, compare=True)

        mean_reward = fmean(one or 0.0 for group in groups_P for one in group.rewards)
        differing, compared = update.comparison.tokens_differing, update.comparison.tokens_compared
        print(
            f"step {step:2d}: reward {mean_reward:.2f}, entropy {update.metrics['entropy']:.2f}, "
            f"{differing} of {compared} log-probabilities differ, "
            f"{perf_counter() - started_at:.1f} s"
        )
    print(f"after: {accuracy(visit=1):.0%} of {HELD_OUT} held-out sums are right")


if __name__ == "__main__":
    main()
