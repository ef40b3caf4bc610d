"""Errors by site: every gradient counts at one site, INT8's exact backward reads the forward's own
numbers, and the page has the table of the stored result.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.error_by_site import NAME, SITES, by_site, column_sizes, logits_of, measure, table
from experiments.gradients import Size, batch_of
from isobit.config.precision import PrecisionConfig
from isobit.kernels.spec.linear import dequantised
from isobit.kernels.spec.quantise import hadamard
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.precision.quant_tensor import Int8Rows, rotation_size

ROOT = Path(__file__).parents[2]
SIZE = Size(layers=1, sequences=2, length=64)
CONFIG = replace(SIZE.config, tied_embeddings=True)


def test_every_number_stands_at_one_site() -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="int8"), seed=0)
    masters = {name: master.detach() for name, master in policy.masters.items()}
    found = by_site(policy, masters)
    assert tuple(found) == SITES
    assert sum(one.numel() for one in found.values()) == sum(
        map(torch.Tensor.numel, masters.values())
    )
    qkv = masters["layers.0.qkv_proj.weight"]
    assert torch.equal(found["k"].view(-1, qkv.shape[1]), qkv[512:768])
    assert column_sizes(policy)["layers.0.qkv_proj.weight"].shape == (512,)


def test_the_exact_backward_of_int8_multiplies_with_the_numbers_of_the_forward() -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="int8"), seed=0)
    weight = policy.weights("training").linears["layers.0.down_proj"]
    assert isinstance(weight.matrix, Int8Rows)
    n = rotation_size(weight.matrix.values.shape[1])
    rotated = hadamard(dequantised(weight), n) / n
    stored = weight.matrix.values.float() * weight.matrix.scales[:, None]
    torch.testing.assert_close(rotated, stored, rtol=0, atol=1e-6 * float(stored.abs().max()))


@pytest.mark.exhaustive
def test_errors_are_in_the_order_of_the_formats(tmp_path: Path) -> None:
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, tmp_path)
    batch = batch_of(SIZE, 0)
    batch.advantages.copy_(torch.where(torch.arange(len(batch.advantages)) % 3 == 0, 1.0, -1.0))
    rows = measure(tmp_path, [batch], torch.device("cpu"))
    errors = [row["error"] for row in rows]
    bf16, fp8, int8, dgrad, wgrad, both = errors
    assert bf16 == 0 < dgrad < both < int8
    assert int8 < wgrad < 1.1 * int8 and fp8 > dgrad
    assert 0 < rows[0]["logits"] < rows[2]["logits"] == rows[5]["logits"] < rows[1]["logits"]
    assert logits_of(policy, batch).shape == (len(batch.rows), CONFIG.vocab_size)


def test_the_page_has_the_stored_result() -> None:
    stored = ROOT / "benchmarks" / "results" / "real_checkpoint" / f"{NAME}.json"
    lines = table(json.loads(stored.read_text(encoding="utf-8")))
    assert "\n".join(lines) in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
