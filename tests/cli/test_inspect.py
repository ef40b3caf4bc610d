"""``isobit inspect`` from the command line."""

import json
from pathlib import Path

import pytest

from isobit.cli.main import main


def test_tables_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "starter", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", "starter", "--gpu", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "qwen3, 870,016 parameters" in text and found["parameters"] == 870_016
    assert "the 28 matrices in E4M3" in text and len(found["matrices"]) == 28
    assert "on an H100" in text and found["gpu"]["name"] == "h100"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["starter", "--gpu", "tpu"], "known are h100, h200"),
        (["starter", "--precision", "int4"], "int4"),
        (["starter", "--out", "nowhere/page.html"], "there is no directory 'nowhere'"),
    ],
)
def test_what_cannot_be_used_is_an_error_without_a_traceback(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["inspect", "starter", "--out", str(path)]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(str(path))
    assert "870 k" in path.read_text(encoding="utf-8")


def test_a_flow_with_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--precision.first_layers_bf16", "3", "--precision.scales", "fp32"]
    assert main(["inspect", "starter", *options]) == 0
    assert "the 7 matrices in E4M3: fp8, FP32 scales" in capsys.readouterr().out
