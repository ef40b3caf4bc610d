"""docs/after_training.md: its commands, as they stand there, on the starter model.

The server and the harness run where their packages are: in the environment that ISOBIT_TOOLS names,
or in the one of the tests.  ``hf`` is there always, and talks to a hub of the test's own.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import isobit
from isobit.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "after_training.md").read_text(encoding="utf-8")
STARTER = ROOT / "src" / "isobit" / "starter"
HERE = Path(sys.executable).parent
TOOLS = Path(os.environ["ISOBIT_TOOLS"]) / "bin" if "ISOBIT_TOOLS" in os.environ else HERE


def block(language: str, words: str) -> str:
    """The page's only block in that language that has these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (one,) = [text for text in found if words in text]
    return one


def tool(name: str, *modules: str) -> Path:
    """A program of the tools' environment, which must have these modules too."""
    python = TOOLS / "python"
    test = f"import importlib.util as u; assert all(map(u.find_spec, {modules!r}))"
    if not (TOOLS / name).exists() or subprocess.run([python, "-c", test], check=False).returncode:
        pytest.skip(f"{name} with {', '.join(modules)} is not in {TOOLS} (ISOBIT_TOOLS)")
    return TOOLS / name


def environment(**more: str) -> dict[str, str]:
    """Ours without Isobit's path, with the tools first, and no hub."""
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PATH": f"{TOOLS}:{kept['PATH']}", "HF_HUB_OFFLINE": "1"} | more


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which the page's paths lead to the starter model."""
    model = tmp_path / "runs" / "quickstart" / "model"
    model.mkdir(parents=True)
    for path in STARTER.iterdir():
        if path.suffix in {".json", ".safetensors"}:
            shutil.copy(path, model)
    shutil.copy(STARTER / "held_out.jsonl", tmp_path)
    return tmp_path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(log.read_text())


def test_the_server_answers_as_isobit_does(place: Path) -> None:
    tool("transformers", "fastapi", "uvicorn", "openai", "torch")
    port = str(free_port())
    command = block("sh", "transformers serve").replace("8000", port).strip()
    (place / "ask.py").write_text(block("python", "ask.py").replace("8000", port))
    log = place / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command} --host 127.0.0.1"],
            cwd=place,
            env=environment(),
            stdout=out,
            stderr=out,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log)
            done = subprocess.run(
                [TOOLS / "python", "ask.py"],
                cwd=place,
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            server.terminate()
            server.wait()
    (ours,) = isobit.generate("starter", "3+8+2+9=", precision="bf16", max_new_tokens=16)
    assert (done.stdout.strip(), done.stderr) == (ours.completions[0].text, "")


def test_the_harness_measures_what_isobit_does(place: Path) -> None:
    tool("lm_eval", "lm_eval", "torch", "transformers")
    task = block("yaml", "task: sums")
    (place / "tasks").mkdir()
    (place / task.splitlines()[0].removeprefix("# ")).write_text(task)
    command = block("sh", "--tasks sums").replace("--limit 500", "--limit 100")
    # In BF16 the two round differently, which decides near-ties of this model.
    command = command.replace("runs/quickstart/model", "runs/quickstart/model,dtype=float32")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=environment(HF_HOME=str(place / "hub")),
        capture_output=True,
        text=True,
        check=False,
    )
    row = re.search(r"\|sums\|Yaml\|last\|  0\|exact_match\|↑  \|([\d.]+) *\|", done.stdout)
    assert row is not None, done.stdout + done.stderr
    ours = isobit.evaluate(
        "starter",
        data={"eval": {"sums": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 100}}},
        reward="isobit.starter.tasks:correct_answer",
        precision="fp32",
        rollout={"max_new_tokens": 32},
    )
    assert float(row[1]) == pytest.approx(ours["sums"].accuracy)


class Hub(BaseHTTPRequestHandler):
    """A hub that takes every upload, and keeps it."""

    files: dict[str, bytes]
    made: list[dict[str, object]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        host = f"http://{self.headers['Host']}/ORG/sums"
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self.answer({"url": host, "id": "ORG/sums"})
        elif self.path == "/api/models/ORG/sums/preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer(
                {
                    "files": [
                        {"path": path, "uploadMode": "regular", "shouldIgnore": False}
                        for path in paths
                    ]
                }
            )
        elif self.path == "/api/models/ORG/sums/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{host}/commit/abc", "commitOid": "abc"})
        else:
            self.answer({})  # is the card's header valid: yes

    def do_GET(self) -> None:
        self.answer({})

    def answer(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Quietly."""


@contextmanager
def hub() -> Iterator[tuple[str, type[Hub]]]:
    kept = type("KeptHub", (Hub,), {"files": {}, "made": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_export_is_uploaded_with_its_card(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    lines = block("sh", "hf upload").splitlines()
    assert [line.split()[0] for line in lines] == ["isobit", "hf", "hf"]
    arguments = lines[0].replace("runs/quickstart", "runs/quickstart/model").split()[1:]
    assert main(arguments) == 0
    with hub() as (address, kept):
        done = subprocess.run(
            [str(HERE / "hf"), *lines[2].split()[1:]],
            env=environment(
                HF_ENDPOINT=address,
                HF_HUB_OFFLINE="0",
                HF_TOKEN="hf_of_the_test",
                HF_HOME=str(place / "hub"),
                HF_HUB_DISABLE_XET="1",
            ),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = kept.made
    assert (made["organization"], made["name"], made["visibility"]) == ("ORG", "sums", "private")
    assert kept.files == {path.name: path.read_bytes() for path in (place / "sums").iterdir()}
    assert kept.files["README.md"].startswith(b"---\nlibrary_name: transformers\n")
