"""Runs on lists of files, mixtures, streamed sets and by epochs that stop and go on, to the bytes
of the run that never stopped; what is streamed leaves the bytes of what is in memory.
"""

import bz2
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from isobit.config.recipes import RunConfig, SftConfig
from isobit.run.loop import train
from isobit.run.sft import sft
from isobit.starter.tasks import guess, problems, question, worked_out
from isobit.util.errors import ConfigError, StoppedAtOnce
from tests.tiny import json_lines

MakeConfig = Callable[..., RunConfig]
Outcome = Callable[[Path], dict[str, Any]]
DIES = (
    "from isobit.util.errors import StoppedAtOnce\n"
    "if call == {call}: hook.unlink(); raise StoppedAtOnce"
)
EVALUATION, STEP = 3, 16
"""Rewards asked for by an evaluation and by a step."""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """``a-1.jsonl.gz``, ``a-2.jsonl``, ``a-3.jsonl.bz2`` and ``b.jsonl`` of 4, 3, 2 and 8 rows."""
    rows = iter(json.dumps({"prompt": question(p), "answer": "1"}) + "\n" for p in problems(False))
    taken = [b"".join(next(rows).encode() for _ in range(count)) for count in (4, 3, 2, 8)]
    (tmp_path / "a-1.jsonl.gz").write_bytes(gzip.compress(taken[0]))
    (tmp_path / "a-2.jsonl").write_bytes(taken[1])
    (tmp_path / "a-3.jsonl.bz2").write_bytes(bz2.compress(taken[2]))
    (tmp_path / "b.jsonl").write_bytes(taken[3])
    return tmp_path


def data_of(kind: str, parts: Path) -> dict[str, Any]:
    listed = {"type": "jsonl", "path": [str(parts / "a-*"), str(parts / "b.jsonl")]}
    mixture = {
        "type": "mixture",
        "sources": {
            "a": {"type": "jsonl", "path": str(parts / "a-*")},
            "b": {"type": "jsonl", "path": str(parts / "b.jsonl"), "limit": 5},
        },
        "weights": {"a": 3},
        "stop": "all_exhausted",
        "seed": 1,
    }
    return {
        "list": {"train": listed},
        "mixture": {"train": mixture},
        "streaming": {"train": listed, "streaming": True},
        "streamed mixture": {"train": mixture, "streaming": True},
        "epochs": {"train": listed, "epochs": 1.4},
    }[kind]


KINDS = ["list", "mixture", "streaming", "streamed mixture", "epochs"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_dies_twice_and_goes_on_leaves_the_same_files(
    kind: str,
    parts: Path,
    values: dict[str, Any],
    hook: Callable[[str], None],
    outcome: Outcome,
    tmp_path: Path,
) -> None:
    training = dict(values["training"])
    if kind == "epochs":
        del training["steps"]  # 1.4 times 17 prompts, 4 a step, are 6 steps

    def config(name: str) -> RunConfig:
        data = values["data"] | data_of(kind, parts)
        changes = {"data": data, "training": training, "output": tmp_path / name}
        return RunConfig.model_validate(values | changes)

    whole, broken = config("whole"), config("broken")
    train(whole)
    for resume, call in ((False, EVALUATION + 2 * STEP + 5), (True, EVALUATION + STEP + 5)):
        hook(DIES.format(call=call))  # in step 3, and of step 3 and those after it in the fourth
        with pytest.raises(StoppedAtOnce):
            train(broken, resume=resume)
    assert len(json_lines(broken.output / "digests.jsonl")) < 6
    train(broken, resume=True)
    assert outcome(broken.output) == outcome(whole.output)
    assert len(json_lines(whole.output / "digests.jsonl")) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["list", "mixture"])
@pytest.mark.parametrize("lag", [0, 1])
def test_streamed_prompts_leave_the_bytes_of_prompts_in_memory(
    kind: str, lag: int, parts: Path, values: dict[str, Any], tmp_path: Path
) -> None:
    for streaming in (False, True):
        data = values["data"] | data_of(kind, parts) | {"streaming": streaming}
        changes = {"data": data, "async": {"lag": lag}, "output": tmp_path / str(streaming)}
        train(RunConfig.model_validate(values | changes))
    same_files(tmp_path / "False", tmp_path / "True")


@pytest.mark.few(1)
@pytest.mark.parametrize("objective", ["supervised", "preference"])
def test_streamed_examples_leave_the_bytes_of_examples_in_memory(
    objective: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations of several turns, rows that are too long or evaluated, and several chunks."""
    shutil.copytree(place / "model", tmp_path / "model")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    monkeypatch.setattr("isobit.data.spool.ROWS_AT_ONCE", 3)
    random, rows = Random(0), []
    for place_of, problem in enumerate(problems(False)[:14]):
        asked, answer = question(problem), worked_out(problem)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        more = {"chosen": answer, "rejected": guess(problem, random)}
        long = "1" * 300 if place_of == 5 else ""
        rows.append({"prompt": asked + long, "talk": turns * (1 + place_of % 2), **more})
    for name, some in {"a": rows[:9], "b": rows[9:], "held": rows[3:4]}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    columns = {"messages": "talk"} if objective == "supervised" else {}
    tables = {
        name: {"type": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), **columns}
        for name in ("a", "b", "held")
    }
    for streaming in (False, True):
        config = {
            "objective": objective,
            "model": str(tmp_path / "model"),
            "threads": 1,
            "output": tmp_path / str(streaming),
            "data": {
                "train": {
                    "type": "mixture",
                    "sources": {"a": tables["a"], "b": tables["b"]},
                    "stop": "all_exhausted",
                },
                "eval": {"held": tables["held"]},
                "epochs": 2,
                "too_long": "drop",
                "max_tokens": 128,
                "streaming": streaming,
            },
            "training": {"prompts_per_step": 5, "learning_rate": 1e-3},
        }
        sft(SftConfig.model_validate(config))
    same_files(tmp_path / "False", tmp_path / "True")
    figures = json.loads((tmp_path / "True" / "run.json").read_text())["data"]
    assert figures["dropped_examples"] > 0


def same_files(one: Path, other: Path) -> None:
    manifests = [json.loads((root / "run.json").read_text()) for root in (one, other)]
    assert manifests[0]["inputs"] == manifests[1]["inputs"]
    assert manifests[0]["data"] == manifests[1]["data"]
    for name in ("model/model.safetensors", "completions.jsonl"):
        if (one / name).exists():
            assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.exhaustive
def test_a_run_by_epochs_goes_on_for_more_of_them(
    parts: Path, values: dict[str, Any], outcome: Outcome, tmp_path: Path
) -> None:
    training = {**values["training"], "schedule": "constant", "warmup_updates": 0}
    del training["steps"]

    def config(epochs: float, name: str) -> RunConfig:
        data = values["data"] | data_of("list", parts) | {"epochs": epochs}
        changes = {"data": data, "training": training, "output": tmp_path / name}
        return RunConfig.model_validate(values | {"evaluation": {}} | changes)

    whole = train(config(1.0, "whole"))
    train(config(0.2, "more"))
    more = train(config(1.0, "more"), resume=True)
    assert (whole.model / "model.safetensors").read_bytes() == (
        more.model / "model.safetensors"
    ).read_bytes()
    assert len(json_lines(tmp_path / "more" / "digests.jsonl")) == 5


def test_epochs_and_other_steps_are_refused_together(make_config: MakeConfig) -> None:
    config = make_config(data={"epochs": 3})
    with pytest.raises(
        ConfigError, match=r"data\.epochs is 3, which is 8 steps .* is 6; leave one"
    ):
        train(config)
    assert not config.output.exists()
