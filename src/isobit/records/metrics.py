"""Every metric that a run writes, as one table.

A row says what a metric is called, in which unit it is, how values of it are reduced, what it
means, what is healthy, and where a reader meets it.  Everything else reads the table: the trainer
reduces what losses report by it, the log writes only what it lists, the console line, the charts of
``isobit report`` and the tables of ``docs/metrics.md`` are made from it.

    reduce   the micro-batches of an update     the updates of a step   the steps of a chart's point
    mean     sum over tokens / number of tokens  mean                    mean
    sum      sum                                 mean                    highest
    max      highest                             highest                 highest
    min      lowest                              lowest                  lowest
    last     (not reported by a loss)            mean                    last

To report a new metric, add a row here and put a value under its name into the dictionary that a
loss, the trainer's step or the log returns.  A loss gives ``mean`` metrics as sums over its
response tokens, so that they do not depend on how an update is cut into micro-batches.

A name that the table lacks is reduced as a mean and not written: an intermediate value, such as the
moments that the explained variance is computed from.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Metrics = dict[str, float]
Reduction = Literal["mean", "sum", "max", "min", "last"]
Kind = Literal["train", "sft", "preference"]
"""The command that writes a metric: ``isobit train``, or ``isobit sft`` with either objective."""

_TRAIN: tuple[Kind, ...] = ("train",)
_SFT: tuple[Kind, ...] = ("sft",)
_PAIRS: tuple[Kind, ...] = ("preference",)
_BOTH_SFT: tuple[Kind, ...] = ("sft", "preference")
_TEXT: tuple[Kind, ...] = ("train", "sft")
_ALL: tuple[Kind, ...] = ("train", "sft", "preference")


@dataclass(frozen=True, slots=True)
class Line:
    """A metric's part of the console line of a step."""

    text: str
    """A format string whose fields are names of metrics."""
    shorter: tuple[tuple[int, str], ...] = ()
    """Replacements of the text on a narrow terminal, in this order over all parts."""
    runs: tuple[Kind, ...] = _TRAIN


@dataclass(frozen=True, slots=True)
class Metric:
    """One row.  Capitals in a name stand for a name or number that the run chooses."""

    name: str
    unit: str
    help: str
    healthy: str = ""
    reduce: Reduction = "mean"
    runs: tuple[Kind, ...] = _TRAIN
    chart: str = ""
    """The title of its chart in the report, which it shares with others of that title."""
    label: str = ""
    """The name of its curve there; the last part of the metric's name by default."""
    line: Line | None = None
    exact: float | None = None
    """Its value in every step of an exact flow."""


# fmt: off
TABLE: Mapping[str, tuple[Metric, ...]] = {
    "Evaluation": (
        Metric("eval/SET/accuracy", "reward",
               "mean of the problems' scores, an accuracy where every reward is 0 or 1; of pairs, "
               "the share that is ranked right", "rises", runs=_ALL, chart="SET"),
        Metric("eval/SET/right", "share",
               "mean share of right samples (reward at least 1), where rewards are not all 0 or 1",
               "rises with `accuracy`; else partial credit is exploited", runs=_TEXT,
               chart="SET exactly right"),
        Metric("eval/SET/low", "reward",
               "lower end of the 95% interval over problems: Wilson's where every score is 0 or "
               "1, else the bootstrap's", "overlapping intervals do not tell two runs apart",
               runs=_TEXT),
        Metric("eval/SET/high", "reward", "its upper end", runs=_TEXT),
        Metric("eval/SET/pass@K", "share",
               "mean over problems of 1 - C(n - c, K) / C(n, K), with c of n samples right "
               "(reward at least 1); K = 1, 2, 4, ... up to `evaluation.samples`",
               "at least `accuracy`; falling while `accuracy` rises is lost diversity", runs=_TEXT,
               chart="SET"),
        Metric("eval/SET/loss", "nats",
               "mean of -log p over completion tokens; of pairs, of -log sigmoid(margin); in "
               "distillation, of KL",
               "falls; a rise while `loss` falls is overfitting", runs=_BOTH_SFT, chart="SET loss"),
        Metric("eval/SET/margin", "score", "mean margin of pairs", "rises", runs=_PAIRS),
        Metric("eval/SET/nll", "nats", "mean of -log p in distillation",
               runs=_SFT, chart="SET -log p"),
        Metric("eval/SET/teacher_nll", "nats", "by the teacher", runs=_SFT, chart="SET -log p",
               label="teacher"),
        Metric("eval/SET/problems", "problems", "those with a graded sample", "all", runs=_TEXT),
        Metric("eval/SET/failed", "completions", "those whose reward failed", "0", "sum",
               runs=_TEXT),
        Metric("eval/SET/response_length", "tokens", "mean length of completions", runs=_TEXT),
        Metric("eval/SET/truncated", "share", "completions that the length limit ended", "near 0",
               runs=_TEXT),
    ),
    "Rewards and responses": (
        Metric("reward/mean", "reward",
               "mean over graded completions, before penalties for length or KL; missing if all "
               "rewards failed", "rises, with noise of about `reward/std` / sqrt(completions)",
               chart="Reward", line=Line("reward {reward/mean:.3f}")),
        Metric("reward/std", "reward", "population standard deviation", "above 0"),
        Metric("reward/NAME/mean", "reward",
               "mean of the part NAME of `reward.parts`, before its weight",
               "one that rises alone is being exploited", chart="Reward NAME"),
        Metric("reward/NAME/std", "reward", "its standard deviation",
               "times its weight, none dwarfs the others"),
        Metric("reward/NAME/graded", "completions",
               "those that the part gave a number", "not 0", "sum"),
        Metric("reward/failed", "completions",
               "those whose reward raised, timed out, ended its process or was not finite",
               "0; above `reward.max_failed_fraction` the run stops", "sum"),
        Metric("reward/counted", "completions",
               "those in which a [grader](graders.md) met something unusual (out of time, "
               "no code), once for each reward",
               "near 0; a rise: the policy looks for gaps in the grader", "sum"),
        Metric("reward/level_groups", "groups",
               "zero-variance groups: no two valid rewards, with those of turns, differ",
               "well below `prompts_per_step`", "sum"),
        Metric("reward/level_share", "share", "their share of the step's groups",
               "below 0.5; else the data is too easy or too hard", chart="Zero-variance groups"),
        Metric("response_length/mean", "tokens", "mean length of a response", "changes slowly",
               chart="Response length", line=Line("length {response_length/mean:.1f}",
               ((4, "length {response_length/mean:.0f}"), (6, "")))),
        Metric("response_length/max", "tokens", "the longest", "below `rollout.max_new_tokens`",
               "max", chart="Response length", label="longest"),
        Metric("response_length/truncated", "share", "responses that the length limit ended",
               "near 0; else raise `rollout.max_new_tokens`", chart="Truncated"),
        Metric("episode/turns", "turns",
               "mean of an episode's turns ([environments](environments.md))",
               "below `environment.max_turns`", chart="Turns and calls"),
        Metric("episode/calls", "calls", "mean of its answered calls of tools", "",
               chart="Turns and calls", label="calls"),
        Metric("episode/turn_rewards", "reward",
               "mean sum of an episode's turn rewards, beside `reward/mean`",
               "does not rise alone", chart="Reward", label="of turns"),
        Metric("episode/turn_reward/NAME", "reward",
               "mean reward of turn NAME, up to 8", "", chart="Reward by turn"),
        Metric("episode/results/NAME", "calls",
               "calls whose result was an error, `malformed` or cut", "near 0", "sum"),
        Metric("episode/ended/NAME", "episodes",
               "those ended by length, turns, time or failure", "near 0", "sum"),
        Metric("episode/failed/NAME", "episodes",
               "those whose environment failed, by kind", "0", "sum"),
        Metric("rollout/refills", "times",
               "further prompts for zero-variance groups (`algorithm.dynamic_sampling`)",
               "below `algorithm.max_refills`", "sum", chart="Refills"),
        Metric("rollout/dropped_groups", "groups", "zero-variance groups that were replaced", "few",
               "sum", chart="Refills", label="groups replaced"),
    ),
    "Learning": (
        Metric("loss", "- or nats",
               "`train`: the [algorithm's](algorithms.md), with KL, entropy and value terms where "
               "they have a coefficient; `sft`: -log p a token, or -log sigmoid(margin) a pair",
               "`sft`: falls; `train`: says little", runs=_ALL, chart="Loss",
               line=Line("loss {loss:.4f}", runs=_BOTH_SFT)),
        Metric("accuracy", "share", "pairs with a margin, score(chosen) - score(rejected), above 0",
               "rises from 0.5", runs=_PAIRS, chart="Pairs ranked right",
               line=Line("accuracy {accuracy:.3f}", runs=_PAIRS)),
        Metric("margin", "score", "mean margin", "rises from 0", runs=_PAIRS, chart="Margin",
               line=Line("margin {margin:.3f}", runs=_PAIRS)),
        Metric("score_mean", "score", "mean score of both answers of a pair", "anywhere",
               runs=_PAIRS, chart="Scores"),
        Metric("score_max", "score", "the largest score of both answers of a pair",
               "near the mean", "max", runs=_PAIRS,
               chart="Scores"),
        Metric("score_min", "score", "the smallest score of both answers of a pair", "likewise",
               "min", runs=_PAIRS, chart="Scores"),
        Metric("entropy", "nats", "entropy of the sampling distribution",
               "falls slowly; near 0 early ends exploration (raise `algorithm.clip_high`); rising "
               "with falling reward is divergence", runs=_TEXT, chart="Entropy",
               line=Line("entropy {entropy:.3f}", ((5, ""),), _TEXT)),
        Metric("learning_rate", "-",
               "the schedule's value, with `training.rate_by_ess` times "
               "sqrt(`ratio/effective_sequences`)", "as configured", runs=_ALL,
               chart="Learning rate"),
        Metric("grad_norm", "-",
               "L2 norm over all FP32 masters, before clipping to `training.max_grad_norm`",
               "steady; spikes of ten times call for a lower learning rate", runs=_ALL,
               chart="Gradient norm", line=Line("grad_norm {grad_norm:.3f}", runs=_BOTH_SFT)),
        Metric("weight_bytes_changed", "share",
               "bytes of the linears' published weights that an update changed",
               "above 0.01; else hardly anything is learnt (raise `training.learning_rate`)",
               runs=_ALL, chart="Weight bytes changed"),
        Metric("updates/taken", "updates", "those that changed the weights",
               "`updates_per_batch` x `epochs`", "sum"),
        Metric("updates/without_signal", "updates",
               "those with nothing to learn from: every advantage is 0, and no KL, entropy or "
               'value term; left out unless `training.without_signal = "take"`',
               "0; see `check.on_no_signal`", "sum"),
        Metric("no_signal/NAME", "completions",
               "completions that teach nothing in a step without signal, by reason", "none", "sum"),
        Metric("updates/skipped", "updates",
               "those whose loss or gradient norm was not finite",
               "0; `training.max_skipped_updates` in a row stop the run", "sum", runs=_ALL),
        Metric("response_tokens", "tokens", "completion tokens learnt from", "steady", "sum",
               runs=_SFT),
    ),
    "Policy ratio": (
        Metric("ratio/mean", "-", "mean of r",
               "1; exactly 1 in the first update of an exact flow without replay", chart="Ratio"),
        Metric("ratio/max", "-", "the largest r", "below 2", "max", chart="Ratio", label="largest"),
        Metric("ratio/min", "-", "the smallest r",
               "above 0.5; with replay near 0 for unlearnt tokens", "min", chart="Ratio",
               label="smallest"),
        Metric("ratio/effective_sample_size", "share",
               "(sum w)^2 / (n sum w^2) over n response tokens, w = r of the token, with "
               "[corrections](algorithms.md#corrections) times rho",
               "exactly 1 where every r is 1, else near it", chart="Effective sample size",
               label="of the policy ratios"),
        Metric("ratio/effective_sequences", "share",
               "the same over sequences, w the product of their tokens' r",
               "likewise; a sharp fall warns of a collapse", chart="Effective sample size",
               label="of whole sequences"),
        Metric("clip_fraction/low", "share",
               "tokens with r < 1 - clip_low and A < 0, whose gradient the clip removed (`cispo`: "
               "whose weight it bounded, whatever A)",
               "0 with one update a step, else a few percent (`gspo`: more)",
               chart="Clip fraction"),
        Metric("clip_fraction/high", "share", "the same for r > 1 + clip_high and A > 0",
               "likewise", chart="Clip fraction"),
        Metric("clip_fraction/dual", "share",
               "tokens with A < 0 whose loss `dual_clip` x abs(A) bounds", "near 0",
               chart="Clip fraction"),
        Metric("clip/low", "-", "clip_low as it was [calibrated](algorithms.md)", "steady"),
        Metric("clip/high", "-", "clip_high, likewise", "steady"),
    ),
    "KL to the reference": (
        Metric("kl/k1", "nats", "mean of x: unbiased, noisy, of either sign",
               "0 at the first update and after a refresh, then near `kl/k3`",
               chart="KL to the reference"),
        Metric("kl/k3", "nats", "mean of exp(-x) - 1 + x: never negative",
               "0 at first, then below 0.1; a steep rise is drift (raise "
               "`algorithm.kl_coefficient`)", chart="KL to the reference"),
        Metric("teacher/kl", "nats", "mean divergence from the [teacher](distillation.md)", "falls",
               chart="KL to the teacher", line=Line("teacher KL {teacher/kl:.4f}", ((1, ""),))),
    ),
    "Value head": (
        Metric("value/loss", "reward squared",
               "max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2",
               "falls", chart="Value loss"),
        Metric("value/clip_fraction", "share", "tokens whose V moved further than `value_clip`",
               "0 with one update a step, else a few percent", chart="Value clip fraction"),
        Metric("value/explained_variance", "-",
               "1 - variance of (R - V) / variance of R; missing where all returns are equal",
               "rises towards 1; below 0 for long, the head harms", chart="Explained variance"),
    ),
    "Rollout against training": (
        Metric("log_prob_diff/mean", "nats", "mean of abs(d)",
               "`fp8-rollout`: 0.02 to 0.08 for the starter model; a rise is drift",
               chart="Log-probability difference", exact=0),
        Metric("log_prob_diff/p99", "nats", "its 99th percentile",
               chart="Log-probability difference", label="99th percentile", exact=0),
        Metric("log_prob_diff/max", "nats", "the largest abs(d)", "", "max",
               chart="Largest difference", label="largest", exact=0),
        Metric("log_prob_diff/tokens_compared", "tokens", "tokens compared, bit for bit",
               "all response tokens of the first update; 16 completions with a lag", "sum"),
        Metric("log_prob_diff/tokens_differing", "tokens",
               "those whose 32 bits differ; 0.0 and -0.0 do, equal NaNs do not",
               "`isobit verify --bisect` names the place", "sum", chart="Differing tokens",
               label="log-probabilities", exact=0,
               line=Line("differing {log_prob_diff/tokens_differing:.0f} of "
                         "{log_prob_diff/tokens_compared:.0f}",
                         ((3, "{log_prob_diff/tokens_differing:.0f} differ"),))),
        Metric("log_prob_diff/share", "share",
               "of a step's response tokens, those compared; only where below 1",
               "1 / `training.updates_per_batch`",
               line=Line("compared {log_prob_diff/share:.0%}", ((3, ""),))),
        Metric("routing_diff/tokens_compared", "tokens",
               "those whose digests of all chosen experts were compared",
               "as above", "sum"),
        Metric("routing_diff/tokens_differing", "tokens",
               "those that went to other experts, or in another order",
               "`isobit verify --bisect` names the router", "sum", chart="Differing routings",
               exact=0, line=Line("routings {routing_diff/tokens_differing:.0f}")),
        Metric("mismatch/k1", "nats", "mean of -d: KL(rollout, training), of either sign", "near 0",
               chart="KL of rollout and training", exact=0),
        Metric("mismatch/k3", "nats", "mean of exp(d) - 1 - d: the same, never negative",
               "below 0.01; a rise is drift", chart="KL of rollout and training", exact=0),
        Metric("mismatch/mult_prob_error", "-",
               "mean of exp(abs(d)): NeMo RL's token multiplicative probability error",
               "below 1.05", chart="Probability error", exact=1),
        Metric("mismatch/ratio_mean", "-", "mean of w", "1 within its noise",
               chart="Importance ratio", label="mean", exact=1),
        Metric("mismatch/ratio_min", "-", "the smallest w", "", "min",
               chart="Importance ratio", label="smallest", exact=1),
        Metric("mismatch/ratio_max", "-", "the largest w", "below 2: corrections bound it", "max",
               chart="Importance ratio", label="largest", exact=1),
        Metric("mismatch/effective_sample_size", "share", "(sum w)^2 / (n sum w^2)", "above 0.9",
               chart="Effective sample size", label="of the ratios", exact=1),
        Metric("kv_scales/largest_ratio", "-",
               'largest Q, K or V / what its scale holds (`kv_scales = "per_tensor"`)',
               "up to 1; above it saturates", "max",
               chart="Q, K and V by scale"),
        Metric("correction/mean", "-",
               "mean of the weight c that [corrections](algorithms.md#corrections) give a token",
               "near 1; far below, add `normalise` or widen the band", chart="Correction"),
        Metric("correction/effective_sample_size", "share", "(sum c)^2 / (n sum c^2)", "above 0.5",
               chart="Effective sample size", label="of the corrections"),
        Metric("correction/rejected", "share", "tokens with c = 0, which teach nothing",
               "a few percent; above a third, the band is too narrow", chart="Rejected"),
        Metric("check/gradients_repeated", "masters",
               "gradients of a micro-batch that was computed twice (`check.repeat_every`)", "all",
               "sum"),
        Metric("check/gradients_differing", "masters", "those with other bits the second time",
               "0; else a [faulty processor, memory or kernel](exactness.md#what-a-pass-proves)",
               "sum", exact=0),
        Metric("check/forwards_differing", "-", "1 where its metrics or log-probabilities differed",
               "0", "sum", exact=0),
    ),
    "Experts": (
        Metric("router/balance", "-",
               "mean over sequences and sparse layers of sum_e f_e P_e: f_e the share of choices "
               "that fell on expert e times the number of experts, P_e its mean probability",
               "1 to 2; a rise: raise `training.router_balance`", runs=_TEXT,
               chart="Balance of the experts"),
        Metric("router/z", "-", "mean of log(sum of exp(logits))^2",
               "steady; a steady rise: set `training.router_z`", runs=_TEXT, chart="Router z-loss"),
        Metric("router/busiest", "share",
               "the largest share of a layer's choices that fell on one expert",
               "a few times 1 / experts", runs=_TEXT, chart="Busiest expert"),
        Metric("router/idle", "experts", "experts of all layers that no token of the update chose",
               "0", runs=_TEXT, chart="Idle experts"),
    ),
    "Replay and staleness": (
        Metric("replay/samples", "completions", "replayed ones that were learnt from",
               "`replay.fraction` of the batch", "sum"),
        Metric("replay/size", "completions", "those in the buffer", "constant at last", "last",
               chart="Replay buffer"),
        Metric("replay/mib", "MiB", "their memory", "at most `replay.max_mib`", "last"),
        Metric("staleness/mean", "updates",
               "mean updates since the weights that drew a response token",
               "0 without replay and lag", chart="Staleness"),
    ),
    "Speed": (
        Metric("time/rollout_s", "s", "wall clock of generation", "most of the step",
               chart="Time a step", label="rollout"),
        Metric("time/update_s", "s", "weights to [engines](engines.md)"),
        Metric("time/grading_s", "s", "wall clock of rewards after generation has ended",
               "small; else more `reward.workers`", chart="Time a step", label="grading"),
        Metric("time/waiting_s", "s",
               "wall clock in which trainers wait for [rollouters](cluster.md#asynchrony)",
               "near 0; else give the rollouters more GPUs", chart="Time a step", label="waiting"),
        Metric("time/training_s", "s", "wall clock of judging, packing, updates and publishing",
               runs=_ALL, chart="Time a step", label="training"),
        Metric("time/calibration_s", "s",
               'wall clock of the forward that sets `kv_scales = "per_tensor"`', "small"),
        Metric("time/evaluation_s", "s", "wall clock of an evaluation", runs=_ALL),
        Metric("time/offload_s", "s",
               "the part of `time/training_s` in which moments travel to the GPU and back "
               "(`training.offload_moments`)", "small", runs=_ALL),
        Metric("tokens_per_s/rollout", "tokens/s", "tokens generated / `time/rollout_s`", "steady",
               chart="Throughput", line=Line("rollout {tokens_per_s/rollout:,.0f} tok/s",
               ((1, ""),))),
        Metric("tokens_per_s/training", "tokens/s",
               "prompt and response tokens trained on, once an epoch / `time/training_s`", "steady",
               runs=_ALL, chart="Throughput",
               line=Line("training {tokens_per_s/training:,.0f} tok/s", ((2, ""),), _ALL)),
        Metric("rollout/preemptions", "events",
               "running samples that lost their pages to an earlier one",
               "0; else raise `rollout.kv_memory_gib` or lower `rollout.max_sequences`", "sum"),
        Metric("rollout/shared_pages", "pages",
               "cache pages taken over from a prompt", "", "sum"),
        Metric("rollout/kept_tokens", "tokens",
               "of earlier turns, still cached", "", "sum"),
        Metric("rollout/chunks", "events",
               "pieces of prompts that `rollout.max_batched_tokens` cut off", "0 for short prompts",
               "sum"),
        Metric("rollout/drafted_tokens", "tokens",
               "guessed and verified (`rollout.speculation`)", "", "sum"),
        Metric("rollout/accepted_tokens", "tokens",
               "of those, drawn as they were guessed", "most of them", "sum"),
        Metric("memory/rollout_peak_gib", "GiB",
               "the most that torch held in rollout and evaluation", "at most the plan",
               "max", runs=_ALL, chart="GPU memory", label="rollout"),
        Metric("memory/training_peak_gib", "GiB", "the same in training", "at most the plan", "max",
               runs=_ALL, chart="GPU memory", label="training"),
        Metric("waiting/mean_s", "s", "mean over ranks of the time a rank waits for others",
               "small", runs=_ALL),
        Metric("waiting/max_s", "s", "that of the rank that waits longest", "near the mean", "max",
               runs=_ALL),
        Metric("waiting/min_s", "s", "that of the rank that the others wait for",
               "near the mean; else a straggler", "min", runs=_ALL),
        Metric("waiting/min_rank", "rank", "that rank", "changes; else a slow machine", "last",
               runs=_ALL),
    ),
}
# fmt: on

METRICS = {metric.name: metric for metrics in TABLE.values() for metric in metrics}
_PATTERNS = [
    (re.compile(re.sub("SET|NAME", "(?P<NAME>.+)", name).replace("K", r"\d+"), re.DOTALL), metric)
    for name, metric in METRICS.items()
    if re.search("SET|NAME", name)
]
"""Patterns of the rows whose names have capitals."""


def find_metric(name: str) -> Metric | None:
    """The row of a name as a run writes it; None where the table lacks it."""
    if name in METRICS:
        return METRICS[name]
    return next((row for pattern, row in _PATTERNS if pattern.fullmatch(name)), None)


def chosen_name(name: str) -> str:
    """The name that the run chose for the capitals in a row's name, "" where there are none."""
    matches = (pattern.fullmatch(name) for pattern, _ in _PATTERNS)
    return next((match["NAME"] for match in matches if match), "")


def listed(metrics: Mapping[str, float], kind: Kind) -> Metrics:
    """The metrics that the table lists for a kind of run."""
    return {
        name: value
        for name, value in metrics.items()
        if (row := find_metric(name)) is not None and kind in row.runs
    }


def add_microbatch(totals: Metrics, metrics: Mapping[str, float]) -> None:
    """Add the metrics of the next micro-batch to ``totals``, of which there may be none yet."""
    for name, value in metrics.items():
        how = _reduction(name)
        if how in ("max", "min"):
            totals[name] = (max if how == "max" else min)(totals.get(name, value), value)
        else:
            totals[name] = totals.get(name, 0.0) + value


def of_update(totals: Mapping[str, float], tokens: int) -> Metrics:
    """The metrics of an update of so many response tokens from the totals of its micro-batches."""
    return {
        name: value / tokens if _reduction(name) == "mean" else value
        for name, value in totals.items()
    }


def over_updates(updates: Iterable[Mapping[str, float]]) -> Metrics:
    """The metrics of a step from those of the updates that it took."""
    rows = list(updates)
    return {
        name: {"max": max, "min": min}.get(_reduction(name), fmean)([row[name] for row in rows])
        for name in (rows[0] if rows else ())
    }


def _reduction(name: str) -> Reduction:
    row = METRICS.get(name)
    return "mean" if row is None else row.reduce
