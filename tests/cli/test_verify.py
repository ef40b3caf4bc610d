import json
import re
from shlex import split
from typing import get_args

import pytest

import isobit
import isobit.proof.verify
from isobit.cli.main import main
from isobit.cli.verify import scenario_printer
from isobit.config.precision import Preset
from isobit.models.config import ModelConfig
from isobit.proof.difference import Operations
from isobit.proof.verify import ScenarioResult
from isobit.rollout.engine_stats import EngineStats
from isobit.training.comparison import Comparison
from tests.forked import command

SMALL = ["--prompts", "2", "--samples", "2", "--max-new-tokens", "4", "--threads", "1"]


@pytest.mark.exhaustive
def test_an_exact_flow_has_no_difference_and_as_json_the_counts(capsys):
    code = main(["verify", "starter", "--precision", "fp32", *SMALL, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_compared"] > 0
    assert (result["tokens_differing"], result["max_abs_diff"]) == (0, 0.0)
    assert code == (2 if result["missing"] else 0)


def test_what_did_not_happen_is_said_with_what_makes_it(capsys, tiny_folder):
    one = ["--prompts", "1", "--samples", "1", "--max-new-tokens", "1", "--threads", "1"]
    assert main(["verify", str(tiny_folder), "--precision", "fp32", *one]) == 2
    *_, missing, more = capsys.readouterr().err.splitlines()
    assert missing.startswith("not proved: ")
    assert more == "larger --prompts, --samples or --max-new-tokens usually make these happen"


def test_the_help_names_every_preset(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert set(get_args(Preset)) <= words


@pytest.mark.exhaustive
def test_a_flow_with_two_functions_exits_1(capsys, tiny_folder):
    assert main(["verify", str(tiny_folder), "--precision", "fp8-rollout", *SMALL]) == 1
    *scenarios, total = capsys.readouterr().out.splitlines()
    assert scenarios
    assert total.startswith("fp8-rollout: ")
    assert not total.startswith("fp8-rollout: 0 of ")


@pytest.mark.parametrize("experts", [False, True])
def test_a_row_of_a_scenario_fits_80_columns(experts, capsys):
    """With the longest name and the counts of the largest checks."""
    routings = {"routings_compared": 9_999_999, "routings_differing": 0} if experts else {}
    counts = Comparison(tokens_compared=9_999_999, tokens_differing=999_999, **routings)
    seen = Operations(rows=9_999_999_999, sites=145, difference=None)
    show = scenario_printer()
    for name in ("few pages, small chunks, temperature 0.7", "roomy"):
        show(ScenarioResult(name, EngineStats(), {"alone": counts}, (), seen))
    header, *rows = capsys.readouterr().out.splitlines()
    assert max(map(len, (header, *rows))) <= 80
    assert header.split() == ["scenario", "compared", "differ", "operations"]
    assert rows[-1 - experts].split()[:4] == ["roomy", "9,999,999", "999,999", "9,999,999,999"]
    assert ("routings" in rows[-1]) == experts


@pytest.mark.exhaustive
def test_ranks_that_sample_together_say_once_what_they_found(tmp_path):
    shared = ["--cluster.rollout_tp", "2"]
    out, errors = tmp_path / "out", tmp_path / "errors"
    words = ["verify", "starter", "--precision", "fp8-rollout", *SMALL, *shared]
    process = command(words, out, errors)
    process.join()
    assert process.exitcode == 1
    assert out.read_text().splitlines()[-1].startswith("fp8-rollout: ")
    assert out.read_text().count("roomy") == 1
    assert "error: rank 0: " in errors.read_text()
    assert "log-probabilities differ" in errors.read_text()


def test_one_process_is_not_two(capsys):
    assert main(["verify", "starter", "--bisect", "--cluster.rollout_tp", "2"]) == 2
    assert "leave cluster.rollout_tp out" in capsys.readouterr().err


def test_a_check_that_breaks_exits_2_with_its_traceback(capsys, monkeypatch):
    def broken(*arguments: object) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(isobit.proof.verify, "verify", broken)
    assert main(["verify", "starter"]) == 2
    assert "RuntimeError: no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["no-such-folder"], "no-such-folder"),
        (["starter", "--precision", "fp9"], "precision.preset: should be"),
        (["starter", "--rollout.top_k", "3"], "rollout: unknown key"),
    ],
)
def test_what_cannot_be_used_is_named_and_exits_2(words, expected, capsys):
    assert main(["verify", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.exhaustive  # the site: as JSON below; the lines: proof/test_planted_faults.py
def test_bisect_names_the_first_site_of_a_flow_with_two_functions(capsys, tiny_folder):
    assert main(["verify", str(tiny_folder), "--precision", "fp8-rollout", "--bisect", *SMALL]) == 1
    printed = capsys.readouterr().out
    assert "observing every operation: roomy" in printed
    assert (
        "part at layers.0.qkv_proj.input (quantiser); the 3 operations before it are equal"
        in printed
    )
    assert "E4M3 there in rollout and BF16 in training" in printed


@pytest.mark.exhaustive  # in one: proof/test_planted_faults.py
def test_bisect_says_that_nothing_differs_in_any_scenario(capsys, tiny_folder):
    assert main(["verify", str(tiny_folder), "--precision", "fp8", "--bisect", *SMALL]) in (0, 2)
    printed = capsys.readouterr().out
    assert len(re.findall(r"\d equal$", printed, re.MULTILINE)) == 8
    assert "observing every operation" not in printed, "verify has, and nothing differs"
    assert printed.splitlines()[-1].startswith("nothing differs: ")


def test_bisect_as_json_is_one_object_with_the_counts(capsys, tiny_folder):
    words = ["--precision", "fp8-rollout", "--bisect", "--json", *SMALL]
    assert main(["verify", str(tiny_folder), *words]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_differing"] > 0
    first = result["bisect"]["first_difference"]
    assert (first["site"], first["operation"]) == ("layers.0.qkv_proj.input", "quantiser")
    assert first["tokens_differing"] == first["tokens_compared"] > 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--shape", "nope"], "the shape 'nope' is not known"),
        (["--shape=qwen3-8b", "--bisect"], "--bisect takes a FOLDER"),
        (["--shape", "qwen3-8b", "--device", "tpu"], "device"),
        (["--shape", "qwen3-8b", "--longest", "100"], "leave no room for prompts"),
    ],
)
def test_a_shape_is_checked_by_name(words, expected, capsys):
    assert main(["verify", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_small_shape_is_verified_with_outliers(capsys, monkeypatch):
    config = ModelConfig(
        "qwen2", 128, 128, 128, 2, 4, 2, 32, 1024, 1e-6, 10000.0, tied_embeddings=True
    )
    monkeypatch.setattr("isobit.proof.full_size.model_shape", lambda name: config)
    sizes = split("--prompts 4 --samples 2 --max-new-tokens 8 --longest 200 --outliers")
    main(["verify", "--shape", "tiny", "--device", "cpu", *sizes, "--json"])
    assert json.loads(capsys.readouterr().out)["tokens_differing"] == 0
