"""The forms of reward functions: recognised by the names of parameters, called, or refused."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards.grade import Failure, Outcome
from isobit.rewards.signatures import recognise
from isobit.util.errors import RewardError

ROW = {"answer": "22", "level": 3, "prompt": "not this one"}
PROMPT = Prompt("train/0", "<user>3+8=", (1,), ROW, "3+8=")
CHAT = ({"role": "system", "content": "add"}, {"role": "user", "content": "3+8="})


def completions(*texts: str) -> list[Completion]:
    return [
        Completion(TokenSequence.of_answer((1,), (7, place)), text, "stop")
        for place, text in enumerate(texts)
    ]


def grade(
    function: Callable[..., Any],
    *texts: str,
    prompt: Prompt = PROMPT,
    options: dict[str, Any] | None = None,
) -> list[Outcome]:
    graded = dict(recognise(function, "mine.py:f", options).grade(prompt, completions(*texts)))
    return [graded[index] for index in range(len(texts))]


def test_isobits_own_form_in_any_order() -> None:
    def swapped(completion: Completion, prompt: Prompt) -> float:
        return float(completion.text == prompt.row["answer"])

    assert grade(swapped, "22", "21") == [1.0, 0.0]
    assert recognise(swapped, "f").describe() == "f (Isobit's form: completion, prompt)"


def test_options_are_keyword_arguments() -> None:
    def scaled(prompt: Prompt, completion: Completion, scale: float, shift: float = 0.0) -> float:
        return scale * len(completion.text) + shift

    assert grade(scaled, "abc", options={"scale": 2.0}) == [6.0]
    assert "scale=2.0" in recognise(scaled, "f", {"scale": 2.0}).describe()
    with pytest.raises(RewardError, match="nothing gives its parameters 'scale'"):
        recognise(scaled, "f")
    with pytest.raises(RewardError, match="'scael', which the reward 'f' does not take; it takes"):
        recognise(scaled, "f", {"scale": 1.0, "scael": 2.0})
    with pytest.raises(RewardError, match="gives 'prompt', which the run itself gives"):
        recognise(scaled, "f", {"scale": 1.0, "prompt": "x"})


def test_trls_form_gets_all_completions_and_columns_as_lists() -> None:
    seen: dict[str, Any] = {}

    def reward(completions: list[str], level: list[int], **columns: Any) -> list[float]:
        seen.update(columns, completions=completions, level=level)
        return [float(len(text)) for text in completions]

    assert grade(reward, "a", "bbb") == [1.0, 3.0]
    assert seen == {
        "completions": ["a", "bbb"],
        "prompts": ["3+8=", "3+8="],
        "completion_ids": [[7, 0], [7, 1]],
        "answer": ["22", "22"],
        "level": [3, 3],
    }


def test_trls_form_takes_only_what_it_names() -> None:
    def reward(completions: list[str], answer: list[str], log_metric: Any) -> list[float]:
        log_metric("exact", 1.0)
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    assert grade(reward, "22", "3") == [1.0, 0.0]
    assert "TRL's form: completions, answer, log_metric" in recognise(reward, "f").describe()


def test_trls_form_gets_messages_where_the_dataset_has_them() -> None:
    def reward(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert prompts[0][-1] == {"role": "user", "content": "3+8="}
        return [float(len(completion[0]["content"])) for completion in completions]

    prompt = Prompt("train/0", "<system>add<user>3+8=", (1,), ROW, CHAT)
    assert grade(reward, "a", "bbb", prompt=prompt) == [1.0, 3.0]


def test_trls_form_gets_a_begun_answer_as_a_part_of_the_answer() -> None:
    """As in TRL, which takes the last message out of the prompt."""

    def reward(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert prompts == [[dict(message) for message in CHAT]]
        assert completions == [[{"role": "assistant", "content": "It is 22"}]]
        return [1.0]

    begun = (*CHAT, {"role": "assistant", "content": "It is "})
    assert grade(reward, "22", prompt=Prompt("train/0", "..", (1,), ROW, begun)) == [1.0]


def test_forms_of_other_frameworks_see_the_stop_string_that_ended_an_answer() -> None:
    (stopped,) = (replace(one, stop_string="</answer>") for one in completions("<answer>22"))
    told: list[Any] = []

    def trls(completions: list[Any]) -> list[float]:
        told.append(completions)
        return [1.0]

    def verls(solution_str: str) -> float:
        told.append(solution_str)
        return 1.0

    whole = "<answer>22</answer>"
    for function, prompt in (
        (trls, PROMPT),
        (verls, PROMPT),
        (trls, replace(PROMPT, content=CHAT)),
    ):
        assert recognise(function, "mine.py:f")(prompt, stopped) == 1.0
    assert told == [[whole], whole, [[{"role": "assistant", "content": whole}]]]


def test_trls_none_and_lists_that_do_not_fit() -> None:
    def reward(completions: list[str], returns: Any) -> Any:
        return returns

    first, second = grade(reward, "a", "b", options={"returns": [None, 1]})
    assert isinstance(first, Failure) and first.kind == "no reward" and second == 1.0
    for returned, kind in (([1.0], "wrong length"), (0.5, "not a list"), ("ab", "not a number")):
        outcomes = grade(reward, "a", "b", options={"returns": returned})
        assert [one.kind for one in outcomes if isinstance(one, Failure)] == [kind, kind]


def test_a_column_that_trls_form_wants_must_be_there() -> None:
    def reward(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(RewardError, match=r"takes 'solution', .*; its columns are 'answer', 'l"):
        grade(reward, "a")


def test_verls_form_in_full() -> None:
    seen = []

    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **rest: Any
    ) -> dict[str, Any]:
        seen.append((data_source, ground_truth, extra_info, rest))
        return {"score": solution_str == ground_truth, "acc": 0.25, "pred": solution_str}

    row = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "22"},
        "extra_info": {"index": 4},
        "answer": "not this",
    }
    assert grade(compute_score, "22", "1", prompt=Prompt("a", "", (1,), row)) == [1.0, 0.0]
    assert seen == [("openai/gsm8k", "22", {"index": 4}, {})] * 2


def test_verls_gsm8k_is_bound_by_its_names() -> None:
    """Bound by position, its ``solution_str`` would be the prompt: 0.0 for ever."""

    def compute_score(
        solution_str: str, ground_truth: str, method: str = "strict", score: float = 1.0
    ) -> float:
        assert method == "strict"
        return score if solution_str == ground_truth else 0.0

    assert grade(compute_score, "22", "21") == [1.0, 0.0]
    assert grade(compute_score, "22", options={"score": 2}) == [2.0]
    described = recognise(compute_score, "f").describe()
    assert described == "f (verl's form: solution_str, ground_truth)"


@pytest.mark.parametrize("answer", ["model_output", "predict_str"])
def test_what_verls_other_functions_call_the_answer(answer: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def compute_score({answer}, ground_truth): return {answer} == ground_truth", space)
    assert grade(space["compute_score"], "22", "21") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"data_source": "a", "level": 1}, "takes 'ground_truth' or .*columns are 'data_source'"),
        ({"ground_truth": "22"}, "takes 'data_source', which prompt a does not have"),
    ],
)
def test_columns_that_verls_form_wants_must_be_there(row: dict[str, Any], message: str) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str = "") -> float:
        return 0.0

    with pytest.raises(RewardError, match=message):
        grade(compute_score, "22", prompt=Prompt("a", "", (1,), row))


def test_async_functions_run_at_the_same_time_and_answer_one_by_one() -> None:
    both_began = asyncio.Event()

    async def judge(solution_str: str, ground_truth: str) -> dict[str, float]:
        if solution_str == "first":
            await both_began.wait()  # hangs where one waits for the other
        both_began.set()
        return {"score": float(len(solution_str))}

    assert grade(judge, "first", "x") == [5.0, 1.0]
    assert "async, verl's form" in recognise(judge, "f").describe()

    async def batch(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    assert grade(batch, "ab", "c") == [2.0, 1.0]


def test_failures_stay_with_their_completion() -> None:
    def fails(prompt: Prompt, completion: Completion) -> float:
        if completion.text == "!":
            raise SystemExit(0)
        return 1.0

    async def fails_later(prompt: Prompt, completion: Completion) -> float:
        return fails(prompt, completion)

    for function in (fails, fails_later):
        first, failure, last = grade(function, "a", "!", "b")
        assert (first, last) == (1.0, 1.0)
        assert isinstance(failure, Failure) and failure.kind == "SystemExit"
        assert failure.message.startswith("SystemExit: 0 (")


@pytest.mark.parametrize("raised", [asyncio.CancelledError, GeneratorExit, BaseException])
def test_what_is_no_exception_is_a_failure_too(raised: type[BaseException]) -> None:
    """Libraries that stop their own threads or tasks let such a one escape."""

    def fails(prompt: Prompt, completion: Completion) -> float:
        raise raised

    async def fails_later(prompt: Prompt, completion: Completion) -> float:
        return fails(prompt, completion)

    def fails_together(completions: list[str]) -> list[float]:
        raise raised

    name = raised.__name__
    for function in (fails, fails_later, fails_together):
        for failure in grade(function, "a", "b"):
            assert isinstance(failure, Failure) and failure.kind == name
            assert failure.message.startswith(f"{name}:  (")


def test_a_reward_error_says_that_nothing_can_be_graded() -> None:
    def refuses(prompt: Prompt, completion: Completion) -> float:
        raise RewardError("no such scorer")

    async def refuses_later(prompt: Prompt, completion: Completion) -> float:
        return refuses(prompt, completion)

    for function in (refuses, refuses_later):
        with pytest.raises(RewardError, match="no such scorer"):
            grade(function, "a")


def test_objects_that_are_called() -> None:
    class Judge:
        async def __call__(self, completion: Completion, prompt: Prompt) -> float:
            return 2.0

    assert grade(Judge(), "a") == [2.0]
    assert recognise(Judge(), "f").mode == "concurrent"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("p, c", r"takes \(p, c\), which is no form of a reward; the forms are \(prompt, comple"),
        ("*args, **kwargs", "is no form of a reward"),
        ("completion, answer", "is no form of a reward"),
        ("model_output", "is no form of a reward"),
        ("prompt, completion, /", "takes 'completion', 'prompt' by position alone"),
        ("prompt, completion, ground_truth", "nothing gives its parameters 'ground_truth'"),
        ("solution_str, ground_truth, tokenizer", "nothing gives its parameters 'tokenizer'"),
    ],
)
def test_anything_else_is_refused_with_the_forms(parameters: str, message: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f({parameters}): return 0.0", space)
    with pytest.raises(RewardError, match=message):
        recognise(space["f"], "mine.py:f")


def test_a_dict_without_a_score_is_no_number() -> None:
    (outcome,) = grade(lambda prompt, completion: {"reward": 1.0}, "a")
    assert isinstance(outcome, Failure) and "'reward', expected 'score'" in outcome.message


def test_one_completion_can_be_graded_by_a_call() -> None:
    one = recognise(lambda solution_str, ground_truth: solution_str == ground_truth, "f")
    (right, wrong) = completions("22", "21")
    assert (one(PROMPT, right), one(PROMPT, wrong)) == (1.0, 0.0)
    with pytest.raises(RewardError, match="failed: the reward returned None"):
        recognise(lambda prompt, completion: None, "f")(PROMPT, right)
