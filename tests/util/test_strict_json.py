"""JSON that readers other than Python's take."""

import json
import math
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isobit
from isobit.util.strict_json import json_line, json_text

SOURCES = Path(isobit.__file__).parent


def refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def strict(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ({"x": math.nan}, {"x": None}),
        ({"x": [1.5, (math.inf, {"y": -math.inf})]}, {"x": [1.5, [None, {"y": None}]]}),
        ({"x": np.float64("nan"), "y": {1: math.nan}}, {"x": None, "y": {"1": None}}),
        ({"x": np.array([1.0, math.nan])}, {"x": [1.0, None]}),
        ({"x": date(2026, 1, 2), "y": math.nan}, {"x": "2026-01-02", "y": None}),
        ({(1, 2): 3, math.nan: 4}, {"(1, 2)": 3, "nan": 4}),
        ({"x": "\ud83d half", "y": "ö"}, {"x": "\ud83d half", "y": "ö"}),
        ({"x": 2**63, "y": True, "z": None}, {"x": 2**63, "y": True, "z": None}),
    ],
)
def test_what_python_writes_otherwise_is_null_or_text(content: Any, read: Any) -> None:
    def known(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else str(value)

    texts = [json_text(content, default=known, indent=indent) for indent in (None, 2)]
    for text in (*texts, json_text(content, default=known, ascii=True)):
        assert strict(text.encode()) == read
    line = json_line(content, known)
    assert strict(line) == read and line.endswith(b"\n")


def test_a_line_is_one_line_for_every_reader() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"
    line = json_line({"x": text})
    assert len(line.decode().splitlines()) == 1
    assert strict(line) == {"x": text}


def test_what_no_one_knows_is_refused() -> None:
    with pytest.raises(TypeError, match="date"):
        json_text({"x": date(2026, 1, 2)})


DIGESTS_AND_MESSAGES = """
config/tables.py data/hugging_face.py data/prompts.py data/sources.py data/stop_tokens.py
data/tasks.py environments/hosted.py environments/openenv.py
environments/tasksets.py environments/env_backends.py environments/verifiers_classic.py
environments/worker.py config/precision.py models/safetensors.py
observe/flow_choice.py observe/model_card.py parallel/black_box.py parallel/watch.py
parallel/world.py
records/digests.py records/messages.py rewards/sandboxed/main.py
rewards/sandboxed/wire.py rewards/graders/judge.py rewards/graders/reasoning_gym.py
rewards/messages.py rewards/sandbox.py rollout/carried_episodes.py rollout/episodes.py
rollout/http_engine.py
rollout/servers.py rollout/vllm_engine.py rollout/vllm_model.py rollout/vllm_server.py
commands/diff.py commands/replay.py serve/protocol.py serve/response_formats.py store/checkpoint.py
store/resume.py store/reward_record.py util/strict_json.py
"""
"""What writes no file or answer for other readers: digests, whose bytes stay, and own messages."""


def test_one_module_writes_json_for_readers() -> None:
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if re.search(r"json\.dumps?\b", path.read_text(encoding="utf-8"))
    }
    assert found <= {*DIGESTS_AND_MESSAGES.split()}, (
        "write files and answers by isobit.util.strict_json"
    )
