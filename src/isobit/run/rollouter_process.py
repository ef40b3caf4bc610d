"""The ranks of a training, divided: the first ones train, and each of the last is a rollouter,
which samples what the trainers ask for (``isobit.run.rollouters``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.parallel.world import ALONE, World
from isobit.records.wire import completions_value, groups_value
from isobit.run.agreement import check_recipes
from isobit.run.interruption import Interruption
from isobit.run.loop import collect, train
from isobit.run.open_run import environments_of, open_graders
from isobit.run.pending import batch_value, compared
from isobit.run.resolved import ResolvedRecipe, as_begun, resolve, settled
from isobit.run.rl_run import RlRun, prepare_rl, read_rl
from isobit.run.rollouters import Asked, Rollouters, check_parts
from isobit.run.run import Surroundings
from isobit.store.reward_record import SentAnswers, SentRecord


def train_by_ranks(
    config: RunConfig, resume: bool = False, world: World = ALONE, allowed: Sequence[str] = ()
) -> None:
    """``train`` by all ranks of a world, or by its first ones while the others sample
    (``cluster.rollouters``).  Raises as it does, and ConfigError for a world that is too small.
    """
    check_recipes(world, config)  # whatever follows differs with them, also which ranks meet
    if not config.cluster.rollouters:
        train(config, resume=resume, world=world, allowed=allowed)
        return
    check_parts(config, world)
    recipe = as_begun(resolve(config), resume, world)
    rollouters = Rollouters(world, config.cluster.rollouters)
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
        # a signal waits for an answer, since the run's own interruption hears none
        around = replace(Surroundings.none(world), graders=graders, environments=environments)
        run = prepare_rl(recipe, world, around=around, learns=False)
        if graders is not None:
            graders.describe()
        with interruption:
            rollouters.check_machines(run.model.policy.device)
            while (asked := rollouters.wait(run.model.policy, interruption.check)) is not None:
                rollouters.answer(partial(_sampled, run, asked))


def _sampled(run: RlRun, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for, where the order of prompts stands after it, and what the run was given for
    it; order and records begin where the trainers' stand.
    """
    ahead = {name: [line.encode() for line in lines] for name, lines in asked["ahead"].items()}
    rewards = SentRecord(lambda _: None, ahead["gradings"])
    answers = SentAnswers(lambda _: None, ahead["answers"])
    run.take_records(rewards, answers)
    run.sampler.restore(asked["sampler"])
    result = _SAMPLED[asked["what"]](run)
    sent = {"gradings": rewards.gradings, "answers": answers.sent}
    given = {name: [line.decode() for line in lines] for name, lines in sent.items()}
    seconds, sampler = run.clock.take(), run.sampler.state()
    return {**result, "seconds": seconds, "sampler": sampler, "given": given}


def _batch(run: RlRun) -> dict[str, Any]:
    """The next batch, compared by the weights that drew it."""
    batch = collect(run)
    with run.turns.training(run.clock):
        batch = compared(batch, run.trainer)
    return {"batch": batch_value(batch), "engine": asdict(batch.engine)}


def _evaluation(run: RlRun) -> dict[str, Any]:
    """The figures and the graded groups of each evaluation set."""
    made = run.evaluate_now()
    return {
        "figures": {name: asdict(figures) for name, (figures, _) in made.items()},
        "groups": {name: groups_value(groups) for name, (_, groups) in made.items()},
    }


def _few(run: RlRun) -> dict[str, Any]:
    return {"samples": completions_value(run.sample_few())}


_SAMPLED: Mapping[Asked, Callable[[RlRun], dict[str, Any]]] = {
    "batch": _batch,
    "evaluation": _evaluation,
    "few": _few,
}
