"""Servers in processes of their own, and what tests ask them."""

import http.client
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from isobit.starter import starter_folder
from tests.forked import called

KEY = "open sesame"
TEMPLATE = (
    "{% for tool in tools or [] %}tool: {{ tool.function.name }}; {% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}; {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


CALLS = "".join(map(chr, range(ord("A"), ord("X"))))
"""Tokens of the starter that are calls of ``add`` with ``a`` = 0, 1, .. in the chat folder."""
BROKEN = '<tool_call>{"name": "add", </tool_call>'
"""What its token Z is."""


def chat_folder(place: Path) -> Path:
    """The starter with a chat template that knows tools in Hermes' form, and with a tokenizer in
    which most capitals are calls, so that hot samples have some.
    """
    folder = place / "chatty"
    shutil.copytree(starter_folder(), folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    texts = {one: call_text(at) for at, one in enumerate(CALLS)} | {"Z": BROKEN}
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {texts.get(one, one): token for one, token in vocab.items()}
    path.write_text(json.dumps(tokenizer))
    return folder


def call_text(number: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'


@dataclass(slots=True)
class Running:
    process: BaseProcess
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
        timeout: float = 120,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, and body of one request; bytes are sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {KEY}"} if headers is None else dict(headers)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, sent, given)
            response = connection.getresponse()
            shown = {name.lower(): value for name, value in response.getheaders()}
            return response.status, shown, response.read()
        finally:
            connection.close()

    def answer(self, body: Mapping[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        status, _, content = self.ask(path, body)
        assert status == 200, content
        return json.loads(content)

    def metrics(self) -> dict[str, float]:
        _, _, content = self.ask("/metrics")
        pairs = (line.rsplit(" ", 1) for line in content.decode().splitlines() if line[0] != "#")
        return {name: float(value) for name, value in pairs}

    def wait_for(self, name: str, least: int) -> None:
        """Until a figure has grown; a client that asks without a pause takes the engine's core."""
        for _ in range(6000):
            if self.metrics()[f"isobit_{name}"] >= least:
                return
            time.sleep(0.02)
        raise AssertionError(f"{name} stays below {least}")

    def end(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(600)
        assert self.process.exitcode is not None, "it has not ended"
        return self.process.exitcode


@contextmanager
def serving(
    model: Path | str, place: Path, *arguments: str, spawn: bool = False
) -> Iterator[Running]:
    """``isobit serve``; ``spawn`` as for ``called``."""
    said, log = place / "server.out", place / "server.log"
    for file in (said, log):
        file.write_text("")
    words = ["serve", str(model), "--port", "0", "--api-key", "env:SERVER_KEY", "--threads", "1"]
    key, until = {"SERVER_KEY": KEY}, time.monotonic() + 300
    process = called(
        "isobit.cli.main:main",
        said,
        [*words, *arguments],
        errors=log,
        environ=os.environ | key,
        spawn=spawn,
    )
    try:
        while not (found := re.search(r":(\d+)/v1$", said.read_text(), re.MULTILINE)):
            assert process.is_alive() and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield Running(process, int(found[1]), log)
    finally:
        process.kill()
        process.join()


def choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All that an answer says but its name and time."""
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def events(body: bytes) -> list[dict[str, Any]]:
    """Of a stream that has come to its end."""
    parts = body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], body[-300:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
