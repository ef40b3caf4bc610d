"""The grader ``llm_judge``, with `isobit serve` as the judge."""

from typing import Any

import pytest

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.grade import Failure
from isobit.rewards.graders.judge import FORM
from isobit.rewards.load import load_reward
from tests.serve.servers import KEY, Running


def test_a_served_model_judges(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score is the first digit that the model draws, the same one for the same text."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    options = {
        "base_url": server.url, "model": "chatty", "rubric": "Is it right?",
        "api_key": "env:JUDGE_KEY", "pattern": r"^\D*(\d)", "max_tokens": 8,
    }  # fmt: skip
    texts = ["1+1=", "12+3=", "7+7=", "a" * 600]
    completions = [Completion(TokenSequence.of_answer((1,), (2,)), one, "stop") for one in texts]
    prompt = Prompt("train/0", "1+2=", (1,), {})
    found = dict(load_reward("llm_judge", options).grade(prompt, completions))
    too_long = found.pop(3)
    assert isinstance(too_long, Failure) and "HTTP 400" in too_long.message
    assert "prompt messages/0" in too_long.message
    asked: dict[str, Any] = {"model": "chatty", "temperature": 0, "seed": 0, "max_tokens": 8}
    for place, outcome in found.items():
        system = FORM.format(rubric="Is it right?", low=0, high=10)
        user = f"Question:\n1+2=\n\nAnswer:\n{texts[place]}"
        asked["messages"] = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
        ]
        said = server.answer(asked, "/v1/chat/completions")["choices"][0]["message"]["content"]
        digits = [one for one in said if one.isdigit()]
        if digits:
            assert outcome == int(digits[0]) / 10
        else:
            assert isinstance(outcome, Failure) and repr(said) in outcome.message
    assert any(isinstance(one, float) for one in found.values())
