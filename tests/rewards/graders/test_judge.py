"""``llm_judge`` against an endpoint that answers, refuses, fails and keeps it waiting."""

import inspect
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from isobit.config.reward import JUDGE_SECONDS, RewardConfig
from isobit.config.rules import _check_seconds
from isobit.records.text import Prompt
from isobit.rewards.grade import Failure
from isobit.rewards.graders import judge
from isobit.rewards.load import load_reward
from isobit.util.errors import ConfigError, RewardError
from tests.rewards.graders.test_text_graders import completion

PROMPT = Prompt("train/0", "2+2=", (1,), {"answer": "4"})


class Endpoint(ThreadingHTTPServer):
    """Answers with what is in line, status, headers and content; then with the last of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.line: list[tuple[int, dict[str, str], str]] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.lock, self.live, self.most_live = threading.Lock(), 0, 0
        self.gate = threading.Event()
        self.gate.set()


class Handler(BaseHTTPRequestHandler):
    server: Endpoint  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.headers.get("Authorization", ""), body))
            line = self.server.line
            status, headers, said = line.pop(0) if len(line) > 1 else line[0]
            self.server.live += 1
            self.server.most_live = max(self.server.most_live, self.server.live)
        self.server.gate.wait(10)
        with self.server.lock:
            self.server.live -= 1
        content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(judge, "FIRST_WAIT_S", 0.01)
    made = Endpoint()
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def graded(endpoint: Endpoint, *texts: str, **options: Any) -> list[Any]:
    """Rewards, or failures, of several completions of one prompt."""
    given = {"model": "m", "rubric": "Is it right? {x}", "timeout_s": 20}
    given |= {"base_url": f"http://127.0.0.1:{endpoint.server_port}/v1/", **options}
    found = dict(load_reward("llm_judge", given).grade(PROMPT, list(map(completion, texts))))
    return [found[place] for place in range(len(texts))]


def test_a_score_is_read_from_the_end_and_mapped_to_the_scale(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "very secret")
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Only 4 is right.\n")
    endpoint.line = [(200, {}, "SCORE: 9 would be too much.\n**SCORE: 2.5**")]
    assert graded(
        endpoint, "4 SCORE: 10", rubric=str(rubric), column="answer", scale=[-5, 5],
        api_key="env:JUDGE_KEY", cache_dir=str(tmp_path / "kept"),
    ) == [0.75]  # fmt: skip
    ((key, body),) = endpoint.asked
    assert key == "Bearer very secret"
    assert (body["model"], body["temperature"]) == ("m", 0)
    system, user = (message["content"] for message in body["messages"])
    assert system.startswith("Only 4 is right.\n\n") and 'from -5 to 5."'[:-1] in system
    assert user == "Question:\n2+2=\n\nReference:\n4\n\nAnswer:\n4 SCORE: 10"
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "very secret" not in kept


def test_the_same_question_is_asked_once(endpoint: Endpoint, tmp_path: Path) -> None:
    """Kept in a folder, which another process or a resumed run reads; what cannot be read is not
    kept.
    """
    endpoint.line = [(200, {}, "no idea"), (200, {}, "SCORE: 4")]
    options = {"cache_dir": str(tmp_path)}
    (first,) = graded(endpoint, "a", **options)
    assert isinstance(first, Failure) and first.kind == "JudgeError"
    assert "gives no score from 0 to 10: 'no idea'" in first.message
    assert graded(endpoint, "a", **options) == [0.4]
    endpoint.line = [(500, {}, "")]
    assert graded(endpoint, "a", **options) == [0.4] and len(endpoint.asked) == 2
    (other,) = graded(endpoint, "b", retries=0, **options)
    assert isinstance(other, Failure) and len(endpoint.asked) == 3


def test_failures_are_tried_again_and_never_score(endpoint: Endpoint) -> None:
    good = (200, {}, "SCORE: 10")
    endpoint.line = [(500, {}, "x"), (429, {"Retry-After": "0.05"}, "x"), good]
    assert graded(endpoint, "a", retries=2) == [1.0] and len(endpoint.asked) == 3
    for line, why, calls in (
        ((503, {}, "x"), "and retries = 2; the last attempt: HTTP 503", 3),
        ((429, {"Retry-After": "900"}, "x"), "the last attempt: HTTP 429", 1),  # past timeout_s
        ((401, {}, "x"), "refuses: HTTP 401", 1),
        ((307, {"Location": "http://127.0.0.1:1/"}, "x"), "refuses: HTTP 307", 1),
        ((200, {}, "SCORE: 11"), "no score from 0 to 10", 1),
    ):
        endpoint.line, before = [line], len(endpoint.asked)
        (found,) = graded(endpoint, "a", retries=2)
        assert isinstance(found, Failure) and found.kind == "JudgeError"
        assert why in found.message and len(endpoint.asked) - before == calls
    endpoint.line = [good]
    endpoint.gate.clear()
    (found,) = graded(endpoint, "a", timeout_s=0.2)
    endpoint.gate.set()
    assert isinstance(found, Failure) and "timed out" in found.message
    endpoint.shutdown()
    endpoint.server_close()
    (found,) = graded(endpoint, "a", retries=1)
    assert isinstance(found, Failure) and "Connection refused" in found.message


def test_calls_are_bounded_at_once_and_in_all(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.line = [(200, {}, "SCORE: 1")]
    endpoint.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(
            lambda: graded(
                endpoint, *map(str, range(8)), max_concurrent=3, budget=9, cache_dir=str(tmp_path)
            )
        )
        while endpoint.live < 3:
            pass
        endpoint.gate.set()
        assert found.result() == [0.1] * 8
    assert endpoint.most_live == 3
    endpoint.line = [(500, {}, "x")]
    with pytest.raises(RewardError, match="the budget of 9 calls is spent"):
        graded(endpoint, "new", budget=9, cache_dir=str(tmp_path))
    assert len(endpoint.asked) == 9
    assert graded(endpoint, "0", budget=9, cache_dir=str(tmp_path)) == [0.1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"base_url": "file:///etc/passwd"}, "expected http"),
        ({"scale": [1]}, "expected two numbers"),
        ({"scale": [1, 1]}, "the lower end first"),
        ({"pattern": "("}, "is no expression"),
        ({"pattern": "x"}, "needs one group"),
        ({"retries": -1}, "retries of 0 or more"),
        ({"budget": 5}, "name that folder too"),
        ({"rubric": "none.md"}, "the rubric none.md cannot be read"),
        ({"column": "none"}, "needs the column 'none'"),
    ],
)
def test_unusable_options_end_the_run(
    options: dict[str, Any], why: str, endpoint: Endpoint
) -> None:
    with pytest.raises(RewardError, match=why):
        graded(endpoint, "a", **options)
    assert endpoint.asked == []


def test_the_deadline_is_above_the_judge_s_time() -> None:
    assert inspect.signature(judge.score).parameters["timeout_s"].default == JUDGE_SECONDS
    options = {"base_url": "x", "model": "m", "rubric": "r"}
    with pytest.raises(ConfigError, match="timeout_s of the grader 'llm_judge' is 60 by default"):
        _check_seconds(RewardConfig(function="llm_judge", options=options, deadline_s=60))
    _check_seconds(RewardConfig(function="llm_judge", options=options, deadline_s=61))
