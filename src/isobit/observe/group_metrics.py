"""Metrics of graded groups: rewards, lengths, episodes, special tokens in completions."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean, pstdev

from transformers import PreTrainedTokenizerBase

from isobit.data.encoding import special_token_ids
from isobit.records.metrics import Metrics
from isobit.records.rounding import are_level
from isobit.records.text import CUT, Completion, Group


def group_metrics(groups: Sequence[Group]) -> Metrics:
    """The metrics of the groups of a step."""
    return {**reward_metrics(groups), **length_metrics(groups), **episode_metrics(groups)}


def reward_metrics(groups: Sequence[Group]) -> Metrics:
    """Mean and standard deviation of the rewards that did not fail, and of each part by name, with
    the number of completions that it graded; without a mean where there is none.
    """
    names = groups[0].reward_parts if groups else ()
    columns = {f"reward/{name}": [group.reward_parts[name] for group in groups] for name in names}
    columns["reward"] = [group.rewards for group in groups]
    metrics: Metrics = {}
    for name, column in columns.items():
        rewards = [reward for group in column for reward in group if reward is not None]
        metrics |= {f"{name}/graded": len(rewards)} if name != "reward" else {}
        if rewards:
            std = 0.0 if are_level(rewards) else pstdev(rewards)
            metrics |= {f"{name}/mean": fmean(rewards), f"{name}/std": std}
    return metrics


def length_metrics(groups: Sequence[Group]) -> Metrics:
    """Lengths of the completions in tokens, and the share that the length limit ended."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.length for completion in completions]
    return {
        "response_length/mean": fmean(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated": fmean(
            completion.finish_reason == "length" for completion in completions
        ),
    }


def episode_metrics(groups: Sequence[Group]) -> Metrics:
    """Turns, calls, rewards of turns and ends of the episodes; empty without an environment."""
    completions = [completion for group in groups for completion in group.completions]
    episodes = [one.episode for one in completions if one.episode is not None]
    if not episodes:
        return {}
    told = [[kind for behind in one.results for kind, _ in behind] for one in episodes]
    calls = [[kind for kind in kinds if kind != "user"] for kinds in told]
    kinds = Counter(kind for kinds in calls for kind in kinds)
    ends = Counter(one.finish_reason for one in completions if one.is_cut)
    failures = Counter(one.failure for one in episodes if one.failure)
    return {
        "episode/turns": fmean(len(one.turns) for one in episodes),
        "episode/calls": fmean(map(len, calls)),
        **{f"episode/results/{kind}": kinds[kind] for kind in ("error", "malformed", "cut")},
        **{f"episode/ended/{reason}": ends[reason] for reason in CUT},
        **{f"episode/failed/{kind}": count for kind, count in sorted(failures.items())},
        **_turn_rewards(completions),
    }


_TURNS_SHOWN = 8


def _turn_rewards(completions: Sequence[Completion]) -> Metrics:
    """Rewards of turns that called tools: the mean over episodes of their sum, and over those of
    each of the first turns; empty without any.
    """
    given = [
        one.sequence.rewards_of_turns[: len(one.episode.results)]
        for one in completions
        if one.episode is not None and one.sequence.rewards_of_turns is not None
    ]
    known = [[reward for reward in rewards if reward is not None] for rewards in given]
    if not known:
        return {}
    by_turn = list(zip_longest(*known))[:_TURNS_SHOWN]
    return {
        "episode/turn_rewards": fmean(map(math.fsum, known)),
        **{
            f"episode/turn_reward/{turn}": fmean(one for one in rewards if one is not None)
            for turn, rewards in enumerate(by_turn, 1)
        },
    }


def describe_failed_calls(completions: Sequence[Completion]) -> str | None:
    """A line if tools were called and every one of them raised an error; None otherwise."""
    episodes = [one.episode for one in completions if one.episode is not None]
    results = [one for episode in episodes for behind in episode.results for one in behind]
    told = [(kind, text) for kind, text in results if kind not in ("user", "malformed")]
    if not told or any(kind != "error" for kind, _ in told):
        return None
    return f"all {len(told):,} calls of tools failed; the first was answered {told[0][1]!r:.300}"


def describe_hidden(
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> str | None:
    """A line if completions hold special tokens, the stops at the end of each turn aside; None if
    none does.
    """
    special, found = special_token_ids(tokenizer), list[int]()
    for one in completions:
        ids = list(one.token_ids)
        for end in reversed(one.sequence.turn_ends.tolist()):
            if ids[end] in stop_token_ids:
                del ids[end]
        if not special.isdisjoint(ids):
            found.append(next(token for token in ids if token in special))
    if not found:
        return None
    first = tokenizer.convert_ids_to_tokens(found)[0]
    return (
        f"{len(found):,} of {len(completions):,} completions ({len(found) / len(completions):.0%}) "
        f"hold a special token, such as {first!r}, which rewards do not see: "
        'rollout.special_tokens = "show" shows them'
    )
