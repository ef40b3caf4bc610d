"""Completions outside of training: evaluation on named sets, and ``isobit rollout``.

In an evaluation every problem is completed and graded.  The noise is keyed by the problem and the
sample, never by the step: two evaluations of one run differ by the weights and by nothing else.
The figures are described in ``isobit.observe.evaluation``.

``isobit rollout`` completes texts or the rows of a file with a model folder, and grades nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from isobit.config.data import (
    ChatConfig,
    ColumnsData,
    DataSource,
    EnvironmentConfig,
    ReasoningGymData,
)
from isobit.config.recipes import GenerationConfig, RunConfig
from isobit.config.rules import check_greedy, check_has_sets, check_reward, check_samples
from isobit.config.tables import EvaluationConfig, RolloutConfig
from isobit.data.continuation import Continuation, Speaker
from isobit.data.prompts import (
    Noticed,
    TooLong,
    build_prompts,
    describe_too_long,
    prompts_of_rows,
)
from isobit.data.sources import load_rows, row_of
from isobit.data.tokenizer import describe_end_of_turn, most_characters
from isobit.data.tool_calls import tool_format
from isobit.environments.pool import Environments
from isobit.models.folder import DescribedModel, SamplingModel, load_sampling_model
from isobit.models.tensor_parallel import check_ranks
from isobit.observe.evaluation import EvalResult, describe_hidden, result_of
from isobit.parallel.world import ALONE, World
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Graders, Grading
from isobit.rewards.reference_check import check_references
from isobit.rewards.tally import GradeStats
from isobit.rollout.engine import RolloutEngine, generate
from isobit.rollout.engine_stats import EngineStats, Progress
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.rollout.shared import generate_shared
from isobit.run.data import evaluation_limit, rendering_notes, with_date, with_date_of
from isobit.run.frozen_models import ModelRewards
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_line
from isobit.util.terminal import say

OnProgress = Callable[[Progress], None]
"""Called after every forward of the engine."""
Generate = Callable[..., tuple[list[list[Completion]], list[int], EngineStats]]
"""``generate_shared`` with a world and an engine."""
Acting = tuple[Sequence[Mapping[str, Any]], Generate | None]
"""The schemas of an environment's tools, and what generates with them; without one no schemas, and
None.
"""
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
    generate: Generate | None = None
    """What completes the requests in place of the engine alone: episodes with an environment."""

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
            Group(request.prompt, request.visit, made)
            for request, made in zip(requests, completions, strict=True)
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
    check_reward(config.reward)
    _check_acting(config.environment, world)
    with Graders(config.reward) as graders:
        evaluation = _evaluate_folder(folder, config, progress, graders, world)
    for name, (_, groups) in evaluation.items():
        if take is not None:
            take(name, groups)
    return {name: result for name, (result, _) in evaluation.items()}


def _evaluate_folder(
    folder: Path,
    config: RunConfig,
    progress: OnProgress | None,
    graders: Graders,
    world: World,
) -> Evaluation[EvalResult]:
    model = load_sampling_model(folder, config.precision, config.device, world)
    engine = NativeEngine(model.policy, config.rollout, model.tokenizer, config.seed)
    config = with_date_of(config, folder, world)
    with _acting(config.environment, config.data, model, config.rollout, engine) as (schemas, acts):
        sets = read_sets(config, model.tokenizer, model.context, world, tools=schemas)
        requests = evaluation_requests(sets, config.evaluation, config.rollout, model)
        evaluator = Evaluator(engine, requests, generate=acts)
        return _evaluate(evaluator, config, model, progress, graders, world)


def _evaluate(
    evaluator: Evaluator,
    config: RunConfig,
    model: SamplingModel,
    progress: OnProgress | None,
    graders: Graders,
    world: World,
) -> Evaluation[EvalResult]:
    engine, requests, data = evaluator.engine, evaluator.requests, config.data
    if world.rank == 0:
        _say_end_of_turn(model, config.rollout, data.chat)
    if world.rank > 0:
        for asked in requests.values():
            generate(engine, asked)
            engine.release()
        return {}
    graders.describe()
    models = ModelRewards(config.reward, model.policy.device, data.date).scores(engine.release)

    def grading(groups: Sequence[Group]) -> GradeStats:
        if world.size > 1:  # reward models release it on this rank; what all capture must be alike
            engine.release()
        return graders.collect(groups, models=models)

    evaluation = evaluator.run(progress, grading)
    stops = model.sampling(config.rollout).stop_token_ids
    made = [
        one for _, groups in evaluation.values() for group in groups for one in group.completions
    ]
    if config.rollout.special_tokens == "hide" and (
        note := describe_hidden(made, model.tokenizer, stops)
    ):
        say(f"isobit: {note}")
    return evaluation


def _check_acting(environment: EnvironmentConfig | None, world: World) -> None:
    if environment is not None and world.size > 1:
        raise ConfigError(
            "an environment's episodes are drawn by one process; leave cluster.rollout_tp out"
        )


class _Unrecorded:
    """The ``KnownAnswers`` of completions that nobody repeats."""

    def begin(self, weights_version: int, prompts: Sequence[tuple[str, int]]) -> None: ...

    def find(self, key: Sequence[Any]) -> None: ...

    def end(self, answers: Sequence[Any]) -> None: ...


def read_tools(
    environments: Environments[Handle],
    environment: EnvironmentConfig,
    chat: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> Tools:
    """The tools of an environment whose processes are open.

    Raises ConfigError for a chat template that cannot be continued.
    """
    schemas, leads, speaks = environments.tools(), environments.leads, environments.speaks
    if leads and not (chat.chat and tokenizer.chat_template):
        why = "data.chat is false" if tokenizer.chat_template else "the tokenizer has none"
        raise ConfigError(f"an environment of verifiers needs a chat template, but {why}")
    form = environment.format if schemas else "plain"
    known = tool_format(tokenizer, chat) if form == "auto" else form
    speakers: dict[Speaker, bool] = {"tool": bool(schemas) or not leads, "user": speaks}
    answered_by: list[Speaker] = [who for who, does in speakers.items() if does]
    made = Continuation(tokenizer, chat, known, schemas, stop_token_ids, answered_by)
    return Tools(schemas, known, made, environments.note)


@contextmanager
def open_environments(
    config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Environments[Handle]]:
    """A block with the environment's processes.  Raises ToolError for a class that cannot be
    loaded.
    """
    most = most_characters(config.max_result_tokens, tokenizer)
    environments = Environments[Handle](config, most)
    try:
        environments.tools()
        yield environments
    finally:
        environments.close()


@contextmanager
def _acting(
    environment: EnvironmentConfig | None,
    chat: ChatConfig,
    model: SamplingModel,
    rollout: RolloutConfig,
    engine: RolloutEngine,
) -> Iterator[Acting]:
    """A block with the environment's processes.  Raises as they and ``read_tools`` do."""
    if environment is None:
        yield (), None
        return
    tokenizer, stops = model.tokenizer, model.sampling(rollout).stop_token_ids
    with open_environments(environment, tokenizer) as opened:
        tools = read_tools(opened, environment, chat, tokenizer, stops)
        say(f"isobit: {tools.describe()}")
        episodes = Episodes(
            environment, tools, opened, _Unrecorded(), tokenizer, model.context, engine
        )
        yield tools.schemas, partial(episodes.generate, ALONE, model.policy.version)


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
    noticed = {name: Noticed() for name in data.eval}
    # an answer may end at the context's end, unless prompts that leave less room are not wanted
    longest = evaluation_limit(config.evaluation, config.rollout)
    new_tokens = 1 if data.too_long == "refuse" else longest
    too_long = {name: TooLong(data.too_long) for name in data.eval}
    sets = {
        name: build_prompts(
            name,
            source,
            tokenizer,
            data,
            context,
            too_long[name],
            new_tokens,
            noticed[name],
            tools=tools,
        )
        for name, source in data.eval.items()
    }
    if world.rank == 0 and (said := describe_too_long(too_long)):
        say(f"isobit: {said.removeprefix('; ')}")
    if graded:
        _say_notes(check_references(config.reward, sets), world)
    _say_notes(rendering_notes(data, tokenizer, noticed), world)
    return sets


def _say_notes(notes: Sequence[str], world: World) -> None:
    for line in notes if world.rank == 0 else ():
        say(f"isobit: {line}")


def rollout_folder(
    folder: Path,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]] | DataSource,
    settings: GenerationConfig,
    samples: int = 1,
    seed: int = 0,
    chat: bool = True,
    progress: Callable[[Progress], None] | None = None,
    world: World = ALONE,
    take: Callable[[Group], None] | None = None,
) -> list[Group]:
    """Complete each prompt ``samples`` times; a completion that would outgrow the model's context
    ends there ("length").  Where the settings say nothing of the temperature, one sample is greedy,
    which shows what a model has learnt.  ``take`` is given each group as soon as it and those
    before are there.

    ``prompts`` are texts or lists of chat messages, or a dataset whose prompt column holds them.
    Raises ModelError, DataError or RequestError, before anything is generated, for what cannot be
    used, and ConfigError for several samples of greedy decoding.  Ranks of ``world`` share the
    model, and each has all completions.
    """
    check_ranks(settings.cluster.rollout_tp, world)
    _check_acting(settings.environment, world)
    rollout = _with_temperature(settings.rollout, samples)
    check_greedy(samples, rollout.temperature, "samples", "rollout.temperature")
    model = load_sampling_model(folder, settings.precision, settings.device, world)
    rows = (
        load_rows(prompts)
        if isinstance(prompts, ColumnsData | ReasoningGymData)
        else [row_of(prompt, {}, f"prompt {i}") for i, prompt in enumerate(prompts)]
    )
    how = settings.data if chat else settings.data.model_copy(update={"chat": False})
    how, noticed = with_date(how, [folder] if how.chat else [], world), Noticed()
    engine = NativeEngine(model.policy, rollout, model.tokenizer, seed)
    with _acting(settings.environment, how, model, rollout, engine) as (schemas, acts):
        made = prompts_of_rows(
            "prompt",
            rows,
            model.tokenizer,
            how,
            context_tokens=model.context,
            noticed=noticed,
            tools=schemas,
        )
        _say_notes(rendering_notes(how, model.tokenizer, {"prompts": noticed}), world)
        requests = [Request(prompt, 0, samples, model.sampling(rollout)) for prompt in made]
        if world.rank == 0:
            _say_end_of_turn(model, rollout, chat)
        complete = _in_order(made, take) if take is not None else None
        if acts is not None:
            completions, *_ = acts(requests, progress, complete)
        else:
            completions = generate(engine, requests, progress, complete)
    return [Group(prompt, 0, group) for prompt, group in zip(made, completions, strict=True)]


def _say_end_of_turn(model: SamplingModel, rollout: RolloutConfig, chat: bool) -> None:
    for line in describe_end_of_turn(model.tokenizer, chat, model.sampling(rollout).stop_token_ids):
        say(f"isobit: {line}")


def _in_order(
    prompts: Sequence[Prompt], take: Callable[[Group], None]
) -> Callable[[int, list[Completion]], None]:
    """Takes completions by the place of their prompt, as they come, and hands them on in order."""
    waiting: dict[int, list[Completion]] = {}
    due = 0

    def complete(place: int, completions: list[Completion]) -> None:
        nonlocal due
        waiting[place] = completions
        while due in waiting:
            take(Group(prompts[due], 0, waiting.pop(due)))
            due += 1

    return complete


def _with_temperature(rollout: RolloutConfig, samples: int) -> RolloutConfig:
    """Greedy for one sample, unless something is said of how it is drawn."""
    said = {"temperature", "top_k", "top_p", "min_p"} & rollout.model_fields_set
    return rollout if said or samples > 1 else rollout.model_copy(update={"temperature": 0.0})


def completion_lines(group: Group) -> Iterator[bytes]:
    """A JSON object, as a line, a completion: its prompt and columns, text, tokens and their
    log-probabilities, and with an environment its turns and results as messages and the rewards of
    turns.
    """
    for sample, completion in enumerate(group.completions):
        record: dict[str, Any] = {
            "prompt_id": group.prompt.id,
            "sample": sample,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            **({"stop_string": completion.stop_string} if completion.stop_string else {}),
            "token_ids": completion.token_ids,
            "log_probs": completion.log_probs,
            "columns": dict(group.prompt.row),
        }
        if completion.episode is not None:
            record["messages"] = completion.episode.messages
        if completion.sequence.turn_rewards is not None:
            record["turn_rewards"] = completion.sequence.rewards_of_turns
        if completion.routings is not None:
            record["routings"] = completion.routings
        yield json_line(record, default=str)
