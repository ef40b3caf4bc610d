import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import isobit
import isobit.proof.verify
from isobit.cli.doctor import _print_finding
from isobit.cli.main import main
from isobit.kernels.spec import linear
from isobit.proof import doctor, doctor_environment
from isobit.proof.doctor_findings import Check, Finding
from isobit.util.machine import Memory


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


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("status", ["pass", "warn", "fail"])
def test_a_finding_is_no_wider_than_the_terminal(status, width, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    finding = Finding("cpu: gradients of linear in INT8", status, "as told " * 20, "do this " * 20)
    _print_finding(finding)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width
    monkeypatch.delenv("FORCE_COLOR")
    _print_finding(finding)
    assert len(capsys.readouterr().out.splitlines()) == 2, "a file has a line for each"


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
        "starter model, int8",
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
