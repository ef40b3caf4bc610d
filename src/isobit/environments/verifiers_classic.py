"""Environments of the package ``verifiers``, versions 0.2 and 0.3, which lead the conversation
themselves (an environment backend, ``isobit.environments.env_backends``).

The environment has a client for a model whose answers are the turns that the engine draws. It asks
with all messages up to there; those that are new are what it says after the last turn.
"""

import ast
import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isobit.environments.env_backends import HostStart, Turn, rewarded, text_of, truncated_result
from isobit.rewards.grade import outcome_of
from isobit.util.errors import ToolError
from isobit.util.plain_files import read_plain
from isobit.util.user_code import run_file

CLASSIC, TASKSET = "load_environment", "__all__"
"""The names that an environment of verifiers 0.2 or 0.3 defines, and a taskset of 0.4."""


def defines(place: str, name: str) -> bool:
    """Whether a file, or an installed package, defines or imports ``name``, without running it."""
    try:
        if not place.endswith(".py"):
            found = find_spec(place.replace("-", "_"))
            place = (found and found.origin) or ""
        body = ast.parse(read_plain(Path(place))).body
    except (OSError, ValueError, SyntaxError, ImportError, RecursionError):
        return False
    named = set[str]()
    for one in body:
        match one:
            case ast.FunctionDef(name=known) | ast.AsyncFunctionDef(name=known):
                named.add(known)
            case ast.ImportFrom(names=names):
                named.update(alias.asname or alias.name for alias in names)
            case ast.Assign(targets=targets):
                named.update(target.id for target in targets if isinstance(target, ast.Name))
    return name in named


def load_verifiers(place: str, options: Mapping[str, Any]) -> Any:
    """The environment of an installed package, or of a file with ``load_environment``.  Raises
    ToolError.
    """
    if place.endswith(".py") and not Path(place).is_file():
        raise ToolError(f"there is no file {place} of an environment")
    is_taskset = defines(place, TASKSET) and not defines(place, CLASSIC)
    try:
        load_environment = importlib.import_module("verifiers").load_environment
    except (ImportError, AttributeError) as error:
        extra = "verifiers-classic" if defines(place, CLASSIC) else "verifiers"
        raise ToolError(
            f"an environment of verifiers needs the package: pip install 'isobit[{extra}]' "
            f"({error})"
        ) from error
    try:
        if not place.endswith(".py"):
            return load_environment(place, **options)
        name = f"isobit_environment_{Path(place).stem}"
        return run_file(Path(place), name).load_environment(**options)
    except (Exception, SystemExit) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if is_taskset:
            what += (
                "; it is a taskset of verifiers 0.4, and an older one is installed: pip install "
                "'verifiers>=0.4,<0.5'"
            )
        raise ToolError(f"the environment {place!r} cannot be loaded: {what}") from error


class HostedVerifiers:
    """An environment whose model is the engine."""

    def __init__(self, start: HostStart) -> None:
        self._environment = load_verifiers(start.place, start.options)
        self._most = start.most_characters
        if self._environment.requires_group_rollouts:
            raise ToolError(
                f"the rubric of {start.place!r} has a reward of a whole group, but each episode is "
                "scored by itself; leave that function out"
            )

    def ready(self) -> dict[str, Any]:
        vf = importlib.import_module("verifiers")
        names = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {name: tool[name] for name in names}}
            for tool in self._environment.tool_defs or ()
        ]
        quiet = isinstance(self._environment, vf.SingleTurnEnv | vf.ToolEnv)
        how = {"has_reward": True, "opens": True, "leads": True, "speaks": not quiet}
        return {"ready": tools, **how}

    def open(self) -> "Conversation":
        refusal = importlib.import_module("verifiers").OverlongPromptError
        return Conversation(self._environment, self._most, refusal)


class Conversation:
    """A rollout of such an environment.  It runs up to its next question to the model, and then
    stands still until the next turn has been drawn.
    """

    def __init__(self, environment: Any, most: int, refusal: type[Exception]) -> None:
        self._environment, self._most, self._refusal = environment, most, refusal
        self._tools = {tool.name: tool.parameters for tool in environment.tool_defs or ()}
        self._loop, self._is_asked = asyncio.new_event_loop(), asyncio.Event()
        self._question: tuple[Any, Any] = (), ()
        self._reply: asyncio.Future[Any] = self._loop.create_future()
        """The reply that the rollout waits for."""
        self._reply.set_result(None)
        self._messages: list[dict[str, Any]] = []
        """The messages of the last question."""
        self._turns = 0

    async def reply(self, prompt: Any, tools: Any) -> Any:
        """The model's answer to messages: its next turn."""
        if not self._reply.done():
            raise RuntimeError("the environment asks the model two things at once")
        self._question, self._reply = (prompt, tools), self._loop.create_future()
        self._is_asked.set()
        return await self._reply

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The messages of the first question, where they are others than the row's."""
        self._rollout = self._loop.create_task(self._play(columns))
        if not self._runs_on():
            return self._over()
        is_given = self._messages == [*map(_plain, columns["prompt"])]
        return {} if is_given else {"opening": self._messages}

    def _play(self, columns: Mapping[str, Any]) -> Any:
        """The rollout: a coroutine."""
        row = {"example_id": 0, **columns}
        return self._environment.run_rollout(row, _client(self), "isobit", {})

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        """The messages after the last turn, or the reward once the rollout is over: by itself, or
        because its model will say no more.
        """
        answer: dict[str, Any] = {}
        for turn in turns:
            if self._rollout.done():
                raise RuntimeError("the environment ended before a turn that it had answered")
            response, spoken = self._response(turn)
            before = [*self._messages, _plain(spoken)]
            runs = self._runs_on(response)
            answer = {"results": self._said_behind(before)} if runs else self._over()
        while wants_reward and not self._rollout.done():
            if not self._runs_on(self._refusal("the episode has reached its limit")):
                return {**self._over(), "over": False}
        return answer

    def _runs_on(self, reply: Any = None) -> bool:
        """Whether the rollout, once it has the ``reply``, comes to another question."""
        if isinstance(reply, Exception) and not self._reply.done():
            self._reply.set_exception(reply)
        elif reply is not None and not self._reply.done():  # as its own time limit cancels it
            self._reply.set_result(reply)

        async def until_asked() -> None:
            asked = asyncio.ensure_future(self._is_asked.wait())
            await asyncio.wait((self._rollout, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()

        self._loop.run_until_complete(until_asked())
        if self._rollout.done():
            return False
        self._is_asked.clear()
        prompt, tools = self._question
        if [tool.name for tool in tools or ()] != list(self._tools):
            raise ToolError(
                "the environment gives the model other tools in some rows; give all rows the same"
            )
        self._messages = [*map(_plain, prompt)]
        return True

    def _over(self) -> dict[str, Any]:
        output = self._rollout.result()
        if output["error"]:
            return {"failed": "crash", "message": output["error"]["error_chain_repr"]}
        return {"over": True, **rewarded(outcome_of(output["reward"]))}

    def _response(self, turn: Turn) -> tuple[Any, Any]:
        """The response to the rollout for a turn, and its message."""
        types = importlib.import_module("verifiers.types")
        self._turns += 1
        calls = [
            types.ToolCall(
                id=f"call_{self._turns}_{place}",
                name=call.name,
                arguments=json.dumps(call.by_name(self._tools.get(call.name, {}))),
            )
            for place, call in enumerate(turn.calls)
        ]
        reason = "length" if turn.is_cut else "tool_calls" if calls else "stop"
        message = types.ResponseMessage(
            content=turn.text,
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=turn.is_cut,
        )
        name = f"turn_{self._turns}"
        return types.Response(id=name, created=0, model="isobit", message=message), message

    def _said_behind(self, before: list[dict[str, Any]]) -> list[list[str]]:
        said = self._messages[len(before) :]
        roles = [message["role"] for message in said]
        if self._messages[: len(before)] != before or not said:
            raise ToolError(
                "the environment asks the model without what was said before, or with nothing "
                "behind the last turn; an episode is one conversation that grows"
            )
        if set(roles) - {"tool", "user"} or roles != sorted(roles):
            raise ToolError(
                f"the environment answers a turn with messages of {', '.join(roles)}; those that "
                "can follow are of tools, and behind them of the user"
            )
        texts = [truncated_result(message["content"], self._most) for message in said]
        return [
            [kind if role == "tool" else "user", text]
            for role, (kind, text) in zip(roles, texts, strict=True)
        ]


def _client(conversation: Conversation) -> Any:
    """The client of a model that is elsewhere."""
    base: Any = importlib.import_module("verifiers.clients").Client

    class EngineClient(base):
        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            return await conversation.reply(prompt, tools)

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None: ...

    return EngineClient(None)


def _plain(message: Any) -> dict[str, Any]:
    """A message as JSON.  Raises ToolError for one that is more than text."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or ()
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    if None in texts:
        raise ToolError("the environment shows the model something that is no text")
    called = (call.get("function", call) for call in message.get("tool_calls") or ())
    calls = [
        {"type": "function", "function": {name: call.get(name) for name in ("name", "arguments")}}
        for call in called
    ]
    text = text_of("".join(map(str, texts)))
    return {"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})}
