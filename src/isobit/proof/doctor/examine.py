"""``isobit doctor``: every check in turn, and what this machine will do."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobit.config.precision import PrecisionConfig
from isobit.errors import ConfigError
from isobit.kernels.backend import is_present, support, usable_devices
from isobit.memory.machine import usable_cores
from isobit.proof.doctor.back_ends import back_end_checks
from isobit.proof.doctor.environment import environment_checks, extras
from isobit.proof.doctor.finding import Check, Finding, Status, exact_detail
from isobit.proof.doctor.kernels import gradient_checks, kernel_checks
from isobit.proof.doctor.quantisers import quantiser_checks
from isobit.proof.verify import VerifyOptions, verify

_DEVELOPMENT = "dev"
_SMALL = VerifyOptions(prompts=5, samples=2, max_new_tokens=12)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and what follows from them."""

    findings: tuple[Finding, ...]
    runs_here: tuple[str, ...]
    """What will run where, and what to install for more."""

    @property
    def exit_code(self) -> int:
        """1 if anything failed, else 0."""
        return int(self.count("fail") > 0)

    def count(self, status: Status) -> int:
        """Findings of that status."""
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The findings in order, with their counts."""
        counts = {
            "passed": self.count("pass"),
            "warnings": self.count("warn"),
            "failed": self.count("fail"),
        }
        return {
            **counts,
            "findings": [asdict(finding) for finding in self.findings],
            "runs_here": list(self.runs_here),
        }


def examine(
    directory: Path = Path(),
    on_check: Callable[[str], None] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> Examination:
    """Test this machine; ``directory`` is where files are tried out.

    ``on_check`` is called with the name of each check before it runs, ``on_finding`` with what it
    found.

    Raises ConfigError where ``directory`` is none.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{str(directory)!r} is not a directory; name one that exists, in which runs will be "
            "written"
        )
    findings = []
    for check in _checks(directory.absolute()):
        if on_check is not None:
            on_check(check.name)
        findings.append(check.find())
        if on_finding is not None:
            on_finding(findings[-1])
    return Examination(tuple(findings), tuple(_runs_here(findings)))


def _checks(directory: Path) -> list[Check]:
    threads = sorted({1, max(2, usable_cores())})
    return [
        *environment_checks(directory),
        *quantiser_checks(),
        *kernel_checks(threads),
        *gradient_checks(threads),
        *back_end_checks(),
        Check(
            "starter model, fp8",
            _verify_starter,
            "rollout and training part: `isobit verify starter --bisect` names the first operation",
        ),
    ]


def _verify_starter() -> str:
    return exact_detail(verify(Path("starter"), PrecisionConfig(preset="fp8"), _SMALL))


def _runs_here(findings: list[Finding]) -> Iterator[str]:
    """Where things run, and how to get more."""
    if any(finding.status == "fail" for finding in findings):
        yield "nothing should run here before the failures above are mended"
    else:
        flows = "in fp32, bf16, fp8-rollout, fp8-linear and fp8"
        yield f"rollout, training, evaluation and verify: on the CPU, {flows}"
        for device, problem in usable_devices().items():
            if device != "cpu" and problem is None:
                flows = flows.replace("fp32, ", "")
                yield f"the same on {device}, and there by default, {flows}"
    useless = {support(device).extra for device in usable_devices() if not is_present(device)}
    for extra, lacking in extras().items():
        if extra not in (_DEVELOPMENT, *useless):
            yield f"not installed: {', '.join(lacking)}; pip install 'isobit[{extra}]'"
