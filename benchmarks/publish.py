"""Publishing new weights in place, and how long a process takes to its first token, on one Hopper
GPU.

    python -m benchmarks.publish [--shape qwen3-8b] [--precision fp8] [--out FILE]

publish    all masters (FP32, on the card) rounded and quantised into the tensors that the engine
           reads, and the bytes counted that change: the median of five, and what copying as many
           bytes would take (masters read, the linears' matrices read and written, the rest written)
startup    a fresh process with random weights made on the card, once with the kernel caches as they
           are and once with warm ones
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

_STARTED_AT = perf_counter()
REPEATS = 5


def measure_publish(shape: str, precision: str, copy_tb_per_s: float) -> dict[str, object]:
    import torch

    from isobit.config.precision import PrecisionConfig
    from isobit.models.policy import random_policy
    from isobit.models.shapes import model_shape

    policy = random_policy(
        model_shape(shape), PrecisionConfig.model_validate(precision), seed=0, device="cuda"
    )
    storage = published_storage(policy)
    policy.publish()
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = perf_counter()
        policy.publish()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    assert published_storage(policy) == storage, "published in place"
    moved = sum(4 * master.numel() for master in policy.parameters()) + sum(storage.values())
    for linear in policy.weights("training").linears.values():
        matrix = linear.matrix
        moved += (matrix if isinstance(matrix, torch.Tensor) else matrix.values).nbytes
    floor = moved / copy_tb_per_s / 1e12
    return {
        "publish_ms": median(seconds) * 1e3,
        "all_ms": [s * 1e3 for s in seconds],
        "moved_gb": moved / 1e9,
        "floor_ms": floor * 1e3,
    }


def published_storage(policy) -> dict[int, int]:  # noqa: ANN001 (isobit is imported late)
    """Address -> bytes of every tensor that either side reads."""
    from benchmarks.common import published_tensors

    sides = (published_tensors(policy.weights(side)) for side in ("rollout", "training"))
    return {one.data_ptr(): one.nbytes for tensors in sides for one in tensors.values()}


def startup(shape: str, precision: str) -> None:
    """In a process of its own: print the seconds from its start to its first token."""
    from benchmarks.rollout_engines import start

    start(precision, shape)
    print(json.dumps({"startup_s": perf_counter() - _STARTED_AT}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--startup", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.startup:
        startup(arguments.shape, arguments.precision)
        return
    command = [sys.executable, "-m", "benchmarks.publish", "--startup"]
    command += ["--shape", arguments.shape, "--precision", arguments.precision]
    times = {}
    for name in ("first", "warm"):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 (this file)
        times[f"{name}_startup_s"] = json.loads(done.stdout.splitlines()[-1])["startup_s"]

    from benchmarks.common import measure_card, write_json
    from benchmarks.rollout_engines import native_versions

    card = measure_card()
    published = measure_publish(arguments.shape, arguments.precision, card["copy_tb_per_s"])
    case = {"shape": arguments.shape, "precision": arguments.precision}
    result = case | {"card": card, "versions": native_versions()} | times | published
    print(json.dumps(result, indent=2))
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
