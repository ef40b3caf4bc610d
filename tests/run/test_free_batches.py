"""``async.max_staleness``: 0 is the synchronous run, nothing is too old, and a run is repeated and
goes on with the schedule that it had.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event, current_thread
from time import sleep
from typing import Any

import pytest

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.models.folder import read_config
from isobit.parallel.world import ALONE, World
from isobit.records.text import Group
from isobit.rollout.open_groups import OpenGroups
from isobit.rollout.shared_groups import Choose, SharedGroups
from isobit.run.free_batches import FreeBatches
from isobit.run.loop import train
from isobit.run.rollouter_process import train_by_ranks
from isobit.store import resume
from isobit.training.step import Learner
from isobit.util.errors import CheckpointError, ConfigError, PeerError
from tests.rollout.served import served
from tests.run.test_lag import (
    REWARD,
    ROWS,
    outcome,
    rows_of,
    steps_of,
    train_to_a_death,
)
from tests.run.test_ranks import write_model
from tests.run.test_rollouters import config_of
from tests.serve.servers import KEY
from tests.tiny import json_lines
from tests.worlds import free_port, in_world

MakeConfig = Callable[..., RunConfig]
STEPS = 6


@pytest.fixture
def free(make_config: MakeConfig, write_reward: Callable[[str], str]) -> MakeConfig:
    """Six steps, with few places, so that samples of a group begin and end apart."""

    def make(max_staleness: int | None, **sections: Any) -> RunConfig:
        return make_config(
            write_reward(REWARD),
            training={"steps": STEPS, "learning_rate": 1e-2, **sections.pop("training", {})},
            rollout={"max_new_tokens": 9, "max_sequences": 7, **sections.pop("rollout", {})},
            checkpoint={"every": 1, "keep_last": 9, **sections.pop("checkpoint", {})},
            **{"async": {"max_staleness": max_staleness}, **sections},
        )

    return make


def left_by(root: Path) -> dict[str, Any]:
    """All bytes that a run leaves but for times, waits, and counts of what the engine did."""
    found = outcome(root)
    for line in found["metrics"]:
        for name in [name for name in line if name.startswith(("rollout/", "waiting/"))]:
            del line[name]
    return found


def schedule_of(root: Path) -> list[dict[str, Any]]:
    return json_lines(root / "schedule.jsonl")


def check_bounds(root: Path, staleness: int, last: int, per_step: int) -> None:
    """No step of ``last`` leaves more open groups than may have begun; each is learnt from once."""
    lines = schedule_of(root)
    for line in lines:
        begun = line["step"] * per_step + len(line["drawn"])
        assert begun <= min(last, line["step"] + staleness) * per_step
    learnt = [tuple(name) for line in lines for name in line["learns"]]
    assert len(set(learnt)) == len(learnt) == last * per_step


def test_without_staleness_it_is_the_synchronous_run(free: MakeConfig, tmp_path: Path) -> None:
    synchronous = free(None, output=tmp_path / "synchronous")
    train(synchronous)
    config = free(0, output=tmp_path / "free")
    train(config)
    assert left_by(config.output) == left_by(synchronous.output)
    assert [line["drawn"] for line in schedule_of(config.output)] == [[]] * STEPS


@pytest.mark.few(1)
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_samples_go_on_with_other_weights_and_nothing_differs(
    staleness: int, free: MakeConfig
) -> None:
    config = free(staleness)
    summary = train(config)
    assert summary.tokens_differing == 0 < summary.tokens_compared
    assert 0 < summary.tokens_learnt <= summary.tokens_generated
    lines = schedule_of(config.output)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert any(any(counts) for line in lines for *_, counts in line["drawn"])
    steps = steps_of(config.output)
    assert any(line["staleness/mean"] % 1 for line in steps), "a sample has tokens of two versions"
    assert all(line["staleness/mean"] <= staleness for line in steps)
    check_bounds(config.output, staleness, STEPS, config.training.prompts_per_step)


def test_what_other_weights_drew_would_differ(
    free: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of 0 is a check: tokens of an older version have other log-probabilities now."""
    monkeypatch.setattr("isobit.run.free_batches.drawn_by", lambda sequence, _: sequence)
    config = free(2, check={"on_mismatch": "warn"})
    assert train(config).tokens_differing > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_killed_between_any_two_steps_it_is_one_run_that_can_be_replayed(
    precision: str, free: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after a kill has another schedule, as an engine that has been elsewhere has; all
    of it together is one run, which repeats from its start.
    """
    config = free(2, precision=precision)
    for step in range(1, STEPS + 1):
        train_to_a_death(monkeypatch, config, resume=step > 1)
    train(config, resume=True)
    assert list(config.output.glob("checkpoints/*/open_groups.safetensors"))
    assert replay(config.output, say=lambda _: None).differences == []
    check_bounds(config.output, 2, STEPS, config.training.prompts_per_step)


class Hurried:
    """An engine's steps that end by chance: the schedule depends on something that no record but
    ``schedule.jsonl`` has.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, least: int = 0) -> None:
        """``least`` turns come behind each choice in any case."""
        self._state = seed
        turns = SharedGroups._turns

        def more(shared: SharedGroups, choose: Choose, *arguments: Any) -> list[int]:
            places = turns(shared, choose, *arguments)
            for _ in range(least + self._random() % 5):
                shared.open.turn()
            return places

        monkeypatch.setattr(SharedGroups, "_turns", more)

    def _random(self) -> int:
        self._state = self._state * 1103515245 + 12345 & 0x7FFFFFFF
        return self._state >> 16


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after", "steps"), [(4, 1, 6), (4, 2, 4), (4, 4, 3), (1, 3, 5)])
def test_other_bounds_and_steps_at_a_resume(
    before: int,
    after: int,
    steps: int,
    free: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It learns from what is open, says so where it is more than may be, and is replayed whole."""
    for step in (1, 2):
        with monkeypatch.context() as patch:
            Hurried(0, patch, least=200)  # all that may begin is drawn to its end
            train_to_a_death(patch, free(before), resume=step > 1)
    config = free(after, training={"steps": steps, "learning_rate": 1e-2})
    train(config, resume=True, allowed=["async.max_staleness"] if after != before else [])
    assert ("learn from older ones" in capfd.readouterr().err) == (after < before)
    lines = schedule_of(config.output)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    if steps == STEPS:
        check_bounds(config.output, before, steps, config.training.prompts_per_step)
    assert replay(config.output, say=lambda _: None).differences == []


def test_open_groups_that_a_bound_of_0_has_not_are_told(
    free: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Hurried(0, patch, least=200)
        train_to_a_death(patch, free(2))
    with pytest.raises(CheckpointError, match=r"open_groups.* async.max_staleness .*set it to"):
        train(free(0), resume=True, allowed=["async.max_staleness"])


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_schedule_that_time_has_made_is_replayed_and_resumed(
    seed: int, free: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = free(2)
    with monkeypatch.context() as patch:
        Hurried(seed, patch)
        train(config)
    lines, expected = schedule_of(config.output), left_by(config.output)
    for step in (None, 4):
        found = replay(config.output, step, say=lambda _: None)
        assert found.differences == []
    # the last three steps again, by the lines that are there, and killed behind the first of them
    for step in range(4, STEPS + 1):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}")
    train_to_a_death(monkeypatch, config, resume=True)
    train(config, resume=True)
    assert schedule_of(config.output) == lines
    assert left_by(config.output) == expected


@pytest.mark.exhaustive
def test_a_replay_that_draws_a_token_by_other_weights_is_found(
    free: MakeConfig, tmp_path: Path
) -> None:
    config = free(2)
    train(config)
    path = config.output / "schedule.jsonl"
    lines = schedule_of(config.output)
    line = next(line for line in lines if any(any(counts) for *_, counts in line["drawn"]))
    counts = next(counts for *_, counts in line["drawn"] if any(counts))
    place = next(place for place, count in enumerate(counts) if count)
    counts[place] -= 1
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = replay(config.output, say=lambda _: None)
    assert {one.step for one in found.differences} != set()


def test_servers_sample_while_a_step_learns_and_one_process_replays_it(
    free: MakeConfig, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the servers had drawn when the weights changed is in the record alone."""
    monkeypatch.setenv("SERVER_KEY", KEY)
    learn, turn, beside = Learner.update, OpenGroups.turn, Event()

    def watched(self: OpenGroups) -> None:
        before = self.counted.generated_tokens
        turn(self)
        if current_thread().name == "sampling" and self.counted.generated_tokens > before:
            beside.set()

    def until_drawn(self: Learner, groups: Any, estimated: Any, step: int, *more: Any) -> Any:
        assert step > 1 or beside.wait(120), "nothing was drawn while the first step learnt"
        return learn(self, groups, estimated, step, *more)

    monkeypatch.setattr(OpenGroups, "turn", watched)
    monkeypatch.setattr(Learner, "update", until_drawn)
    settings = read_config(tiny_folder)
    with served(config=settings) as one, served(config=settings) as two:
        rollout = {"engine": "http", "servers": [one, two], "server_key": "env:SERVER_KEY"}
        config = free(3, rollout=rollout)
        summary = train(config)
    assert summary.tokens_differing == 0 < summary.tokens_compared
    assert any(line["drawn"] for line in schedule_of(config.output))
    found = replay(config.output, say=lambda _: None)
    assert found.differences == []


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"async": {"lag": 1, "max_staleness": 1}}, "async.lag is 1"),
        ({"algorithm": {"name": "remax"}}, "greedy"),
        ({"algorithm": {"dynamic_sampling": True}}, "dynamic_sampling"),
        ({"algorithm": {"calibrate_every": 2}}, "calibrate_every"),
        ({"precision": {"preset": "fp8", "kv_scales": "per_tensor"}}, "per_tensor"),
        ({"replay": {"fraction": 0.5, "max_staleness": 1}}, "replay.max_staleness"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(
    sections: dict[str, Any], problem: str, free: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(free(1, **sections))


def work(world: World, case: dict[str, Any]) -> None:
    """A run of this part of a world, and what it goes on with."""
    rollout: dict[str, Any] = {"max_new_tokens": 9, "max_sequences": 5}
    if servers := case.get("servers"):
        rollout |= {"engine": "http", "servers": servers, "server_key": "env:SERVER_KEY"}
    more = {"async": {"max_staleness": case["max_staleness"]}, "rollout": rollout}
    config = config_of({**case, "lag": 0, "algorithm": {"name": "grpo"}, "more": more})
    train_by_ranks(config, resume=case.get("resume", False), world=world)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_draw_together_what_one_process_replays(ranks: int, tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "output": "several", "max_staleness": 2}
    in_world(ranks, "tests.run.test_free_batches:work", {**case, "steps": 3})
    work(ALONE, {**case, "steps": 4, "resume": True})
    root = tmp_path / "several"
    check_bounds(root, 2, 4, 3)
    assert any(any(counts) for line in schedule_of(root) for *_, counts in line["drawn"])
    steps = steps_of(root)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * 4
    assert replay(root, say=lambda _: None).differences == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "rollouters"), [(2, 1), (3, 2), (2, 0)], ids=["1 + 1", "1 + 2", "in turn"]
)
def test_ranks_without_staleness_leave_the_bytes_of_one_process(
    ranks: int, rollouters: int, tmp_path: Path
) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 3}
    work(ALONE, {**case, "output": "one", "max_staleness": None})
    several = {**case, "output": "several", "max_staleness": 0, "rollouters": rollouters}
    in_world(ranks, "tests.run.test_free_batches:work", several)
    assert left_by(tmp_path / "several") == left_by(tmp_path / "one")


def draws_beside(world: World, case: dict[str, Any]) -> list[int]:
    """A run whose first step learns no sooner than another group has begun beside it, somewhere, or
    with ``any_token`` than a token has been drawn: where one of several servers is slow, all groups
    may have begun before.  -> the tokens that this rank has drawn while steps learnt, and the
    groups that it has begun.
    """
    learn, turn, draw_on = Learner.update, OpenGroups.turn, FreeBatches.draw_on
    drawn = begun = 0

    def until_begun(self: Learner, groups: Any, estimated: Any, step: int, *more: Any) -> Any:
        looks = 0
        while step == 1 and world.board.read("beside") is None:
            sleep(0.01)
            looks += 1
            assert looks < 6000, "nothing has happened while the first step learnt"
        return learn(self, groups, estimated, step, *more)

    def watched(self: FreeBatches, *arguments: Any) -> None:
        def counted(opened: OpenGroups) -> None:
            nonlocal drawn, begun
            tokens, groups = opened.counted.generated_tokens, len(opened.groups)
            turn(opened)
            drawn += opened.counted.generated_tokens - tokens
            begun += max(0, len(opened.groups) - groups)
            if begun or (drawn and case.get("any_token")):
                world.board.post("beside", b"")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenGroups, "turn", counted)
            draw_on(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", until_begun)
        patch.setattr(FreeBatches, "draw_on", watched)
        work(world, case)
    return [drawn, begun]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trainers", "rollouters", "staleness"), [(1, 1, 2), (1, 2, 4), (2, 1, 3), (2, 2, 4)]
)
def test_rollouters_draw_while_a_step_learns_and_one_process_replays_it(
    trainers: int, rollouters: int, staleness: int, tmp_path: Path
) -> None:
    """Also what one process without them has gone on with."""
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "output": "several", "max_staleness": staleness}
    several = {**case, "steps": 4, "rollouters": rollouters}
    beside = in_world(trainers + rollouters, "tests.run.test_free_batches:draws_beside", several)
    assert beside[:trainers] == [[0, 0]] * trainers
    assert all(sum(counts) for counts in zip(*beside, strict=True))
    work(ALONE, {**case, "steps": 5, "resume": True})
    root = tmp_path / "several"
    check_bounds(root, staleness, 5, 3)
    steps = steps_of(root)
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * 5
    assert sum(line["log_prob_diff/tokens_compared"] for line in steps[:4]) > 0
    assert all(line["staleness/mean"] <= 2 * staleness for line in steps), "two updates a step"
    assert replay(root, say=lambda _: None).differences == []


@pytest.mark.exhaustive
def test_a_line_that_no_run_would_write_is_told(
    free: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without groups is damaged; one of other prompts is not followed, until it is taken out,
    nor by a replay.
    """
    config = free(1, training={"steps": 3, "learning_rate": 1e-2})
    train(config)
    shutil.rmtree(config.output / "checkpoints" / "step_000003")
    shutil.rmtree(config.output / "checkpoints" / "step_000002")
    path = config.output / "schedule.jsonl"
    first, second, third = path.read_text().splitlines(keepends=True)
    line = json.loads(second)
    path.write_text(first + json.dumps({**line, "learns": [["nobody", 0], *line["learns"][1:]]}))
    with path.open("a") as file:
        file.write(f"\n{third}")
    for again in (lambda: replay(config.output, 2), lambda: train(config, resume=True)):
        with pytest.raises(CheckpointError, match=r"line of step 2 in .*nobody.* put the run's"):
            again()
    capsys.readouterr()
    path.write_text(first + json.dumps({**line, "learns": []}) + f"\n{third}")
    train(config, resume=True)
    assert "the line of this step in schedule.jsonl is damaged" in capsys.readouterr().out
    assert [line["step"] for line in schedule_of(config.output)] == [1, 2, 3]
    assert replay(config.output, say=lambda _: None).differences == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [2, None])
def test_ranks_train_together_with_servers_of_their_own(
    staleness: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them has two.  Without staleness they leave the bytes of one process without
    servers, and with it those that this process repeats; also after a resume with other ranks.
    """
    monkeypatch.setenv("SERVER_KEY", KEY)
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "output": "several", "max_staleness": staleness, "steps": 3}
    shape = read_config(tmp_path / "dense")
    with ExitStack() as stack:
        urls = [stack.enter_context(served("int8", shape, max_sequences=4)) for _ in range(3)]
        by_servers = {**case, "servers": urls}
        how = "work" if staleness is None else "draws_beside"
        in_world(2, f"tests.run.test_free_batches:{how}", {**by_servers, "any_token": True})
        work(ALONE, {**by_servers, "steps": 4, "resume": True})
    root = tmp_path / "several"
    assert [line["log_prob_diff/tokens_differing"] for line in steps_of(root)] == [0] * 4
    if staleness is not None:
        check_bounds(root, staleness, 4, 3)
        assert any(any(counts) for line in schedule_of(root) for *_, counts in line["drawn"])
        assert replay(root, say=lambda _: None).differences == []
        return
    one = {**case, "output": "one"}
    work(ALONE, one)
    work(ALONE, {**one, "steps": 4, "resume": True})
    assert left_by(root) == left_by(tmp_path / "one")


def test_a_server_for_each_process_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    write_model(tmp_path, "dense")
    servers = ["http://127.0.0.1:1"]
    case = {"folder": str(tmp_path), "output": "run", "max_staleness": 1, "steps": 1}
    found = in_world(2, "tests.run.test_free_batches:refused", {**case, "servers": servers})
    assert all("names 1, and the run has 2 processes" in one for one in found)


def test_a_server_that_is_not_there_is_told_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "output": "run", "max_staleness": 1, "steps": 1}
    with served("int8", read_config(tmp_path / "dense")) as there:
        servers = [there, f"http://127.0.0.1:{free_port()}"]
        found = in_world(2, "tests.run.test_free_batches:refused", {**case, "servers": servers})
    assert all("none of rollout.servers answers" in one for one in found)


def refused(world: World, case: dict[str, Any]) -> str:
    """What a rank says of a run that cannot begin."""
    try:
        work(world, case)
    except (ConfigError, PeerError) as error:
        return str(error)
    raise AssertionError("it has begun")


@pytest.mark.exhaustive
def test_an_error_while_it_samples_leaves_what_was_open(
    free: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = free(2, checkpoint={"every": 0})
    sample = FreeBatches.sample

    def fail_in_step_4(self: FreeBatches, step: int, *arguments: Any) -> Any:
        found = sample(self, step, *arguments)
        if step == 4:
            raise KeyError("the fourth step")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(FreeBatches, "sample", fail_in_step_4)
        with pytest.raises(KeyError):
            train(config)
    assert (config.output / "checkpoints" / "step_000003" / "open_groups.safetensors").is_file()
    train(config, resume=True)
    assert replay(config.output, say=lambda _: None).differences == []


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fewer samples": ("training", {"training": {"samples_per_prompt": 2}}),
    "more samples": ("training", {"training": {"samples_per_prompt": 5}}),
    "lengths": ("rollout", {"rollout": {"max_new_tokens": 4}}),
    "temperature": ("rollout", {"rollout": {"temperature": 0.5}}),
    "seed": ("seed", {"seed": 3}),
    "other prompts": ("data", {}),
    "longer prompts": ("data", {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("change", OTHERS)
def test_open_groups_of_other_settings_are_drawn_from_their_beginning(
    change: str,
    staleness: int,
    free: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed in the last step, behind a checkpoint of the second: lines of the schedule that are
    recorded behind it name groups of other prompts.
    """
    config = free(staleness, data=rows_of(tmp_path, ROWS[:16]))
    train(config)
    for step in range(3, STEPS + 1):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}")
    opened = [one[:2] for one in schedule_of(config.output)[1]["drawn"]]
    rows = {"other prompts": ROWS[15::-1], "longer prompts": [LONG] * 16}.get(change, ROWS[:16])
    allowed, sections = OTHERS[change]
    learnt, sample = list[Group](), FreeBatches.sample

    def noted(self: FreeBatches, *arguments: Any) -> Any:
        groups, ranks = sample(self, *arguments)
        learnt.extend(groups)
        return groups, ranks

    changed = free(staleness, data=rows_of(tmp_path, rows), **sections)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(FreeBatches, "sample", noted)
        summary = train(changed, resume=True, allowed=[allowed])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dropped")]
    assert len(told) == 1
    assert f"dropped: {3 * len(opened)} samples with " in told[0]
    assert summary.tokens_differing == 0 < summary.tokens_compared
    before = replay_version(config.output)
    for group in learnt:
        assert len(group.completions) == changed.training.samples_per_prompt
        for one in group.completions:
            prompt, sequence = list(group.prompt.token_ids), one.sequence
            assert sequence.token_ids[: len(prompt)].tolist() == prompt
            assert one.length <= changed.rollout.max_new_tokens
            assert sequence.temperature == changed.rollout.temperature
            assert min(one.weights_versions) > before
    names = [[group.prompt.id, group.visit] for group in learnt]
    if change in ("seed", "other prompts", "longer prompts"):
        assert change == "seed" or {visit for _, visit in names} == {1}
    else:
        assert all(name in names for name in opened), "no prompt is passed over"
        check_bounds(config.output, staleness, STEPS, config.training.prompts_per_step)
    assert replay(config.output, say=lambda _: None).differences == []


LONG = '{"prompt": "1+1=1+1=1+1=1+1=1+1=?", "answer": "2"}'


def replay_version(root: Path) -> int:
    """The version of the weights that drew last before the second step was done."""
    return (
        json.loads((root / "checkpoints/step_000002/state.json").read_text())["weights_version"] - 1
    )


def test_an_open_group_of_another_prompt_is_refused(
    free: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rule for changes leaves out."""
    train_to_a_death(monkeypatch, free(2, data=rows_of(tmp_path, ROWS[:16])))
    config = free(2, data=rows_of(tmp_path, ROWS[15::-1]))
    monkeypatch.setattr(resume, "draws_others", lambda _: [])
    with pytest.raises(CheckpointError, match=r"open_groups: .* another prompt than train/"):
        train(config, resume=True, allowed=["data"])


def test_a_run_that_ends_earlier_has_a_schedule_of_its_steps(free: MakeConfig) -> None:
    config = free(2)
    train(config)
    for step in range(5, STEPS + 1):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}")
    train(free(2, training={"steps": 4}), resume=True)
    assert [line["step"] for line in schedule_of(config.output)] == [1, 2, 3, 4]
