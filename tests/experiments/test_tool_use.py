"""The products of ``recipes/tools.py``, and the experiment that learns them: transcripts say what
the calculator says, in the tokens of episodes; phases are resumed, and rows become tables.
"""

import json
import re
import runpy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from experiments import tool_use
from experiments.proof import figures
from experiments.tool_use import OverError, Plan
from isobit.config.data import ChatConfig, JsonlExamples
from isobit.config.load import load_config, load_recipe
from isobit.config.recipes import SftConfig
from isobit.data.continuation import Continuation
from isobit.data.examples import build_examples
from isobit.data.tool_calls import ToolCall, read_turn
from isobit.environments.shipped import Calculator
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from tools.starter.tokenizer import build_tokenizer

TOOLS = runpy.run_path(str(tool_use.ROOT / "recipes" / "tools.py"))
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' "
    "}}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_problems_stand_in_one_file_each_and_most_are_guessed(tmp_path: Path) -> None:
    TOOLS["SIZES"].update(transcripts=400, train=100, held_out=50)
    for folder in ("one", "two"):
        TOOLS["write"](tmp_path / folder)
    files = [tmp_path / "one" / f"{name}.jsonl" for name in TOOLS["SIZES"]]
    assert all(one.read_bytes() == (tmp_path / "two" / one.name).read_bytes() for one in files)
    shown, *asked = (list(map(json.loads, one.read_text().splitlines())) for one in files)
    questions = [row["prompt"] for row in shown if "[" not in row["prompt"]]
    every = [*questions, *(row["prompt"] for rows in asked for row in rows)]
    assert len(set(every)) == len(every) == 550
    called = [row for row in shown if row["completion"].startswith("[")]
    assert 100 < len(called) < 170
    wrong = [row for row in called if _factors(row["prompt"]) != _factors(row["completion"])]
    assert 0.15 < len(wrong) / len(called) < 0.35
    for row in (row for rows in asked for row in rows):
        first, second = _factors(row["prompt"])
        assert row["answer"] == str(Calculator().multiply(first, second))


def _factors(text: str) -> tuple[int, int]:
    first, second = re.findall(r"\d+", text)[:2]
    return int(first), int(second)


@pytest.mark.parametrize("chat", [True, False])
def test_transcripts_have_the_tokens_and_the_results_of_an_episode(
    tmp_path: Path, chat: bool
) -> None:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(512)
    tokenizer.chat_template = CHAT if chat else None
    random = Random(1)
    said = [TOOLS["conversation"](one, random) for one in TOOLS["problems"](30, random)]
    path = tmp_path / "transcripts.jsonl"
    TOOLS["write_rows"](path, [row for one in said for row in TOOLS["turns"](one, chat)])
    words = ["--data.train.path", str(path), "--data.chat", str(chat).lower()]
    sft = load_recipe(SftConfig, tool_use.SFT, words)
    assert isinstance(sft.data.train, JsonlExamples)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    found = iter(build_examples("train", sft.data.train, tokenizer, (end,), sft.data, 512))
    episode = Continuation(tokenizer, ChatConfig(), "plain", [], (end,))
    for one in said:
        first = next(found)
        if len(one) == 2:
            assert read_turn(one[1], "plain", {"multiply": {}}, is_thinking=False).calls == []
            continue
        _, call, result, answer = one
        (parsed,) = read_turn(call, "plain", {"multiply": {}}, is_thinking=False).calls
        assert isinstance(parsed, ToolCall) and parsed.name == "multiply"
        assert answer == str(Calculator().multiply(*parsed.positional))
        assert result == f"[{answer}]"
        drawn = [*first.prompt.token_ids, *first.completion_ids]
        second = next(found)
        assert list(second.prompt.token_ids) == [*drawn, *episode.token_ids([answer], end)]
        assert second.completion_ids == (
            *tokenizer(answer, add_special_tokens=False)["input_ids"],
            end,
        )


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3042473", 1),
        ("4837 * 629 is 3,042,473.", 1),
        ("3042473 or 3042474", 0),
        ("[multiply(4837, 629)]", 0),
        ("", 0),
    ],
)
def test_the_last_number_of_the_last_turn_is_the_answer(text: str, reward: float) -> None:
    prompt = Prompt("held_out/0", "", (1,), {"answer": "3042473"})
    completion = Completion(TokenSequence.of_answer((1,), ()), text, "stop")
    assert TOOLS["correct"](prompt, completion) == reward


def plan_of(directory: Path, model: str = "starter", until: float = float("inf")) -> Plan:
    return Plan(directory, model, ["fp8", "without-tool"], 2, 2, until, {"training.steps": "3"})


@pytest.mark.parametrize("model", ["starter", "/models/smol"])
def test_the_recipes_take_what_each_arm_changes(tmp_path: Path, model: str) -> None:
    plan = plan_of(tmp_path, model)
    words = tool_use.start_command(plan)
    sft = load_recipe(SftConfig, Path(words[3]), words[5:])
    assert sft.model == model and sft.data.chat == (model != "starter")
    for name in plan.names:
        words = tool_use.run_command(plan, name)
        config = load_config(Path(words[3]), words[5:])
        assert (config.environment is None) == name.startswith("without-tool")
        assert config.training.steps == 3 and config.seed == int(name[-1])
        assert config.precision.preset == "fp8"
        assert config.model == str(tmp_path / "start" / "model")


def test_only_what_is_missing_is_made_and_a_failed_run_keeps_no_other_from_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    asked: list[list[str]] = []
    fails = "without-tool-1"

    def finish(_: Plan, commands: Mapping[str, Sequence[str]]) -> None:
        asked.append(list(commands))
        for name in commands:
            output = {"problems": "data/held_out.jsonl", "start": "start/model/config.json"}
            made = tmp_path / output.get(name, f"runs/{name}/model/config.json")
            if name != fails:
                made.parent.mkdir(parents=True, exist_ok=True)
                made.touch()
        if fails in commands:
            raise RuntimeError(f"{fails} failed")

    monkeypatch.setattr(tool_use, "finish", finish)
    with pytest.raises(RuntimeError, match="without-tool-1 failed"):
        tool_use.run(plan)
    runs = ["fp8-0", "without-tool-0", "fp8-1", fails]
    answers = [["before-0", "before-1"], runs, ["after-0", "after-1"]]
    assert asked == [["problems"], ["start"], *answers]
    asked.clear()
    known = [{"model": name, "tool": False} for name in ("untaught", "start", "fp8-0", "fp8-1")]
    TOOLS["write_rows"](tmp_path / "rows" / "answers.jsonl", known)
    with pytest.raises(RuntimeError, match="without-tool-1 failed"):
        tool_use.run(plan)
    assert asked == [[], [fails], ["after-0"]]


def test_what_runs_ends_with_the_seconds_and_a_failure_is_told(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    sleeper = ["-c", "import time; time.sleep(60)"]
    began = time.monotonic()
    with pytest.raises(OverError):
        tool_use.finish(plan_of(tmp_path, until=began), {"sleeper": sleeper})
    commands = {"fails": ["-c", "raise SystemExit('no reason')"], "works": ["-c", "print(5)"]}
    with pytest.raises(RuntimeError, match=r"^fails failed: see .*fails\.log"):
        tool_use.finish(plan_of(tmp_path), commands)
    assert (tmp_path / "logs" / "works.log").read_text() == "5\n"
    assert "no reason" in (tmp_path / "logs" / "fails.log").read_text()


def write_run(output: Path, accuracies: Sequence[list[float]]) -> None:
    """What a run's directory has after two steps, of which the second has no evaluation yet."""
    config = {"model": "starter"}
    steps: list[dict[str, Any]] = [
        {"step": step, "reward/mean": 0.5, "episode/calls": calls}
        | {"log_prob_diff/tokens_compared": 100, "log_prob_diff/tokens_differing": 0}
        for step, calls in ((1, 0.25), (2, 0.75))
    ]
    held_out = [
        {"step": step, "eval/held_out/accuracy": sum(one) / len(one)}
        for step, one in enumerate(accuracies)
    ]
    graded = [
        {"prompts": [[f"held_out/{place}", 0] for place in range(len(one))]}
        | {"rewards": [[reward] for reward in one]}
        for one in accuracies
    ]
    graded.insert(1, {"prompts": [["train/0", 0]], "rewards": [[1.0, 0.0]]})
    output.mkdir(parents=True)
    (output / "run.json").write_text(json.dumps({"config": config}), "utf-8")
    TOOLS["write_rows"](output / "metrics.jsonl", [*held_out, *steps])
    TOOLS["write_rows"](output / "rewards.jsonl", graded)
    with (output / "rewards.jsonl").open("a") as file:
        file.write('{"prompts": [["held_')  # it is being written


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "DRAWS", 100)


@pytest.mark.usefixtures("few_draws")
def test_rows_become_tables_and_a_picture(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    plan.rows.mkdir()
    write_run(tmp_path / "runs" / "fp8-0", [[0, 1, 0, 0], [1, 1, 1, 1]])
    write_run(tmp_path / "runs" / "fp8-1", [[0, 0, 0, 0], [1, 1, 0, 1]])
    write_run(tmp_path / "runs" / "without-tool-0", [[0, 0, 0, 0]])
    tool_use.keep_rows(plan)
    right = {"accuracy": 0.5, "interval": [0.1, 0.9], "problems": 4}
    answers = [
        {"model": "untaught", "tool": False, **right},
        {"model": "fp8-0", "tool": True, **right, "accuracy": 0.25},
        {"model": "fp8-1", "tool": True, **right, "accuracy": 0.75},
    ]
    TOOLS["write_rows"](plan.rows / "answers.jsonl", answers)
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(f"before\n{tool_use.BEGIN}\nold\n{tool_use.END}\nbehind\n")
    tool_use.report([plan.rows], picture, page)
    text = page.read_text()
    assert "arm by arm](picture.svg)" in text
    assert text.startswith("before\n") and text.endswith("\nbehind\n") and "old" not in text
    assert "| rows, as it was | 50.0% [10.0%, 90.0%] of 4 | - |" in text
    assert "| rows, after `fp8` | - | 25.0%, 75.0% |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| rows, `fp8`"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells[0] == "2" and cells[1].startswith("12.5% [0.0%") and cells[2].startswith("87.5% [")
    assert cells[3] == "100.0%, 75.0%" and cells[4].startswith("+75.0 [")
    assert cells[5:] == ["0.50 to 0.50", "0 of 400"]
    assert picture.read_text().count('class="curve"') > 1
    with pytest.raises(ValueError, match="no block"):
        tool_use.with_tables("a page without marks", "tables")
    with pytest.raises(SystemExit, match="no run in"):
        tool_use.report([tmp_path / "data"], None, None)


@pytest.mark.usefixtures("few_draws")
def test_an_interval_is_never_narrower_than_that_of_an_unseen_event() -> None:
    text = tool_use.with_interval(torch.zeros(3, 100), tool_use.PERCENT)
    assert text == "0.0% [0.0%, 3.7%]"
