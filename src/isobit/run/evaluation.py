"""Evaluation on named sets: every problem is completed and graded.

The noise is keyed by the problem and the sample, never by the step: two evaluations of one run
differ by the weights and by nothing else.  The figures are described in
``isobit.observe.evaluation``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from isobit.config.rollout import RolloutConfig
from isobit.config.tables import EvaluationConfig
from isobit.models.folder import DescribedModel, SamplingModel
from isobit.observe.evaluation import EvalResult, result_of
from isobit.parallel.world import ALONE, World
from isobit.records.text import Group, Prompt
from isobit.rewards.grading import Grading
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.engine_stats import Progress
from isobit.rollout.requests import Request
from isobit.rollout.shared import generate_shared
from isobit.run.acting import Generate
from isobit.run.data import evaluation_limit

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


def evaluation_requests(
    sets: Mapping[str, Sequence[Prompt]],
    evaluation: EvaluationConfig,
    rollout: RolloutConfig,
    model: SamplingModel | DescribedModel,
) -> dict[str, list[Request]]:
    """What an engine is asked for on each set, by name: ``rollout`` with what ``evaluation`` says
    otherwise.
    """
    changed = {
        "temperature": evaluation.temperature,
        "max_new_tokens": evaluation_limit(evaluation, rollout),
        "top_p": rollout.top_p if evaluation.top_p is None else evaluation.top_p,
    }
    sampling = model.sampling(rollout.model_copy(update=changed))
    return {
        name: [Request(prompt, 0, evaluation.samples, sampling) for prompt in prompts]
        for name, prompts in sets.items()
    }
