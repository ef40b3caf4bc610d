"""A game of verifiers 0.4: the environment plays the user."""

# pyright: reportMissingImports=false
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf


class Number(vf.TaskData):
    secret: str


class Guess(vf.Task[Number, vf.State, vf.TaskConfig]): ...


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self) -> Iterable[Guess]:
        yield Guess(Number(prompt="Guess a digit.", secret="7"), self.config.task)


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        turns = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                turns += 1
                if task.data.secret in segment.last_reply:
                    interaction.trace.record_reward("found", 1 / turns, 1.0)
                    break
                segment = await interaction.turn(f"Not {segment.last_reply}.")


__all__ = ["Game", "Guesses"]
