"""The builder: repeatable pretraining text, and a whole folder from a few updates."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isobit.config.schema import PrecisionConfig
from isobit.data.tokenizer import decode, load_tokenizer
from isobit.models.checkpoint import load_policy
from isobit.starter import build
from isobit.starter.tasks import is_held_out
from isobit.starter.tokenizer import EOS_ID, build_tokenizer


def options(out: Path, updates: int = 3) -> build.BuildOptions:
    return build.BuildOptions(out=out, updates=updates, batch=16, seed=1, threads=1)


def test_training_pairs_repeat_and_leave_held_out_problems_out(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(512)
    first = list(build.training_pairs(options(tmp_path, updates=20), tokenizer))
    assert first == list(build.training_pairs(options(tmp_path, updates=20), tokenizer))
    pairs = [pair for batch in first for pair in batch]
    assert len(pairs) == 20 * 16
    for prompt, answer in pairs:
        one, two, three, four = decode(tokenizer, prompt).rstrip("=").split("+")
        assert not is_held_out((int(one), int(two), int(three), int(four)))
        assert answer[-1] == EOS_ID


def test_a_build_writes_a_folder_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "problems", lambda held_out: [(3, 8, 2, 9), (1, 2, 3, 4)] * (1 if held_out else 8))
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        build.build(options(folder))
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert load_policy(folders[0], PrecisionConfig(preset="fp8")).config == build.MODEL
    assert len(load_tokenizer(folders[0])) == 99
    assert "2 held-out problems" in capsys.readouterr().out
    card = (folders[0] / "README.md").read_text()
    assert "3 updates of 16 answers in the `bf16` flow" in card
    assert "{" not in card


def test_the_command_line_has_the_figures_of_the_card() -> None:
    parsed = build.parse(["--out", "folder", "--updates", "5"])
    assert parsed.out == Path("folder")
    assert parsed.command == "python -m isobit.starter.build --updates 5 --batch 96 --seed 0 --threads 2"
