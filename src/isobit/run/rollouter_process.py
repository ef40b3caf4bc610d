"""The ranks of a training, divided: the first ones train, and each of the last is a rollouter,
which samples what the trainers ask for (``isobit.run.rollouters``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from isobit.config.load import build
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_started
from isobit.parallel.parts import Parts, has_come_back
from isobit.parallel.world import ALONE, Board, World
from isobit.records.wire import completions_value, groups_value
from isobit.run.agreement import check_recipes
from isobit.run.free_batches import FreeBatches
from isobit.run.interruption import Interruption
from isobit.run.loop import collect, draw_batch, train
from isobit.run.open_run import environments_of, open_graders
from isobit.run.pending import batch_value, compared, compared_sequences
from isobit.run.resolved import ResolvedRecipe, as_begun, resolve, settled
from isobit.run.rl_run import RlRun, prepare_rl, read_rl
from isobit.run.rollouters import Asked, Rollouters
from isobit.run.run import Surroundings
from isobit.store.reward_record import SentAnswers, SentRecord
from isobit.store.schedule_record import SentSchedule


def train_by_ranks(
    config: RunConfig, resume: bool = False, world: World = ALONE, allowed: Sequence[str] = ()
) -> None:
    """``train`` by all ranks of a world, or by its first ones while the others sample
    (``cluster.rollouters``).  Raises as it does, and ConfigError for a world that is too small.
    """
    if has_come_back(world):
        parts = Parts(world, config.cluster.rollouters)
        begun = as_begun(resolve(recipe_of_trainers(parts.board)), True, parts.mine)
        sample_for_trainers(begun, Rollouters(parts))
        return
    check_recipes(world, config)  # whatever follows differs with them, also which ranks meet
    check_started(config, world.size)
    if not config.cluster.rollouters:
        train(config, resume=resume, world=world, allowed=allowed)
        return
    recipe = as_begun(resolve(config), resume, world)
    if world.rank == 0:
        tell_recipe(world.board, recipe.config)
    parts = Parts(world, config.cluster.rollouters)
    rollouters = Rollouters(parts)
    if rollouters.is_rollouter:
        sample_for_trainers(recipe, rollouters)
        return
    with rollouters.errors_shared():
        train(
            recipe.config,
            resume=resume,
            world=rollouters.mine,
            rollouters=rollouters,
            allowed=allowed,
        )


_RECIPE = "recipe"
"""The note with the recipe of the run, as it has begun: the files that it was read from may change
before rollouters come back.
"""


def tell_recipe(board: Board, config: RunConfig) -> None:
    """Note the recipe for rollouters that come back."""
    board.post(_RECIPE, config.model_dump_json(exclude_unset=True).encode())


def recipe_of_trainers(board: Board) -> RunConfig:
    """The recipe of the trainers."""
    note = board.read(_RECIPE)
    assert note is not None, "trainers note it before they can go on with others"
    return build(RunConfig, json.loads(note), "the recipe of the trainers")


def sample_for_trainers(recipe: ResolvedRecipe[RunConfig], rollouters: Rollouters) -> None:
    """What a rollouter does until the trainers are done.  Raises what ``train`` raises of sampling
    and grading, and PeerError where they fail.
    """
    world, interruption = rollouters.mine, Interruption(rollouters.mine)
    with (
        rollouters.errors_shared(),
        interruption.open_to_requests(),
        open_graders(recipe.config) as graders,
        environments_of(recipe) as environments,
    ):
        recipe = settled(recipe, read_rl)
        around = replace(Surroundings.none(world), graders=graders, environments=environments)
        if recipe.config.asynchrony.max_staleness is not None:
            around = replace(around, interruption=interruption)
        # with a lag a signal waits for an answer, since the run's own interruption hears none
        run = prepare_rl(recipe, world, around=around, learns=False)
        if graders is not None:
            graders.describe()
        with interruption:
            if not rollouters.come(interruption.check):
                return
            rollouters.check_machines(run.model.policy.device, run.inputs)
            while (asked := rollouters.wait(run.model.policy, interruption.check)) is not None:
                rollouters.answer(partial(_sampled, run, rollouters, asked))
                if run.free_batches is not None:
                    run.free_batches.check()


def _sampled(run: RlRun, rollouters: Rollouters, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for, where the order of prompts stands after it, and what the run was given for
    it; order and records begin where the trainers' stand.
    """
    ahead = {name: [line.encode() for line in lines] for name, lines in asked["ahead"].items()}
    rewards = SentRecord(lambda _: None, ahead["gradings"])
    answers = SentAnswers(lambda _: None, ahead["answers"])
    schedule = SentSchedule(lambda _: None, ahead["schedule"])
    run.take_records(rewards, answers, schedule)
    run.sampler.restore(asked["sampler"])
    result = _SAMPLED[asked["what"]](run, rollouters, asked)
    sent = {"gradings": rewards.gradings, "answers": answers.sent, "schedule": schedule.sent}
    given = {name: [line.decode() for line in lines] for name, lines in sent.items()}
    seconds, sampler = run.clock.take(), run.sampler.state()
    return {**result, "seconds": seconds, "sampler": sampler, "given": given}


def _batch(run: RlRun, *_: Any) -> dict[str, Any]:
    """The next batch, compared by the weights that drew it."""
    batch = collect(run)
    with run.turns.training(run.clock):
        batch = compared(batch, run.trainer)
    return {"batch": batch_value(batch), "engine": asdict(batch.engine)}


def _chosen(run: RlRun, _: Rollouters, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The batch of a step; it is compared with all else that the step's weights draw."""
    free = _free_batches_of(run)
    if asked["open"] is not None:
        free.restore(**asked["open"])
    batch = draw_batch(run, free, asked["step"])
    return {"batch": batch_value(batch), "line": free.line_then(asked["step"])}


def _open(run: RlRun, rollouters: Rollouters, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The open groups, drawn on while the step learns; and what the comparison has found, which
    comes before the step has learnt where nothing is left to draw.
    """
    free, learnt, beat = _free_batches_of(run), rollouters.have_learnt, run.world.pulse.beat
    with run.clock("rollout"):
        free.or_go_back(lambda: free.draw_on(learnt, beat))
        engine = free.end_step(asked["step"])
    with run.turns.training(run.clock):
        comparison, mismatch = compared_sequences(run.trainer, free.to_compare)
    answer = {
        "open": free.value(),
        "engine": asdict(engine),
        "comparison": asdict(comparison),
        "mismatch": mismatch,
        "late": free.late,
    }
    free.grade_on(learnt, beat)
    return answer


def _free_batches_of(run: RlRun) -> FreeBatches:
    assert run.free_batches is not None, "this is asked under a free schedule alone"
    return run.free_batches


def _evaluation(run: RlRun, *_: Any) -> dict[str, Any]:
    """The figures and the graded groups of each evaluation set."""
    made = run.evaluate_now()
    return {
        "figures": {name: asdict(figures) for name, (figures, _) in made.items()},
        "groups": {name: groups_value(groups) for name, (_, groups) in made.items()},
    }


def _few(run: RlRun, *_: Any) -> dict[str, Any]:
    return {"samples": completions_value(run.sample_few())}


_SAMPLED: Mapping[Asked, Callable[[RlRun, Rollouters, Mapping[str, Any]], dict[str, Any]]] = {
    "batch": _batch,
    "chosen": _chosen,
    "open": _open,
    "evaluation": _evaluation,
    "few": _few,
}
