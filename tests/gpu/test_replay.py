"""On a GPU: checksums are those of the host, and a run that is done again is equal, whose moments
travel to the host between updates, too.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from isobit.models.policy import Policy
from isobit.models.safetensors import Slice, checksum, checksum_of
from tests.gpu.small_runs import write_recipe

REWARD = """
def reward(prompt, completion):
    return sum(token % 3 == 0 for token in completion.token_ids) / max(len(completion.token_ids), 1)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_a_checksum_is_that_of_the_host(dtype: torch.dtype) -> None:
    data = torch.randint(0, 256, (9_000_011 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    there = data.cuda()
    whole = checksum_of({"x": there})
    assert whole == checksum_of({"x": data})
    there.view(torch.uint8)[8_500_000] ^= 1
    assert checksum_of({"x": there}) != whole


def assert_equal_there(rows: dict[str, Slice]) -> None:
    """Of the host and of the GPU; the rows on the GPU are copies that lie in memory as the host's
    do.
    """
    there = {name: replace(one, rows=as_it_lies(one.rows)) for name, one in rows.items()}
    assert checksum(there.items()) == checksum(rows.items())


def as_it_lies(rows: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=rows.dtype).set_(rows.untyped_storage()).cuda()
    return whole.as_strided(rows.shape, rows.stride(), rows.storage_offset())


def test_a_checksum_of_many_tensors_is_that_of_the_host() -> None:
    """Small ones of odd sizes beside one of more chunks than a program takes, all bits set."""
    sizes = [1 + (37 * place) % 9001 for place in range(500)]
    data = {f"t{place}": torch.randint(0, 256, (n,)).byte() for place, n in enumerate(sizes)}
    data["bfloat16"] = torch.randn(1001).bfloat16()
    data["number"] = torch.tensor(1.5, dtype=torch.float64)
    data["transposed"] = torch.randn(300, 5000).t()
    data["columns"] = torch.randn(300, 5000)[:, 3:4000]
    data["long"] = torch.full((40 * (1 << 23) + 12_345,), 255, dtype=torch.uint8)
    assert_equal_there({name: Slice.whole(tensor) for name, tensor in data.items()})


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
def test_bytes_may_lie_anywhere(offset: int) -> None:
    data = torch.randint(0, 256, (20_000_003,), dtype=torch.uint8)
    assert_equal_there({"x": Slice.whole(data[offset:])})
    assert_equal_there({"x": Slice((1 << 30,), 1 << 23, data[offset:])})


@pytest.mark.parametrize("cuts", [(0, 3000), (0, 1, 2047, 2050, 3000), (0, 128, 2944, 3000)])
def test_checksums_of_rows_are_those_of_the_host(cuts: tuple[int, ...]) -> None:
    """Whose first words are multiples of four, and not."""
    for width in (1, 5, 2048):
        tensor = torch.randn(3000, width)
        parts = [Slice((3000, width), a, tensor[a:b]) for a, b in pairwise(cuts)]
        there = [replace(part, rows=part.rows.cuda()) for part in parts]
        for part in parts:
            assert_equal_there({"x": part})
        assert checksum(("x", part) for part in there) == checksum_of({"x": tensor})


def test_a_checksum_waits_for_the_gpu_once() -> None:
    data = {f"t{place}": torch.randn(place, 100, device="cuda") for place in range(1, 200)}
    whole = checksum_of(data)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert checksum_of(data) == whole
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(one.message) for one in said) == 1


def test_published_weights_have_a_checksum(shape: str, make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(shape, "fp8")
    whole = policy.checksum()
    policy.weights("training").plain["norm.weight"].view(torch.uint8)[7] ^= 1
    assert policy.checksum() != whole


@pytest.fixture(params=["fp32", "fp8"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Six steps, and checkpoints after 2, 4 and 6."""
    held_out = {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 8}
    moments = {"moments": request.param, "offload_moments": request.param == "fp32"}
    return write_recipe(
        tmp_path,
        REWARD,
        data={"eval": {"held_out": held_out}},
        training={"steps": 6, **moments},
        evaluation={"every": 3},
        checkpoint={"keep_last": 3},
    )


def isobit(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "isobit.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_done_again_is_equal_and_a_change_is_found(recipe: Path) -> None:
    trained = isobit("train", str(recipe))
    assert trained.returncode == 0, trained.stderr
    assert "in memory are not" not in trained.stdout
    run = recipe.with_name("run")
    for words in ([], ["--step", "5"]):
        made = isobit("replay", str(run), *words)
        assert made.returncode == 0, made.stdout + made.stderr
    path = run / "digests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["moments"] = "0" * 16
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = isobit("replay", str(run), "--step", "5")
    assert made.returncode == 1, made.stdout + made.stderr
    assert "step 5: moments differ in digests.jsonl" in made.stdout
