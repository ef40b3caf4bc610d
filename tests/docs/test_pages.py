"""The pages of docs/: their Python runs, their links lead somewhere, and the index names every
page.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from isobit.cli.main import main
from isobit.config.keys import all_keys
from isobit.config.load import build, load_recipe, read_toml
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.rules import check_run, check_sft

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
RUN = re.compile(r"^ *isobit (train|sft) (recipes/\w+\.toml)(.*)$", re.MULTILINE)
OWN_FLAGS = re.compile(r"--(resume|dry-run|verbose|print-config|gpus? \S+|allow-change \S+)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [
        text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language
    ]


@pytest.fixture
def small_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes in a directory of their own, the quickstart cut down to two steps on few rows."""
    (tmp_path / "recipes").mkdir()
    for path in (ROOT / "recipes").iterdir():
        if path.is_file():
            (tmp_path / "recipes" / path.name).write_bytes(path.read_bytes())
    quickstart = tmp_path / "recipes" / "quickstart.toml"
    text = quickstart.read_text()
    for full, small in (
        ("steps = 20", "steps = 2"),
        ("limit = 500", "limit = 20"),
        ('"starter:train.jsonl"', '"starter:train.jsonl"\nlimit = 200'),
        ("prompts_per_step = 16", "prompts_per_step = 4"),
    ):
        assert full in text
        text = text.replace(full, small)
    quickstart.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.exhaustive
def test_the_examples_of_the_python_page_run(
    small_checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = blocks(ROOT / "docs" / "api.md", "python")
    assert len(examples) > 8
    names: dict[str, object] = {}
    for text in examples:
        exec(compile(text, "docs/api.md", "exec"), names)  # the page's own text
    printed = capsys.readouterr().out
    assert "did you mean training.steps?" in printed
    assert re.search(r"^0 of \d+ log-probabilities differ$", printed, re.MULTILINE)
    assert re.search(r"^0 [1-9]\d+$", printed, re.MULTILINE), "the proof compared something"
    assert (small_checkout / "runs" / "api-saved" / "model.safetensors").exists()


def test_the_cells_of_the_notebook_page_run(
    small_checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for text in blocks(ROOT / "docs" / "notebook.md", "python"):
        exec(compile(text, "a cell", "exec"), names)  # the page's own text
    printed = capsys.readouterr().out
    assert re.search(r"^0 of [1-9]\d* log-probabilities differ$", printed, re.MULTILINE)
    assert len(names["steps"]) >= 2  # pyright: ignore[reportArgumentType]


def small_notebook() -> dict[str, Any]:
    text = (ROOT / "recipes" / "tens.ipynb").read_text(encoding="utf-8")
    full = "STEPS, LIMIT = 50, 300"
    assert full in text
    return json.loads(text.replace(full, "STEPS, LIMIT = 2, 4"))


@pytest.mark.exhaustive
def test_the_notebook_runs_cell_by_cell(
    small_checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in small_notebook()["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "a cell", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"^held out: [\d.]+% right before, [\d.]+% after$", printed, re.MULTILINE)
    assert re.search(r"^0 of \d+ log-probabilities differ$", printed, re.MULTILINE)


def test_the_notebook_is_kept_with_small_outputs_of_a_run_that_learnt() -> None:
    path = ROOT / "recipes" / "tens.ipynb"
    assert path.stat().st_size < 30_000
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    found = re.search(r"held out: ([\d.]+)% right before, ([\d.]+)% after", text)
    assert found is not None
    assert float(found[1]) < 20 and float(found[2]) > 70


@pytest.mark.exhaustive
def test_the_notebook_runs_in_a_kernel(small_checkout: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.reads(json.dumps(small_notebook()), as_version=4)
    where = {"metadata": {"path": str(small_checkout)}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.text for output in outputs if "text" in output]
    assert any("log-probabilities differ" in text for text in texts)


def test_the_runs_of_the_tutorial_work(small_checkout: Path) -> None:
    """Each block whose first line is a comment with a file's name is that file."""
    page = ROOT / "docs" / "tutorial.md"
    for text in blocks(page, "python") + blocks(page, "toml"):
        name = text.splitlines()[0].removeprefix("# ")
        (small_checkout / name).write_text(text)
    example = {"prompt": "3+4+1+9=", "completion": "7,8,17"}
    (small_checkout / "my_examples.jsonl").write_text(json.dumps(example) + "\n")
    small = ["--training.steps", "1", "--training.prompts_per_step", "2", "--threads", "1"]
    assert (
        main(
            [
                "train",
                "my_run.toml",
                *small,
                "--training.samples_per_prompt",
                "2",
                "--data.eval.held_out.limit",
                "3",
            ]
        )
        == 0
    )
    assert main(["sft", "my_sft.toml", *small]) == 0
    rewards = [
        json.loads(line)["reward"]
        for line in (small_checkout / "runs/mine/completions.jsonl").read_text().splitlines()
    ]
    assert set(rewards) <= {0.0, 1.0}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_on_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    for text in (text for text in blocks(page, "toml") if "output" in text):
        (tmp_path / "recipe.toml").write_text(text)
        schema = SftConfig if "completion" in text else RunConfig
        build(schema, read_toml(tmp_path / "recipe.toml"), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_of_commands_on_a_page_exist(page: Path) -> None:
    keys = {key.path for schema in (RunConfig, SftConfig) for key in all_keys(schema)}
    named = re.findall(r"--([a-z]+(?:\.[a-z][a-z_0-9]*)+)", page.read_text(encoding="utf-8"))
    own = re.compile(r"(reward\.options|data\.(train|eval))\.")  # names that a recipe chooses
    assert {name for name in named if not own.match(name)} <= keys


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_runs_of_recipes_on_a_page_contradict_nothing(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for command, recipe, words in RUN.findall(text):
        overrides = shlex.split(OWN_FLAGS.sub("", words), comments=True)
        if command == "train":
            check_run(load_recipe(RunConfig, Path(recipe), overrides))
        else:
            check_sft(load_recipe(SftConfig, Path(recipe), overrides))


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index
    ] == []


def test_the_page_on_the_proof_quotes_the_tables_of_the_experiment() -> None:
    page = (ROOT / "docs" / "proof.md").read_text(encoding="utf-8")
    full = (ROOT / "experiments" / "proof" / "results.md").read_text(encoding="utf-8")
    quoted = page[page.index("## What explains the gap") : page.index("## Limits")]
    differences = re.findall(r"[+-][\d.]+ \[[^]]+\]", quoted)
    assert len(differences) == 23
    assert [one for one in differences if one not in full] == []
