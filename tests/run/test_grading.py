"""What ranks grade together is what one grades: rewards, counts in their order, the first error,
the record's bytes; and what is wrong on one rank ends all.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobit.config.reward import RewardConfig
from isobit.parallel.world import Alone, World, is_raised_on_all
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Graders
from isobit.run.grading import RecordedGrading
from isobit.run.interruption import Interruption
from isobit.store.reward_record import RewardRecord
from isobit.store.waiting_writer import WaitingWriter
from isobit.util.errors import IsobitError
from tests.worlds import in_world

REWARDS = """
import os

from isobit.util.errors import RewardError
from isobit.rewards.counts import count

def length(prompt, completion):
    with open(os.environ["GRADED"], "a") as file:
        file.write(prompt.id + "\\n")
    if completion.text == "end":
        raise RewardError("nothing can be graded")
    if completion.text.startswith("!"):
        raise {"!k": KeyError, "!v": ValueError}[completion.text](prompt.id)
    for kind in completion.text:
        count(f"letter {kind}")
    return len(completion.text) / 3
"""
TEXTS = (
    ["aab", "!v", "", "cb"],
    ["!k", "!v", "abc", "b"],
    ["c", "a", "!k", ""],
    ["bb", "a", "c", "b"],
)


def groups_of(texts: Sequence[Sequence[str]]) -> list[Group]:
    return [
        Group(
            Prompt(f"train/{place}", "", (1,)),
            0,
            [Completion(TokenSequence.of_answer((1,), (2,), [0.0], [3]), t, "stop") for t in some],
        )
        for place, some in enumerate(texts)
    ]


def judge(pairs: Sequence[tuple[Prompt, Completion]]) -> list[float]:
    return [float("nan") if one.text == "bb" else 0.1 * len(one.text) for _, one in pairs]


def grade_all(world: World, argument: dict[str, str]) -> dict[str, Any]:
    """Several gradings, one behind the other, as a rank knows them afterwards."""
    folder = Path(argument["folder"])
    os.environ["GRADED"] = str(folder / f"graded-{argument['name']}-{world.rank}")
    record, told = folder / f"{argument['name']}.jsonl", []
    part = {"function": f"{folder / 'reward.py'}:length"}

    def grading(graders: Graders, lines: Sequence[bytes] = ()) -> RecordedGrading:
        rewards = RewardRecord(told.append, lines)
        rewards.open(record) if world.rank == 0 else rewards.follow()
        writer = WaitingWriter(world, folder, 0, told.append, lambda: None)
        return RecordedGrading(
            rewards, graders, {"judge": judge}, Interruption(world), world, writer
        )

    def ask(name: str, grading: RecordedGrading, texts: Any, homes: list[int] | None) -> None:
        groups = groups_of(texts)
        for group, home in zip(groups, homes or [], strict=bool(homes)):
            if home == world.rank:
                grading.submit(group)
        try:
            stats = asdict(grading(groups, homes))
        except IsobitError as error:
            agreed = "" if is_raised_on_all(error) or world.size == 1 else "not agreed: "
            found[name] = f"{agreed}{type(error).__name__}: {error}"
            return
        rewards = [[group.rewards, group.reward_parts] for group in groups]
        found[name] = [list(stats["failures"]), list(stats["counts"]), stats, rewards]

    found: dict[str, Any] = {}
    homes = [0] * 4 if world.size == 1 else [1, 1, 0, 1]
    parts = {"length": part, "judge": {"model": "mine", "weight": 0.5}}
    several = RewardConfig.model_validate({"parts": parts, "in_process": True})
    with Graders(several.model_copy(update={"max_failed_fraction": 0.5})) as graders:
        graded = grading(graders)
        ask("by home", graded, TEXTS, homes)
        ask("by turns", graded, TEXTS, None)
        ask("one group", graded, TEXTS[1:2], None)
        ask("at the limit, all on one rank", graded, [*TEXTS[:1], ["!v"] * 3, ["aa"] * 3], None)
        ask("beyond it", graded, [*TEXTS[:1], ["!k"] * 9, ["aa"] * 3], None)
        ask("no reward", graded, [["a"], ["end"]], None)
    world.barrier("it is written")
    lines = record.read_bytes().splitlines(keepends=True)
    world.barrier("it is read")
    asked = Path(os.environ["GRADED"]).read_bytes()
    with Graders(several) as graders:
        ask("again", again := grading(graders, lines[:2]), TEXTS, homes)
        assert again.record.is_ahead
        ask("other answers", again, TEXTS[:1], None)
        assert not again.record.is_ahead
    found["again by turns"] = Path(os.environ["GRADED"]).read_bytes() == asked
    found["told"] = told
    return found


def test_two_ranks_grade_as_one(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARDS, encoding="utf-8")
    alone = grade_all(Alone(), {"folder": str(tmp_path), "name": "alone"})
    found = in_world(
        2, "tests.run.test_grading:grade_all", {"folder": str(tmp_path), "name": "two"}
    )
    assert alone["by home"][2]["failed"] == 5
    assert alone["by home"][2]["first_error"].startswith("prompt train/0, sample 1, length: ")
    assert alone["by home"] == alone["by turns"] == alone["again"]
    assert alone["beyond it"].startswith("RewardError: 10 of 16 rewards failed, more than")
    for rank, one in enumerate(found):
        if rank == 0:
            one["no reward"] = one["no reward"].removeprefix("PeerError: rank 1 failed: ")
        assert one.keys() == alone.keys()
        for name in one.keys() - {"again by turns"}:
            assert one[name] == alone[name], name
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    graded = [(tmp_path / f"graded-two-{rank}").read_text().split() for rank in range(2)]
    assert sum(map(len, graded)) == len((tmp_path / "graded-alone-0").read_text().split())
    assert min(map(len, graded)) > 20
