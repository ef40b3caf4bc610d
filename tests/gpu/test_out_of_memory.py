"""An update that runs out of the GPU's memory, which is limited for the purpose, ends with the bits
of the budget that it fits with.
"""

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from random import Random

import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import TrainingConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.training.budget import BudgetChange, MicrobatchBudget
from isobit.training.step import train_on_groups
from isobit.training.trainer import Trainer

SHAPE = ModelConfig("qwen3", 1000, 512, 768, 3, 8, 2, 128, 1024, 1e-6, 1e6, tied_embeddings=False)
GRPO = build_algorithm(GrpoConfig())
LARGE, SMALL = 16384, 4096
"""Tokens a micro-batch: all of a step's sequences together, and a quarter of them."""


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def groups_of(trainer: Trainer) -> list[Group]:
    """8 prompts of 4 sequences of 300 to 512 tokens, with the log-probabilities of the trainer,
    each computed alone.
    """
    random = Random(0)

    def group(number: int) -> Group:
        ids = [
            tuple(random.randrange(1000) for _ in range(random.randint(250, 462))) for _ in range(4)
        ]
        prompt = Prompt(f"test/{number}", "", tuple(random.randrange(1000) for _ in range(50)))
        blank = [TokenSequence.of_answer(prompt.token_ids, tokens) for tokens in ids]
        recorded = [
            replace(
                one,
                log_probs=one.spread(
                    trainer.scorer.score(lay_end_to_end([one])).log_probs.tolist()
                ),
            )
            for one in blank
        ]
        completions = [Completion(one, "", "stop") for one in recorded]
        return Group(prompt, 0, completions, [0.0, 1.0, 1.0, 0.0])

    return [group(number) for number in range(8)]


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_a_step_without_memory_is_that_of_a_smaller_budget(preset: Preset) -> None:
    """In a process of its own: a step would fit into what torch keeps of other tests' memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(steps_with_less_and_less_memory, preset).result()


def steps_with_less_and_less_memory(preset: Preset) -> None:
    def step(
        tokens: int, changes: Sequence[BudgetChange] = ()
    ) -> tuple[dict[str, torch.Tensor], MicrobatchBudget, int]:
        """One step of two updates -> the masters on the host, the budget, and the most bytes that
        torch had from the GPU.
        """
        free()
        trainer = Trainer(
            random_policy(SHAPE, precision, 0, "cuda"),
            TrainingConfig(tokens_per_microbatch=tokens, epochs=2, learning_rate=1e-3),
            10,
        )
        for change in changes:
            trainer.budget.set(change.update, change.new)
        groups = groups_of(trainer)
        free()
        torch.cuda.reset_peak_memory_stats()
        metrics = train_on_groups(trainer, groups, GRPO, trainer.policy.flow.exact)
        assert metrics.comparison.tokens_differing == 0 < metrics.comparison.tokens_compared
        masters = {name: master.detach().cpu() for name, master in trainer.policy.masters.items()}
        return masters, trainer.budget, torch.cuda.max_memory_reserved()

    precision = PrecisionConfig(preset=preset)
    step(LARGE)  # compiles, and fills what is cached for the process
    large, _, most = step(LARGE)
    small, _, least = step(SMALL)
    assert most - least > 100 << 20, "the limit below must stand between the two"
    assert any(not torch.equal(large[name], small[name]) for name in small), (
        "the cut must decide some bit"
    )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((least + (most - least) / 4) / total)
    limited, budget, _ = step(LARGE)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert budget.changes and budget.changes[0].update == 0
    # The second update has moments, too.
    reached = [(change.update, change.new) for change in budget.changes]
    print(
        f"{preset}: {most >> 20} MiB with {LARGE} tokens a micro-batch, {least >> 20} with "
        f"{SMALL}; limited, it came to {reached}"
    )
    expected, _, _ = step(LARGE, budget.changes)
    assert all(torch.equal(limited[name], expected[name]) for name in expected)
