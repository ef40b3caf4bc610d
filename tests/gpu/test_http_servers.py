"""A run that samples with two ``isobit serve`` on the card of its trainer (docs/engines.md).

    pytest tests/gpu/test_http_servers.py -s        # perhaps 90 s with compiled kernels

``ISOBIT_SMOLLM2`` names a folder of ``tools/smollm2.sh`` to do it with in place of a small random
model, whose samples hardly end before their last token either.
"""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.models import weight_deltas
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from tests.gpu.conftest import QWEN3
from tests.rollout.server_runs import check_a_killed_server, run_maker, two_servers
from tests.serve.servers import KEY
from tests.tiny import json_lines

FIGURES = ("time/update_s", "time/rollout_s", "time/training_s", "tokens_per_s/rollout")


@pytest.mark.usefixtures("large")
def test_a_run_by_servers_leaves_the_bytes_of_a_native_one_though_one_is_killed(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="pip install 'isobit[serve]'")
    monkeypatch.setenv("SERVER_KEY", KEY)
    folder = Path(os.environ.get("ISOBIT_SMOLLM2", tmp_path / "model"))
    if not folder.exists():
        policy = random_policy(QWEN3, PrecisionConfig(preset="fp32"), 0)
        save_policy(policy, folder, tokenizer_from=starter_folder())
    make = run_maker(make_config, tmp_path)

    def make_run(*words: object) -> RunConfig:
        return make(
            *words,
            model=str(folder),
            device="cuda",
            precision={"preset": "fp8"},
            rollout={"max_new_tokens": 128, "kv_memory_gib": 2.0},
            training={
                "steps": 3,
                "prompts_per_step": 16,
                "samples_per_prompt": 8,
                "learning_rate": 1e-5,
            },
            checkpoint={"every": 3, "keep_last": 1},
        )

    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    sizes = ("--device", "cuda", "--precision", "fp8", "--rollout.kv_memory_gib", "2")
    begun = perf_counter()
    with ExitStack() as stack:
        servers = two_servers(stack, folder, places, *sizes, spawn=True)
        print(json.dumps({"servers_started_s": perf_counter() - begun}))
        check_a_killed_server(make_run, servers, tmp_path, spawn=True)
    for name in ("native", "servers", "killed"):
        for line in json_lines(tmp_path / name / "metrics.jsonl"):
            if "time/rollout_s" in line:
                found = {one: line[one] for one in FIGURES if one in line}
                print(json.dumps({"run": name, "step": line["step"], **found}))
    print(json.dumps({"seconds": perf_counter() - begun}))


def test_an_update_is_found_on_the_device_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads, in chunks of which the last is short."""
    monkeypatch.setattr(weight_deltas, "CHUNK", 1 << 10)
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(300, 129, generator=generator)
    after = before + 1e-3 * torch.randn(before.shape, generator=generator)
    held, _ = weight_deltas.rounded(before, torch.bfloat16)
    expected, change = weight_deltas.rounded(after, torch.bfloat16, held)
    made, found = weight_deltas.rounded(after.to("cuda"), torch.bfloat16, held)
    assert not made.is_cuda and torch.equal(made, expected)
    assert found.keys() == change.keys() == {"counts", "places", "values"}
    assert all(torch.equal(found[name], change[name]) for name in change)
