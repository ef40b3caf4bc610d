"""The recipes that come with the package reach someone who has nothing else, and run there."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.config.load import load_recipe
from isobit.config.recipes import RECIPES
from isobit.config.shipped import read_shipped, shipped_folder, shipped_recipes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 2
    return capsys.readouterr().err


def paths_of(text: str) -> list[Path]:
    """The files beside it that a recipe reads."""
    return [Path(found[1]) for found in re.finditer(r'"([^":]*/[\w.]+\.(?:jsonl|py))\b', text)]


def test_every_recipe_is_listed_but_that_of_the_starter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe"]) == 0
    shown = capsys.readouterr().out.splitlines()
    names = {path.stem for path in (ROOT / "recipes").glob("*.toml")} - {"starter"}
    assert {line.split()[0] for line in shown[:-2]} == names | {"rl_loop.py", "tens.ipynb"}
    assert max(map(len, shown)) <= 100 and all(len(line.split()) > 2 for line in shown[:-2])


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "." not in name])
def test_a_recipe_reads_files_that_are_there(
    name: str, capsys: pytest.CaptureFixture[str], empty: Path
) -> None:
    assert main(["recipe", name]) == 0
    shown = capsys.readouterr()
    made = [path for path in paths_of(shown.out) if path.parts[0] != "runs"]
    assert all(path.is_absolute() and path.is_file() for path in made), made
    assert bool(made) <= ("--out FOLDER" in shown.err) and "#:schema" not in shown.out
    assert main(["recipe", name, "--out", "mine"]) == 0
    command = capsys.readouterr().err.partition(f" mine/{name}.toml")[0].split()[-1]
    copied = Path("mine", f"{name}.toml").read_text(encoding="utf-8")
    ours = [path for path in paths_of(copied) if path.parts[0] != "runs"]
    assert [path.name for path in ours] == [path.name for path in made]
    assert all(path.parent == Path("mine") and path.is_file() for path in ours)
    assert f"recipes/{name}" not in copied
    load_recipe(RECIPES[command], Path("mine", f"{name}.toml"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("quickstart", "moe"),
        ("moe", "quickstart"),
        ("tools_sft", "tools"),
        ("fine_tune", "fine_tune"),
        ("tens", "tens.ipynb"),
        ("rl_loop.py", "rl_loop.py"),
    ],
)
def test_a_file_that_is_there_as_shipped_is_kept(
    first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", first, "--out", "a"]) == 0
    assert main(["recipe", second, "--out", "a"]) == 0
    named = capsys.readouterr().out.split()
    assert all(Path(name).is_file() for name in named)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quickstart", "isobit train a/quickstart.toml"),
        ("your_data", "isobit train a/your_data.toml"),
        ("tools_sft", "python a/tools.py runs/tools-data && isobit sft a/tools_sft.toml"),
        (
            "tools",
            "python a/tools.py runs/tools-data && isobit sft a/tools_sft.toml && isobit train "
            "a/tools.toml",
        ),
        (
            "checkpoint",
            "isobit verify PATH/TO/MODEL && isobit train a/checkpoint.toml --model PATH/TO/MODEL",
        ),
        ("hybrid", "isobit sft a/hybrid.toml"),
        ("rl_loop.py", "python a/rl_loop.py"),
    ],
)
def test_all_commands_of_a_recipe_are_said(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", name, "--out", "a"]) == 0
    assert capsys.readouterr().err == f"run it: {said}\n"


def test_files_that_files_name_come_too_and_nothing_is_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipe", "tools.toml", "--out", "a/b"]) == 0
    assert capsys.readouterr().out.split() == [
        "a/b/tools.toml",
        "a/b/tools.py",
        "a/b/tools_sft.toml",
    ]
    assert "python a/b/tools.py runs" in Path("a/b/tools_sft.toml").read_text(encoding="utf-8")
    Path("a/b/tools.toml").unlink()
    for name in ("tools.py", "tools_sft.toml"):
        with Path("a/b", name).open("a", encoding="utf-8") as file:
            file.write("# mine\n")
    said = error_of(capsys, "recipe", "tools", "--out", "a/b")
    assert "a/b/tools.py, a/b/tools_sft.toml exist already, and not as shipped; name an" in said
    assert not Path("a/b/tools.toml").exists()
    Path("file").write_text("")
    assert "cannot be written: " in error_of(capsys, "recipe", "tens", "--out", "file/below")
    assert "without quotes" in error_of(capsys, "recipe", "tens", "--out", 'a"b')
    os.mkfifo("a/tens.toml")  # which nobody ever writes to
    said = error_of(capsys, "recipe", "tens", "--out", "a")
    assert "a/tens.toml cannot be written: is a named pipe, not a file" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe", "quickstat"], "tens.ipynb; did you mean quickstart?"),
        (["recipe", "starter"], "made by tools of a checkout; the shipped recipes are checkpoint,"),
        (["recipe", "../recipes/tens"], "there is no recipe '../recipes/tens'"),
        (["recipe", "--out", "x"], "--out is for one recipe: name it"),
        (
            ["train", "starter"],
            "starter: no such file; name a recipe, which is a TOML file: `iso",
        ),
        (["train", "dapo"], "dapo: no such file; `isobit recipe dapo --out .` writes the shipped"),
        (["sft", "recipes/distil.toml"], "`isobit recipe distil --out recipes` writes the shipped"),
        (["train", "my.toml"], "my.toml: no such file; name a recipe, which is a TOML file"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(capsys, *words)


def test_what_an_error_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "train", "starter")
    commands = re.findall(r"`isobit (recipe[^`>]*)", said)
    assert len(commands) == 2 and all(main(command.split()) == 0 for command in commands)


def test_a_wheel_has_the_recipes_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"recipes": "isobit/recipes"}
    assert shipped_folder() == ROOT / "recipes"
    (tmp_path / "isobit" / "recipes").mkdir(parents=True)
    monkeypatch.setattr("isobit.config.shipped._PACKAGE", tmp_path / "isobit")
    assert shipped_folder() == tmp_path / "isobit" / "recipes"


def test_the_command_that_runs_a_recipe_is_its_own() -> None:
    assert read_shipped("fine_tune").command == "isobit sft"
    assert read_shipped("tools").command == "isobit train"
    assert read_shipped("rl_loop.py").command == "python"
