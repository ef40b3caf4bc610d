"""Files and folders of another user: the error names the path and says that it is closed, whoever
reads it.
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tomli_w

from isobit.cli.main import main
from isobit.starter import starter_folder
from tests.forked import ran

NOBODY = 65534
CASES = {
    "recipe": "recipe.toml",
    "recipe's folder": "closed/recipe.toml",
    "data": "data.jsonl",
    "table": "data.csv",
    "data's folder": "closed/data.jsonl",
    "reward": "mine.py",
    "reward's folder": "closed/mine.py",
    "configuration": "model/config.json",
    "model's folder": "closed/model",
}
"""What is closed to others in each case: a file of mode 0600, or the folder ``closed``, 0700."""


def as_nobody(recipes: dict[str, str]) -> None:
    """What each of them says, in a process of its own."""
    assert main(["train", recipes.pop("open"), "--dry-run"]) == 0  # imports what is root's to read
    os.seteuid(NOBODY)
    for name, recipe in recipes.items():
        print(f"== {name}", file=sys.stderr, flush=True)
        print(f"code {main(['train', recipe, '--dry-run'])}", file=sys.stderr, flush=True)


def recipe_of(folder: Path, case: str) -> str:
    """A recipe in which the path of a case is in its place, closed."""
    (folder / "closed").mkdir(parents=True)
    paths = {"data": "data.jsonl", "reward": "mine.py", "model": "model", "recipe": "recipe.toml"}
    closed = CASES.get(case, "")
    for kind, name in paths.items():
        if Path(closed).name == name:
            paths[kind] = closed
    if case == "table":
        paths["data"] = closed
    (folder / paths["data"]).write_text(
        "prompt,answer\n1+1=,2\n" if case == "table" else '{"prompt": "1+1=", "answer": "2"}\n'
    )
    (folder / paths["reward"]).write_text("def f(prompt, completion):\n    return 1.0\n")
    shutil.copytree(starter_folder(), folder / paths["model"])
    kind = "csv" if case == "table" else "jsonl"
    values = {
        "model": str(folder / paths["model"]),
        "output": str(folder / "run"),
        "data": {"train": {"type": kind, "path": str(folder / paths["data"])}},
        "reward": {"function": f"{folder / paths['reward']}:f", "in_process": True},
        "rollout": {"max_new_tokens": 8},
        "training": {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
    }
    recipe = folder / paths["recipe"]
    recipe.write_text(tomli_w.dumps(values), encoding="utf-8")
    for path in (folder, *folder.rglob("*")):  # whatever the umask is
        path.chmod(0o755 if path.is_dir() else 0o644)
    if closed.startswith("closed"):
        (folder / "closed").chmod(0o700)
    elif closed:
        (folder / closed).chmod(0o600)
    return str(recipe)


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_closed_file_or_folder_is_named(tmp_path: Path) -> None:
    with TemporaryDirectory() as name:  # pytest closes its own to others
        Path(name).chmod(0o755)
        _check_in(Path(name), tmp_path)


def _check_in(place: Path, logs: Path) -> None:
    recipes = {
        case: recipe_of(place / str(number), case) for number, case in enumerate(["open", *CASES])
    }
    done = ran(f"{__name__}:as_nobody", logs, recipes)
    assert done.returncode == 0, done.stderr
    _, *said = done.stderr.split("== ")
    assert [text.partition("\n")[0] for text in said] == list(CASES)
    for number, (text, path) in enumerate(zip(said, CASES.values(), strict=True), start=1):
        assert "Permission denied" in text, text
        assert str(place / str(number) / path.partition("/")[0]) in text, text
        assert text.count("error: ") == 1 and "Traceback" not in text, text
        assert text.endswith("code 2\n"), text
