"""A run with an environment whose random model calls tools, and which kills itself."""

import os
import signal
from pathlib import Path
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.data import tool_calls
from isobit.data.tool_calls import Parsed, ToolCall
from isobit.parallel.world import World
from isobit.rollout.episodes import Episodes
from isobit.run.loop import train


def parse(text: str) -> list[Parsed]:
    """Most turns are a call, as a random model makes none."""
    return [] if len(text) % 5 == 4 else [ToolCall("add", {"count": len(text)})]


def die_at(moment: int, counter: Path) -> None:
    """Kill the process in which answer number ``moment`` of all ranks has come."""
    go_on = Episodes._go_on

    def dying(*arguments: Any) -> None:
        with counter.open("ab") as file:
            file.write(b".")
        if counter.stat().st_size >= moment:
            os.kill(os.getpid(), signal.SIGKILL)
        go_on(*arguments)

    episodes: Any = Episodes
    episodes._go_on = dying


def resume(world: World, case: dict[str, Any]) -> list[int]:
    """In a process of its own, killed where the case says so; -> how many episodes of each rollout
    had their answers here.
    """
    tool_calls._PARSERS["plain"] = parse
    if "dies_at" in case:
        die_at(case["dies_at"], Path(case["counter"]))
    counts = list[int]()
    generate = Episodes.generate

    def counting(episodes: Any, *arguments: Any) -> Any:
        made = generate(episodes, *arguments)
        counts.append(len({tuple(key[:3]) for key, _ in episodes._said}))
        return made

    changed: Any = Episodes
    changed.generate = counting
    train(RunConfig.model_validate(case["config"]), resume=True, world=world)
    return counts
