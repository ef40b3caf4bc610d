"""Are the log-probabilities that replay gives those of the weights that drew them, bit for bit?

    python -m experiments.replay --out FILE [--steps 20] [--seeds 3] [--device cpu]

The quickstart with half of each batch replayed, from weights of up to four updates before, in one
process that keeps the published weights of every version for as long.  Whatever is drawn from the
buffer is scored again twice before it is learnt from:

    by its own version's weights    compared with what the buffer gave (``compared``, ``differing``)
    by the weights of now           ``ess``: the effective sample size of pi_now / mu over the
                                    replayed tokens, as a share of them

FILE and standard output have a JSON line a step and one a seed: counts over all steps, ``ess`` and
``staleness`` (updates since a replayed token was drawn) as means over the steps that replay, the
greedy accuracy before and after.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import rich.console
import torch

from benchmarks.quickstart import RECIPE, describe_device
from isobit.config.algorithm import ReplayConfig
from isobit.config.load import load_config
from isobit.config.recipes import RunConfig
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.observe.console import Console
from isobit.records.packing import responses
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.run.loop import collect, open_run
from isobit.store.state import StepDigests, state_digest
from isobit.training.advantage_estimator import score_sequences
from isobit.training.comparison import ComparedTokens, Comparison
from isobit.training.replay_buffer import ReplayBuffer

CHANGES = {"replay.fraction": "0.5", "replay.max_staleness": "4", "checkpoint.keep_last": "0"}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    samples: int
    comparison: Comparison
    ess: float | None
    """None where nothing is replayed, as ``staleness``."""
    staleness: float | None


class Witness(ReplayBuffer):
    """A replay buffer that keeps the weights of the versions that it may replay, and scores with
    them what it gives.
    """

    def __init__(self, config: ReplayConfig, seed: int, policy: Policy, tokens: int) -> None:
        """``tokens`` is the size of a micro-batch."""
        super().__init__(config, seed)
        self._policy, self._tokens = policy, tokens
        self._weights: dict[int, FrozenPolicy] = {}
        self.steps: list[Drawn] = []

    def draw(self, fresh: int, version: int) -> list[Group]:
        """What the buffer draws, with an entry in ``steps``; before the step's first update."""
        drawn = super().draw(fresh, version)
        oldest = version - self.config.max_staleness
        kept = {known: weights for known, weights in self._weights.items() if known >= oldest}
        self._weights = {**kept, version: FrozenPolicy.of(self._policy)}
        sequences = [group.completions[0].sequence for group in drawn]
        self.steps.append(self._checked(sequences, version))
        return drawn

    def _checked(self, sequences: Sequence[TokenSequence], version: int) -> Drawn:
        by_version = defaultdict[int, list[TokenSequence]](list)
        for sequence in sequences:
            (drew,) = set(sequence.of_response(sequence.weights_versions).tolist())
            by_version[drew].append(sequence)
        then, now, behind = ComparedTokens.none(), ComparedTokens.none(), list[int]()
        for drew, theirs in by_version.items():
            given = responses(theirs, [one.log_probs for one in theirs])
            then.add(given, self._log_probs(drew, theirs))
            now.add(given, self._log_probs(version, theirs))
            behind += [version - drew] * given.numel()
        distance = now.mismatch()
        return Drawn(
            len(sequences),
            then.comparison(),
            distance.get("mismatch/effective_sample_size"),
            fmean(behind) if behind else None,
        )

    def _log_probs(self, version: int, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Log-probabilities float32 [N] by the weights of a version."""
        scores = score_sequences(Scorer(self._weights[version]), sequences, self._tokens)
        return torch.cat([score.log_probs for score in scores])


def measure(config: RunConfig, say: Callable[[Row], None]) -> Row:
    """``isobit train`` with a witness in the place of its replay buffer; ``say`` is told of every
    step -> the row of the run.
    """
    tokens = config.training.tokens_per_microbatch
    with open_run(config, Console(rich.console.Console(stderr=True))) as opened:
        run = opened.run
        witness = Witness(config.replay, config.seed, run.model.policy, tokens)
        run.learner = replace(run.learner, replay=witness)
        opened.log.replay = run.extras["replay"] = witness
        for step in opened.steps():
            batch = collect(run)
            with opened.learning():
                estimated = run.learner.with_advantages(batch.groups)
                trained = run.learner.update(batch.groups, estimated, step)
                digests = StepDigests.of(step, batch.groups, state_digest(run))
            opened.log.step(step, batch, batch.engine, trained, digests, estimated)
            opened.end_step(step)
            opened.evaluate_if_due(step)
            opened.save_if_due(step)
            say({"seed": config.seed, "step": step, **_figures(witness.steps[-1])})
        opened.save_model()
        summary = opened.log.finish()
    return {
        "seed": config.seed,
        "steps": len(witness.steps),
        **_figures(_together(witness.steps)),
        "fresh_compared": summary.tokens_compared,
        "fresh_differing": summary.tokens_differing,
        "accuracy_before": summary.accuracy_before,
        "accuracy_after": summary.accuracy_after,
        "train_seconds": summary.train_seconds,
    }


def _figures(drawn: Drawn) -> Row:
    compared = asdict(drawn.comparison)
    return {
        "replayed": drawn.samples,
        "compared": compared["tokens_compared"],
        "differing": compared["tokens_differing"],
        "max_abs_diff": compared["max_abs_diff"],
        "ess": drawn.ess,
        "staleness": drawn.staleness,
    }


def _together(steps: Sequence[Drawn]) -> Drawn:
    """Sums, and means over the steps that replayed something."""
    shares = [step.ess for step in steps if step.ess is not None]
    behind = [step.staleness for step in steps if step.staleness is not None]
    return Drawn(
        sum(step.samples for step in steps),
        sum((step.comparison for step in steps), Comparison()),
        fmean(shares) if shares else None,
        fmean(behind) if behind else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    place = describe_device(arguments.device)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, arguments.out.open("w") as lines:

        def say(row: Row) -> None:
            print(line := json.dumps(row), flush=True)
            lines.write(line + "\n")
            lines.flush()

        for seed in range(arguments.seeds):
            settings = {"seed": str(seed), "output": f"{directory}/{seed}", **CHANGES}
            settings |= {"training.steps": str(arguments.steps), "device": arguments.device}
            words = [word for key, value in settings.items() for word in (f"--{key}", value)]
            say({**measure(load_config(RECIPE, words), say), **place})


if __name__ == "__main__":
    main()
