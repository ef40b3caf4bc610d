"""The engine protocol over HTTP, for runs that sample here (``rollout.engine = "http"``,
docs/engines.md):

    GET  /isobit/engine            what computes here, and the digest of its weights
    POST /isobit/weights/begin     {"base": "<digest>"}: what the update starts from, or null
    POST /isobit/weights/part      a safetensors file (``isobit.models.weight_deltas``); repeatedly
    POST /isobit/weights/publish   {"sha256": "<digest>"} -> {"sha256", "published"}
    POST /isobit/step              {"client", "session", "weights", "ask", "drop"} -> {"samples"},
                                   with "kept" in the first answer of a session

``isobit.serve.run_samples`` answers the steps.

A copy of the last weights stays in the host's memory, in BF16.  An update is applied to it, and
published only where its digest is the one that the client has named; it ends all samples of runs
and what was kept of them, so that no answer mixes two versions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from secrets import token_hex
from typing import Any

import torch

import isobit
from isobit.config.base import Strict
from isobit.models.adapter_folder import check_numbers
from isobit.models.checkpoint import is_finite
from isobit.models.policy import Policy
from isobit.models.weight_deltas import apply_change, digest_of, parted_names, read_file
from isobit.serve.admission import Gate
from isobit.serve.engine import EngineCall, EngineThread
from isobit.serve.errors import ApiError
from isobit.serve.metrics import Metrics
from isobit.serve.protocol import read_request
from isobit.serve.run_samples import AskedStep, RunSamples
from isobit.store.manifest import environment
from isobit.util.errors import ModelError, shown

PROTOCOL = 1


class AskedBegin(Strict):
    base: str | None


class AskedPublish(Strict):
    sha256: str


@dataclass(slots=True)
class Runs:
    """The routes' state."""

    policy: Policy
    thread: EngineThread
    _gate: Gate | None = None
    _samples: RunSamples | None = None
    """Both are the server's, which opens the routes."""
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weights of the last update, by master."""
    _digest: str | None = None
    """The digest of these weights."""
    _published: int | None = None
    """The policy's version that was published from them."""
    _staged: dict[str, torch.Tensor] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _name: str = field(default_factory=lambda: token_hex(8))
    """A name that no other server has, whatever its address."""

    def open(self, gate: Gate, metrics: Metrics) -> None:
        """Let runs in by the server's gate."""
        self._gate = gate
        self._samples = RunSamples(self.thread, gate, metrics, self._check_weights)

    @property
    def weights(self) -> str | None:
        """The digest of what is sampled from; None where it did not come from a run."""
        return self._digest if self.policy.version == self._published else None

    @property
    def routes(self) -> Mapping[tuple[str, str], Callable[[bytearray], Awaitable[dict[str, Any]]]]:
        """The handler that answers the body of a request."""
        return {
            ("GET", "/isobit/engine"): self._describe,
            ("POST", "/isobit/weights/begin"): self._begin,
            ("POST", "/isobit/weights/part"): self._part,
            ("POST", "/isobit/weights/publish"): self._publish,
            ("POST", "/isobit/step"): self._answer,
        }

    async def _describe(self, _: bytearray) -> dict[str, Any]:
        """A description of what computes here: one that is equal in all but the sizes computes the
        same bits.
        """
        limits, graph = self.thread.engine.limits, self.policy.flow.graph("rollout")
        assert self._gate is not None
        return {
            "protocol": PROTOCOL,
            "isobit": isobit.__version__,
            "model": asdict(self.policy.config),
            "flow": [list(site.forward_formats) for site in graph.sites],
            "bits": environment(self.policy.device)["bits"],
            "weights": self.weights,
            "server": self._name,
            "pages": limits.num_pages,
            "page_tokens": limits.page_tokens,
            "places": self._gate.places,
            "running": self.thread.engine.max_sequences,
        }

    # Weights

    async def _begin(self, body: bytearray) -> dict[str, Any]:
        asked = read_request(AskedBegin, body)
        async with self._lock:
            if asked.base is not None and asked.base != self._digest:
                raise ApiError(
                    409,
                    f"base: this server does not hold the weights {asked.base[:12]}; send all of "
                    "them, with the base null",
                )
            self._staged = {}
            if asked.base is None:
                self._held, self._digest = {}, None
        return {}

    async def _part(self, body: bytearray) -> dict[str, Any]:
        async with self._lock:
            staged = self._begun()
            try:
                tensors = await asyncio.to_thread(read_file, body)
                self._check_part(tensors)
            except ModelError as error:
                raise ApiError(400, str(error)) from None
            staged.update(tensors)
        return {"tensors": len(tensors)}

    def _check_part(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises ModelError for what no update has, so that it need not be kept."""
        shapes = self.policy.shapes
        for name, sent in parted_names(found).items():
            if name not in shapes:
                raise ModelError(f"{shown(name)} is no master of this model")
            most = 4 * torch.Size(shapes[name]).numel()  # all of it in FP32
            size = sum(one.nbytes for one in sent.values())
            if size > 2 * most:
                raise ModelError(f"{name} has {size:,} bytes; an update of it at most {2 * most:,}")

    async def _publish(self, body: bytearray) -> dict[str, Any]:
        asked = read_request(AskedPublish, body)
        async with self._lock:
            staged, self._staged = self._begun(), None
            self._digest = None  # until all of it has been applied
            digest = await asyncio.to_thread(self._apply, staged)
            if digest != asked.sha256:
                self._held = {}
                return {"sha256": digest, "published": None}
            assert self._samples is not None
            self._samples.end_all()
            call = EngineCall(is_control=True)
            self.thread.publish(call, lambda: self.policy.republish(self._held))
            await call.next()
            self._digest, self._published = digest, self.policy.version
            published = await asyncio.to_thread(self.policy.checksum, values=False)
            return {"sha256": digest, "published": published}

    def _begun(self) -> dict[str, torch.Tensor]:
        if self._staged is None:
            raise ApiError(409, "no update has begun: ask /isobit/weights/begin")
        return self._staged

    def _apply(self, staged: Mapping[str, torch.Tensor]) -> str:
        """The digest of all weights with what has come."""
        shapes, dtype = self.policy.shapes, torch.bfloat16
        if self.policy.flow.preset == "fp32":
            dtype = torch.float32
        try:
            for name, sent in parted_names(staged).items():
                whole = sent.get("")
                if whole is None:
                    if name not in self._held:
                        raise ModelError(f"{name}: a change has come, and it is not held here")
                    apply_change(self._held[name], sent, name)
                elif (tuple(whole.shape), whole.dtype) != (tuple(shapes[name]), dtype):
                    raise ModelError(
                        f"{name} is {whole.dtype} {tuple(whole.shape)}; expected {dtype} "
                        f"{tuple(shapes[name])}"
                    )
                else:
                    self._held[name] = whole
                _check_sent(name, self._held[name] if whole is not None else sent["values"])
        except ModelError as error:
            self._held = {}
            raise ApiError(400, str(error)) from None
        missing = [name for name in shapes if name not in self._held]
        if missing:
            raise ApiError(400, f"{len(missing)} tensors have not come, the first is {missing[0]}")
        return digest_of(self._held)

    # Samples

    async def _answer(self, body: bytearray) -> dict[str, Any]:
        assert self._samples is not None
        return await self._samples.answer(read_request(AskedStep, body))

    def _check_weights(self, asked: str) -> None:
        if asked != self.weights:
            held = "others" if self.weights is None else self.weights[:12]
            raise ApiError(409, f"weights: samples are drawn from {held} here", "weights")


def _check_sent(name: str, values: torch.Tensor) -> None:
    """Raise ModelError for numbers that cannot be computed with."""
    if not is_finite(values):
        raise ModelError(f"{name} holds a NaN or an infinity")
    if ".lora_" in name:
        check_numbers(values, name)
