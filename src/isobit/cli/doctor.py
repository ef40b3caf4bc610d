"""``isobit doctor``: tests this machine. It exits 1 where anything failed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.options import JSON, Command, check_directory, option, path_value
from isobit.cli.start import starting
from isobit.util.strict_json import json_text

if TYPE_CHECKING:
    from isobit.proof.doctor_findings import Finding
_COMMAND = Command(
    "doctor",
    "Test this machine: versions, disk and memory, the quantisers against stored bytes, every "
    "kernel for exactness at one thread and at all, and the starter model.  Takes half a minute "
    "to two minutes on a CPU; exits 1 where anything failed.",
    [
        option(
            "--directory DIR",
            "where files are tried out; by default the current one",
            path_value,
            default=Path(),
        ),
        option(
            "--report FILE",
            "also write it as JSON to attach to an issue, with versions, the GPU and the digest of "
            "the kernels, without paths and names of users and hosts",
            path_value,
        ),
        JSON,
    ],
)
_MARKS = {"pass": "pass", "warn": "WARN", "fail": "FAIL"}


def run_doctor(arguments: Sequence[str]) -> int:
    options = _COMMAND.read(arguments)
    if options.report is not None:
        check_directory(options.report, "--report")

    with starting():
        from isobit.proof.doctor import examine

    result = (
        examine(options.directory)
        if options.json
        else examine(options.directory, _announce, _print_finding)
    )
    if options.report is not None:
        from isobit.proof.doctor_report import write_report

        write_report(result, options.directory, options.report)
    if options.json:
        print(json_text(result.as_json(), indent=2))
        return result.exit_code
    print(
        f"\n{result.count('pass')} passed, {result.count('warn')} warnings, {result.count('fail')} "
        "failed"
    )
    for line in result.runs_here:
        print(line)
    if options.report is not None:
        print(f"{options.report} can be attached to an issue; read it first")
    return result.exit_code


def _announce(name: str) -> None:
    """Show the running check on a terminal, until its finding replaces the line."""
    if sys.stdout.isatty():
        print(f"....  {name}", end="\r", flush=True)


def _print_finding(finding: "Finding") -> None:
    from isobit.observe.console import Console

    Console().line(f"{_MARKS[finding.status]}  {finding.name:<26}  {finding.detail}")
    if finding.fix:
        Console().line(f"      fix: {finding.fix}")
