import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.cli.main import main


def test_tables_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "starter", "--gpu", "h100", "--weights", "--precision", "fp8"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "qwen3, 870,016 parameters" in text and found["parameters"] == 870_016
    assert "the 28 matrices in E4M3" in text and len(found["matrices"]) == 28
    assert "on an H100" in text and found["gpu"]["name"] == "h100"


@pytest.mark.parametrize("gpu", ["h200", "rtx4090", "24", "l40s"])
def test_the_rest_of_a_long_line_is_indented_further(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "starter", "--gpu", gpu]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    plan = lines[next(i for i, line in enumerate(lines) if "to train, sequences" in line) :]
    plan = plan[: plan.index("")]
    headings = [line for line in plan if line.startswith("  ") and not line.startswith("   ")]
    assert all(line.startswith(("  to train", "  device", "  time")) for line in headings)
    assert "      within 18%" in plan


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
    assert main(["inspect", "starter", "--precision", "fp8", *options]) == 0
    said = capsys.readouterr().out
    flow = '{preset = "fp8", first_layers_bf16 = 3, scales = "fp32"}'
    assert f"the 7 matrices in E4M3: {flow}" in said


@pytest.mark.parametrize("first", [True, False])
def test_an_override_may_stand_before_the_folder(
    first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rollout.max_new_tokens", "64"]
    words = [*words, "starter"] if first else ["starter", *words]
    assert main(["inspect", *words, "--gpu", "h200"]) == 0
    assert "completions have 64 tokens" in capsys.readouterr().out
