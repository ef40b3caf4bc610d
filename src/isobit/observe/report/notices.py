"""Notices: what a reader has to know of a run before its charts."""

from collections.abc import Iterator

import numpy as np

from isobit.config.algorithm_rules import ONE_SAMPLE
from isobit.observe.run_record import RunRecord
from isobit.records.no_signal import REASONS_WITHOUT_SIGNAL, describe_reasons

TRUNCATED = 0.05
"""A larger share of the last step's completions at the length limit is a notice."""
LEVEL = 0.5
"""A larger share of zero-variance groups over all steps is a notice."""


def notices(record: RunRecord) -> Iterator[str]:
    """Sentences, the most serious first."""
    differing = record.total("log_prob_diff/tokens_differing")
    if differing and record.setting("precision", "exact"):
        yield (
            f"{differing:,.0f} log-probabilities differ between rollout and training, in a flow "
            "where none should: isobit verify --bisect names the place"
        )
    if failed := record.total("reward/failed"):
        yield (
            f"{failed:,.0f} rewards failed, and their completions were left out; the console says "
            "of each step which error came first"
        )
    if skipped := record.total("updates/skipped"):
        yield f"{skipped:,.0f} updates were skipped: loss or gradient norm was not finite"
    is_training = ~np.isnan(record.figures.column("updates/skipped"))
    if without_signal := record.total("updates/without_signal"):
        without = np.sum(is_training & (record.figures.column("updates/taken") == 0))
        reasons = {name: record.total(f"no_signal/{name}") for name in REASONS_WITHOUT_SIGNAL}
        why = f" ({describe_reasons(reasons, advise=True)})" if any(reasons.values()) else ""
        yield (
            f"{without_signal:,.0f} updates had nothing to learn from; no weight changed in "
            f"{without:,} of {np.sum(is_training):,} steps{why}"
        )
    level = record.figures.column("reward/level_share")[is_training]
    shares = level[np.isfinite(level)]
    compares = record.setting("config", "algorithm", "name") not in ONE_SAMPLE
    if compares and len(shares) and (mean := shares.mean()) > LEVEL:
        yield (
            f"{100 * mean:.0f}% of all groups were level: no two of their rewards differ, and "
            "nothing is learnt from them; the problems are too easy or too hard for this model"
        )
    cut = record.values("response_length/truncated")
    if cut and cut[-1] > TRUNCATED:
        limit = record.setting("config", "rollout", "max_new_tokens")
        of_limit = f" of {limit} tokens" if isinstance(limit, int) else ""
        yield (
            f"{100 * cut[-1]:.0f}% of the last step's completions were cut off by the length limit"
            f"{of_limit} (rollout.max_new_tokens)"
        )
    yield from record.problems
