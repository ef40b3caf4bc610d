"""The environments that ship with Isobit, each by itself, and one in its processes."""

from pathlib import Path
from typing import Any

import pytest

from isobit.environments.shipped import Calculator, Guess, Python, Search
from isobit.rewards.sandbox import launcher
from isobit.util.errors import ToolError
from tests.environments.test_pool import answers, ask, call, environments, texts


@pytest.mark.parametrize("text", ["", "x", "2 ** 9", "f(1)", "1" * 201, "9" * 60, "(" * 150, "1/0"])
def test_the_calculator_refuses_what_is_no_arithmetic(text: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError, MemoryError)):
        Calculator().calculate(text)


def test_arithmetic() -> None:
    assert Calculator().multiply(37, 48) == 1776
    assert Calculator().calculate("(3 + 4) * 12 / 4") == "21"
    values = {"-3 + 5": "2", "7 // 2": "3", "7 % 4": "3", "1/4": "0.25"}
    assert {text: Calculator().calculate(text) for text in values} == values


def test_a_number_is_found_by_guesses() -> None:
    game = Guess()
    game.reset(secret=5)
    assert [game.guess(4), game.guess(6), game.get_reward()] == ["higher", "lower", 0.0]
    assert [game.guess(5), game.guess(1), game.get_reward()] == ["right", "higher", 1.0]


def test_programs_run_in_the_sandbox(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("seen")
    tool = Python(seconds=2.0)
    assert tool.python("from math import comb\nprint(comb(6, 2))") == "15\n"
    failed = tool.python("print(1)\n1 / 0").splitlines()
    assert failed[:2] == ["1", "Traceback (most recent call last):"]
    assert '"<program>", line 2' in failed[2]
    assert failed[-1] == "ZeroDivisionError: division by zero"
    assert "SyntaxError" in tool.python("1 +")
    assert "FileNotFoundError" in tool.python(f"print(open({str(secret)!r}).read())")
    with pytest.raises(ValueError, match="ran longer than it may"):
        Python(seconds=0.5).python("while True: pass")


def test_the_sandbox_is_found_once_for_all_episodes_and_told() -> None:
    """Where none worked, the first program of each episode would try again."""
    launcher.cache_clear()
    told = Python._prepare(seconds=1.0)
    assert told.startswith("sandbox: ")
    assert launcher.cache_info().misses == 1
    assert [Python(seconds=1.0).python("print(1)") for _ in range(2)] == ["1\n"] * 2
    assert launcher.cache_info().misses == 1
    with environments("python") as made:
        made.tools()
        assert made.note == told


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    folder, index = tmp_path / "documents", tmp_path / "index"
    (folder / "birds").mkdir(parents=True)
    (folder / "birds" / "owl.md").write_text("The owl hunts at night. Owls are birds.")
    (folder / "cat.txt").write_text("A cat hunts mice, and an owl too, " + "now and then, " * 50)
    (folder / "code.py").write_text("owl")
    return {"folder": str(folder), "index": str(index)}


def opened(options: dict[str, Any]) -> Search:
    Search._prepare(**options)
    return Search(**options)


def test_documents_are_found_by_their_words_and_indexed_once(options: dict[str, Any]) -> None:
    tool = opened(options)
    assert [one["document"] for one in tool.search('OWL" NEAR(')] == ["birds/owl.md", "cat.txt"]
    assert [one["document"] for one in tool.search("owl hunts", k=1)] == ["birds/owl.md"]
    assert "mice" in tool.search("mice")[0]["excerpt"]
    assert tool.read("birds/owl.md", start=4) == "owl hunts at night. Owls are birds."
    for name in ("../documents/code.py", "code.py"):
        with pytest.raises(ValueError, match="there is no document"):
            tool.read(name)
    index = Path(options["index"])
    (made,) = index.iterdir()
    before = made.stat().st_mtime_ns
    opened(options)
    assert [(one, one.stat().st_mtime_ns) for one in index.iterdir()] == [(made, before)]
    (Path(options["folder"]) / "cat.txt").write_text("gone")
    assert [one["document"] for one in opened(options).search("owl")] == ["birds/owl.md"]
    with pytest.raises(ToolError, match="has no file with the suffix"):
        Search._prepare(str(index))


def test_the_host_makes_the_index_for_all_episodes(options: dict[str, Any]) -> None:
    with environments("search", options=options) as made:
        ask(made, "a", call("search", "mice"), call("read", "birds/owl.md"))
        ask(made, "b", call("read", "birds/owl.md", 24))
        found = answers(made)
        assert "cat.txt" in texts(found["a"])[0]
        assert texts(found["a"])[1].startswith("The owl")
        assert texts(found["b"]) == ["Owls are birds."]
