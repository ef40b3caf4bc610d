"""What a step's digests of its state cost (``isobit.store.state``): published weights,
masters and moments of a model's shape with random weights.

    python -m benchmarks.digests [--shape qwen3-8b] [--moments bf16] [--device cuda]

A step takes them once for ``digests.jsonl``, and once more with ``check.state``.
"""

import argparse
import time
from collections.abc import Callable

import torch

from isobit.config.tables import named_precision
from isobit.models.checksum import checksum_of
from isobit.models.config import model_shape
from isobit.models.policy import random_policy

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--moments", choices=MOMENTS, default="bf16")
    parser.add_argument("--device", default="cuda")
    return parser


def seconds_of(compute: Callable[[], int]) -> float:
    """The least of three; each ends with a number on the host."""
    compute()
    found = list[float]()
    for _ in range(3):
        begun = time.perf_counter()
        compute()
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    arguments = make_parser().parse_args()
    shape = model_shape(arguments.shape)
    policy = random_policy(shape, named_precision("fp8"), 0, arguments.device)
    masters = {name: master.detach() for name, master in policy.masters.items()}
    moments = {
        f"{name}.{kind}": torch.zeros_like(master, dtype=MOMENTS[arguments.moments])
        for name, master in masters.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    total = 0.0
    for name, compute in (
        ("weights", policy.checksum),
        ("masters", lambda: checksum_of(masters)),
        ("moments", lambda: checksum_of(moments)),
    ):
        seconds = seconds_of(compute)
        total += seconds
        print(f"{name:<8} {seconds * 1e3:9.1f} ms")
    print(f"{'all':<8} {total * 1e3:9.1f} ms of {arguments.shape}, {arguments.moments} moments")


if __name__ == "__main__":
    main()
