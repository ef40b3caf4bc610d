"""Isobit's training: forward and backward into FP32 masters, and the whole update of its
trainer.
"""

import torch

from benchmarks.passes.cases import Case
from benchmarks.passes.phases import Phases
from benchmarks.passes.timing import Pass, Step
from isobit.config.tables import PrecisionConfig, Recompute, TrainingConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import PackedPass
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer


def make_pass(case: Case, device: str = "cuda") -> Pass:
    """Random weights on the card, and the pass over them."""
    policy = _policy(case, device)
    ids, d_log_probs = case.token_ids().to(device), case.weights().to(device).view(-1)
    return lambda: add_gradients(policy, ids, d_log_probs, case.recompute)


@torch.no_grad()
def add_gradients(
    policy: Policy, ids: torch.Tensor, d_log_probs: torch.Tensor, recompute: Recompute
) -> None:
    """Forward and backward over sequences of one length, int64 [S, L] on the policy's device, whose
    loss has the gradient ``d_log_probs`` FP32 [S (L - 1)] by the log-probabilities of all tokens
    but the first of each.
    """
    sequences, length = ids.shape
    at, weights = torch.arange(ids.numel(), device=ids.device), policy.weights("training")
    whole = PackedPass(policy, ids.view(-1), at % length, (length,) * sequences, recompute)
    rows = at.view(sequences, -1)[:, :-1].reshape(-1)
    hidden = whole.forward()
    given = hidden.index_select(0, rows), ids[:, 1:].reshape(-1), torch.ones_like(d_log_probs)
    head = policy.decoder.lm_head
    head.token_log_probs(weights, *given)
    d_rows = head.backward(weights, policy.gradient, *given, d_log_probs)
    whole.backward(torch.zeros_like(hidden).index_copy_(0, rows, d_rows))


def make_step(case: Case, microbatches: int, device: str = "cuda") -> Step:
    """A trainer over random weights, with BF16 moments, and its step over so many micro-batches:
    the mean of -log p of all tokens.
    """
    config = TrainingConfig(moments="bf16", recompute=case.recompute)
    phases = Phases(on_gpu=device != "cpu")
    trainer = Trainer(_policy(case, device), config, total_updates=1000, timing=phases)
    batches = pack_pairs(
        [((first,), rest) for first, *rest in case.token_ids().tolist() * microbatches], case.tokens
    )
    assert len(batches) == microbatches

    def one(count: int) -> dict[str, float]:
        phases.start()
        metrics = trainer.update(batches[:count], SupervisedObjective())
        seconds = phases.stop()
        assert metrics.skipped is None, metrics.skipped
        return seconds

    return one


def _policy(case: Case, device: str) -> Policy:
    return random_policy(
        case.config, PrecisionConfig.model_validate(case.mode), seed=0, device=device
    )
