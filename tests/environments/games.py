"""Environments of the package verifiers, written as its documentation does: answers in one turn,
tools with and without state, and a game of several turns.
"""

import asyncio
from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]  # an extra
from datasets import Dataset


def sums() -> vf.Environment:
    """One turn, scored by a parser and two functions."""
    parser = vf.XMLParser(["answer"])

    def right(completion: vf.Messages, answer: str) -> float:
        return float(parser.parse_answer(completion) == answer)

    def short(completion: vf.Messages) -> float:
        return float(len(completion[-1].content) < 30)

    rubric = vf.Rubric([right, short], weights=[1.0, 0.25], parser=parser)
    rows = Dataset.from_list([{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(4)])
    return vf.SingleTurnEnv(
        dataset=rows, system_prompt="Answer in <answer> tags.", parser=parser, rubric=rubric
    )


async def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tools() -> vf.Environment:
    def called(completion: vf.Messages) -> float:
        return float(sum(message.role == "tool" for message in completion))

    rows = Dataset.from_list([{"question": "Add 3 and 4.", "answer": "7", "info": {"n": 1}}])
    return vf.ToolEnv(tools=[add], dataset=rows, rubric=vf.Rubric([called]), max_turns=4)


class Counter(vf.StatefulToolEnv):
    """Each rollout counts by itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(self.count, args_to_skip=["state"])

    async def setup_state(self, state: vf.State) -> None:
        state["total"] = state["info"]["start"]

    def count(self, by: int, state: dict[str, Any]) -> str:
        """Count on.

        Args:
            by: How far.
            state: Where it stands.
        """
        state["total"] += by
        return f"total {state['total']}"

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: vf.Messages, state: vf.State, **_: Any
    ) -> dict:
        return {**tool_args, "state": state}


def counter() -> vf.Environment:
    rows = Dataset.from_list([{"question": "Count.", "info": {"start": 10}}])
    return Counter(dataset=rows, rubric=vf.Rubric([lambda state: float(state["total"])]))


class Guess(vf.MultiTurnEnv):
    """A game: the first question depends on the state, and the environment answers as the user."""

    async def setup_state(self, state: vf.State) -> None:
        state["prompt"] = [*state["prompt"], vf.UserMessage(content="It is below 10.")]
        if state["answer"] == "broken":
            raise vf.InfraError("no such game")

    @vf.stop
    async def found(self, state: vf.State) -> bool:
        turns = state["trajectory"]
        return bool(turns) and state["answer"] in turns[-1]["completion"][-1].content

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        if "give up" in messages[-1].content:
            raise RuntimeError("the game was left")
        return [vf.UserMessage(content=f"Not {messages[-1].content}.")]


class Hasty(Guess):
    """Asks the model twice at once."""

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        asked = (self.get_model_response(state, state["prompt"]) for _ in range(2))
        await asyncio.gather(*asked)
        return state["prompt"]


class Forgetful(Guess):
    """Shows the model its last answer alone."""

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        return (await super().get_prompt_messages(state))[-1:]


def guess(kind: type[Guess] = Guess) -> vf.Environment:
    def turns(state: vf.State) -> float:
        return 1.0 / len(state["trajectory"]) if state.get("stop_condition") == "found" else 0.0

    rows = Dataset.from_list([{"question": "Guess.", "answer": "7"}])
    return kind(dataset=rows, rubric=vf.Rubric([turns]), max_turns=5)


def group() -> vf.Environment:
    def best(completions: list[vf.Messages]) -> list[float]:
        return [0.0 for _ in completions]

    rows = Dataset.from_list([{"question": "Guess.", "answer": "7"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([best]))


def load_environment(name: str = "sums") -> vf.Environment:
    print("an environment may print")
    made = {"sums": sums, "tools": tools, "counter": counter, "guess": guess, "group": group}
    games = {"forgetful": Forgetful, "hasty": Hasty}
    return guess(games[name]) if name in games else made[name]()
