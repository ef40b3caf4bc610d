"""The reasons for which a completion gives no signal to learn from, and what to do about each."""

from collections.abc import Mapping

from isobit.util.terminal import counted

REASONS_WITHOUT_SIGNAL: Mapping[str, tuple[str, str]] = {
    "failed": ("without a valid reward", "the first error of the reward is noted above"),
    "excluded": (
        'cut off by the length limit (algorithm.truncated = "exclude")',
        "raise rollout.max_new_tokens",
    ),
    "masked": (
        'cut off by the length limit (algorithm.truncated = "mask")',
        "raise rollout.max_new_tokens",
    ),
    "empty": ("empty", "see completions.jsonl, and which tokens end a completion"),
    "alone": (
        "with the only valid reward of their prompt, where it takes two",
        "see why the other rewards are missing",
    ),
    "no_baseline": (
        "of prompts whose greedy completion has no valid reward",
        "see why that reward is missing",
    ),
    "left_out": ("left out by the algorithm", "see its method credit"),
    "rejected": ("given the weight 0 by corrections", "widen their bounds"),
    "zero": (
        "with reward 0, as all others of their prompt",
        "see whether the reward reads the answers (completions.jsonl); if it does, the model never "
        "gets one right: fine-tune it first (docs/tutorial.md)",
    ),
    "cancelled": (
        "with the same total reward as all others of their prompt, though its parts differ",
        "see reward.parts.NAME.weight",
    ),
    "level": (
        "with the same reward as all others of their prompt: rewards are equal",
        "see whether the reward tells right answers from wrong ones (completions.jsonl)",
    ),
    "as_greedy": (
        "with the reward of their prompt's greedy completion",
        "see whether the reward tells right answers from wrong ones (completions.jsonl)",
    ),
    "no_advantage": ("with an advantage of 0", "see their rewards in completions.jsonl"),
}
"""Why a completion gave no signal, by name: the rest of a sentence, and what to do."""


def describe_reasons(counts: Mapping[str, float], advise: bool = False) -> str:
    """Why completions, counted by the names of ``REASONS_WITHOUT_SIGNAL``, gave no signal; with
    ``advise`` also what to do about most of them.
    """
    reasons = [(name, counts[name]) for name in REASONS_WITHOUT_SIGNAL if counts.get(name)]
    total = sum(count for _, count in reasons)
    if not reasons:
        return "no completions"
    parts = [f"{count:,.0f} {REASONS_WITHOUT_SIGNAL[name][0]}" for name, count in reasons]
    completions = counted(round(total), "completions")
    if len(reasons) == 1:
        every = "" if total == 1 else "all "
        text = f"{completions}, {every}{REASONS_WITHOUT_SIGNAL[reasons[0][0]][0]}"
    else:
        text = f"{completions}, {', '.join(parts[:-1])} and {parts[-1]}"
    most = max(reasons, key=lambda pair: pair[1])[0]
    return f"{text}; {REASONS_WITHOUT_SIGNAL[most][1]}" if advise else text
