"""Everything a run of reinforcement learning needs, made and checked before its directory exists:
what can be refused is refused here.

The cheap refusals come first: a KL penalty is reported before any file is read, and a prompt that
is too long before any weight.  Nothing is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.algorithms.objective import Algorithm
from isobit.algorithms.registry import build_algorithm
from isobit.config.rules import check_run
from isobit.config.run import RunConfig
from isobit.data.sampler import PromptSampler
from isobit.models.function import is_one_function
from isobit.observe.console import describe_policy
from isobit.observe.eval_result import EvalResult
from isobit.observe.wandb_tracker import check_tracking
from isobit.precision.compare import describe_flow
from isobit.records.text import SamplingParams
from isobit.rewards.grade import Grading
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.request import Request
from isobit.run.evaluate import Evaluation, Evaluator, OnProgress, evaluation_requests
from isobit.run.model_source import describe_source
from isobit.run.outline import Outline, check_requests
from isobit.run.parts import PreparedRun, build_parts
from isobit.run.rl.data import RlData, load_prompts


@dataclass(frozen=True, slots=True)
class RlMaterial:
    """What a run is made from, as far as it is known without the weights."""

    outline: Outline
    data: RlData
    algorithm: Algorithm
    sampling: SamplingParams
    evaluation: Mapping[str, Sequence[Request]]
    """What the engine is asked for on each evaluation set."""
    training: Sequence[Request]
    """A sample of each training prompt."""

    @property
    def requests(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """What the engine may be asked for: all of an evaluation, or prompts to learn from."""
        return [one for asked in self.evaluation.values() for one in asked], self.training


@dataclass(frozen=True, slots=True)
class RlRun(PreparedRun):
    """The parts of a run, ready to start."""

    config: RunConfig
    figures: Mapping[str, Any]
    """How many prompts there are to learn from and to be measured on."""
    about_data: str
    """The same in a line."""
    algorithm: Algorithm
    sampling: SamplingParams
    engine: RolloutEngine
    evaluator: Evaluator

    @property
    def exact(self) -> bool:
        """Whether what the engine records and what the trainer computes are one function."""
        return is_one_function(self.engine.function, self.trainer.function)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the training prompts."""
        return self.sampler.fingerprint

    def data_figures(self) -> dict[str, Any]:
        """How many training prompts and evaluation problems there are, for the manifest."""
        return dict(self.figures)

    def describe(self) -> list[str]:
        """The first lines: the model, the data, the flow, the plan of the memory."""
        policy = self.model.policy
        return [
            describe_policy(self.config.model, policy),
            self.about_data,
            *(f"  {line}" for line in describe_flow(policy.flow)),
            *self.turns.describe(),
        ]

    def next_requests(self) -> list[Request]:
        """The prompts of the next step, as the engine takes them."""
        samples = self.config.training.samples_per_prompt
        return [
            Request(prompt, visit, samples, self.sampling) for prompt, visit in self.sampler.next()
        ]

    def evaluate(self, progress: OnProgress, grading: Grading) -> Evaluation[EvalResult]:
        """Every evaluation set under the current policy."""
        return self.evaluator.run(progress, grading)


def prepare_rl(config: RunConfig) -> RlRun:
    """Load and check a run.  Raises an ``IsobitError`` that names what cannot be used; writes
    nothing.
    """
    check_tracking(config.tracking)
    made = read_rl(config)
    parts = build_parts(made.outline)
    assert parts.engine is not None, "reinforcement learning always generates"
    check_requests(made.requests, parts.engine.check, parts.model.context)
    return RlRun(
        parts,
        PromptSampler(
            made.data.prompts, config.training.prompts_per_step, config.seed, config.data.shuffle
        ),
        config,
        made.data.figures(),
        made.data.describe(),
        made.algorithm,
        made.sampling,
        parts.engine,
        Evaluator(parts.engine, made.evaluation),
    )


def read_rl(config: RunConfig) -> RlMaterial:
    """Read everything but the weights.  Raises an ``IsobitError`` for what cannot be used."""
    check_run(config)
    algorithm = build_algorithm(config.algorithm)
    source = describe_source(config.model)
    model = source.described
    data = load_prompts(config.data, model)
    sampling = model.sampling(config.rollout)
    evaluation = evaluation_requests(data.sets, config.evaluation, config.rollout, model)
    samples = [Request(prompt, 0, 1, sampling) for prompt in data.prompts]
    longest = max(request.max_length(model.config.max_positions) for request in samples)
    training = config.training
    updates = training.updates_per_batch * training.epochs
    outline = Outline(
        config,
        source,
        training,
        training.steps * updates,
        longest,
        learning=(
            data.describe(),
            f"steps: {training.steps} of "
            f"{training.prompts_per_step * training.samples_per_prompt} samples, {updates} updates "
            f"each; sequences of at most {longest} tokens",
        ),
    )
    return RlMaterial(outline, data, algorithm, sampling, evaluation, samples)
