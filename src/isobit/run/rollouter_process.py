"""The ranks of a training, divided: the first ones train, and each of the last is a rollouter,
which carries out the trainers' commands (``isobit.run.rollouters``).

    command          what a rollouter does, and sends back
    "take weights"   receives the published weights
    "probe"          samples the beginnings of a few answers
    "sample"         samples, grades and compares the next batch
    "evaluate"       completes and grades every evaluation set
    "end"            ends
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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
from isobit.run.rollouters import Rollouters, check_parts
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
        # a signal waits for a command's end, since the run's own interruption hears none
        around = replace(Surroundings.none(world), graders=graders, environments=environments)
        run = prepare_rl(recipe, world, around=around, learns=False)
        if graders is not None:
            graders.describe()
        with interruption:
            rollouters.check_machines(run.model.policy.device)
            while (command := rollouters.receive_command(interruption.check))["do"] != "end":
                _obey(command, run, rollouters)


def _obey(command: Mapping[str, Any], run: RlRun, rollouters: Rollouters) -> None:
    match command["do"]:
        case "take weights":
            rollouters.transfer_weights(run.model.policy)
        case "probe":
            run.sampler.restore(command["sampler"])
            rollouters.send_result(lambda: completions_value(run.sample_few()))
        case "sample":
            rollouters.send_result(lambda: _served(_serve_batch, run, command))
        case _:
            rollouters.send_result(lambda: _served(_serve_evaluation, run, command))


def _served(
    serve: Callable[[RlRun, Mapping[str, Any]], dict[str, Any]],
    run: RlRun,
    command: Mapping[str, Any],
) -> dict[str, Any]:
    """The result of a command, with what the run was given for it; the records begin where the
    trainers' stand.
    """
    ahead = {name: [line.encode() for line in lines] for name, lines in command["ahead"].items()}
    rewards = SentRecord(lambda _: None, ahead["gradings"])
    answers = SentAnswers(lambda _: None, ahead["answers"])
    run.take_records(rewards, answers)
    result = serve(run, command)
    sent = {"gradings": rewards.gradings, "answers": answers.sent}
    recorded = {name: [line.decode() for line in lines] for name, lines in sent.items()}
    return {**result, "given": recorded}


def _serve_batch(run: RlRun, command: Mapping[str, Any]) -> dict[str, Any]:
    """The next batch, and where the order of prompts stands after it."""
    run.sampler.restore(command["sampler"])
    batch = collect(run)
    with run.turns.training(run.clock):
        batch = compared(batch, run.trainer)
    return {
        "batch": batch_value(batch),
        "engine": asdict(batch.engine),
        "seconds": run.clock.take(),
        "sampler": run.sampler.state(),
    }


def _serve_evaluation(run: RlRun, _: Mapping[str, Any]) -> dict[str, Any]:
    """The graded groups of each evaluation set."""
    evaluation = run.evaluate_now()
    run.clock.take()  # the trainers count what they wait
    return {"sets": {name: groups_value(groups) for name, (_, groups) in evaluation.items()}}
