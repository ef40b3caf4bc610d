import json
from pathlib import Path

import pytest

from isobit.cli.main import main

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
