"""Evaluation on named sets: every problem is completed and graded.

The noise is keyed by the problem and the sample, never by the step: two evaluations of one run
differ by the weights and by nothing else.  The figures are described in
``isobit.observe.evaluation``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from isobit.observe.evaluation import EvalResult, result_of
from isobit.parallel.world import ALONE, World
from isobit.records.text import Group
from isobit.rewards.grading import Grading
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.engine_stats import Progress
from isobit.rollout.requests import Request
from isobit.rollout.shared import generate_shared
from isobit.run.acting import Generate

OnProgress = Callable[[Progress], None]
"""Called after every forward of the engine."""
Result = TypeVar("Result")
Evaluation = Mapping[str, tuple[Result, Sequence[Group]]]
"""The figures of each set, by name, with the completions that they come from."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the policy of an engine on named sets."""

    engine: RolloutEngine
    requests: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each set, by name (``evaluation_requests``)."""
    world: World = ALONE
    """The ranks that evaluate together, each with an engine, and all with the same requests."""
    generate: Generate | None = None
    """Completes the requests in place of the engine alone: episodes with an environment."""

    def run(self, progress: OnProgress | None, grading: Grading) -> Evaluation:
        """The figures and the completions of each set, by name, as ``grading`` grades them.

        Raises RewardError where it does.
        """
        return {
            name: self._run_set(requests, progress, grading)
            for name, requests in self.requests.items()
        }

    def _run_set(
        self, requests: Sequence[Request], progress: OnProgress | None, grading: Grading
    ) -> tuple[EvalResult, list[Group]]:
        generate = self.generate or partial(generate_shared, self.world, self.engine)
        completions, *_ = generate(requests, progress)
        groups = [
            Group(request.prompt, request.visit, of_prompt)
            for request, of_prompt in zip(requests, completions, strict=True)
        ]
        grades = grading(groups)
        return result_of(groups, requests[0].samples, grades.all_counts()), groups
