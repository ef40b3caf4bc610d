"""Tasksets of verifiers 0.4, written as its documentation does: answers in one turn, with tools if
the configuration says so.
"""

# pyright: reportMissingImports=false
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int = 0) -> int:
        """Add two numbers."""
        return a + b


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TaskConfig):
    tools: bool = False


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[Any]:
        return [Calculator(vf.ToolsetConfig())] if config.tools else []

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(task.answer in trace.transcript)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.transcript) < 400)


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterable[Sum]:
        for n in range(4):
            data = SumData(prompt=f"{n} + 1 = ?", system_prompt="Be short.", answer=str(n + 1))
            yield Sum(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
