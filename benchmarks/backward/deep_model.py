"""A deep, narrow model, trained a little on structured text: gradients of random weights say little
about those of a model that has learnt.

The text is a chain in which each token has four successors of unequal likelihood; of every 64
tokens the second half repeats the first, so that there is something to learn beyond pairs of
tokens.
"""

from dataclasses import dataclass

import torch

from isobit.config.tables import PrecisionConfig, TrainingConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.records.batch import PackedBatch
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer

VOCABULARY = 512
HALF = 32
LIKELIHOODS = (0.55, 0.25, 0.15, 0.05)
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model, of a batch, and of the training."""

    layers: int = 24
    sequences: int = 8
    length: int = 1024
    steps: int = 300

    @property
    def config(self) -> ModelConfig:
        """Eight query heads and four KV heads of 64."""
        return ModelConfig(
            "qwen3",
            VOCABULARY,
            512,
            1536,
            self.layers,
            8,
            4,
            64,
            self.length,
            1e-6,
            1e4,
            tied_embeddings=False,
        )


def trained_policy(size: Size, device: str) -> tuple[Policy, list[float]]:
    """An ``fp8`` policy after ``size.steps`` steps of AdamW in its own flow, and the loss of each
    step.
    """
    policy = random_policy(size.config, PrecisionConfig(preset="fp8"), seed=0, device=device)
    config = TrainingConfig(
        learning_rate=LEARNING_RATE,
        warmup_updates=WARM_UP_STEPS,
        schedule="cosine",
        max_skipped_updates=1,
    )
    trainer = Trainer(policy, config, total_updates=size.steps)
    losses = [
        trainer.update([batch_of(size, step)], SupervisedObjective()).metrics["loss"]
        for step in range(size.steps)
    ]
    return policy, losses


def batch_of(size: Size, number: int) -> PackedBatch:
    """Batch ``number`` of the text; every token but the first of a sequence is predicted."""
    (batch,) = pack_pairs(
        [((first,), rest) for first, *rest in text(size, number).tolist()],
        size.sequences * size.length,
    )
    return batch


def text(size: Size, number: int) -> torch.Tensor:
    """int64 [sequences, length]."""
    successors = torch.randint(
        VOCABULARY, (VOCABULARY, len(LIKELIHOODS)), generator=torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(number + 1)
    choices = torch.multinomial(
        torch.tensor(LIKELIHOODS),
        size.sequences * size.length,
        replacement=True,
        generator=generator,
    )
    choices = choices.view(size.sequences, size.length)
    tokens = torch.empty_like(choices)
    tokens[:, 0] = torch.randint(VOCABULARY, (size.sequences,), generator=generator)
    for at in range(1, size.length):
        is_repeat = at // HALF % 2 == 1
        tokens[:, at] = (
            tokens[:, at - HALF] if is_repeat else successors[tokens[:, at - 1], choices[:, at]]
        )
    return tokens
