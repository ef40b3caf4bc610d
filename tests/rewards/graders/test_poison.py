"""Text of ill will in a pool of graders: it scores 0, its process goes on, and a wrong answer after
it is as wrong as before.
"""

from typing import Any

import pytest

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards import sandbox
from isobit.rewards.grading import Graders

HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "1000000000!",
    "(" * 2000 + "5" + ")" * 2000,
    "1" * 100_000,
    "import os; os._exit(0)",
    "__import__('os').system('touch /tmp/isobit-executed')",
    "().__class__.__base__.__subclasses__()",
    "\0" * 1000,
    "\u202e5",
    "５",  # noqa: RUF001
    "\ud800",
    "<think>" * 20_000,
]
POISON = """
import builtins, json, operator, os, sys
for name in ("eval", "exec", "compile", "abs", "isinstance", "print", "AssertionError"):
    setattr(builtins, name, lambda *a, **k: True)
json.loads = json.dumps = lambda *a, **k: "passed"
operator.eq = lambda *a: True
sys.modules["sandboxed"] = sys.modules["isobit"] = type(sys)("x")
os.write(1, b'{"item": 1, "value": 1.0}\\n')
class Five(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def five(): return Five(1)
"""


def graded(texts: list[str], parts: dict[str, Any], **row: Any) -> Group:
    completions = [Completion(TokenSequence.of_answer((1,), (2,)), t, "stop") for t in texts]
    group = Group(Prompt("train/0", "", (1,), row), 0, completions)
    config = RewardConfig.model_validate({"parts": parts, "workers": 1, "deadline_s": 120})
    with Graders(config) as graders:
        stats = graders.collect([group])
    assert (stats.failed, stats.failures) == (0, {})
    return group


def test_hostile_text_scores_zero_and_its_process_goes_on() -> None:
    """No deadline, no crash: the same process grades all that follow."""
    parts = {
        "math": {"function": "math_verify"},
        "exact": {"function": "exact_match"},
        "form": {"function": "format"},
        "found": {"function": "regex", "options": {"pattern": r"^boxed \d$"}},
    }
    group = graded([*HOSTILE, "4", "5"], parts, answer="5")
    nothing = [0.0] * (len(HOSTILE) + 1)
    assert group.reward_parts == {
        "math": [*nothing, 1.0],
        "exact": [*nothing, 1.0],
        "form": [*nothing, 0.0],
        "found": [*nothing, 0.0],
    }


def test_a_poisoned_sample_does_not_help_the_next() -> None:
    if sandbox.trial(sandbox.Bubblewrap()) and sandbox.trial(sandbox.Namespaces()):
        pytest.skip("no sandbox works here")
    answers = [POISON, "def five(): return 4", "def five(): return 5"]
    texts = [f"```python\n{code}\n```" for code in answers]
    part = {"function": "code", "options": {"seconds": 60}}
    group = graded(texts, {"code": part}, tests="assert five() == 5")
    assert group.rewards == [0.0, 0.0, 1.0]
