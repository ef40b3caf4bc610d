"""Value and score heads on a GPU, through the whole pass: the bits of the pass without gradients,
free of the batch, and gradients, those of entropies too, near the CPU's.
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import Recompute
from isobit.models.policy import Policy, random_masters
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch
from tests.gpu.conftest import QWEN3
from tests.gpu.test_training import LENGTHS, batch, on_cpu

HEADS = ["value_head", "score_head"]
LAST = torch.tensor(LENGTHS).cumsum(0) - 1


def make(head: str, preset: Preset) -> Policy:
    """With a head that is not zeros."""
    config = replace(QWEN3, **{head: True})
    masters = dict(random_masters(config, 0, "cuda"))
    *_, last = masters
    masters[last] = 0.02 * torch.randn_like(masters[last])
    return Policy(config, PrecisionConfig(preset=preset), masters, "cuda")


def batch_of(policy: Policy) -> PackedBatch:
    """Every row, or a reward model's last of each sequence."""
    packed, _ = batch(policy.config.vocab_size)
    if policy.decoder.head is not None:
        return packed
    ones = torch.ones(len(LAST))
    return replace(
        packed,
        rows=LAST,
        targets=packed.targets[LAST],
        sequence=torch.arange(len(LAST)),
        temperatures=ones,
        recorded_log_probs=ones,
        old_log_probs=ones,
        advantages=ones,
    )


def values_of(policy: Policy, packed: PackedBatch) -> torch.Tensor:
    values = Scorer(policy).score(packed).values
    assert values is not None
    return values


def gradients(policy: Policy, recompute: Recompute) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The values, and the gradients of a weighted sum of all scores by master."""
    packed, generator = batch_of(policy), torch.Generator().manual_seed(3)
    scored = ScoredPass(policy, packed, recompute)
    scores = scored.forward()
    assert scores.values is not None
    d = torch.randn(3, len(scores.values), generator=generator) / 100
    if policy.decoder.head is None:
        scored.backward(None, d_values=d[2])
    else:
        scored.backward(d[0], d[1], d[2])
    found = {
        n: master.grad.cpu() for n, master in policy.masters.items() if master.grad is not None
    }
    for master in policy.parameters():
        master.grad = None
    return scores.values, found


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_against_the_cpus(head: str, preset: Preset) -> None:
    """Against FP32 they are not much worse than the CPU's in the same flow; a reward model learns
    from five rows here.
    """
    policy = make(head, preset)
    values, ours = gradients(policy, "none")
    cpu_values, cpu = gradients(on_cpu(policy, PrecisionConfig(preset=preset)), "none")
    exact_values, exact = gradients(on_cpu(policy, PrecisionConfig(preset="fp32")), "none")
    error, cpu_error = ((v - exact_values).norm() for v in (values, cpu_values))
    assert error < 1.5 * cpu_error + 1e-3 * exact_values.norm()
    assert ours.keys() == exact.keys() == policy.masters.keys()
    worst = max((float((ours[n] - g).norm() / (cpu[n] - g).norm()), n) for n, g in exact.items())
    print(f"{head} {preset}: largest error {worst[0]:.3f} times the CPU's ({worst[1]})")
    assert worst[0] < 2


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_bits_repeat_also_when_layers_are_computed_again(head: str, preset: Preset) -> None:
    policy = make(head, preset)
    plain = values_of(policy, batch_of(policy))
    values, first = gradients(policy, "none")
    assert torch.equal(values, plain)
    for recompute in get_args(Recompute):
        values, found = gradients(policy, recompute)
        assert torch.equal(values, plain)
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_a_sequence_has_no_say_in_the_values_of_another(head: str, preset: Preset) -> None:
    policy = make(head, preset)
    packed = batch_of(policy)
    whole = values_of(policy, packed).split(packed.sequence.bincount().tolist())
    for index, (ids, values) in enumerate(zip(packed.token_ids.split(LENGTHS), whole, strict=True)):
        own = packed.sequence == index
        ones = torch.ones(int(own.sum()))
        alone = PackedBatch(
            token_ids=ids,
            positions=torch.arange(len(ids)),
            lengths=(len(ids),),
            rows=packed.rows[own] - sum(LENGTHS[:index]),
            targets=packed.targets[own],
            sequence=torch.zeros(len(ones), dtype=torch.int64),
            temperatures=ones,
            recorded_log_probs=ones,
            old_log_probs=ones,
            advantages=ones,
        )
        assert torch.equal(values_of(policy, alone), values)
