"""Isobit's training: forward and backward into FP32 masters, and the whole optimiser step of its
trainer.
"""

import torch

from benchmarks.passes.cases import Case
from benchmarks.passes.phases import Phases, watch
from benchmarks.passes.timing import Pass, Step
from isobit.config.precision import PrecisionConfig
from isobit.config.training import TrainingConfig
from isobit.models import decoder, head
from isobit.models.policy import Policy, random_policy
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer


def make_pass(case: Case, device: str = "cuda") -> Pass:
    """Random weights on the card, and the pass over them."""
    policy = _policy(case, device)
    ids = case.token_ids().to(device)
    positions = torch.arange(case.length, device=device).repeat(case.sequences)
    rows = torch.arange(case.tokens, device=device).view(case.sequences, -1)[:, :-1].reshape(-1)
    targets, weights = ids[:, 1:].reshape(-1), case.weights().to(device).view(-1)
    temperatures = torch.ones_like(weights)
    lengths = (case.length,) * case.sequences

    def one() -> None:
        hidden = decoder.packed_hidden_states(
            policy, ids.view(-1), positions, lengths, case.recompute
        )
        log_probs, _ = head.token_log_probs(
            policy, "training", hidden.index_select(0, rows), targets, temperatures
        )
        (log_probs * weights).sum().backward()

    return one


def make_step(case: Case, microbatches: int, device: str = "cuda") -> Step:
    """A trainer over random weights, with BF16 moments, and its step over so many micro-batches:
    the mean of -log p of all tokens.
    """
    config = TrainingConfig(moments="bf16", recompute=case.recompute)
    trainer = Trainer(_policy(case, device), config, total_updates=1000)
    batches = pack_pairs(
        [((first,), rest) for first, *rest in case.token_ids().tolist() * microbatches], case.tokens
    )
    assert len(batches) == microbatches
    phases = Phases(on_gpu=device != "cpu")
    watch(trainer, phases)

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
