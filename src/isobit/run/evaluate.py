"""Evaluation on named sets: completions of every problem, graded.

The noise is keyed by the problem and the sample, never by the step: two evaluations of one run
differ by the weights and by nothing else.  The figures are described in
``isobit.observe.eval_result``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from isobit.config.evaluation import EvaluationConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.rules import check_has_sets, check_reward, check_samples
from isobit.config.run import RunConfig
from isobit.data.prompts import TooLong, build_prompts, describe_too_long
from isobit.models.cut import check_ranks
from isobit.models.loaded import DescribedModel, SamplingModel, load_sampling_model
from isobit.observe.eval_result import EvalResult, result_of
from isobit.parallel.world import ALONE, World
from isobit.records.text import Group, Prompt
from isobit.rewards.grade import GradeStats, Grading
from isobit.rewards.grading import Graders
from isobit.rollout.engine import RolloutEngine, generate
from isobit.rollout.native.engine import NativeEngine
from isobit.rollout.progress import Progress
from isobit.rollout.request import Request
from isobit.rollout.shared import generate_shared
from isobit.run.reward_models import ModelRewards
from isobit.terminal import say

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
    """Who evaluates together: each rank with an engine, and all with the same requests."""

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
        completions = generate_shared(self.world, self.engine, requests, progress).completions
        groups = [
            Group(request.prompt, request.visit, made)
            for request, made in zip(requests, completions, strict=True)
        ]
        grading(groups)
        return result_of(groups, requests[0].samples), groups


def evaluation_requests(
    sets: Mapping[str, Sequence[Prompt]],
    evaluation: EvaluationConfig,
    rollout: RolloutConfig,
    model: SamplingModel | DescribedModel,
) -> dict[str, list[Request]]:
    """What an engine is asked for on each set, by name: ``rollout`` with what ``evaluation`` says
    otherwise.
    """
    limit = evaluation.max_new_tokens or rollout.max_new_tokens
    sampling = model.sampling(
        rollout.model_copy(update={"temperature": evaluation.temperature, "max_new_tokens": limit})
    )
    return {
        name: [Request(prompt, 0, evaluation.samples, sampling) for prompt in prompts]
        for name, prompts in sets.items()
    }


def evaluate_folder(
    folder: Path,
    config: RunConfig,
    progress: OnProgress | None = None,
    world: World = ALONE,
) -> dict[str, EvalResult]:
    """Evaluate a model folder on the sets of a configuration, whose own model is not read.  Writes
    nothing.

    Raises ConfigError where the configuration names no set, and everything that loading, generating
    and grading raise.  Ranks of ``world`` share the model; the first one grades and has the
    figures, the others none.
    """
    check_ranks(config.cluster.rollout_tp, world)
    check_has_sets(config.data.eval)
    check_samples(config.evaluation)
    check_reward(config.reward)
    with Graders(config.reward) as graders:
        return _evaluate_folder(folder, config, progress, graders, world)


def _evaluate_folder(
    folder: Path,
    config: RunConfig,
    progress: OnProgress | None,
    graders: Graders,
    world: World,
) -> dict[str, EvalResult]:
    model = load_sampling_model(folder, config.precision, config.device, world)
    engine = NativeEngine(model.policy, config.rollout, model.tokenizer, config.seed)
    data = config.data
    too_long = {name: TooLong(data.too_long) for name in data.eval}
    sets = {
        name: build_prompts(name, source, model.tokenizer, data, model.context, too_long[name])
        for name, source in data.eval.items()
    }
    if world.rank == 0 and (said := describe_too_long(too_long)):
        say(f"isobit: {said.removeprefix('; ')}")
    requests = evaluation_requests(sets, config.evaluation, config.rollout, model)
    if world.rank > 0:
        for asked in requests.values():
            generate(engine, asked)
            engine.release()
        return {}
    graders.describe()
    models = ModelRewards(config.reward, model.policy.device).scores(engine.release)

    def grading(groups: Sequence[Group]) -> GradeStats:
        if world.size > 1:  # reward models release it on this rank; what all capture must be alike
            engine.release()
        return graders.collect(groups, models=models)

    evaluation = Evaluator(engine, requests).run(progress, grading)
    return {name: result for name, (result, _) in evaluation.items()}
