"""``async.max_staleness`` with an environment: episodes stay open while steps learn."""

import os
import shutil
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.data.tool_calls import ToolCall
from isobit.environments.pool import Environments
from isobit.models.folder import read_config
from isobit.models.safetensors import TensorFile
from isobit.observe.console import silent
from isobit.records.sequence import GIVEN
from isobit.records.wire import completions_of
from isobit.rollout import episodes
from isobit.run.free_batches import FreeBatches
from isobit.run.loop import train
from isobit.run.pending import value_of
from isobit.store.keeper import CheckpointKeeper
from isobit.util.errors import RewardError, ServerError, ToolError
from tests.environments.servers import Count, serving
from tests.rollout.served import served
from tests.run import acting
from tests.run.test_environment import HELD_OUT, STOPS, TOOLS
from tests.run.test_free_batches import Hurried, check_bounds, left_by, schedule_of
from tests.run.test_lag import Killed, steps_of, train_to_a_death
from tests.serve.servers import KEY
from tests.tiny import json_lines
from tests.worlds import in_world

MakeConfig = Callable[..., RunConfig]
STEPS = 5


@pytest.fixture
def free_acting(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    """Few places, so that episodes of a group begin and end apart."""
    monkeypatch.setattr(episodes, "read_turn", acting.reading(acting.parse))

    def make(max_staleness: int | None, name: str = "Counter", **sections: Any) -> RunConfig:
        given: dict[str, Any] = {
            "environment": {"class": f"{TOOLS}:{name}", "max_turns": 6},
            "rollout": {"max_new_tokens": 40, "stop_tokens": STOPS, "max_sequences": 7},
            "training": {"steps": STEPS, "learning_rate": 1e-2},
            "checkpoint": {"every": 1, "keep_last": 9},
            "data": {"eval": {"held_out": {**HELD_OUT, "limit": 2}}},
            "evaluation": {"every": 2},
            "async": {"max_staleness": max_staleness},
            "tracking": {"completions": "all"},
        }
        gives = name in ("Counter", "Paced", "Slow", "Ticking")
        reward = "environment" if gives else "isobit.starter.tasks:correct_answer"
        return make_config(reward, **{**given, **sections})

    return make


def left_with_answers(root: Path) -> dict[str, Any]:
    return {**left_by(root), "answers": (root / "environment.jsonl").read_bytes()}


def open_samples(root: Path, step: int) -> list[Any]:
    path = root / "checkpoints" / f"step_{step:06}" / "open_groups.safetensors"
    tensors = TensorFile(path)
    if "samples" not in tensors:
        return []
    return completions_of(value_of(tensors["samples"]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Counter", "Paced", "Speaks"])
def test_without_staleness_it_is_the_synchronous_run(
    name: str, free_acting: MakeConfig, tmp_path: Path
) -> None:
    three: dict[str, Any] = {"training": {"steps": 3, "learning_rate": 1e-2}}
    synchronous = free_acting(None, name, output=tmp_path / "synchronous", **three)
    train(synchronous, silent())
    config = free_acting(0, name, output=tmp_path / "free", **three)
    train(config, silent())
    assert left_with_answers(config.output) == left_with_answers(synchronous.output)
    assert [line["drawn"] for line in schedule_of(config.output)] == [[]] * 3


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [3, None])
def test_episodes_go_on_with_other_weights_and_are_replayed(
    step: int | None, free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = free_acting(2)
    summary = train(config, silent())
    assert summary.tokens_differing == 0 < summary.tokens_compared
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    steps = steps_of(config.output)
    assert any(line["staleness/mean"] % 1 for line in steps), (
        "an episode has tokens of two versions"
    )
    several = [
        one
        for step in range(1, STEPS)
        for one in open_samples(config.output, step)
        if one.finish_reason == "aborted" and len(one.sequence.turn_lengths) > 1
    ]
    assert any(len(set(one.weights_versions)) > 1 for one in several), "over turns and versions"
    for sequence in (one.sequence for one in several):
        assert all(sequence.weights_versions[~sequence.loss_mask] == GIVEN)

    ask_nothing(monkeypatch)
    again = replay(config.output, step, say=lambda _: None, recorded_rewards=True)
    assert again.differences == []


def ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was asked")

    monkeypatch.setattr(Environments, "ask", refuse)


@pytest.mark.exhaustive  # test_free_batches has it for samples without turns
@pytest.mark.parametrize("name", ["Speaks", "Paced", "Counter"])
def test_a_schedule_that_time_has_made_is_replayed_and_resumed(
    name: str, free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last steps again by the lines that are there, killed behind the first of them: they leave
    the same bytes, and ask for nothing that is recorded.
    """
    config = free_acting(2, name)
    with monkeypatch.context() as patch:
        Hurried(1, patch)
        train(config, silent())
    lines, expected = schedule_of(config.output), left_with_answers(config.output)
    assert replay(config.output, say=lambda _: None).differences == []
    for step in range(3, STEPS + 1):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}")
    ask_nothing(monkeypatch)
    train_to_a_death(monkeypatch, config, resume=True)
    train(config, silent(), resume=True)
    assert schedule_of(config.output) == lines
    assert left_with_answers(config.output) == expected


@pytest.mark.exhaustive
def test_records_cut_before_the_only_checkpoint_lose_nothing_of_later_steps(
    free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after steps 2 and 4, of which only the first leaves a checkpoint; between
    them rewards, answers and schedule lose half a line.  The last part asks for nothing.
    """
    save = CheckpointKeeper.save_if_due

    def die_at(step: int, patch: pytest.MonkeyPatch) -> None:
        def save_or_die(self: CheckpointKeeper, done: int) -> None:
            save(self, done)
            if done == step:
                raise Killed

        patch.setattr(CheckpointKeeper, "save_if_due", save_or_die)

    for step, every in ((2, 2), (4, 9)):
        config = free_acting(1, training={"steps": 4}, checkpoint={"every": every, "keep_last": 1})
        with monkeypatch.context() as patch:
            die_at(step, patch)
            with pytest.raises(Killed):
                train(config, silent(), resume=True)
        paths = [config.output / f"{name}.jsonl" for name in ("rewards", "environment", "schedule")]
        before = [path.read_bytes() for path in paths]
        for path, content in zip(paths, before, strict=True):
            if step == 2:
                os.truncate(path, len(content) - len(content.splitlines()[-1]) // 2)
    ask_nothing(monkeypatch)
    train(config, silent(), resume=True)
    for path, content in zip(paths, before, strict=True):
        assert path.read_bytes() == content
        assert [list(line) for line in json_lines(path)].count(["lost_bytes"]) == 1


@pytest.mark.exhaustive  # a death behind a step is above
@pytest.mark.parametrize("name", ["Moody", "Counter"])
def test_killed_between_any_two_steps_it_is_one_run(
    name: str, free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with an environment that never says the same twice."""
    calls = acting.reading(lambda text: [ToolCall("now", {})] if len(text) % 3 else [])
    if name == "Moody":
        monkeypatch.setattr(episodes, "read_turn", calls)
    config = free_acting(2, name)
    for step in range(1, STEPS + 1):
        train_to_a_death(monkeypatch, config, resume=step > 1)
    assert train(config, silent(), resume=True).tokens_differing == 0
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    check_answers(config.output)
    ask_nothing(monkeypatch)
    again = replay(config.output, say=lambda _: None, recorded_rewards=True)
    assert again.differences == []


def told_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The turns that environments are told of, by questions."""
    told, ask = list[int](), Environments.ask

    def watched(self: Environments[Any], key: Any, columns: Any, turns: Any, *more: Any) -> None:
        told.append(len(turns))
        ask(self, key, columns, turns, *more)

    monkeypatch.setattr(Environments, "ask", watched)
    return told


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [None, 0, 1])
@pytest.mark.parametrize("samples", [2, 3])
def test_every_token_is_counted_where_all_turns_end_at_once(
    staleness: int | None, samples: int, free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has nothing to do between turns of one token whose answers are recorded."""
    monkeypatch.setattr(episodes, "read_turn", acting.reading(lambda text: [ToolCall("now", {})]))
    stops = [*string.ascii_letters, *string.digits, *string.punctuation]
    training = {"steps": 4, "prompts_per_step": 1, "samples_per_prompt": samples}
    rollout = {"max_new_tokens": 40, "stop_tokens": stops, "max_sequences": 7}
    config = free_acting(staleness, "Moody", training=training, rollout=rollout)
    train(config, silent())
    ask_nothing(monkeypatch)
    assert replay(config.output, say=lambda _: None, recorded_rewards=True).differences == []


def check_answers(root: Path) -> None:
    """Each answer is recorded once."""
    keys = [
        (line["weights_version"], tuple(key)) if key[0].startswith("held") else tuple(key)
        for line in json_lines(root / "environment.jsonl")
        for key, _ in line["answers"]
    ]
    assert len(set(keys)) == len(keys) > 20


@pytest.mark.exhaustive
def test_killed_in_the_middle_of_episodes_it_is_one_run(free_acting: MakeConfig) -> None:
    """By SIGKILL, before anything is recorded of the step, and then by two processes."""
    config = free_acting(2, evaluation={"every": 0})
    values = config.model_dump(mode="json", by_alias=True)
    for moment, ranks in ((40, 1), (30, 2), (20, 1)):
        case = {"config": values, "dies": (moment, 0), "counter": f"{config.output}-{moment}"}
        with pytest.raises(AssertionError, match="exit -9"):
            in_world(ranks, "tests.run.acting:resume", case)
    in_world(2, "tests.run.acting:resume", {"config": values})
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    check_answers(config.output)
    lines = schedule_of(config.output)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    steps = steps_of(config.output)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * STEPS
    assert replay(config.output, say=lambda _: None).differences == []


@pytest.mark.exhaustive  # rollouters do, below
@pytest.mark.parametrize("name", ["Counter", "Slow"])
def test_servers_draw_open_episodes_on_while_a_step_learns(
    name: str, free_acting: MakeConfig, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is asked for once.  How much is drawn beside a step is a matter of time."""
    monkeypatch.setenv("SERVER_KEY", KEY)
    told = told_turns(monkeypatch)
    settings = read_config(tiny_folder)
    rollout = {"max_new_tokens": 40, "stop_tokens": STOPS, "engine": "http"}
    with served(config=settings) as one, served(config=settings) as two:
        servers = {"servers": [one, two], "server_key": "env:SERVER_KEY"}
        config = free_acting(2, name, rollout={**rollout, **servers})
        assert train(config, silent()).tokens_differing == 0
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    check_answers(config.output)
    answers = [line["answers"] for line in json_lines(config.output / "environment.jsonl")]
    assert len(told) == sum(map(len, answers))
    ask_nothing(monkeypatch)
    again = replay(config.output, say=lambda _: None, recorded_rewards=True)
    assert again.differences == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Counter", "Speaks", "Slow"])
@pytest.mark.parametrize("turns", [3, 0])
@pytest.mark.parametrize("error", [RewardError, ServerError, ToolError])
def test_a_step_is_not_lost_where_the_drawing_beside_it_fails(
    name: str,
    turns: int,
    error: type[Exception],
    free_acting: MakeConfig,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No checkpoint was due: the last one holds the step all the same."""
    monkeypatch.setenv("SERVER_KEY", KEY)
    rollout = {"max_new_tokens": 40, "stop_tokens": STOPS, "engine": "http"}
    with served(config=read_config(tiny_folder)) as one:
        servers = {"servers": [one], "server_key": "env:SERVER_KEY"}
        config = free_acting(2, name, rollout={**rollout, **servers}, checkpoint={"every": 0})
        with monkeypatch.context() as patch:
            patch.setattr(FreeBatches, "draw_on", FreeBatches.draw_on)  # is put back
            acting.fail_beside(3, turns, error)
            with pytest.raises(error, match="again and again"):
                train(config, silent())
        assert [one.name for one in (config.output / "checkpoints").iterdir()] == ["step_000003"]
        train(config, silent(), resume=True)
    check_whole(config)
    ask_nothing(monkeypatch)
    again = replay(config.output, say=lambda _: None, recorded_rewards=True)
    assert again.differences == []


def check_whole(config: RunConfig) -> None:
    """Nothing is learnt from twice, late, or by other weights than were compared."""
    lines = schedule_of(config.output)
    learnt = [tuple(name) for line in lines for name in line["learns"]]
    assert len({*learnt}) == len(learnt) == STEPS * config.training.prompts_per_step
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    check_answers(config.output)
    steps = steps_of(config.output)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * STEPS


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("turns", [3, 0])
def test_a_step_is_not_lost_where_a_rollouter_fails_beside_it(
    ranks: int, turns: int, free_acting: MakeConfig
) -> None:
    cluster = {"processes": ranks, "rollouters": ranks - 1}
    config = free_acting(2, checkpoint={"every": 0}, cluster=cluster)
    case = {"config": config.model_dump(mode="json", by_alias=True), "turns": turns}
    *others, last = in_world(ranks, "tests.run.acting:fails_beside", case)
    assert last.startswith("ToolError: the host")
    assert all(f"rank {ranks - 1} failed: ToolError: the host" in one for one in others)
    assert [one.name for one in (config.output / "checkpoints").iterdir()] == ["step_000003"]
    in_world(ranks, "tests.run.acting:resume", case)
    check_whole(config)
    assert replay(config.output, say=lambda _: None).differences == []


@pytest.mark.exhaustive
def test_a_server_has_room_for_few_episodes(
    free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait give their room up, to an evaluation and to others of a replay, and are
    played again up to where they were.
    """
    monkeypatch.setattr(
        episodes,
        "read_turn",
        acting.reading(lambda text: [ToolCall("step", {"by": len(text) % 5})]),
    )
    held_out = {"train": {**HELD_OUT, "limit": 4}}  # with the names of the training's prompts
    with serving(Count, capacity=2) as (address, _, _):
        environment = {"openenv": address, "options": {"goal": 5}, "max_turns": 6, "at_once": 2}
        evaluated = {"environment": environment, "data": {"eval": held_out}}
        config = free_acting(2, "OpenEnv", **evaluated, evaluation={"every": 1})
        assert train(config, silent()).tokens_differing == 0
        assert replay(config.output, say=lambda _: None).differences == []
    lines = json_lines(config.output / "environment.jsonl")
    failures = [answer["failure"] for line in lines for _, answer in line["answers"]]
    assert {*failures} == {None}, "nobody was refused for long"


@pytest.mark.exhaustive
def test_a_run_with_more_steps_than_it_once_had_is_replayed(free_acting: MakeConfig) -> None:
    """The last of the first steps could begin no group of the later ones.  Other answers are still
    found.
    """
    few = free_acting(1, training={"steps": 2})
    train(few, silent())
    train(free_acting(1, training={"steps": 4}), silent(), resume=True)
    assert replay(few.output, say=lambda _: None).differences == []
    record = few.output / "environment.jsonl"
    record.write_text(record.read_text().replace("total ", "sum ", 1))
    (found,) = replay(few.output, say=lambda _: None).differences
    assert "'total " in found.what and "'sum " in found.what


@pytest.mark.exhaustive
def test_processes_stay_while_steps_learn_and_over_evaluations(
    free_acting: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools that are slow answer in steps after that in which they were asked; each is asked once,
    and told of one turn at a time.
    """
    told = told_turns(monkeypatch)
    config = free_acting(2, "Slow", evaluation={"every": 1})
    assert train(config, silent()).tokens_differing == 0
    assert max(told) == 1
    answers = [line["answers"] for line in json_lines(config.output / "environment.jsonl")]
    assert len(told) == sum(map(len, answers))
    check_answers(config.output)
    assert replay(config.output, say=lambda _: None).differences == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "rollouters", "name"), [(2, 1, "Counter"), (3, 2, "Paced")])
def test_rollouters_draw_open_episodes_on_while_a_step_learns(
    ranks: int, rollouters: int, name: str, free_acting: MakeConfig
) -> None:
    config = free_acting(2, name, cluster={"processes": ranks, "rollouters": rollouters})
    go_on_in_turn(config, [(ranks, rollouters, None)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layouts", [(2, 1, 1, 2), (1, 3, 2, 1), (3, 2, 3, 1)])
def test_killed_runs_go_on_with_other_numbers_of_rollouters(
    layouts: Sequence[int], free_acting: MakeConfig
) -> None:
    """Of so many ranks all but one are rollouters."""
    dies = [90, 70, 30, None]  # answers; there is a checkpoint behind some 70
    runs = [(ranks, ranks - 1, moment) for ranks, moment in zip(layouts, dies, strict=True)]
    few = {"max_new_tokens": 40, "stop_tokens": STOPS, "max_sequences": 3}  # so that some are open
    go_on_in_turn(free_acting(2, "Slow", rollout=few), runs)


def go_on_in_turn(config: RunConfig, runs: Sequence[tuple[int, int, int | None]]) -> None:
    """One run by processes of which some are rollouters, one after the other, killed behind so many
    answers if they come to as many: nothing differs, and one process replays it.
    """
    values = config.model_dump(mode="json", by_alias=True)
    for ranks, rollouters, moment in runs:
        cluster = {**values["cluster"], "processes": ranks, "rollouters": rollouters}
        case: dict[str, Any] = {"config": {**values, "cluster": cluster}}
        if moment is not None:
            case |= {"dies": (moment, 0), "counter": f"{config.output}-{moment}"}
        try:
            in_world(ranks, "tests.run.acting:resume", case)
        except AssertionError as error:
            if moment is None or "exit -9" not in str(error):
                raise
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)
    check_answers(config.output)
    steps = steps_of(config.output)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * STEPS
    assert replay(config.output, say=lambda _: None).differences == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "rollouters"), [(1, 0), (2, 1), (3, 2), (2, 0)])
def test_answers_that_outlive_the_line_of_their_step_are_not_asked_for_again(
    ranks: int, rollouters: int, free_acting: MakeConfig
) -> None:
    """Of an environment that says something else each time.  Which groups the step learns from, and
    so which of the answers are used again, is a matter of time.
    """
    cluster = {"processes": ranks, "rollouters": rollouters}
    config = free_acting(2, "Ticking", cluster=cluster)
    case = {"config": config.model_dump(mode="json", by_alias=True)}
    dies, lives = (
        {"unscheduled": step, "counter": f"{config.output}-{step}"} for step in (3, None)
    )
    with pytest.raises(AssertionError, match="exit -9"):
        in_world(ranks, "tests.run.acting:resume", {**case, **dies})
    before = said_by_version(config.output, 3)
    assert [line["step"] for line in schedule_of(config.output)] == [1, 2]
    in_world(ranks, "tests.run.acting:resume", {**case, **lives})
    after = said_by_version(config.output, 3)
    again = before.keys() & after.keys()
    assert len(again) > 5
    assert {key: after[key] for key in again} == {key: before[key] for key in again}
    assert replay(config.output, say=lambda _: None, recorded_rewards=True).differences == []


def said_by_version(root: Path, version: int) -> dict[str, Any]:
    """What was said in the step by these weights, by keys."""
    lines = json_lines(root / "environment.jsonl")
    found = [one for one in lines if one["weights_version"] == version]
    return {
        str(key): said
        for line in found
        for key, said in line["answers"]
        if not key[0].startswith("held")
    }


@pytest.mark.exhaustive
def test_rollouters_without_staleness_leave_the_synchronous_run(
    free_acting: MakeConfig, tmp_path: Path
) -> None:
    synchronous = free_acting(None, output=tmp_path / "synchronous")
    train(synchronous, silent())
    config = free_acting(0, output=tmp_path / "free", cluster={"processes": 2, "rollouters": 1})
    values = config.model_dump(mode="json", by_alias=True)
    in_world(2, "tests.run.acting:resume", {"config": values})
    found, expected = left_with_answers(config.output), left_with_answers(synchronous.output)
    assert found == expected


@pytest.mark.exhaustive
def test_servers_draw_for_several_ranks_and_after_a_death(
    free_acting: MakeConfig, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    settings = read_config(tiny_folder)
    with served(config=settings) as one, served(config=settings) as two:
        servers = {"servers": [one, two], "server_key": "env:SERVER_KEY"}
        rollout = {"max_new_tokens": 40, "stop_tokens": STOPS, "engine": "http", **servers}
        go_on_in_turn(free_acting(2, rollout=rollout), [(2, 0, 50), (2, 0, None)])
