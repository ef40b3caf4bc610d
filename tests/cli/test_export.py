import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isobit.cli.main import main
from isobit.models.adapter_folder import write_adapters
from isobit.models.adapters import adapter_masters, peft_tensors
from isobit.models.config import Lora
from isobit.models.folder import read_any_config
from isobit.starter import starter_folder

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


@pytest.mark.parametrize(("format", "kind"), [("bf16", ""), ("fp8", "E4M3"), ("int8", "INT8")])
def test_merged_adapters_are_said_to_be_another_function(
    format: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_any_config(starter_folder())
    config = replace(config, lora=Lora(2, 4.0, ("q_proj", "down_proj")))
    masters = {
        name: torch.full(master.shape, 1e-2) for name, master in adapter_masters(config).items()
    }
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    assert config.lora is not None
    write_adapters(adapters, config.lora, starter_folder(), peft_tensors(config, masters, {}))
    assert main(["export", str(adapters), "--to", str(tmp_path / "peft")]) == 0
    assert "MB in 1 file of tensors, fp32" in capsys.readouterr().out
    merged = ["--to", str(tmp_path / "merged"), "--merge", "--format", format]
    assert main(["export", str(adapters), *merged]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rounding moved their matrices by" in said and "of what the adapters change" in said
    assert "another function than the one that was trained" in said
    assert "own bytes" not in said
    assert (f"28 matrices in {kind}, quantised anew" in said) == bool(kind)
