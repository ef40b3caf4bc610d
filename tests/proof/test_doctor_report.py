"""A report that is attached to a public issue says what the machine computes with, and names
nobody.
"""

import getpass
import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.cli.main import main
from isobit.kernels.backend import support
from isobit.kernels.triton import support as triton_support
from isobit.proof import doctor, doctor_report
from isobit.proof.doctor import Examination
from isobit.proof.doctor_findings import Check, Fault, Finding
from isobit.store.kernels_digest import kernels_sha256

NAMES = {"/home/jane doe": "PATH", "jane": "USER", "node7": "HOST"}


def examined(directory: Path) -> Examination:
    def fails() -> str:
        raise Fault(f"{Path.home()}/x y/file.py of {getpass.getuser()} on {socket.gethostname()}")

    checks = [Check(f"disk in {directory}", lambda: "3 GiB free", ""), Check("fault", fails, "")]
    return Examination(tuple(check.find() for check in checks), ("on the CPU",))


def test_a_report_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda directory, *_: examined(directory))
    file = tmp_path / "report.json"
    assert main(["doctor", "--directory", str(tmp_path), "--report", str(file)]) == 1
    assert "report.json can be attached to an issue" in capsys.readouterr().out
    text = file.read_text()
    page: dict[str, Any] = json.loads(text)
    assert page["format"] == 1 and page["back_end"] == "spec" and page["cards"] == []
    assert page["bits"]["kernels"] == kernels_sha256()
    assert page["versions"]["torch"] == torch.__version__
    assert (page["passed"], page["failed"]) == (1, 1)
    assert [one["status"] for one in page["findings"]] == ["pass", "fail"]
    assert page["findings"][0]["name"] == "disk in PATH"
    private = (str(tmp_path), str(Path.home()), socket.gethostname())
    assert not [name for name in private if name in text]
    assert not re.search(rf"\b{getpass.getuser()}\b", text)


def test_a_report_has_a_directory_to_go_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--report", str(tmp_path / "none" / "report.json")]) == 2
    assert "--report is" in capsys.readouterr().err
    with pytest.raises(doctor_report.ConfigError, match="cannot be written: Is a directory"):
        doctor_report.write_report(examined(tmp_path), tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("disk in /home/jane doe/runs", "disk in PATH/runs"),
        ("[Errno 13] '/data/jane/x.pt'", "[Errno 13] 'PATH'"),
        ("jane@node7.example: ~/secret", "USER@HOST.example: PATH"),
        ("janet and mynode7", "janet and mynode7"),
        ("4 GiB/s, read/write, n / 32", "4 GiB/s, read/write, n / 32"),
        ("https://pytorch.org/get-started has it", "https://pytorch.org/get-started has it"),
    ],
)
def test_paths_and_names_are_replaced(text: str, expected: str) -> None:
    assert doctor_report.without_names([{"detail": text}], NAMES) == [{"detail": expected}]


def test_the_card_is_in_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090",
        major=8,
        minor=9,
        total_memory=25 << 30,
        multi_processor_count=128,
        shared_memory_per_block_optin=99 << 10,
    )
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.82.07  Release (jane@x)\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(triton_support, "DRIVER", driver)
    monkeypatch.setattr(doctor_report, "is_present", lambda _: True)
    page = doctor_report.report(Examination((Finding("x", "pass", ""),), ()), tmp_path)
    card = {key: value for key, value in page["cards"][0].items() if key != "cuda"}
    assert card == {
        "name": "NVIDIA GeForce RTX 4090",
        "generation": "sm_89",
        "memory_bytes": 25 << 30,
        "multiprocessors": 128,
        "shared_memory_bytes": 99 << 10,
        "driver": "580.82.07",
    }
    assert support("cpu").figures(torch.device("cpu")) == {}
