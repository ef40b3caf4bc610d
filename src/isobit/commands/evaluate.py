"""``isobit eval``: a model folder measured on the evaluation sets of a recipe, with its reward."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.commands.rollout import check_acting, say_end_of_turn, say_notes
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_has_sets, check_reward, check_samples
from isobit.data.prompts import Noticed, TooLong, build_prompts, describe_too_long
from isobit.kernels.backend import use_back_end
from isobit.models.folder import SamplingModel, load_sampling_model
from isobit.models.tensor_parallel import check_ranks
from isobit.observe.evaluation import EvalResult
from isobit.observe.group_metrics import describe_hidden
from isobit.parallel.world import ALONE, World
from isobit.records.text import Group, Prompt
from isobit.rewards.grading import Graders
from isobit.rewards.reference_check import check_references
from isobit.rewards.tally import GradeStats
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.run.acting import episodes_of, grades_by_environment
from isobit.run.data import evaluation_limit, evaluation_requests, rendering_notes
from isobit.run.evaluation import Evaluation, Evaluator, OnProgress
from isobit.run.resolved import with_date_of
from isobit.run.reward_models import ModelRewards, reward_model_folders
from isobit.util.terminal import say


def evaluate_folder(
    folder: Path,
    config: RunConfig,
    progress: OnProgress | None = None,
    world: World = ALONE,
    take: Callable[[str, Sequence[Group]], None] | None = None,
) -> dict[str, EvalResult]:
    """Evaluate a model folder on the sets of a configuration, whose own model is not read.  Writes
    nothing.  ``take`` is given the graded completions of each set, by its name.

    Raises ConfigError where the configuration names no set, and everything that loading, generating
    and grading raise.  Ranks of ``world`` share the model; the first one grades and has the
    figures, the others none.
    """
    check_ranks(config.cluster.rollout_tp, world)
    check_has_sets(config.data.eval)
    check_samples(config.evaluation)
    check_reward(config.reward, config.environment is not None)
    check_acting(config.environment, world)
    with Graders(config.reward) as graders:
        evaluation = _evaluate_folder(folder, config, progress, graders, world)
    for name, (_, groups) in evaluation.items():
        if take is not None:
            take(name, groups)
    return {name: result for name, (result, _) in evaluation.items()}


def _evaluate_folder(
    folder: Path, config: RunConfig, progress: OnProgress | None, graders: Graders, world: World
) -> Evaluation[EvalResult]:
    use_back_end(config.back_end)
    model = load_sampling_model(folder, config.precision, config.device, world)
    engine = NativeEngine(model.policy, config.rollout, model.tokenizer, config.seed)
    reward_models = reward_model_folders(config.reward)
    config = with_date_of(config, model.folder, reward_models.values(), world)
    grades = grades_by_environment(config.reward)
    with episodes_of(config.environment, config.data, model, config.rollout, engine, grades) as (
        schemas,
        acts,
    ):
        sets = read_sets(config, model.tokenizer, model.context, world, tools=schemas)
        requests = evaluation_requests(sets, config.evaluation, config.rollout, model)
        evaluator = Evaluator(engine, requests, generate=acts)
        return _evaluate(evaluator, config, model, reward_models, progress, graders, world)


def _evaluate(
    evaluator: Evaluator,
    config: RunConfig,
    model: SamplingModel,
    reward_models: Mapping[str, Path],
    progress: OnProgress | None,
    graders: Graders,
    world: World,
) -> Evaluation[EvalResult]:
    engine = evaluator.engine
    requests = evaluator.requests
    data = config.data
    if world.rank == 0:
        say_end_of_turn(model, config.rollout, data.chat)
    if world.rank > 0:
        for asked in requests.values():
            generate(engine, asked)
            engine.release()
        return {}
    graders.check_columns({name: [one.prompt for one in of] for name, of in requests.items()})
    device = model.policy.device
    rewards = ModelRewards(config.reward, reward_models, device, data.date)
    models = rewards.scores(engine.release)

    def grading(groups: Sequence[Group]) -> GradeStats:
        if world.size > 1:  # reward models release it on this rank; what all capture must be alike
            engine.release()
        return graders.collect(groups, models=models)

    evaluation = evaluator.run(progress, grading)
    sampling = model.sampling(config.rollout)
    made = [
        one for _, groups in evaluation.values() for group in groups for one in group.completions
    ]
    if not sampling.special_tokens and (
        note := describe_hidden(made, model.tokenizer, sampling.stop_token_ids)
    ):
        say(f"isobit: {note}")
    return evaluation


def read_sets(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    world: World = ALONE,
    graded: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> dict[str, list[Prompt]]:
    """The prompts of each evaluation set by name, of a configuration with its date; says what
    stands out.  Raises as ``build_prompts`` and ``check_references`` do.
    """
    data = config.data
    noticed = {name: Noticed(TooLong(data.too_long)) for name in data.eval}
    # an answer may end at the context's end, unless prompts that leave less room are not wanted
    longest = evaluation_limit(config.evaluation, config.rollout)
    new_tokens = 1 if data.too_long == "refuse" else longest
    sets = {
        name: build_prompts(
            name, source, tokenizer, data, context, new_tokens, noticed[name], tools=tools
        )
        for name, source in data.eval.items()
    }
    if world.rank == 0 and (said := describe_too_long(noticed)):
        say(f"isobit: {said.removeprefix('; ')}")
    if graded:
        say_notes(check_references(config.reward, sets), world)
    say_notes(rendering_notes(data, tokenizer, noticed), world)
    return sets
