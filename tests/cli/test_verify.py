import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from shlex import split
from typing import get_args

import pytest

import isobit
import isobit.proof.verify
from isobit.cli.main import main
from isobit.config.precision import Preset
from isobit.kernels.spec import linear
from isobit.models.config import ModelConfig
from isobit.proof import doctor, doctor_environment
from isobit.proof.doctor_findings import Check
from isobit.util.machine import Memory
from tests.forked import command

SMALL = ["--prompts", "2", "--samples", "2", "--max-new-tokens", "4", "--threads", "1"]


@pytest.mark.exhaustive
def test_an_exact_flow_has_no_difference_and_as_json_the_counts(capsys):
    code = main(["verify", "starter", "--precision", "fp32", *SMALL, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_compared"] > 0
    assert (result["tokens_differing"], result["max_abs_diff"]) == (0, 0.0)
    assert code == (2 if result["missing"] else 0)


def test_the_help_names_every_preset(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert set(get_args(Preset)) <= words


def test_a_flow_with_two_functions_exits_1(capsys, tiny_folder):
    assert main(["verify", str(tiny_folder), "--precision", "fp8-rollout", *SMALL]) == 1
    *scenarios, total = capsys.readouterr().out.splitlines()
    assert scenarios
    assert total.startswith("fp8-rollout: ")
    assert not total.startswith("fp8-rollout: 0 of ")


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


def test_bisect_names_the_first_site_of_a_flow_with_two_functions(capsys, tiny_folder):
    assert main(["verify", str(tiny_folder), "--precision", "fp8-rollout", "--bisect", *SMALL]) == 1
    printed = capsys.readouterr().out
    assert "observing every operation: roomy" in printed
    assert (
        "part at layers.0.qkv_proj.input (quantiser); the 3 operations before it are equal"
        in printed
    )
    assert "E4M3 there in rollout and BF16 in training" in printed


def test_bisect_says_that_nothing_differs_in_any_scenario(capsys, tiny_folder):
    assert main(["verify", str(tiny_folder), "--precision", "fp8", "--bisect", *SMALL]) in (0, 2)
    printed = capsys.readouterr().out
    assert printed.count("rows of operations equal") == 8
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


@pytest.fixture
def no_starter(monkeypatch):
    """Leave the slowest check to the one test that wants it."""
    monkeypatch.setattr(doctor, "_verify_starter", lambda: "not run here")


def lines(shown: str) -> dict[str, str]:
    return {
        line[6:].split("  ")[0]: line
        for line in shown.splitlines()
        if line[:4] in ("pass", "WARN", "FAIL")
    }


@pytest.mark.exhaustive
def test_this_machine_passes(tmp_path, monkeypatch, capsys):
    """With half the tokens of the starter model's check."""
    monkeypatch.setattr(doctor, "_SMALL", replace(doctor._SMALL, max_new_tokens=6))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == 0
    names = {finding["name"] for finding in result["findings"]}
    assert {
        "python",
        "torch",
        "OpenMP",
        "quantise 128x128",
        "cpu: attention in E4M3",
        "starter model, fp8",
    } <= names
    assert result["runs_here"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.exhaustive
def test_a_wrong_gemm_fails_by_name_with_a_fix(no_starter, tmp_path, monkeypatch, capsys):
    exact = linear.fp8_gemm_nt
    monkeypatch.setattr(linear, "fp8_gemm_nt", lambda a, b: exact(a, b).bfloat16().float())
    assert main(["doctor", "--directory", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert lines(shown)["cpu: GEMM in E4M3"].startswith("FAIL")
    assert "the GEMM in E4M3 and its definition give different bits" in shown and "fix: " in shown
    assert "1 failed" in shown and "nothing should run here" in shown


@contextmanager
def found(name: str, status: str, capsys, directory) -> Iterator[None]:
    yield
    code = main(["doctor", "--directory", str(directory)])
    shown = lines(capsys.readouterr().out)
    assert next(line for key, line in shown.items() if key.startswith(name)).startswith(status)
    assert code == (1 if status == "FAIL" else 0)


@pytest.mark.exhaustive
def test_what_surrounds_it(no_starter, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "kernel_checks", lambda threads: [])
    monkeypatch.setattr(doctor, "quantiser_checks", list[Check])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def flipped(path):
        tensors = exact_load(path)
        return {
            name: tensor.clone()
            .view(doctor_environment.torch.uint8)
            .bitwise_xor(1)
            .view(tensor.dtype)
            for name, tensor in tensors.items()
        }

    exact_load = doctor_environment.load_file
    exact_version = doctor_environment.version
    cases = [
        ("disk", "FAIL", (doctor_environment.os, "fsync", full)),
        ("safetensors in", "FAIL", (doctor_environment, "load_file", flipped)),
        (
            "torch",
            "FAIL",
            (
                doctor_environment,
                "version",
                lambda name: "2.10.1" if name == "torch" else exact_version(name),
            ),
        ),
        ("OpenMP", "WARN", (isobit, "spin_count_in_time", False)),
        ("memory", "WARN", (doctor_environment, "read_memory", lambda: Memory(8 << 30, 1 << 30))),
        ("memory", "WARN", (doctor_environment, "read_memory", lambda: None)),
        ("processor", "WARN", (doctor_environment, "usable_cores", lambda: 0)),
    ]
    for name, status, patch in cases:
        with monkeypatch.context() as context, found(name, status, capsys, tmp_path):
            context.setattr(*patch)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_none(tmp_path, capsys):
    assert main(["doctor", "--directory", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_what_to_install_for_more_is_said(monkeypatch):
    monkeypatch.setattr(
        doctor,
        "extras",
        lambda: {"dev": ["ruff"], "hopper": ["sgl-deep-gemm"], "wandb": ["wandb"]},
    )
    monkeypatch.setattr(doctor, "is_present", lambda device: device == "cpu")
    assert list(doctor._runs_here([]))[1:] == ["not installed: wandb; pip install 'isobit[wandb]'"]
    monkeypatch.setattr(doctor, "is_present", lambda device: True)
    monkeypatch.setattr(doctor, "usable_devices", lambda: {"cuda": None, "cpu": None})
    _, on_gpu, hopper, _ = doctor._runs_here([])
    assert "the same on cuda" in on_gpu and "sgl-deep-gemm" in hopper
