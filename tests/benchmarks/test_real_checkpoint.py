"""The measurements on a real checkpoint, on the starter: a checkpoint like any other."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.pretrained.answers import compare_answers
from benchmarks.pretrained.perplexity import linear_formats, of_transformers, ours
from benchmarks.pretrained.results import write_result
from benchmarks.pretrained.table import print_table
from benchmarks.real_checkpoint import make_parser
from isobit.config.tables import PrecisionConfig
from isobit.models.folder import load_policy
from isobit.starter import starter_folder


def test_greedy_answers_are_those_of_transformers() -> None:
    compared = compare_answers(starter_folder(), ("3+8+2+9=", "1+1="), 8)
    assert all(one.equal and one.gap is None for one in compared)
    assert sum(len(one.ours) for one in compared) > 4


def test_perplexities_agree_and_every_linear_is_quantised() -> None:
    torch.manual_seed(0)
    windows = [tuple(torch.randint(3, 60, (40,)).tolist()) for _ in range(3)]
    theirs = of_transformers(starter_folder(), windows, torch.float32, "cpu")
    exact = load_policy(starter_folder(), PrecisionConfig(preset="fp32"))
    assert ours(exact, windows) == pytest.approx(theirs, rel=1e-5)
    quantised = load_policy(starter_folder(), PrecisionConfig(preset="fp8"))
    found = ours(quantised, windows)
    # random text, of which the starter expects nothing: 19 nats a token
    assert found != theirs and math.log(found) == pytest.approx(math.log(theirs), rel=0.01)
    assert set(linear_formats(quantised)) == {"e4m3"}


def test_a_precision_is_a_preset_or_a_table_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = '{preset = "fp8", last_layers_bf16 = 1}'
    words = ["perplexity", str(starter_folder()), "--windows", "1", "--length", "16"]
    options = make_parser().parse_args([*words, "--precisions", table, "--out", str(tmp_path)])
    options.run(options)
    assert f"\n{table}: " in capsys.readouterr().out
    (result,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir())
    assert set(result["linears"][table]) == {"e4m3", "bf16"} and table in result["perplexity"]
    with pytest.raises(SystemExit):
        make_parser().parse_args([*words, "--precisions", "fp7", "--out", str(tmp_path)])
    assert "fp7 is no precision" in capsys.readouterr().err


def test_results_become_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    perplexity = {"transformers bf16": 20.0, "fp8": 20.2}
    result = {"device": "cpu", "perplexity": perplexity, "linears": {"fp8": {"e4m3": 120}}}
    write_result(tmp_path, "perplexity-cpu", result)
    write_result(tmp_path, "answers-cpu", {"questions": 2, "equal": 1, "tokens": 9, "gaps": [0.1]})
    assert "versions" in json.loads((tmp_path / "answers-cpu.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    print_table(tmp_path)
    printed = capsys.readouterr().out
    assert "| fp8 | 20.2000 | 1.0100 | 120 e4m3 |" in printed
    assert "1 of 2 greedy answers (9 tokens)" in printed
