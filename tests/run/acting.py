"""A run with an environment whose random model calls tools, and which kills itself."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from isobit.config.recipes import RunConfig
from isobit.data import tool_calls
from isobit.data.tool_calls import Parsed, ToolCall
from isobit.rollout.episodes import Episodes
from isobit.run.loop import train


def parse(text: str) -> list[Parsed]:
    """Most turns are a call, as a random model makes none."""
    return [] if len(text) % 5 == 4 else [ToolCall("add", {"count": len(text)})]


def die_at(moment: int) -> None:
    count = iter(range(10**9))
    go_on = Episodes._go_on

    def dying(*arguments: Any) -> None:
        if next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        go_on(*arguments)

    episodes: Any = Episodes
    episodes._go_on = dying


def resume_and_die(config: Path, moment: int) -> int:
    """In a process of its own."""
    tool_calls._PARSERS["plain"] = parse
    die_at(moment)
    train(RunConfig.model_validate(json.loads(config.read_text())), resume=True)
    return 0
