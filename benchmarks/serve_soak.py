"""Many clients against `isobit serve` on the starter, for as long as you like.

    python -m benchmarks.serve_soak [--minutes 30] [--clients 64] [--precision fp8]

Clients ask completions and chats, whole and streamed, with alternatives, tools and echoed prompts;
a fifth of them goes away before the answer.  Every answer is compared with that of the same request
alone, byte for byte but for its id and time.  Places are few, so that some requests are refused.

Prints a line of JSON with the requests by what became of them, and the server's resident memory
after the lone requests and then every minute.  The exit code is 1 if an answer
differs, a request fails otherwise than by 429, or samples, places or pages are left over.
"""

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PLACES = 48
GOES = 0.2
"""Share of the requests whose client goes away."""
STEP: dict[str, Any] = {"model": "soak", "temperature": 1.2}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def bodies(has_template: bool) -> list[tuple[str, dict[str, Any]]]:
    """Paths and requests of different lengths and kinds."""
    made: list[tuple[str, dict[str, Any]]] = []
    for seed in range(12):
        prompt, tokens = "12+3=" * (1 + 3 * (seed % 5)), 8 + 9 * seed
        body = STEP | {"seed": seed, "max_tokens": tokens, "ignore_eos": seed % 2 == 0}
        body |= {"prompt": prompt, "stream": seed % 3 == 0, "n": 1 + seed // 3 % 3}
        body |= {"logprobs": 2} if seed % 4 == 0 else {}
        body |= {"echo": True, "logprobs": 1, "stream": False} if seed % 6 == 5 else {}
        made.append((TEXT, body))
    if has_template:
        for seed in range(4):
            messages = [{"role": "user", "content": "1+2=" * (1 + seed)}]
            body = STEP | {"seed": seed, "max_tokens": 20, "messages": messages, "tools": [TOOL]}
            made.append((CHAT, body | {"stream": seed % 2 == 0}))
    return made


@dataclass(slots=True)
class Soak:
    port: int
    requests: Sequence[tuple[str, dict[str, Any]]]
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, sent)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def leave(self, path: str, body: Mapping[str, Any], seconds: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", path, json.dumps(body))
        time.sleep(seconds)
        connection.close()

    def live(self, number: int, until: float, alone: Sequence[Any]) -> None:
        """A client's life."""
        draw = random.Random(number)  # noqa: S311
        while time.monotonic() < until:
            which = draw.randrange(len(self.requests))
            path, body = self.requests[which]
            try:
                if draw.random() < GOES:
                    self.leave(path, body, draw.random())
                    outcome = "left"
                else:
                    outcome = self._outcome(which, *self.ask(path, body), alone)
            except OSError as error:
                outcome = "failed"
                self.note(f"{which}: {type(error).__name__}: {error}")
            with self.lock:
                self.counts[outcome] += 1
            if outcome == "refused":
                time.sleep(draw.random())

    def _outcome(self, which: int, status: int, content: bytes, alone: Sequence[Any]) -> str:
        if status == 429:
            return "refused"
        if status != 200:
            self.note(f"{which}: {status}: {content[:300]!r}")
            return "failed"
        if said(content, self.requests[which][1]) == alone[which]:
            return "equal"
        self.note(f"{which} differs: {content[:300]!r}")
        return "different"

    def note(self, problem: str) -> None:
        with self.lock:
            self.problems.append(problem)

    def metrics(self) -> dict[str, float]:
        lines = self.ask("/metrics", None)[1].decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        return {name.removeprefix("isobit_"): float(value) for name, value in pairs}


def said(content: bytes, body: Mapping[str, Any]) -> list[Any]:
    """The choices of an answer; of a stream for each of them its chunks in order, since the order
    between them is not part of the answer.
    """
    if not body["stream"]:
        return json.loads(content)["choices"]
    parts = content.decode().split("\n\n")
    if parts[-2:] != ["data: [DONE]", ""]:
        return parts
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    found = [choice for chunk in chunks for choice in chunk.get("choices", [chunk])]
    return sorted(found, key=lambda choice: choice.get("index", -1))


def resident_mib(process: int) -> float:
    with open(f"/proc/{process}/status") as file:
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", file.read())
    return round(int(kib) / 1024, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="many clients against isobit serve")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--precision", default="fp8")
    options = parser.parse_args(arguments)
    command = [
        sys.executable, "-m", "isobit.cli.main", "serve", options.model, "--name", "soak",
        "--port", "0", "--precision", options.precision, "--max-live", str(PLACES),
        "--rollout.kv_pages", "40", "--rollout.max_batched_tokens", "100",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 (this file)
    try:
        assert process.stdout is not None
        found = next(
            filter(None, (re.search(r":(\d+)/v1$", line.strip()) for line in process.stdout))
        )
        report = run(int(found[1]), process.pid, options)
        process.send_signal(signal.SIGTERM)
        report["exit_code"] = process.wait(60)
    finally:
        process.kill()
    print(json.dumps(report), flush=True)
    return 1 if report["problems"] or report["left_over"] or report["exit_code"] else 0


def run(port: int, process: int, options: argparse.Namespace) -> dict[str, Any]:
    soak = Soak(port, bodies(has_template=False))
    probe = STEP | {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    if soak.ask(CHAT, probe | {"tools": [TOOL]})[0] == 200:
        soak.requests = bodies(has_template=True)
    alone = [said(soak.ask(path, body)[1], body) for path, body in soak.requests]
    memory = [resident_mib(process)]
    began = time.monotonic()
    until = began + 60 * options.minutes
    clients = [
        threading.Thread(target=soak.live, args=(number, until, alone))
        for number in range(options.clients)
    ]
    for client in clients:
        client.start()
    while clients:
        time.sleep(min(60.0, max(1.0, until - time.monotonic())))
        memory.append(resident_mib(process))
        clients = [client for client in clients if client.is_alive()]
    left = soak.metrics()
    for _ in range(600):  # those who left may have been noticed a moment ago
        if left["samples_in_place"] == left["samples_live"] == 0:
            break
        time.sleep(0.1)
        left = soak.metrics()
    pages = left["kv_pages"] - left["kv_pages_free"]
    return {
        "model": options.model,
        "precision": options.precision,
        "clients": options.clients,
        "seconds": round(time.monotonic() - began, 1),
        "requests": dict(sorted(soak.counts.items())),
        "tokens": int(left["generated_tokens_total"]),
        "resident_mib": memory,
        "left_over": int(left["samples_in_place"] + left["samples_live"] + pages),
        "problems": soak.problems[:10],
    }


if __name__ == "__main__":
    sys.exit(main())
