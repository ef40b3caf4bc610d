"""The figures of the structure: a small tree with one of each thing, gates that hold and that only
tighten, and this tree's own step.
"""

from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

import isobit
from tests.forked import ran
from tools.structure import __main__ as structure
from tools.structure import source, subjects
from tools.structure.__main__ import Figure, Gate

TREE = Path(str(isobit.__file__)).parent
FILES = {
    "__init__.py": '"""The package."""\n',
    "run/__init__.py": '"""Runs."""\n',
    "run/loop.py": '"""The loop."""\n\n\ndef train():\n' + "    pass\n" * 60 + "x = 1\n" * 500,
    "run/tiny.py": f'"""{"wide " * 25}"""\n',
    "kernels/hopper/gemm.py": '"""On Hopper."""\n\n\ndef kernel():\n' + "    pass\n" * 700,
}
GATES = """[at_most]
"modules" = { limit = 9, goal = 4 }

[at_least]
"median module, lines" = { limit = 10, goal = 150 }
"""


def tree_of(folder: Path, files: dict[str, str]) -> list[source.Source]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source.read_tree(folder)


def module(other: str, lines: int = 30, fragment: str = "") -> str:
    """A module of two definitions, of which the second does ``other``."""
    first = "A = 1\n\n\ndef b():\n    return A\n" + "    pass\n" * lines
    second = f"class C:\n    x = 1\n    {fragment!r}\n" + "    y = 1\n" * lines
    return f"{first}\n\n{second}\n    def d(self):\n        return {other}\n"


@pytest.fixture
def sources(tmp_path: Path) -> list[source.Source]:
    return tree_of(tmp_path, FILES)


def test_sizes_are_counted_outside_kernels(sources: list[source.Source]) -> None:
    assert source.modules_sized(sources, lambda n: n < 40) == ["run/tiny.py (1)"]
    assert source.modules_sized(sources, lambda n: n > 500) == ["run/loop.py (564)"]
    assert source.long_functions(sources) == ["run/loop.py: train (61)"]
    assert source.median_module(sources) == 564
    assert source.packages(sources) == {"kernels": (1, 704), "run": (2, 566)}


def test_wide_prose_is_found_in_pages_and_docstrings(
    sources: list[source.Source], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"# A\n\n{'word ' * 30}\n")
    assert source.wide_prose(tmp_path, sources) == ["README.md:3", "run/tiny.py:1"]


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        ("word " * 20 + "y\n", [1]),
        ("word " * 19 + "wordy\n", []),
        (f"- {'word ' * 30}", [1]),
        (f"| {'cell ' * 30} |", []),
        (f"```\n{'code ' * 30}\n```\n{'word ' * 30}", [4]),
        (f"    {'code ' * 30}", []),
        (f"[1]: https://{'x' * 100}", []),
        (f"---\ntitle: {'word ' * 30}\n---\n{'word ' * 30}", [4]),
    ],
)
def test_what_counts_as_wide_prose(page: str, numbers: list[int]) -> None:
    assert list(source.wide_lines(page)) == numbers


def test_a_module_has_two_subjects_where_its_parts_are_unconnected(tmp_path: Path) -> None:
    sources = tree_of(
        tmp_path,
        {
            "two.py": module("None"),
            "one.py": module("A"),
            "by_name.py": module("'b'"),
            "small.py": module("None", lines=15),
        },
    )
    assert subjects.unconnected_modules(sources) == {"two.py": "36: C | 33: A, b"}


def test_a_class_name_of_two_files_is_counted(tmp_path: Path) -> None:
    sources = tree_of(
        tmp_path,
        {
            "a.py": "class X: ...\nclass Y: ...\n",
            "b.py": "class Z:\n    class X: ...\n",
            "c.py": "class Y2: ...\nclass Y2: ...\n",
        },
    )
    assert subjects.repeated_classes(sources) == {"X": "a.py, b.py"}


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Of a part.", True),
        ("whose name is known", True),
        ("``by`` rank", False),
        ("By rank.", True),
        ("That which\n    is", True),
        ("On-policy samples.", False),
        ("Offers a part.", False),
        ("The part of a rank.", False),
        ("", False),
    ],
)
def test_fragments_are_found_in_all_docstrings(text: str, counts: bool, tmp_path: Path) -> None:
    files = {
        "a.py": f'X = 1\n"""{text}"""\n',
        "b.py": f'class C:\n    x: int\n    """{text}"""\n',
        "c.py": f'def f():\n    """{text}"""\n',
        "d.py": f'def f():\n    x = 1\n    """{text}"""\n',  # no docstring
    }
    found = [one.split(":")[0] for one in subjects.fragments(tree_of(tmp_path, files))]
    assert found == (["a.py", "b.py", "c.py"] if counts else [])


def test_commands_have_files_of_their_names(tmp_path: Path) -> None:
    files = {
        "cli/main.py": 'COMMANDS: dict[str, str] = {"train": "..", "sft": "..", "ui": ".."}\n',
        "cli/train.py": "def run_train(): ...\ndef run_sft(): ...\n",
        "cli/ui.py": "def run_serve(): ...\n",
    }
    assert subjects.commands_elsewhere(tree_of(tmp_path, files)) == ["sft", "ui"]


EXCEPTIONS = """# Reasons.
[parts]
"run/two.py" = "its tables"
"run/one.py" = "its tables"
[words]
"X" = "two back ends"
Y = "two back ends"
"""


def test_exceptions_are_not_counted_and_go_when_they_are_stale(tmp_path: Path) -> None:
    files = {
        "run/two.py": module("None"),
        "run/more.py": module("None").replace("class C", "class X"),
        "run/one.py": module("A").replace("class C", "class X"),
    }
    sources = tree_of(tmp_path / "src" / "isobit", files)
    exceptions = subjects.Exceptions.read(EXCEPTIONS)
    figures = structure.figures_of_text(tmp_path / "src" / "isobit", sources, exceptions)
    assert figures["modules with two subjects"].value == 1
    assert figures["class names that stand for two things"].value == 0
    assert exceptions.stale(sources) == ["run/one.py", "Y"]
    left = subjects.without(EXCEPTIONS, exceptions.stale(sources))
    assert subjects.Exceptions.read(left).stale(sources) == []
    assert left.splitlines() == ["# Reasons.", "[parts]", '"run/two.py" = "its tables"', "[words]",
                                 '"X" = "two back ends"']  # fmt: skip


def test_every_exception_has_a_reason() -> None:
    exceptions = subjects.Exceptions.read(structure.EXCEPTIONS.read_text())
    assert all(exceptions.parts.values()) and all(exceptions.words.values())


def test_a_gate_fails_beyond_its_limit_and_names_what_was_counted() -> None:
    gates = [Gate("modules", 2, 1, False), Gate("median", 10, 20, True)]
    assert structure.failures(gates, {"modules": Figure(2), "median": Figure(10)}) == []
    found = structure.failures(gates, {"modules": Figure(3, ["a.py"]), "median": Figure(9)})
    assert found == [
        "modules: 3, should be at most 2",
        "    a.py",
        "median: 9, should be at least 10",
    ]


@pytest.mark.parametrize(
    ("modules", "median", "limits"),
    [(7, 100, (7, 100)), (3, 200, (4, 150)), (12, 5, (9, 10))],
    ids=["nearer", "beyond the goal", "never looser"],
)
def test_limits_only_tighten(modules: int, median: int, limits: tuple[int, int]) -> None:
    gates = structure.read_gates(GATES)
    figures = {"modules": Figure(modules), "median module, lines": Figure(median)}
    after = structure.read_gates(structure.tightened(GATES, gates, figures))
    assert tuple(gate.limit for gate in after) == limits
    assert [gate.goal for gate in after] == [4, 150]


@pytest.mark.exhaustive
def test_every_package_stands_in_a_layer() -> None:
    layers = structure.layers()
    assert list(layers) == ["applications", "engines", "parts", "ground"]
    named = sorted(name for names in layers.values() for name in names)
    assert named == sorted(source.packages(source.read_tree(TREE)))


def test_a_walk_names_the_files_in_their_order() -> None:
    figure = Figure(4, {"data/a.py": "", "run/b.py": "", "run/c.py": "", "api.py": ""})
    assert structure.walk(figure) == "4 files:\n\n```text\ndata/a > run/{b,c} > api\n```"


@pytest.mark.exhaustive
def test_the_package_table_keeps_the_words_of_the_page() -> None:
    page = "| ground | `util/` | 1 | 0.1k | errors and files |\n"
    table = structure.package_table(page)
    assert "errors and files |" in table
    assert "| applications | `cli/` |" in table


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """This tree's step, traced once, by a process of its own, which is forked.  It takes some 15 s,
    and ``make lint`` traces it too.
    """
    folder = tmp_path_factory.mktemp("trace")

    def run(words: list[str], **_: Any) -> CompletedProcess[str]:
        assert words[1] == "-m"
        return ran("tests.forked:be_module", folder, *words[2:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "subprocess", SimpleNamespace(run=run))
        return structure.trace(TREE)


@pytest.mark.exhaustive
def test_a_token_is_followed_from_prompt_to_gradient(traced: dict[str, Any]) -> None:
    """Graders, packing and loss are on its way; console, journals and publishing are not."""
    packages = {file.split("/")[0] for file in traced["token_files"]}
    assert {"data", "rollout", "models", "kernels", "rewards", "algorithms", "training"} <= packages
    assert {"rewards/grading.py", "records/packing.py"} <= traced["token_files"].keys()
    assert not packages & {"observe", "cli", "config", "proof"}
    assert "training/optimiser.py" not in traced["token_files"]
    assert {"Prompt", "Completion", "Group"} <= traced["containers"].keys()
    assert "SamplingParams" not in traced["containers"]


@pytest.mark.exhaustive
def test_environment_and_lag_are_followed_to_the_gradient_too(traced: dict[str, Any]) -> None:
    for figure in ("environment_files", "lag_files"):
        assert {"rollout/native.py", "training/step.py"} <= traced[figure].keys()
    assert "rollout/episodes.py" in traced["environment_files"].keys() - traced["token_files"]
    assert "run/pending.py" in traced["lag_files"]


@pytest.mark.exhaustive
def test_a_configuration_is_followed_until_a_weight_is_read(traced: dict[str, Any]) -> None:
    assert next(iter(traced["config_files"])) == "run/loop.py"
    assert not any(
        file.startswith(("kernels/", "models/layers")) for file in traced["config_files"]
    )
    assert all(" -> " in climb for climb in traced["climbs"])


@pytest.mark.exhaustive
def test_a_weight_is_followed_to_its_first_gemm(traced: dict[str, Any]) -> None:
    assert any(file.endswith("spec/linear.py") for file in traced["weight_files"])
    assert "models/policy.py" in traced["weight_files"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("span", "package"), [("checkpoint", "store"), ("log", "observe"), ("reward", "rewards")]
)
def test_spans_enter_their_packages(traced: dict[str, Any], span: str, package: str) -> None:
    assert any(file.startswith(f"{package}/") for file in traced[f"{span}_files"])
    assert len(traced[f"{span}_files"]) < len(traced["token_files"])
