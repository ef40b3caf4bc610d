"""``isobit export``, ``inspect``, ``report`` and ``schema`` from the command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.cli.schema import configuration_page
from isobit.config.recipes import RECIPES
from isobit.config.schema import json_schema

FP8 = ["starter", "--to", "out", "--format", "fp8"]


def test_it_writes_the_folder_and_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16, fp8 = tmp_path / "bf16", tmp_path / "fp8"
    assert main(["export", "starter", "--to", str(bf16), "--shard-mb", "1"]) == 0
    assert "1.7 MB in 2 files of tensors, bf16" in capsys.readouterr().out
    command = ["export", str(bf16), "--to", str(fp8), "--format", "fp8"]
    assert main([*command, "--precision.modules_bf16", '["down_proj"]']) == 0
    assert "24 matrices in E4M3" in capsys.readouterr().out
    quantization = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert "model.layers.2.mlp.down_proj" in quantization["modules_to_not_convert"]
    command = ["export", str(bf16), "--to", str(tmp_path / "int8"), "--format", "int8"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "28 matrices in INT8, the policy's own bytes" in out and "apply_transform" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export", "nowhere", "--to", "out"], "no such run or model folder: nowhere;"),
        (["export", "runs/typo", "--to", "out"], "no such run or model folder: runs/typo;"),
        (["export", "starter", "--to", "out", "--precision", "fp8"], "--format is bf16: leave one"),
        (["export", *FP8, "--precision", "int4"], "int4"),
        (["export", *FP8, "--depth", "3"], "depth"),
        (["inspect", "nowhere"], "nowhere is not a folder"),
        (["inspect", "starter", "--gpu", "tpu"], "known are h100, h200"),
        (["inspect", "starter", "--precision", "int4"], "int4"),
        (["inspect", "starter", "--out", "nowhere/page.html"], "there is no directory 'nowhere'"),
        (["report", "."], "is no run"),
    ],
)
def test_what_cannot_be_used_is_an_error_without_a_traceback(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tables_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "starter", "--gpu", "h100", "--weights"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "qwen3, 870,016 parameters" in text and found["parameters"] == 870_016
    assert "the 28 matrices in E4M3" in text and len(found["matrices"]) == 28
    assert "on an H100" in text and found["gpu"]["name"] == "h100"


def test_a_gpu_is_planned_from_the_config_alone(
    tmp_path: Path, config_alone: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", str(config_alone("qwen3-8b")), "--gpu", "h200", "--gpus", "2"]
    assert main([*words, "--training.moments", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matrices"] == [] and found["gpu"]["gpus"] == 2
    assert found["gpu"]["time"]["generated_tokens_per_s"] > 1000
    assert main([*words, "--training.recompute", "all"]) == 2
    assert "training.recompute" in capsys.readouterr().err
    assert main([*words, "--weights"]) == 2
    assert "neither model.safetensors" in capsys.readouterr().err
    assert main(["inspect", "starter", "--gpus", "2"]) == 2
    assert "add --gpu h100" in capsys.readouterr().err


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["inspect", "starter", "--out", str(path)]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(str(path))
    assert "870 k" in path.read_text(encoding="utf-8")


def test_a_flow_with_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--precision.first_layers_bf16", "3", "--precision.scales", "fp32"]
    assert main(["inspect", "starter", *options]) == 0
    said = capsys.readouterr().out
    flow = '{preset = "fp8", first_layers_bf16 = 3, scales = "fp32"}'
    assert f"the 7 matrices in E4M3: {flow}" in said


def test_it_writes_the_page_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 0.5}) + "\n", encoding="utf-8"
    )
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()
    assert capsys.readouterr().out.startswith(str(tmp_path / "report.html"))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n', encoding="utf-8")
    out = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(str(out))
    assert "one against two" in out.read_text(encoding="utf-8")
    assert main(["report", *map(str, runs), "--watch"]) == 2
    assert "--watch shows one run" in capsys.readouterr().err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    code = (
        "import sys; from isobit.cli.main import main; "
        f"main(['report', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", RECIPES)
def test_the_schema_of_a_recipe_is_printed(command, capsys):
    assert main(["schema", command]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(RECIPES[command])


def test_the_page_is_printed(capsys):
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == configuration_page()
