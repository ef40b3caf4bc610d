"""A run with an environment whose random model calls tools, and which kills itself."""

import os
import signal
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.data.tool_calls import Parsed, Said, ToolCall
from isobit.environments.pool import Environments
from isobit.parallel.world import World
from isobit.rollout import episodes
from isobit.rollout.episodes import Episodes
from isobit.rollout.shared_groups import SharedGroups
from isobit.run.free_batches import FreeBatches
from isobit.run.recorded_inputs import RecordedInputs
from isobit.run.rollouter_process import train_by_ranks
from isobit.util.errors import PeerError, ToolError


def reading(parse: Callable[[str], list[Parsed]]) -> Callable[..., Said]:
    """``read_turn`` for a random model, whose turns are calls by ``parse``."""
    return lambda turn, *_: Said(turn, parse(turn))


def parse(text: str) -> list[Parsed]:
    """Most turns are a call, as a random model makes none."""
    return [] if len(text) % 5 == 4 else [ToolCall("add", {"count": len(text)})]


def die_at(moment: int, recorded: int, counter: Path) -> None:
    """Kill all ranks when answer number ``moment`` has come to any of them; the first ones are
    recorded, and none may ask for them.
    """
    go_on, ask = Episodes._go_on, Environments.ask
    ranks = counter.with_suffix(".ranks")
    _write(ranks, f"{os.getpid()} ")

    def dying(*arguments: Any) -> None:
        _write(counter, ".")
        if counter.stat().st_size >= moment:
            others = {*map(int, ranks.read_text().split())} - {os.getpid()}
            for rank in [*others, os.getpid()]:
                os.kill(rank, signal.SIGKILL)
        go_on(*arguments)

    def asking(*arguments: Any, **more: Any) -> None:
        if recorded and (not counter.exists() or counter.stat().st_size < recorded):
            os._exit(77)
        ask(*arguments, **more)

    kind: Any = Episodes
    environments: Any = Environments
    kind._go_on, environments.ask = dying, asking


def die_before_schedule(step: int, ranks: Path) -> None:
    """Kill all ranks when the answers of a step are written, and its line of the schedule is not; a
    step is chosen before its groups are graded, and all that may be drawn beside it is.
    """
    _write(ranks, f"{os.getpid()} ")
    append, draw_on = RecordedInputs.append_schedule, FreeBatches.draw_on
    whole_here = SharedGroups._whole_here

    def dying(self: RecordedInputs, lines: Sequence[bytes]) -> None:
        if self.writer is not None and any(f'"step": {step},'.encode() in one for one in lines):
            for rank in {*map(int, ranks.read_text().split())} - {os.getpid()}:
                os.kill(rank, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, lines)

    def drawing(self: FreeBatches, ended: Callable[[], bool], *more: Any) -> None:
        draw_on(self, lambda: False, *more)

    def hastily(self: SharedGroups, graded: bool) -> set[int]:
        return whole_here(self, False)

    kinds: Any = RecordedInputs, FreeBatches, SharedGroups
    kinds[0].append_schedule, kinds[1].draw_on, kinds[2]._whole_here = dying, drawing, hastily


def fail_beside(step: int, turns: int, error: type[Exception] = ToolError) -> None:
    """Have the drawing beside a step fail, behind some turns."""
    draw_on, steps = FreeBatches.draw_on, count(1)

    def failing(self: FreeBatches, ended: Callable[[], bool], *more: Any) -> None:
        if next(steps) != step:
            draw_on(self, ended, *more)
            return
        left = iter(range(turns))
        draw_on(self, lambda: next(left, None) is None, *more)
        raise error("the host of the environments ends again and again")

    kind: Any = FreeBatches
    kind.draw_on = failing


def fails_beside(world: World, case: dict[str, Any]) -> str:
    """Of the last rank; what each raises."""
    if world.rank == world.size - 1:
        fail_beside(3, case["turns"])
    try:
        resume(world, case)
    except (ToolError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it has gone on")


def _write(file: Path, text: str) -> None:
    with file.open("a") as opened:
        opened.write(text)


def resume(world: World, case: dict[str, Any]) -> None:
    """By each rank, killed where the case says so."""
    episodes.read_turn = reading(parse)
    if "dies" in case:
        moment, recorded = case["dies"]
        die_at(moment, recorded, Path(case["counter"]))
    if "unscheduled" in case:
        die_before_schedule(case["unscheduled"], Path(case["counter"]).with_suffix(".ranks"))
    train_by_ranks(RunConfig.model_validate(case["config"]), resume=True, world=world)
