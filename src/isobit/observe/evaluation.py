"""Metrics of graded groups: rewards, lengths, and evaluations with 95% intervals.

The mean reward over problems is called an accuracy where every reward is 0 or 1.  Greedy decoding
takes one sample a problem; above temperature 0 a problem's score is the mean of its n samples
(mean@n), and a sample counts as right for pass@k where its reward is at least 1.  A sample whose
reward failed is left out and counted; a problem all of whose samples failed is left out of every
metric.

The problem is the unit of sampling: several samples of one problem are averaged first, so that they
do not count as independent evidence (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640,
section 2.2).

    pass@k      mean over problems of 1 - C(n - c, k) / C(n, k): n samples, c of them right;
                unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1)
    Wilson 1927, one score of 0 or 1 a problem:  (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2))
                                                 / (1 + z^2/n)
    bootstrap, any other scores: 2.5% and 97.5% of the means of n scores that are drawn from the n
                                 at random, with replacement (Efron 1979, Annals of Statistics 7:1)

Wilson keeps its coverage at 0% and 100% and for few problems.  The bootstrap stays within the
scores: the normal interval, m +- z s / sqrt(n), reaches below 0 where most partial credits are 0.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from random import Random
from statistics import fmean, pstdev
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from isobit.data.encoding import special_token_ids
from isobit.records.metrics import Metrics
from isobit.records.rounding import are_level, settled
from isobit.records.text import CUT, Completion, Group

Interval = tuple[float, float]

Z_95 = 1.959963984540054

_RESAMPLES = 1000
"""0.1 s for 1,000 problems."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of ``k`` samples is right, estimated from ``right`` of
    ``samples``; 1 <= k <= samples.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson_interval(right: int, problems: int) -> Interval:
    """The 95% score interval of a proportion; (0, 1) without problems."""
    if problems == 0:
        return 0.0, 1.0
    share, spread = right / problems, Z_95**2 / problems
    middle = share + spread / 2
    half = Z_95 * math.sqrt(share * (1 - share) / problems + spread / (4 * problems))
    low = (middle - half) / (1 + spread) if right else 0.0  # 0 and 1 without rounding
    return low, (middle + half) / (1 + spread) if right < problems else 1.0


def bootstrap_interval(scores: Sequence[float]) -> Interval:
    """The 95% interval of the mean of at least two problems' scores, which may be any finite
    numbers; the same for the same scores in the same order.
    """
    random, count = Random(0), len(scores)  # noqa: S311 - no secret
    means = sorted(fmean(random.choices(scores, k=count)) for _ in range(_RESAMPLES))
    outside = _RESAMPLES // 40
    return means[outside], means[-1 - outside]


def paired_interval(differences: Sequence[float]) -> Interval:
    """The 95% bootstrap interval of the mean of paired differences of at least two problems, no
    nearer to the mean than Wilson's bound of an event that was never seen: few problems, or none
    whose answer changes, prove little.
    """
    mean, least = fmean(differences), wilson_interval(0, len(differences))[1]
    low, high = bootstrap_interval(differences)
    return min(low, mean - least), max(high, mean + least)


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """Wilson's interval where every problem scored 0 or 1, else the bootstrap's, or None for fewer
    than two scores.
    """
    if scores and all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(sum(score == 1.0 for score in scores), len(scores))
    return bootstrap_interval(scores) if len(scores) > 1 else None


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


RIGHT = 1.0
"""The reward from which a sample counts as right; 0.1 * 10 added up counts as 1."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of evaluating one set."""

    accuracy: float
    """Mean over problems of the mean reward of their samples; see ``is_accuracy``."""
    interval: Interval | None
    """95%, over problems; None for a single problem with a fractional score."""
    problems: int
    """Problems with at least one graded sample."""
    samples: int
    """Samples per problem."""
    failed: int
    """Samples whose reward raised or was no finite number."""
    pass_at: Mapping[int, float]
    """pass@k for k = 1, 2, 4, .. up to ``samples``; empty for one sample."""
    response_length: float
    """Mean, in tokens."""
    truncated: float
    """Share of the samples that the length limit ended."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Unusual answers by kind, as the graders counted them, and failed rewards."""
    is_accuracy: bool = True
    """Whether every reward is 0 or 1, so that their mean is the share of right answers."""
    right: float | None = None
    """Mean over problems of the share of their samples that are right (``RIGHT``); None where
    ``is_accuracy``, which it then is.
    """

    def figures(self) -> dict[str, Any]:
        """All fields, for JSON, and ``mean_reward``; ``accuracy`` is null where rewards are not all
        0 or 1.
        """
        accuracy, right = (self.accuracy, self.accuracy) if self.is_accuracy else (None, self.right)
        changed = {"accuracy": accuracy, "right": right}
        return {"mean_reward": self.accuracy, **asdict(self), **changed}

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        low, high = self.interval or (math.nan, math.nan)
        figures = {
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "problems": self.problems,
            "failed": self.failed,
        }
        figures |= {} if self.right is None else {"right": self.right}
        figures |= {"response_length": self.response_length, "truncated": self.truncated}
        figures |= {f"pass@{k}": value for k, value in self.pass_at.items()}
        return {f"eval/{name}/{figure}": value for figure, value in figures.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Undo ``dataclasses.asdict`` and JSON, which turn tuples to lists and keys to text."""
        interval = content["interval"]
        restored = {
            "interval": tuple(interval) if interval is not None else None,
            "pass_at": {int(k): value for k, value in content["pass_at"].items()},
        }
        return cls(**{**content, **restored})


def result_of(
    groups: Sequence[Group], samples: int, counts: Mapping[str, int] | None = None
) -> EvalResult:
    """The figures of graded groups of ``samples`` completions each; at least one of them has a
    reward. ``counts`` are the graders'.
    """
    graded = [
        [settled(reward, 0.0, RIGHT) for reward in group.rewards if reward is not None]
        for group in groups
    ]
    scores = [fmean(rewards) for rewards in graded if rewards]
    lengths = length_metrics(groups)
    is_accuracy = all(reward in (0.0, 1.0) for rewards in graded for reward in rewards)
    shares = [fmean(reward >= RIGHT for reward in rewards) for rewards in graded if rewards]
    return EvalResult(
        accuracy=fmean(scores),
        interval=mean_interval(scores),
        problems=len(scores),
        samples=samples,
        failed=sum(reward is None for group in groups for reward in group.rewards),
        pass_at=_pass_at(graded, samples),
        response_length=lengths["response_length/mean"],
        truncated=lengths["response_length/truncated"],
        counts=counts or {},
        is_accuracy=is_accuracy,
        right=None if is_accuracy else fmean(shares),
    )


def _pass_at(graded: Sequence[Sequence[float]], samples: int) -> dict[int, float]:
    """pass@k for powers of two, each over the problems that have k graded samples."""
    figures: dict[int, float] = {}
    for k in (1 << power for power in range(samples.bit_length())) if samples > 1 else ():
        enough = [rewards for rewards in graded if len(rewards) >= k]
        if enough:
            figures[k] = fmean(
                pass_at_k(len(rewards), sum(reward >= RIGHT for reward in rewards), k)
                for rewards in enough
            )
    return figures


def describe_hidden(
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> str | None:
    """A line if completions hold special tokens, their last stop aside; None if none does."""
    special, found = special_token_ids(tokenizer), list[int]()
    for one in completions:
        ids = one.token_ids
        ids = ids[:-1] if ids and ids[-1] in stop_token_ids else ids
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
