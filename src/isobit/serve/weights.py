"""New weights for a running server, pushed by a trainer under the names of vLLM's routes:

    POST /init_weight_transfer_engine    {"init_info": {}}
    POST /pause?mode=abort|wait|keep     POST /resume    GET /is_paused
    POST /start_weight_update            {}
    POST /update_weights                 {"update_info": {"path": "step_8"}}, or the bytes of a
                                         safetensors file as application/octet-stream; repeatedly
    POST /finish_weight_update           {"weight_version": "8"}, or nothing
    GET  /weight_info                    GET /get_world_size

Tensors have the names, shapes and formats of a model folder, and are copied to the host's memory
when they come.  Nothing is published before the update is whole and every number finite; then it is
published between two answers, as the weights of a followed run are.  The bytes that are drawn
afterwards are those of a server that was started on a folder with these tensors.

The digest of an update is ``isobit.models.weight_deltas.digest_of`` over its tensors.  Runs that
sample here have routes of their own (``isobit.serve.runs``).
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from isobit.models.checkpoint import is_finite, open_checkpoint
from isobit.models.decoder import build_decoder
from isobit.models.policy import Policy
from isobit.models.quantised_checkpoint import FORMATS
from isobit.models.safetensors import DTYPES, TensorFile
from isobit.models.stacked import readable_stacks
from isobit.models.weight_deltas import digest_of, read_file
from isobit.serve.engine import EngineCall, EngineThread, PauseMode
from isobit.serve.errors import ApiError
from isobit.serve.runs import Runs
from isobit.util.errors import ModelError, shown

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FORMAT_OF = {DTYPES[name]: name for name in FORMATS}
_MODES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
_OTHER_BACKENDS = (
    "this server takes weights from safetensors files and from bodies of requests, and not by NCCL "
    "or CUDA IPC: leave {} out, and write a safetensors file or send its bytes to /update_weights"
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request to one of the routes."""

    body: bytearray
    is_json: bool
    query: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        """The body; an empty one is an empty object. Raises ApiError."""
        try:
            content = json.loads(self.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not a JSON object: {shown(error)}") from None
        if not isinstance(content, dict):
            raise ApiError(400, "the body is not a JSON object")
        return content


READ_S = 600.0
"""Seconds in which the tensors of a request have to be read."""
T = TypeVar("T")


async def _in_own_thread(work: Callable[[], T]) -> T:
    """The result of work that may never end: nobody waits for its thread when the process ends."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(set_result: Callable[[Any], None], value: object) -> None:
        if not result.done():
            set_result(value)

    def run() -> None:
        try:
            outcome = (tell, result.set_result, work())
        except BaseException as error:
            outcome = (tell, result.set_exception, error)
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(*outcome)

    threading.Thread(target=run, name="isobit-weights", daemon=True).start()
    return await result


Handler = Callable[[Sent], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class WeightUpdates:
    """The routes' state. ``root`` is the folder below which files of weights may lie."""

    policy: Policy
    thread: EngineThread
    root: Path
    runs: Runs = field(init=False)
    """The runs that sample here."""
    _staged: dict[str, torch.Tensor] | None = None
    """The tensors of the update that has begun, by name."""
    _version: str | None = None
    """The trainer's name of the weights; None for the policy's count."""
    _digest: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.runs = Runs(self.policy, self.thread)

    @property
    def routes(self) -> Mapping[tuple[str, str], Handler]:
        def of_body(answer: Callable[[bytearray], Awaitable[dict[str, Any]]]) -> Handler:
            return lambda sent: answer(sent.body)

        return {route: of_body(answer) for route, answer in self.runs.routes.items()} | {
            ("POST", "/init_weight_transfer_engine"): self._initialise,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("GET", "/weight_info"): self._info,
            ("GET", "/get_world_size"): self._world_size,
        }

    @property
    def largest_body(self) -> int:
        """All weights in FP32, and a header; in bytes."""
        return (16 << 20) + 4 * sum(map(prod, self.policy.shapes.values()))

    async def _initialise(self, sent: Sent) -> dict[str, Any]:
        info = _only(sent.json(), "init_info").get("init_info")
        if not isinstance(info, dict):
            raise ApiError(400, 'init_info: expected an object, such as {"init_info": {}}')
        if info:
            raise ApiError(400, f"init_info: {_OTHER_BACKENDS.format(shown(', '.join(info)))}")
        return {"message": "Weight transfer initialized"}

    async def _start(self, sent: Sent) -> dict[str, Any]:
        given = _only(sent.json(), "is_checkpoint_format")
        if given.get("is_checkpoint_format", True) is not True:
            raise ApiError(
                400,
                "is_checkpoint_format: expected true, since weights come under the names of model "
                "folders",
            )
        async with self._lock:
            self._staged = {}
        return {"message": "Weight update started"}

    async def _update(self, sent: Sent) -> dict[str, Any]:
        if self.policy.config.lora is not None:
            raise ApiError(
                400,
                "this server's model has adapters, which only a run that samples here updates; "
                "serve their base, or a folder of `isobit export --merge`",
            )
        staged = self._begun()
        try:  # without the lock: a file system that does not answer keeps nobody else waiting
            async with asyncio.timeout(READ_S):
                tensors = await _in_own_thread(lambda: self._read(sent))
        except TimeoutError:
            raise ApiError(504, f"the weights were not read within {READ_S:g} s") from None
        async with self._lock:
            if self._staged is not staged:
                raise ApiError(409, "another update has begun while these weights were read")
            staged.update(tensors)
        return {"message": "Weights updated", "tensors": len(tensors)}

    async def _finish(self, sent: Sent) -> dict[str, Any]:
        version = _only(sent.json(), "weight_version").get("weight_version")
        if version is not None and not isinstance(version, str):
            raise ApiError(400, "weight_version: expected a text")
        async with self._lock:
            staged = self._begun()
            digest = await asyncio.to_thread(self._check, staged)
            call = EngineCall(is_control=True)
            self.thread.publish(call, lambda: self.policy.republish(self._masters(staged)))
            await call.next()
            self._staged, self._version, self._digest = None, version, digest
            return {"message": "Weight update finished", **self._described()}

    async def _pause(self, sent: Sent) -> dict[str, Any]:
        query = dict(sent.query)
        mode = query.get("mode", "abort")
        if mode not in _MODES:
            raise ApiError(400, f"mode: expected abort, wait or keep; found {shown(mode)}")
        call = EngineCall(is_control=True)
        self.thread.pause(call, _MODES[mode])
        await call.next()
        return {"status": "paused"}

    async def _resume(self, sent: Sent) -> dict[str, Any]:
        call = EngineCall(is_control=True)
        self.thread.resume(call)
        await call.next()
        return {"status": "resumed"}

    async def _is_paused(self, sent: Sent) -> dict[str, Any]:
        return {"is_paused": self.thread.is_paused}

    async def _info(self, sent: Sent) -> dict[str, Any]:
        return self._described()

    async def _world_size(self, sent: Sent) -> dict[str, Any]:
        return {"world_size": 1}

    def _described(self) -> dict[str, Any]:
        """``version`` is the count in ``system_fingerprint``; before the first update there is no
        digest.
        """
        count = self.policy.version
        return {
            "weight_version": self._version or str(count),
            "version": count,
            "sha256": self._digest,
        }

    def _begun(self) -> dict[str, torch.Tensor]:
        if self._staged is None:
            raise ApiError(409, "no update of the weights has begun: ask /start_weight_update")
        return self._staged

    # In a thread of their own

    def _read(self, sent: Sent) -> dict[str, torch.Tensor]:
        """The tensors that an update names or holds, copied. Raises ApiError, ModelError."""
        tensors = self._of_path(sent) if sent.is_json else _of_bytes(sent.body)
        expected = self._expected()
        for name, values in tensors.items():
            if name not in expected:
                raise ApiError(
                    400, f"{shown(name)}: the model has no such tensor, the first of its own is "
                    f"{next(iter(expected))}",
                )  # fmt: skip
            if tuple(values.shape) != expected[name]:
                raise ApiError(
                    400, f"{name} has the shape {tuple(values.shape)}; expected {expected[name]}"
                )
            if values.dtype not in _FORMAT_OF:
                raise ApiError(400, f"{name} is {values.dtype}; expected one of {FORMATS}")
            if not is_finite(values):
                raise ApiError(400, f"{name} holds a NaN or an infinity; expected finite numbers")
        return tensors

    def _of_path(self, sent: Sent) -> dict[str, torch.Tensor]:
        info = _only(sent.json(), "update_info").get("update_info")
        if not isinstance(info, dict):
            raise ApiError(400, 'update_info: expected an object, as {"path": "step_8"}')
        others = [name for name in info if name != "path"]
        if others:
            raise ApiError(400, f"update_info: {_OTHER_BACKENDS.format(shown(', '.join(others)))}")
        path, root = info.get("path"), self.root.resolve()
        if not isinstance(path, str) or not path or "\0" in path:
            raise ApiError(400, "update_info.path: expected a safetensors file or its folder")
        try:
            whole = (root / path).resolve()
            if not whole.is_relative_to(root):
                raise ApiError(
                    403, f"update_info.path: {shown(path)} is outside of {root}, below which the "
                    "server was allowed to read weights",
                )  # fmt: skip
            if whole.is_dir():
                return {n: one.mapped.clone() for n, one in open_checkpoint(whole).items()}
            return {name: values.clone() for name, values in TensorFile(whole).items()}
        except (ModelError, OSError, RuntimeError) as error:
            raise ApiError(400, f"update_info.path: {error}") from None
        except KeyError as error:
            raise ApiError(400, f"update_info.path: {error} is no format of weights") from None

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a model folder's tensors by name: of experts that are in one tensor a layer
        where folders have them so alone, and else of both forms.
        """
        config = self.policy.config
        described = build_decoder(config).masters().values()
        stacked = {stack.name: stack for stack in readable_stacks(config)}
        within = {part for stack in stacked.values() for part in stack.parts}
        shapes = {
            part: (rows, *master.shape[1:])
            for master in described
            for part, rows in master.parts.items()
            if part not in within or not config.stacks_experts
        } | {name: stack.shape for name, stack in stacked.items()}
        if self.policy.config.tied_embeddings and _EMBEDDING in shapes:
            shapes.setdefault(_HEAD, shapes[_EMBEDDING])  # some trainers send it twice
        return shapes

    def _check(self, staged: dict[str, torch.Tensor]) -> str:
        """The digest of a whole update. Raises ApiError."""
        tied = self.policy.config.tied_embeddings
        optional = {_HEAD} if tied else set[str]()
        for stack in readable_stacks(self.policy.config):
            if stack.name not in staged and not self.policy.config.stacks_experts:
                optional.add(stack.name)
                continue
            optional.update(stack.parts)
            if twice := next((part for part in stack.parts if part in staged), None):
                raise ApiError(
                    400, f"{stack.name} has all experts of a layer, and {twice} came beside it"
                )
        missing = [name for name in self._expected() if name not in staged and name not in optional]
        if missing:
            raise ApiError(
                400,
                f"{len(missing)} tensors have not come, the first is {missing[0]}: send them to "
                "/update_weights; the old weights are still served",
            )
        if tied and _HEAD in staged and not torch.equal(staged[_HEAD], staged[_EMBEDDING]):
            raise ApiError(
                400, f"{_HEAD} is another matrix than {_EMBEDDING}, and this model ties the two"
            )
        return digest_of(staged)

    def _masters(self, staged: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's masters, one by one, on its device."""
        places = {
            part: (stack, index)
            for stack in readable_stacks(self.policy.config)
            if stack.name in staged
            for index, part in enumerate(stack.parts)
        }
        for name, master in build_decoder(self.policy.config).masters().items():
            values = torch.zeros(master.shape, dtype=torch.float32, device=self.policy.device)
            for part, rows in master.of_checkpoint(values).items():
                if part in places:
                    stack, index = places[part]
                    rows.copy_(stack.part(staged[stack.name], index))
                else:
                    rows.copy_(staged[part])
            yield name, values


def _only(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Raises ApiError for a key that is none of ``names``."""
    for name in given:
        if name not in names:
            expected = ", ".join(names)
            raise ApiError(400, f"{shown(name)}: this route has no such key; expected {expected}")
    return given


def _of_bytes(body: bytearray) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file's bytes. Raises ApiError."""
    try:
        return read_file(body)
    except ModelError as error:
        raise ApiError(400, f"{error}") from None
