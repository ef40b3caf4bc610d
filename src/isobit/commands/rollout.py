"""``isobit rollout``: a model folder completes texts or the rows of a file; nothing is graded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.config.commands import GenerationConfig
from isobit.config.data import ColumnsData, DataSource, ReasoningGymData
from isobit.config.environment import EnvironmentConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.rules import check_greedy
from isobit.data.prompts import Noticed, prompts_of_rows
from isobit.data.sources import load_rows, row_of
from isobit.data.stop_tokens import describe_end_of_turn
from isobit.kernels.backend import use_back_end
from isobit.models.folder import SamplingModel, load_sampling_model
from isobit.models.tensor_parallel import check_ranks
from isobit.parallel.world import ALONE, World
from isobit.records.text import Completion, Group, Prompt
from isobit.rollout.engine import generate
from isobit.rollout.engine_stats import Progress
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.run.acting import episodes_of
from isobit.run.data import rendering_notes
from isobit.run.resolved import with_date
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_line
from isobit.util.terminal import say


def check_acting(environment: EnvironmentConfig | None, world: World) -> None:
    if environment is not None and world.size > 1:
        raise ConfigError(
            "an environment's episodes are drawn by one process; leave cluster.rollout_tp out"
        )


def say_notes(notes: Sequence[str], world: World) -> None:
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
    check_acting(settings.environment, world)
    rollout = _with_temperature(settings.rollout, samples)
    check_greedy(samples, rollout.temperature, "samples", "rollout.temperature")
    use_back_end(settings.back_end)
    model = load_sampling_model(folder, settings.precision, settings.device, world)
    rows = (
        load_rows(prompts)
        if isinstance(prompts, ColumnsData | ReasoningGymData)
        else [row_of(prompt, {}, f"prompt {i}") for i, prompt in enumerate(prompts)]
    )
    how = settings.data if chat else settings.data.model_copy(update={"chat": False})
    how, noticed = with_date(how, [folder] if how.chat else [], world), Noticed()
    engine = NativeEngine(model.policy, rollout, model.tokenizer, seed)
    with episodes_of(settings.environment, how, model, rollout, engine) as (schemas, acts):
        made = prompts_of_rows(
            "prompt",
            rows,
            model.tokenizer,
            how,
            context_tokens=model.context,
            noticed=noticed,
            tools=schemas,
        )
        say_notes(rendering_notes(how, model.tokenizer, {"prompts": noticed}), world)
        requests = [Request(prompt, 0, samples, model.sampling(rollout)) for prompt in made]
        if world.rank == 0:
            say_end_of_turn(model, rollout, chat)
        complete = _in_order(made, take) if take is not None else None
        if acts is not None:
            completions, *_ = acts(requests, progress, complete)
        else:
            completions = generate(engine, requests, progress, complete)
    return [Group(prompt, 0, group) for prompt, group in zip(made, completions, strict=True)]


def say_end_of_turn(model: SamplingModel, rollout: RolloutConfig, chat: bool) -> None:
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
