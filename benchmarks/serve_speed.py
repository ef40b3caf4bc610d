"""How fast `isobit serve` answers beside the engine alone, on the same model, requests and sizes.

    python -m benchmarks.serve_speed MODEL [--precision fp8] [--clients 128] [--prompt-tokens 256]
        [--new-tokens 512] [--rounds 2] [--kv-memory-gib 20] [--out ROWS.jsonl]

Each client sends one request of random token ids, all at once, and gets exactly so many tokens at
temperature 1.  By turns, each after a short round that warms up:

    native     the engine in a process of its own, which draws the same number of tokens
    whole      the server; each answer is one body
    streamed   the server; each answer comes as server-sent events

Prints a line of JSON for each, with the best round: tokens a second over the time from the first
request to the last answer, their ratio to ``native``, and of ``streamed`` the time to the first
token, the median and the largest of all clients.
"""

import argparse
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

WARM_UP_TOKENS = 16
Figures = dict[str, Any]


def prompts_of(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = options.clients, options.prompt_tokens
    return torch.randint(0, vocabulary, shape, generator=generator).tolist()


def native(options: argparse.Namespace) -> Figures:
    """The engine alone; also the vocabulary that prompts are drawn from."""
    from benchmarks.cases import make_requests
    from isobit.config.precision import PrecisionConfig
    from isobit.config.rollout import RolloutConfig
    from isobit.models.folder import load_sampling_model
    from isobit.rollout.engine import generate
    from isobit.rollout.native import NativeEngine

    precision = PrecisionConfig.model_validate(options.precision)
    model = load_sampling_model(options.model, precision, "auto")
    rollout = RolloutConfig(max_sequences=options.clients, kv_memory_gib=options.kv_memory_gib)
    engine = NativeEngine(model.policy, rollout, model.tokenizer, seed=0)
    prompts = prompts_of(options, model.policy.config.num_drawn)
    times: list[float] = []
    for tokens in (WARM_UP_TOKENS, *[options.new_tokens] * options.rounds):
        begun = time.perf_counter()
        generate(engine, make_requests(prompts, tokens))
        times.append(time.perf_counter() - begun)
    device = model.policy.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    rate = options.clients * options.new_tokens / min(times[1:])
    return {"device": name, "tokens_per_s": rate, "vocabulary": model.policy.config.num_drawn}


class Clients:
    """So many at once, each with a connection and a thread of its own."""

    def __init__(self, port: int, prompts: list[list[int]], name: str) -> None:
        self._port, self._prompts, self._name = port, prompts, name
        self.first: list[float] = []
        """Seconds from the beginning to the first token of each streamed answer."""

    def seconds(self, tokens: int, stream: bool) -> float:
        """From the first request to the last answer.  Raises RuntimeError where one has other than
        so many tokens.
        """
        self.first, failed = [], []

        def ask(index: int) -> None:
            body = {"model": self._name, "prompt": self._prompts[index], "max_tokens": tokens}
            body |= {"temperature": 1.0, "ignore_eos": True, "seed": index, "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            try:
                drawn = self._ask(json.dumps(body), begun, stream)
            except (OSError, ValueError) as error:
                drawn = f"{type(error).__name__}: {error}"
            if drawn != tokens:
                failed.append(drawn)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(self._prompts))]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        passed = time.perf_counter() - begun
        if failed:
            raise RuntimeError(f"{len(failed)} answers have not {tokens} tokens; one: {failed[0]}")
        return passed

    def _ask(self, body: str, begun: float, stream: bool) -> int | str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        if response.status != 200:
            return response.read().decode(errors="replace")[:300]
        if not stream:
            return json.loads(response.read())["usage"]["completion_tokens"]
        last, is_first = b"", True
        for line in response:
            if line.startswith(b"data: {"):
                if is_first:
                    self.first.append(time.perf_counter() - begun)
                last, is_first = line, False
        return json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]


def served(options: argparse.Namespace, vocabulary: int) -> list[Figures]:
    command = [
        sys.executable, "-m", "isobit.cli.main", "serve", options.model, "--port", "0",
        "--name", "speed", "--precision", options.precision, "--max-live", str(options.clients),
        "--rollout.max_sequences", str(options.clients),
        "--rollout.kv_memory_gib", str(options.kv_memory_gib),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 (this file)
    try:
        assert process.stdout is not None
        ports = (re.search(r":(\d+)/v1$", line.strip()) for line in process.stdout)
        found = next(filter(None, ports), None)
        if found is None:
            raise RuntimeError(f"the server ended with {process.wait(60)} before it listened")
        clients = Clients(int(found[1]), prompts_of(options, vocabulary), "speed")
        made: list[Figures] = []
        for stream in (False, True):
            clients.seconds(WARM_UP_TOKENS, stream)
            times, first = [], []
            for _ in range(options.rounds):
                times.append(clients.seconds(options.new_tokens, stream))
                first.append((median(clients.first), max(clients.first)) if stream else (0.0, 0.0))
            best = times.index(min(times))
            rate = options.clients * options.new_tokens / times[best]
            row: Figures = {"row": "streamed" if stream else "whole", "tokens_per_s": rate}
            if stream:
                row["first_token_s"] = dict(zip(("median", "largest"), first[best], strict=True))
            made.append(row)
        return made
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-memory-gib", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--native", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.native:
        print(json.dumps(native(options)), flush=True)
        return
    again = [sys.executable, "-m", "benchmarks.serve_speed", *sys.argv[1:], "--native"]
    told = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 (this file)
    alone = json.loads(told.stdout.splitlines()[-1])
    vocabulary = alone.pop("vocabulary")
    rows = [{"row": "native", **alone}, *served(options, vocabulary)]
    asked = {"clients": options.clients, "prompt_tokens": options.prompt_tokens}
    asked |= {"new_tokens": options.new_tokens, "precision": options.precision}
    for row in rows:
        row |= {"of_native": row["tokens_per_s"] / alone["tokens_per_s"], **asked}
        row |= {"model": options.model, "device": alone["device"]}
        print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
