"""docs/after_training.md: its commands, as they stand there, on the starter model.

The server and the harness run where their packages are: in the environment that ISOBIT_TOOLS names,
or in the one of the tests.  The upload is given an API of the hub that keeps the files.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

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
    columns = r"\|sums *\|Yaml *\|last *\| *0\|exact_match *\|↑ *\| *([\d.]+) *\|"
    row = re.search(columns, done.stdout)
    assert row is not None, done.stdout + done.stderr
    ours = isobit.evaluate(
        "starter",
        data={"eval": {"sums": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 100}}},
        reward="isobit.starter.tasks:correct_answer",
        precision="fp32",
        rollout={"max_new_tokens": 32},
    )
    assert float(row[1]) == pytest.approx(ours["sums"].accuracy)


class Hub:
    """An API of the hub that keeps what is uploaded; another in tests/commands/test_export.py."""

    def __init__(self) -> None:
        self.created: list[tuple[str, bool]] = []
        self.files: dict[str, bytes] = {}

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
        self.created.append((name, private))

    def list_repo_files(self, name: str) -> list[str]:
        return []

    def upload_folder(self, folder_path: Path, **settings: object) -> SimpleNamespace:
        self.files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        return SimpleNamespace(repo_url="https://hub/ORG/sums")


def test_a_model_is_published_with_its_card(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    login, command = block("sh", "hf://").splitlines()
    assert login == "hf auth login"
    assert main(command.replace("runs/quickstart", "runs/quickstart/model").split()[1:]) == 0
    assert hub.created == [("ORG/sums", True)]
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set(hub.files)
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: transformers\n")
