"""For test_exactness.py: how many log-probabilities of paged decoding and of packed training
differ; as a program, because the instruction set is chosen at the first use of torch, one JSON line
for each number of threads.
"""

import json
from collections.abc import Sequence

import torch

# isort: off
import isobit  # noqa: F401 (sets how OpenMP spins, before torch is imported)

# isort: on
from isobit.config.precision import PrecisionConfig
from isobit.kernels.operands import PagedBatch
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.paged_attention import PagedAttention, SpecKvCache
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy

CONFIG = ModelConfig("qwen2", 128, 256, 1152, 2, 4, 2, 64, 256, 1e-6, 1e4, True)
LENGTHS = (1, 18, 67, 130)
LEFT = 16
"""Tokens behind the first chunk of a sequence of more than a page: they reach into its last one."""


def make_policy(preset: str) -> Policy:
    """Random weights with outlier channels in the activations and a large bias on K."""
    policy = random_policy(CONFIG, PrecisionConfig.model_validate(preset), seed=0)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith("proj.weight"):
                master.mul_(4)
            if name.endswith("norm.weight"):
                master[::37] = 30.0
            if name.endswith("qkv_proj.bias"):
                master[256:384] = torch.linspace(-40, 40, 128)
    policy.publish()
    return policy


def packed(policy: Policy, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in lengths])
    weights = policy.weights("training")
    attend = PackedAttention(policy.flow.training, lengths, positions)
    hidden = policy.decoder.hidden_states(weights, ids, attend)
    head = policy.decoder.lm_head
    return head.token_log_probs(weights, hidden, ids, torch.ones(ids.numel()))[0]


def paged(policy: Policy, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """One token a step for every sequence that is not finished; those of more than a page start
    with a chunk that leaves ``LEFT`` tokens.
    """
    pages = -(-max(lengths) // 64)
    table = torch.arange(len(lengths) * pages).flip(0).view(len(lengths), pages)
    carries = 0 if policy.config.delta is None else 2 * len(lengths)
    cache = SpecKvCache(policy.config, policy.flow, table.numel(), carries)
    held = [-1] * len(lengths)  # of each sequence the carry that it reads, one of its two
    starts = torch.tensor([0, *lengths]).cumsum(0)
    done = [0] * len(lengths)
    log_probs = torch.empty(ids.numel())
    while members := [s for s, n in enumerate(lengths) if done[s] < n]:
        counts = [lengths[s] - LEFT if done[s] == 0 and lengths[s] > 64 else 1 for s in members]
        sequence = torch.tensor(members).repeat_interleave(torch.tensor(counts))
        positions = torch.cat(
            [torch.arange(done[s], done[s] + c) for s, c in zip(members, counts, strict=True)]
        )
        slots = table[sequence, positions // 64] * 64 + positions % 64
        reads = [held[s] for s in members]
        for s, c in zip(members, counts, strict=True):
            if held[s] < 0 or (done[s] - 1) // 64 != (done[s] + c - 1) // 64:
                held[s] = 2 * s + (held[s] == 2 * s)
            done[s] += c
        carried = torch.tensor([reads, [held[s] for s in members]]) if carries else None
        ends = tuple(done[s] for s in members)
        batch = PagedBatch(tuple(counts), ends, table[members], slots, carried)
        rows = starts[sequence] + positions
        weights = policy.weights("rollout")
        attend = PagedAttention(cache, batch, positions)
        hidden = policy.decoder.hidden_states(weights, ids[rows], attend)
        log_probs[rows] = policy.decoder.lm_head.token_log_probs(
            weights, hidden, ids[rows], torch.ones(rows.numel())
        )[0]
    return log_probs


@torch.no_grad()
def compared(threads: int, presets: Sequence[str]) -> tuple[dict[str, int], str]:
    """How many differ in each preset, and with which instructions."""
    torch.set_num_threads(threads)
    ids = torch.randint(0, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    differing = {}
    for preset in presets:
        policy = make_policy(preset)
        training = packed(policy, ids, LENGTHS)
        differing[preset] = int((paged(policy, ids, LENGTHS) != training).sum())
        last = packed(policy, ids[-LENGTHS[-1] :], LENGTHS[-1:])
        differing[f"{preset}, alone"] = int((last != training[-LENGTHS[-1] :]).sum())
    return differing, torch.backends.cpu.get_cpu_capability()


def main(counts: Sequence[int], presets: Sequence[str]) -> int:
    """The program."""
    for count in counts:
        print(json.dumps(compared(count, presets)))
    return 0
