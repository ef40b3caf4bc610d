"""Trainers and rollouters on processes of their own leave the bytes of one process with a lag."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.models.published import PublishedWeights
from isobit.parallel.world import ALONE, World
from isobit.rewards.grading import Graders
from isobit.run import loop, rollouter_process
from isobit.run.free_batches import FreeBatches
from isobit.run.loop import train
from isobit.run.rollouter_process import train_by_ranks
from isobit.run.rollouters import Question
from isobit.util.errors import ConfigError, Interrupted, MismatchError, RewardError
from tests.run.test_ranks import left_by, write_model
from tests.worlds import in_world

FREE = {"max_staleness": 2}


def config_of(case: dict[str, Any]) -> RunConfig:
    folder = Path(case["folder"])
    data = {"type": "jsonl", "path": "starter:train.jsonl", "limit": 20}
    return RunConfig.model_validate(
        {
            "model": str(folder / "dense"),
            "output": folder / case["output"],
            "threads": 1,
            "reward": {"function": f"{folder / 'reward.py'}:reward", "in_process": True},
            "data": {"train": data, "eval": {"held_out": {**data, "limit": 5}}},
            "rollout": {"max_new_tokens": 6},
            "training": {
                "steps": case["steps"],
                "prompts_per_step": 3,
                "samples_per_prompt": 4,
                "tokens_per_microbatch": 96,
                "updates_per_batch": 2,
                "learning_rate": 1e-2,
            },
            "algorithm": case["algorithm"],
            "evaluation": {"every": 2},
            "checkpoint": {"every": 2, "keep_last": 2},
            "async": {"lag": case["lag"]},
            "cluster": {"rollouters": case.get("rollouters", 0)},
            **case.get("more", {}),
        }
    )


def work(world: World, case: dict[str, Any]) -> None:
    """The run up to some steps, and from there to its end."""
    for steps, resume in ((3, False), (case["steps"], True)):
        allowed = ["training.steps"] if resume else []
        train_by_ranks(config_of({**case, "steps": steps}), resume, world, allowed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "rollouters", "lag", "algorithm"),
    [
        (2, 1, 1, {"name": "grpo", "dynamic_sampling": True, "max_refills": 2}),
        (3, 1, 2, {"name": "remax"}),
        (3, 2, 1, {"name": "grpo"}),
        (2, 0, 2, {"name": "ppo"}),
    ],
    ids=["1 + 1, dynamic", "2 + 1, remax", "1 + 2", "all in turn"],
)
def test_the_bytes_do_not_depend_on_who_samples(
    size: int, rollouters: int, lag: int, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 5, "lag": lag, "algorithm": algorithm}
    work(ALONE, {**case, "output": "one"})
    several = {**case, "output": "several", "rollouters": rollouters}
    in_world(size, "tests.run.test_rollouters:work", several)
    expected, found = left_by(tmp_path / "one"), left_by(tmp_path / "several")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert any(name.endswith("pending.safetensors") for name in expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_scales", ["per_token", "per_tensor"])
def test_adapters_leave_the_same_bytes_whoever_samples(kv_scales: str, tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    more = {"lora": {"rank": 4}, "precision": {"preset": "fp8", "kv_scales": kv_scales}}
    case = {"folder": str(tmp_path), "steps": 4, "lag": 1, "algorithm": "grpo", "more": more}
    work(ALONE, {**case, "output": "one"})
    in_world(3, "tests.run.test_rollouters:work", {**case, "output": "several", "rollouters": 1})
    expected, found = left_by(tmp_path / "one"), left_by(tmp_path / "several")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def deaf(world: World, case: dict[str, Any]) -> str:
    """A run whose rollouters sample without the adapters; -> what was raised."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("isobit.models.layers.Adapter.add", lambda *_: None)
        try:
            train_by_ranks(config_of(case), world=world)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.exhaustive
def test_rollouters_that_do_not_read_adapters_are_noticed_before_step_1(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 2, "lag": 1, "algorithm": "grpo", "output": "run"}
    case |= {"rollouters": 1, "more": {"lora": {"rank": 4}}}
    trainer, rollouter = in_world(2, "tests.run.test_rollouters:deaf", case)
    assert trainer.startswith("MismatchError: before the first step"), trainer
    assert "log-probabilities are not the trainer's" in trainer
    assert rollouter.startswith("PeerError")


def test_a_run_without_trainers_is_refused(tmp_path: Path) -> None:
    case = {"folder": str(tmp_path), "output": "run", "steps": 1, "lag": 1, "rollouters": 1}
    with pytest.raises(ConfigError, match=r"cluster.rollouters is 1, but the run has 1 process"):
        train_by_ranks(config_of({**case, "algorithm": "grpo"}))
    with pytest.raises(ConfigError, match=r"--cluster.processes N"):
        train(config_of({**case, "algorithm": "grpo"}))


def unlike(world: World, case: dict[str, Any]) -> dict[str, str]:
    """Runs whose rollouter has another recipe, other kernels; -> what was raised."""
    found: dict[str, str] = {}
    for name in ("recipe", "kernels"):
        config = config_of({**case, "output": name})
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1 and name == "recipe":
                rollout = config.rollout.model_copy(update={"temperature": 0.5})
                config = config.model_copy(update={"rollout": rollout})
            elif world.rank == 1:
                patch.setattr("isobit.store.class_of_bits.kernels_sha256", lambda: "others")
            try:
                train_by_ranks(config, world=world)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        assert not config.output.exists(), "refused before anything is written"
    return found


def test_rollouters_unlike_the_trainers_are_refused(tmp_path: Path) -> None:
    """Whose samples they would compare with a forward of their own."""
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 2, "lag": 1, "algorithm": "grpo", "rollouters": 1}
    trainer, rollouter = in_world(2, "tests.run.test_rollouters:unlike", case)
    assert trainer == rollouter
    assert trainer["recipe"].startswith(
        "ConfigError: rank 1 was started with rollout.temperature = 0.5, rank 0 with 1.0"
    )
    assert "has bits.kernels 'others', rank 0 on" in trainer["kernels"]


def asked(world: World, case: dict[str, Any]) -> None:
    """A run all of whose processes are asked for a checkpoint, as the launcher hands it on."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(rollouter_process, "collect", _asking(loop.collect))
        train_by_ranks(config_of(case), world=world)


def _asking(work: Callable[..., Any]) -> Callable[..., Any]:
    def asking(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return work(*arguments)

    return asking


def test_a_rollouter_that_is_asked_for_a_checkpoint_samples_on(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 1, "lag": 1, "algorithm": "grpo", "rollouters": 1}
    in_world(2, "tests.run.test_rollouters:asked", {**case, "output": "run"})
    assert (tmp_path / "run" / "summary.json").is_file()


PLACES: dict[str, tuple[int, tuple[Any, str]]] = {
    "reward": (1, (Graders, "fill")),
    "learning": (0, (loop, "learn")),
    "signal": (1, (Graders, "fill")),
    "weights": (1, (PublishedWeights, "gather")),
    "batch": (1, (rollouter_process, "compared")),
    "drawing": (1, (FreeBatches, "draw_on")),
    "tokens": (1, (rollouter_process, "compared_sequences")),
    "sampling": (1, (FreeBatches, "sample")),
}
"""Who fails, and where."""


def fails(world: World, case: dict[str, Any]) -> dict[str, list[str]]:
    """Runs in which a rank fails in the third step, and each run's end; -> what was raised."""
    found: dict[str, list[str]] = {}
    for name in case["fail"]:
        rank, place = PLACES[name]
        config, raised = config_of({**case, "output": name}), "nothing"
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == rank:
                patch.setattr(*place, _failing(getattr(*place), name))
            try:
                train_by_ranks(config, world=world)
            except (Exception, Interrupted) as error:
                raised = type(error).__name__
        stood = [path.name for path in sorted(config.output.glob("checkpoints/*"))]
        train_by_ranks(config, resume=True, world=world)
        found[name] = [raised, *stood]
    return found


def _failing(work: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``work``, which goes wrong in the third step (of gradings the sixth is in the batch that it
    samples), or before it with the weights that are passed on for the third time.
    """
    calls = count(1)

    def failing(*arguments: Any, **options: Any) -> Any:
        number = next(calls)
        if name == "reward" and number == 6:
            raise RewardError("nothing can be graded")
        if name in ("learning", "drawing") and number == 3:
            raise KeyError("a fault")
        if name == "signal" and number == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        if name == "sampling" and number == 1:  # when nothing is whole yet
            os.kill(os.getpid(), signal.SIGTERM)
            work(*arguments, **options)
            raise AssertionError("it was drawn to its end")
        made = work(*arguments, **options)
        if name == "batch" and number == 4:
            return replace(made, comparison=replace(made.comparison, tokens_differing=1))
        if name == "tokens" and number == 3:
            comparison, mismatch = made
            return replace(comparison, tokens_differing=1), mismatch
        if name == "weights" and number == 3:
            arguments[0].sides["rollout"].plain["norm.weight"].view(torch.uint8)[5] ^= 1
        return made

    return failing


@pytest.mark.exhaustive
def test_an_error_of_one_part_ends_the_other_and_the_run_goes_on(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 5, "lag": 1, "algorithm": {"name": "grpo"}}
    train(config_of({**case, "output": "one"}))
    fail = ["reward", "learning", "signal", "weights", "batch"]
    several = {**case, "rollouters": 1, "fail": fail}
    trainer, rollouter = in_world(2, "tests.run.test_rollouters:fails", several)
    assert {name: raised for name, (raised, *_) in trainer.items()} == {
        "reward": "PeerError",
        "learning": "KeyError",
        "signal": "Interrupted",
        "weights": "MismatchError",
        "batch": "MismatchError",
    }
    assert {name: raised for name, (raised, *_) in rollouter.items()} == {
        "reward": "RewardError",
        "learning": "PeerError",
        "signal": "Interrupted",
        "weights": "MismatchError",
        "batch": "PeerError",
    }
    assert trainer["signal"][-1] == "step_000003", "what stood between two steps is saved"
    expected = left_by(tmp_path / "one")
    for name in trainer:
        assert left_by(tmp_path / name) == expected, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("rollouters", [1, 2])
def test_an_error_under_a_free_schedule_ends_all_and_the_run_goes_on(
    rollouters: int, tmp_path: Path
) -> None:
    """Of two rollouters the first fails."""
    write_model(tmp_path, "dense")
    expected = {
        "reward": ["PeerError", "RewardError"],
        "learning": ["KeyError", "PeerError"],
        "weights": ["MismatchError", "MismatchError"],
        "drawing": ["PeerError", "KeyError"],
        "tokens": ["MismatchError", "PeerError"],
    }
    if rollouters == 1:  # it would stay on the board that two share
        expected |= {name: ["Interrupted"] * 2 for name in ("signal", "sampling")}
    case = {"folder": str(tmp_path), "steps": 5, "lag": 0, "algorithm": {"name": "grpo"}}
    case |= {"rollouters": rollouters, "fail": [*expected], "more": {"async": FREE}}
    found = in_world(1 + rollouters, "tests.run.test_rollouters:fails", case)
    assert {name: [of[name][0] for of in found[:2]] for name in expected} == expected
    for name in expected:
        assert replay(tmp_path / name, say=lambda _: None).differences == [], name


def answered(answers: list[str], groups: str = "drawn", schedule: list[str] | None = None) -> Any:
    """What rollouters answer, as far as it is read of questions that are asked again."""
    given = {"gradings": ["graded"], "answers": answers, "schedule": schedule or []}
    return {"batch": {"groups": groups}, "line": "line", "given": given}


@pytest.fixture
def question() -> Question:
    """An answered one for a batch, where the record still has what tools said in two steps."""
    ahead = {"gradings": [], "answers": ["said", "later"], "schedule": []}
    return Question({"ahead": ahead}, answer=answered([]))


def test_what_tools_have_said_comes_once_where_only_repeats_have_recorded_it(
    question: Question,
) -> None:
    following = answered([], schedule=["line"])
    assert question.completed(following) == following
    assert (
        Question({"ahead": answered([])["given"]}).behind(question)["ahead"] == following["given"]
    )
    recorded = {"gradings": ["graded"], "schedule": ["line"]}
    assert question.again()["ahead"] == {**recorded, "answers": ["said", "later"]}
    for _ in range(2):
        question.take_repeated(answered(["said"]))
        assert question.again()["ahead"] == {**recorded, "answers": ["said"]}
    assert question.completed(following) == answered(["said"], schedule=["line"])


def test_what_the_first_answer_has_recorded_does_not_come_again(question: Question) -> None:
    question.answer = answered(["said"])
    question.take_repeated(answered(["said"]))
    following = answered([], schedule=["line"])
    assert question.completed(following) == following


@pytest.mark.parametrize(("said", "groups"), [("other", "drawn"), ("said", "others")])
def test_a_repeat_that_differs_is_refused(said: str, groups: str, question: Question) -> None:
    question.take_repeated(answered(["said"]))
    with pytest.raises(MismatchError, match="drawn another batch"):
        question.take_repeated(answered([said], groups))


@pytest.mark.parametrize("schedule", [[], ["another"], ["line", "another"]])
def test_a_step_that_is_not_drawn_again_as_its_line_says_is_refused(
    schedule: list[str], question: Question
) -> None:
    question.take_repeated(answered(["said"]))
    with pytest.raises(MismatchError, match="than the line of the step says"):
        question.completed(answered([], schedule=schedule))
