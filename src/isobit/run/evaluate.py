"""Evaluation on named sets: completions of every problem, graded.

The noise is keyed by the problem and the sample, never by the step: two evaluations of one run
differ by the weights and by nothing else.  The figures are described in
``isobit.observe.eval_result``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.config.schema import EvaluationConfig, RolloutConfig, RunConfig
from isobit.data.prompts import build_prompts
from isobit.errors import ConfigError
from isobit.models.loaded import DescribedModel, LoadedModel, load_sampling_model
from isobit.observe.eval_result import EvalResult, result_of
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rewards.function import RewardFunction, load_reward
from isobit.rewards.grade import GradeStats, grade
from isobit.rollout.engine import RolloutEngine, generate
from isobit.rollout.native.engine import NativeEngine
from isobit.rollout.progress import Progress
from isobit.rollout.request import Request

OnProgress = Callable[[Progress], None]
"""Called after every forward of the engine."""
Grading = Callable[[Sequence[Group], RewardFunction, float], GradeStats]
"""Fills the rewards of groups, as ``grade`` does."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the policy of an engine on named sets."""

    engine: RolloutEngine
    sets: Mapping[str, Sequence[Prompt]]
    sampling: SamplingParams
    samples: int
    reward: RewardFunction
    max_failed_fraction: float

    def requests(self) -> list[Request]:
        """What the engine is asked for, over all sets."""
        return [request for name in self.sets for request in self._requests(name)]

    def run(
        self, progress: OnProgress | None = None, grading: Grading = grade
    ) -> dict[str, tuple[EvalResult, list[Group]]]:
        """The figures and the graded completions of each set, by name; ``grading`` may put a record
        around ``grade``.

        Raises RewardError where a larger share of a set's rewards failed than
        ``max_failed_fraction``.
        """
        return {name: self._run_set(name, progress, grading) for name in self.sets}

    def _run_set(
        self, name: str, progress: OnProgress | None, grading: Grading
    ) -> tuple[EvalResult, list[Group]]:
        requests = self._requests(name)
        completions = generate(self.engine, requests, progress)
        groups = [
            Group(request.prompt, request.visit, made)
            for request, made in zip(requests, completions, strict=True)
        ]
        grading(groups, self.reward, self.max_failed_fraction)
        return result_of(groups, self.samples), groups

    def _requests(self, name: str) -> list[Request]:
        return [Request(prompt, 0, self.samples, self.sampling) for prompt in self.sets[name]]


def build_evaluator(
    config: RunConfig, model: LoadedModel, engine: RolloutEngine, reward: RewardFunction
) -> Evaluator:
    """The evaluator of ``config.data.eval`` as ``config.evaluation`` says.

    Raises ConfigError for several greedy samples, which would all be the same, and DataError for a
    set that cannot be used.
    """
    sampling = evaluation_sampling(config.evaluation, config.rollout, model)
    sets = {
        name: build_prompts(name, source, model.tokenizer, config.data, model.context)
        for name, source in config.data.eval.items()
    }
    return Evaluator(
        engine, sets, sampling, config.evaluation.samples, reward, config.reward.max_failed_fraction
    )


def evaluation_sampling(
    evaluation: EvaluationConfig, rollout: RolloutConfig, model: LoadedModel | DescribedModel
) -> SamplingParams:
    """How an evaluation draws tokens.  Raises ConfigError for several greedy samples, which would
    all be the same.
    """
    if evaluation.temperature == 0 and evaluation.samples > 1:
        raise ConfigError(
            f"evaluation.samples is {evaluation.samples}, but evaluation.temperature is 0 and "
            "greedy samples are all the same; "
            "set a temperature above 0, or 1 sample"
        )
    limit = evaluation.max_new_tokens or rollout.max_new_tokens
    return model.sampling(
        rollout.model_copy(update={"temperature": evaluation.temperature, "max_new_tokens": limit})
    )


def evaluate_folder(
    folder: Path, config: RunConfig, progress: OnProgress | None = None
) -> dict[str, EvalResult]:
    """Evaluate a model folder on the sets of a configuration, whose own model is not read.  Writes
    nothing.

    Raises ConfigError where the configuration names no set, and everything that loading, generating
    and grading raise.
    """
    if not config.data.eval:
        raise ConfigError(
            "data.eval names no set to evaluate on; add one, for example [data.eval.held_out]"
        )
    reward = load_reward(config.reward.function)
    model = load_sampling_model(folder, config.precision, config.device)
    engine = NativeEngine(model.policy, config.rollout, model.tokenizer, config.seed)
    evaluator = build_evaluator(config, model, engine, reward)
    return {name: result for name, (result, _) in evaluator.run(progress).items()}
