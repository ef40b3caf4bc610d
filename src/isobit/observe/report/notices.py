"""What a reader should know about a run before its charts: how it ended, if not by itself, and what
went wrong on the way without ending it.
"""

from collections.abc import Iterator

from isobit.observe.report.source import RunRecord

TRUNCATED = 0.05
"""Share of the last step's completions that the length limit may end without a word."""
LEVEL = 0.5
"""Share of level groups over all steps from which they are named."""


def notices(record: RunRecord) -> list[str]:
    """A sentence each, the gravest first."""
    return [*_differing(record), *_counts(record), *_last_step(record), *record.problems]


def total(record: RunRecord, metric: str) -> float:
    """The sum of a figure over all steps."""
    return sum(row.get(metric) or 0.0 for row in record.figures.values())


def _differing(record: RunRecord) -> Iterator[str]:
    differing = total(record, "log_prob_diff/tokens_differing")
    if differing and record.setting("precision", "exact"):
        yield (
            f"{differing:,.0f} log-probabilities differ between rollout and training, in a flow "
            "where none should: isobit verify --bisect names the place"
        )


def _counts(record: RunRecord) -> Iterator[str]:
    steps = [row for row in record.figures.values() if "updates/skipped" in row]
    without = sum(row.get("updates/taken") == 0 for row in steps)
    if failed := total(record, "reward/failed"):
        yield (
            f"{failed:,.0f} rewards failed, and their completions were left out; the console says "
            "of each step which error came first"
        )
    if skipped := total(record, "updates/skipped"):
        yield f"{skipped:,.0f} updates were skipped: loss or gradient norm was not finite"
    if without_signal := total(record, "updates/without_signal"):
        yield (
            f"{without_signal:,.0f} updates had nothing to learn from, since all rewards of each "
            f"prompt were equal; no weight changed in {without:,} of {len(steps):,} steps"
        )
    shares = [v for row in steps if (v := row.get("reward/level_share")) is not None]
    if shares and (mean := sum(shares) / len(shares)) > LEVEL:
        yield (
            f"{100 * mean:.0f}% of all groups were level: no two of their rewards differ, and "
            "nothing is learnt from them; the problems are too easy or too hard for this model"
        )


def _last_step(record: RunRecord) -> Iterator[str]:
    rows = [row for row in record.figures.values() if "response_length/truncated" in row]
    cut = (rows[-1].get("response_length/truncated") or 0.0) if rows else 0.0
    if cut > TRUNCATED:
        limit = record.setting("config", "rollout", "max_new_tokens")
        yield (
            f"{100 * cut:.0f}% of the last step's completions were cut off by the length limit"
            + (f" of {limit} tokens" if isinstance(limit, int) else "")
            + " (rollout.max_new_tokens)"
        )
