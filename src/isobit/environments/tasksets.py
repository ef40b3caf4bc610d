"""Environments of verifiers 0.4, a taskset with the program that plays it (its harness); and the
datasets of all environments of verifiers.

    program  --requests-->  verifiers' own server  --requests-->  here  --turns-->  the engine

The program asks a model at an address, as OpenAI's servers are asked.  The address is in the
episode's process, where an answer is the turn that the engine draws; so programs, tools and rewards
run unchanged.  Which tools a program gives the model is known once it asks: for that a first task
is begun, and left, where the host starts.
"""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isobit.environments.env_backends import HostStart, Turn, rewarded
from isobit.environments.verifiers_classic import CLASSIC, Conversation, defines, load_verifiers
from isobit.rewards.grade import outcome_of
from isobit.util.errors import ToolError

_MODEL = "isobit"


class LimitError(Exception):
    """The episode has reached a limit, and its model says no more."""


def is_classic() -> bool:
    """Whether verifiers has the environments that lead by themselves, which end with 0.3."""
    try:
        return hasattr(importlib.import_module("verifiers"), "load_environment")
    except ImportError:
        return True  # as what is missing is told where they are loaded


def load_taskset(place: str, options: Mapping[str, Any]) -> Any:
    """The environment of an installed taskset, or of a file that exports one, by the configuration
    ``options``.  Programs run on this machine, and those that run no code (``null``) by default.
    Raises ToolError.
    """
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        fields_of = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields
        name = _importable(place)
        seats = fields_of(loaders.env_config_type(name, options.get("id", ""))())
        given = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
        for seat in seats:
            here = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
            given[seat] = {**here, **options.get(seat, {})}
        config = loaders.resolve_env_config(given)
        for seat, harness in config.agent_harnesses().items():
            is_here = getattr(config, seat).runtime.type == "subprocess"
            if is_here and loaders.harness_class(harness.id).EXECUTES_CODE:
                raise ToolError(
                    f"the harness {harness.id!r} runs what the model writes on this machine; give "
                    f'environment.options.{seat}.runtime a container (type = "docker"), or take '
                    'harness.id = "null"'
                )
        return loaders.load_environment(config)
    except ToolError:
        raise
    except (Exception, SystemExit) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if defines(place, CLASSIC):
            raise ToolError(
                f"{place!r} has load_environment, so it is an environment of verifiers 0.2 or 0.3; "
                "what is installed runs tasksets of 0.4: pip install 'isobit[verifiers-classic]' "
                f"(verifiers<0.4), or write it as a taskset (docs/environments.md) ({what})"
            ) from error
        raise ToolError(f"the taskset {place!r} cannot be loaded: {what}") from error


def _importable(place: str) -> str:
    """The name of a module, which tools in processes of their own import too."""
    if not place.endswith(".py"):
        return place
    if not Path(place).is_file():
        raise ToolError(f"there is no file {place} of an environment")
    folder = str(Path(place).absolute().parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.getenv("PYTHONPATH"))))
    return Path(place).stem


def print_rows(place: str, options: Mapping[str, Any], split: str) -> None:
    """Write the dataset of an environment as lines of JSON, for ``isobit.data.tasks``."""
    with redirect_stdout(sys.stderr):
        if is_classic():
            environment = load_verifiers(place, options)
            is_eval = split == "eval"
            rows = environment.get_eval_dataset() if is_eval else environment.get_dataset()
        else:
            rows = _rows(load_taskset(place, options).taskset)
    for row in rows:
        print(json.dumps(row, default=str))


def _rows(taskset: Any) -> Iterator[dict[str, Any]]:
    if not taskset.bounded:
        raise ToolError(
            "this taskset has no end; write the rows that you want to a file, each with its prompt "
            "and its task (isobit.environments.tasksets.row_of)"
        )
    yield from map(row_of, taskset)


def row_of(task: Any) -> dict[str, Any]:
    """The row of a task: what is shown first, and what it is known by."""
    data = task.data
    wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    prompt = [{"role": "user", "content": data.prompt or ""}]
    if data.prompt and not isinstance(data.prompt, str):
        prompt = [*map(wire, data.prompt)]
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return {"prompt": [*system, *prompt], "task": _known_by(task)}


def _known_by(task: Any) -> dict[str, Any]:
    return json.loads(json.dumps(task.data.model_dump(mode="json", exclude_none=True)))


class HostedTaskset:
    """A taskset whose model is the engine."""

    def __init__(self, start: HostStart) -> None:
        self._most = start.most_characters
        self._environment = load_taskset(start.place, start.options)
        taskset = self._environment.taskset
        self._tasks = [*taskset] if taskset.bounded else None
        try:
            first = next(iter(self._tasks or taskset))
        except StopIteration:
            raise ToolError(f"the taskset {start.place!r} has no task") from None
        probe = Played(self._environment, self._most, first, None)
        self._tools = probe.tools_of_first_question()

    def ready(self) -> dict[str, Any]:
        single = importlib.import_module("verifiers.v1.envs.single_agent").SingleAgentEnv
        quiet = isinstance(self._environment, single)
        how = {"has_reward": True, "opens": True, "leads": True, "speaks": not quiet}
        return {"ready": self._tools, **how}

    def open(self) -> "Played":
        return Played(self._environment, self._most, self._task_of, self._tools)

    def _task_of(self, columns: Mapping[str, Any]) -> Any:
        known = columns.get("task")
        index = known.get("idx") if isinstance(known, dict) else None
        taskset = self._environment.taskset
        task = None
        if isinstance(index, int) and index >= 0:
            task = next(iter((self._tasks or [])[index : index + 1]), None)
            if self._tasks is None:
                task = next(islice(taskset, index, None), None)
        if task is None or _known_by(task) != known:
            raise ToolError(
                "a row's task is none of the environment's; take its own dataset "
                '(data.train.type = "verifiers"), with the options of [environment]'
            )
        return task


class Played(Conversation):
    """A task that a program plays.

    Args:
        task: the task, or what gives it for the columns of a row.
        tools: those of all episodes, in OpenAI's form; None where they are not known.
    """

    def __init__(self, environment: Any, most: int, task: Any, tools: Any) -> None:
        listed = [
            SimpleNamespace(
                name=tool["function"]["name"], parameters=tool["function"].get("parameters", {})
            )
            for tool in tools or ()
        ]
        super().__init__(SimpleNamespace(tool_defs=listed), most, LimitError)
        self._played, self._task, self._is_probe = environment, task, tools is None

    def tools_of_first_question(self) -> list[dict[str, Any]]:
        """The tools that the program shows the model with its first question."""
        self._rollout = self._loop.create_task(self._play({}))
        waits = asyncio.wait(
            (self._rollout, self._loop.create_task(self._is_asked.wait())),
            return_when=asyncio.FIRST_COMPLETED,
        )
        self._loop.run_until_complete(waits)
        if self._rollout.done():
            why = self._over().get("message", "it ended")
            raise ToolError(f"the program of the first task asks no model: {why}")
        found = [vars(tool)["given"] for tool in self._question[1]]
        self._rollout.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._rollout)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        return found

    def _play(self, columns: Mapping[str, Any]) -> Coroutine[Any, Any, Any]:
        task = self._task if self._is_probe else self._task(columns)
        return self._episode(task)

    async def _episode(self, task: Any) -> Any:
        web = importlib.import_module("aiohttp.web")
        clients = importlib.import_module("verifiers.v1.clients")
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/chat/completions", self._asked)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            client = clients.EvalClientConfig(base_url=address, api_key_var="ISOBIT_NO_KEY")
            context = clients.ModelContext(model=_MODEL, client=client)
            async with self._played.serving():
                return await self._played.run_episode(task, context)
        finally:
            await runner.cleanup()

    async def _asked(self, request: Any) -> Any:
        """A request to the model, which is answered by the next turn."""
        web = importlib.import_module("aiohttp.web")
        body = await request.json()
        given = body.get("tools") or ()
        tools = [SimpleNamespace(name=one["function"]["name"], given=one) for one in given]
        try:
            message, reason = await self.reply(body["messages"], tools)
        except LimitError as error:
            refusal = {
                "message": f"maximum context length: {error}",
                "type": "invalid_request_error",
            }
            whole = {"error": {**refusal, "code": "context_length_exceeded"}}
            return web.json_response(whole, status=400)
        about = {"id": f"turn_{self._turns}", "created": 0, "model": _MODEL}
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            whole = {**about, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole)
        calls = [{**one, "index": at} for at, one in enumerate(message.get("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        about["object"] = "chat.completion.chunk"
        chunks = [
            {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {**about, "choices": [], "usage": usage},
        ]
        lines = [*map(json.dumps, chunks), "[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines)
        return web.Response(text=text, content_type="text/event-stream")

    def _response(self, turn: Turn) -> tuple[Any, Any]:
        self._turns += 1
        calls = [
            {
                "id": f"call_{self._turns}_{place}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.by_name(self._tools.get(call.name, {}))),
                },
            }
            for place, call in enumerate(turn.calls)
        ]
        said = {"role": "assistant", "content": turn.text}
        message = {**said, "tool_calls": calls} if calls else said
        reason = "length" if turn.is_cut else "tool_calls" if calls else "stop"
        return (message, reason), message

    def _over(self) -> dict[str, Any]:
        episode = self._rollout.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            message = "; ".join(f"{one.type}: {one.message}" for one in errors)
            return {"failed": "crash", "message": message or "the rollout failed"}
        if len(episode.traces) != 1:
            raise ToolError(
                f"an episode of this environment has {len(episode.traces)} agents that are played; "
                "one is trained here"
            )
        return {"over": True, **rewarded(outcome_of(episode.traces[0].reward))}
