"""A stand-in for ``vllm serve`` of version 0.25.1 in development mode, around the model of
``tests.rollout.fake_vllm``: the routes that ``isobit.rollout.vllm_server`` calls, with their
requests and answers.  Its worker is ``isobit.rollout.vllm_model.Worker``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from isobit.rollout.vllm_model import Worker
from tests.rollout.fake_vllm import FUSED, Model
from tests.rollout.served import listening

ASKED = {
    *("model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos", "logprobs", "stream"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}
"""What a request may say: each is a field of vLLM's ``CompletionRequest``."""


class ServedModel(Model):
    """Dummy weights until the first update, as ``--load-format dummy`` has them."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        for name, values in self.held[0].state_dict().items():
            module, _, leaf = name.rpartition(".")
            above, _, own = module.rpartition(".")
            is_e4m3 = values.ndim == 2 and self.kept is not None and not self.kept.keeps(module)
            dtype = torch.float8_e4m3fn if is_e4m3 and own != "embed_tokens" else torch.bfloat16
            path = f"{above}.{FUSED.get(own, own)}.{leaf}".lstrip(".")
            self.tensors[path] = torch.zeros_like(values, dtype=dtype)


class FakeWorker(Worker):
    def __init__(self, folder: str, **given: Any) -> None:
        self.model = ServedModel(folder)
        self.model_runner = SimpleNamespace(calculate_kv_scales=False)
        size = self.model.held[0].config.vocab_size
        values: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "world_size": 1}
        values |= given
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                calculate_kv_scales=given.get("calculate_kv_scales", False),
                num_gpu_blocks=64,
                block_size=16,
            ),
            model_config=SimpleNamespace(
                get_vocab_size=lambda: size,
                logprobs_mode=values["logprobs_mode"],
                max_model_len=256,
            ),
            parallel_config=SimpleNamespace(world_size=values["world_size"]),
            scheduler_config=SimpleNamespace(max_num_seqs=given.get("max_num_seqs", 8)),
        )

    def get_model(self) -> ServedModel:
        return self.model


class VllmServe:
    """The server's state, and its routes."""

    def __init__(self, folder: Path, interval: int, key: str | None, given: dict[str, Any]) -> None:
        self.worker = FakeWorker(str(folder), **given)
        self.interval, self.key = interval, key
        self.is_paused, self.has_dev_mode = False, True
        self.asked: list[dict[str, Any]] = []
        """Bodies of completions, in the order of arrival."""
        self.calls: list[str] = []
        self.running = 0
        self.pauses = 0  # that have ended what was running
        self.random = torch.Generator().manual_seed(3)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/is_paused", self.dev(self.paused)),
                *(
                    Route(f"/{name}", self.dev(getattr(self, name)), methods=["POST"])
                    for name in ("pause", "resume", "reset_prefix_cache", "collective_rpc")
                ),
            ]
        )

    def dev(self, handler: Any) -> Any:
        async def called(request: Request) -> Response:
            self.calls.append(request.url.path)
            if not self.has_dev_mode:
                return JSONResponse({"error": {"message": "Not Found"}}, 404)
            return await handler(request)

        return called

    def is_refused(self, request: Request) -> bool:
        return self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}"

    async def models(self, request: Request) -> Response:
        if self.is_refused(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "the-model", "object": "model"}]})

    async def paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": self.is_paused})

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "abort"
        self.is_paused, self.pauses = True, self.pauses + 1
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self.is_paused = False
        return JSONResponse({"status": "resumed"})

    async def reset_prefix_cache(self, _: Request) -> Response:
        return Response()

    async def collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        method = getattr(self.worker, body["method"], None)
        if method is None:
            return JSONResponse({"error": {"message": "Call to collective_rpc failed"}}, 500)
        assert self.is_paused or body["method"] != "isobit_update"
        assert all(isinstance(one, str) for one in body.get("args", []))
        self.calls[-1] = body["method"]
        found = await asyncio.to_thread(method, *body.get("args", []))
        return JSONResponse({"results": [json.loads(json.dumps(found))]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        assert request.headers["content-type"] == "application/json"
        assert set(body) == ASKED
        assert body["model"] == "the-model" and body["stream"] and body["ignore_eos"]
        assert (body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)
        if self.is_refused(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        if body["temperature"] == 0 and body["n"] > 1:
            message = "n must be 1 when using greedy sampling, got 2."
            return JSONResponse({"error": {"message": message}}, 400)
        self.asked.append(body)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """As ``completion_stream_generator``: a chunk has one choice, with what is new of it."""
        while self.is_paused:
            await asyncio.sleep(0.01)
        pauses, self.running = self.pauses, self.running + 1
        try:
            tokens = [list(body["prompt"]) for _ in range(body["n"])]
            told, live = [len(body["prompt"])] * body["n"], set(range(body["n"]))
            values: list[list[float]] = [[] for _ in tokens]
            while live:
                await asyncio.sleep(0)
                for index in sorted(live):
                    drawn, reason = len(tokens[index]) - len(body["prompt"]), None
                    if self.pauses != pauses:
                        reason = "abort"
                    else:
                        values[index].append(self.draw(tokens[index], body["temperature"]))
                        drawn += 1
                        if tokens[index][-1] in body["stop_token_ids"]:
                            reason = "stop"
                        elif drawn == body["max_tokens"]:
                            reason = "length"
                    if reason is None and drawn != 1 and drawn % self.interval:
                        continue
                    new = tokens[index][told[index] :]
                    told[index] = len(tokens[index])
                    if reason is not None:
                        live.remove(index)
                    first = len(values[index]) - len(new)
                    yield chunk(index, new, values[index][first:], reason)
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    @torch.no_grad()
    def draw(self, tokens: list[int], temperature: float) -> float:
        model = self.worker.model
        for place, layer in enumerate(model.attentions):
            layer.make_scales(model.held[0].model.layers[place].self_attn.k_proj.weight)
        logits = model.held[0](torch.tensor([tokens])).logits[0, -1]
        log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
        if temperature == 0:
            token = int(log_probs.argmax())
        else:
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.random))
        tokens.append(token)
        return max(float(log_probs[token]), -9999.0)


def chunk(index: int, tokens: list[int], log_probs: list[float], reason: str | None) -> str:
    choice = {
        "index": index,
        "text": "",
        "logprobs": {
            "text_offset": [0] * len(tokens),
            "token_logprobs": log_probs,
            "tokens": [f"token_id:{one}" for one in tokens],
            "top_logprobs": [
                {f"token_id:{token}": value} for token, value in zip(tokens, log_probs, strict=True)
            ],
        },
        "finish_reason": reason,
        "stop_reason": tokens[-1] if reason == "stop" else None,
        "token_ids": tokens,
    }
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "the-model"}
    return f"data: {json.dumps({**body, 'choices': [choice]})}\n\n"


@contextmanager
def vllm_served(
    folder: Path, interval: int = 3, key: str | None = None, port: int = 0, **given: Any
) -> Iterator[tuple[str, VllmServe]]:
    """The address of a server of the model that ``folder`` describes, and its state."""
    state = VllmServe(folder, interval, key, given)
    config = uvicorn.Config(state.app(), port=port, log_config=None, timeout_graceful_shutdown=0)
    with listening(config) as address:
        yield address, state
