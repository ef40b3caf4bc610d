"""An update that runs out of memory is the update that a smaller budget would have made, and leaves
nothing behind.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import micro_batches
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.training.budget import BudgetChange, MicrobatchBudget, halved
from isobit.training.optimiser import AdamW
from isobit.training.step import train_on_groups
from isobit.training.trainer import Trainer
from isobit.util.errors import OutOfMemoryError
from tests.training.conftest import INT8_BEFORE, record

GRPO = build_algorithm(GrpoConfig())
MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"


class Memory:
    """Room for micro-batches of so many tokens: a larger one fails in the forward, or in the
    backward once all layers have run.
    """

    def __init__(self, tokens: int, fails_in: str = "forward") -> None:
        self.tokens, self.fails_in = tokens, fails_in
        self.failures = 0
        self.held: weakref.ref[torch.Tensor] | None = None

    @contextmanager
    def of(self, trainer: Trainer) -> Iterator[None]:
        score, forward, backward = Scorer.score, ScoredPass.forward, ScoredPass.backward

        def limited(
            self_: Any, run: Callable[[], TokenScores], batch: PackedBatch, fails: bool
        ) -> Any:
            assert self.held is None or self.held() is None, (
                "the failed attempt's tensors are still alive"
            )
            scores = run()
            if batch.token_ids.numel() > self.tokens:
                self.failures += 1
                self.held = weakref.ref(scores.log_probs)
                if fails:
                    raise torch.OutOfMemoryError(MESSAGE)
            return scores

        def limited_score(self_: Scorer, batch: PackedBatch) -> Any:
            return limited(self_, lambda: score(self_, batch), batch, True)

        def limited_forward(self_: ScoredPass) -> Any:
            fails = self.fails_in == "forward"
            return limited(self_, lambda: forward(self_), self_.batch, fails)

        def limited_backward(self_: ScoredPass, *gradients: torch.Tensor | None) -> None:
            if self_.batch.token_ids.numel() > self.tokens:
                raise torch.OutOfMemoryError(MESSAGE)
            backward(self_, *gradients)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scorer, "score", limited_score)
            patch.setattr(ScoredPass, "forward", limited_forward)
            patch.setattr(ScoredPass, "backward", limited_backward)
            yield


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    masters = {name: master.detach() for name, master in trainer.policy.masters.items()}
    return {name: tensor.clone() for name, tensor in (masters | trainer.moments()).items()}


def equal(first: Trainer, second: Trainer) -> bool:
    one, two = state_of(first), state_of(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("preset", ["fp8", "fp8-rollout", "int8", INT8_BEFORE])
def test_the_result_is_that_of_the_smaller_budget(
    preset: Any, fails_in: str, make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    """Two steps of two updates with warm-up, so that an update counted twice would have another
    learning rate.
    """
    small, large, limited = (
        make_trainer(preset, tokens_per_microbatch=n, updates_per_batch=2, warmup_updates=9)
        for n in (64, 128, 128)
    )
    memory = Memory(64, fails_in)
    for seed in range(2):
        groups = make_groups(small, seed=seed)
        expected = train_on_groups(small, groups, GRPO, small.policy.flow.exact)
        train_on_groups(large, groups, GRPO, large.policy.flow.exact)
        with memory.of(limited):
            metrics = train_on_groups(limited, groups, GRPO, limited.policy.flow.exact)
        assert metrics == expected
    assert memory.failures == 1
    assert limited.budget.changes == [BudgetChange(0, 128, 64)]
    assert equal(limited, small)
    assert not equal(large, small), "the cut must decide some bit, or this shows nothing"
    assert limited.updates == 4
    assert all(master.grad is None for master in limited.policy.masters.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["fp8", "fp8-rollout", "int8", INT8_BEFORE])
def test_updates_before_it_keep_their_cut_and_a_recorded_change_is_made_again(
    preset: Any, make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    """Out of memory in the third update of four: a trainer that is told so, and never runs out of
    memory, ends with the same bits.
    """
    settings = {"tokens_per_microbatch": 128, "updates_per_batch": 2, "epochs": 2}
    limited, told, plain, small = (
        make_trainer(preset, **(settings | more))
        for more in ({}, {}, {}, {"tokens_per_microbatch": 64})
    )
    groups = make_groups(limited)
    update = Trainer.update

    def third_fails_once(self: Trainer, batches: list[PackedBatch], *more: Any) -> Any:
        if self.updates == 2 and max(batch.token_ids.numel() for batch in batches) > 64:
            raise torch.OutOfMemoryError(MESSAGE)
        return update(self, batches, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", third_fails_once)
        metrics = train_on_groups(limited, groups, GRPO, limited.policy.flow.exact)
    assert limited.budget.changes == [BudgetChange(2, 128, 64)]
    told.budget.changes = list(limited.budget.changes)
    assert train_on_groups(told, groups, GRPO, told.policy.flow.exact) == metrics
    for other in (plain, small):
        train_on_groups(other, groups, GRPO, other.policy.flow.exact)
    assert equal(told, limited)
    assert not equal(limited, plain) and not equal(limited, small)


def test_a_change_is_announced_before_anything_is_learnt_with_it(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer()
    seen: list[tuple[BudgetChange, int]] = []
    trainer.budget.on_change = lambda change: seen.append((change, trainer.policy.version))
    with Memory(40).of(trainer):
        train_on_groups(trainer, make_groups(trainer), GRPO, trainer.policy.flow.exact)
    assert seen == [
        (BudgetChange(0, 128, 64), 1),
        (BudgetChange(0, 64, 34), 1),
    ]  # 34 tokens are the longest sequence


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            {},
            "set training.recompute = 'full' (now 'none'; the same bits), or set training.moments "
            "= 'bf16' or 'fp8' (now 'fp32')",
        ),
        ({"recompute": "full", "moments": "bf16"}, "set training.moments = 'fp8' (now 'bf16')"),
        (
            {"recompute": "full", "moments": "fp8"},
            "lower rollout.max_new_tokens or data.max_prompt_tokens",
        ),
    ],
)
def test_one_sequence_that_is_too_long_ends_it_with_the_keys(
    settings: dict[str, str], advice: str, make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(**settings)
    groups = make_groups(trainer)
    before = state_of(trainer)
    with Memory(8).of(trainer), pytest.raises(OutOfMemoryError) as error:
        train_on_groups(trainer, groups, GRPO, trainer.policy.flow.exact)
    said = "training ran out of memory: 2.00 GiB more were needed; each micro-batch is one "
    said += "sequence, of at most 34 tokens, and smaller ones"
    assert str(error.value).startswith(said)
    assert "training.tokens_per_microbatch = 128" in str(error.value)
    assert str(error.value).endswith(advice)
    assert trainer.is_whole and trainer.updates == 0
    assert trainer.budget.at(0) == 128, "with more memory it may begin as it was configured"
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(trainer).items())


def test_sequences_that_share_a_prompt_are_parted_below_the_longest(
    make_trainer: MakeTrainer,
) -> None:
    """Seven sequences of 68 tokens, 116 rows together, beside one of 100: with a budget of 100 five
    of them are still a micro-batch, of 340 tokens.
    """
    few, many = (make_trainer(shared_prefix=True) for _ in range(2))
    answers = {range(1, 61): [range(n, n + 8) for n in range(7)], range(3): [range(97), range(9)]}
    groups = [
        record(
            few,
            Group(
                Prompt("p", "", tuple(prompt)),
                0,
                [
                    Completion(TokenSequence.of_answer(tuple(prompt), tuple(ids)), "", "stop")
                    for ids in each
                ],
                [float(n % 2) for n in range(len(each))],
            ),
        )
        for prompt, each in answers.items()
    ]
    with Memory(100).of(few):
        train_on_groups(few, groups, GRPO, few.policy.flow.exact)
    assert [change.new for change in few.budget.changes] == [100, 50]
    train_on_groups(many, groups, GRPO, many.policy.flow.exact)
    assert many.budget.changes == [] and few.updates == many.updates == 1


@pytest.mark.parametrize("share", [False, True])
def test_a_budget_is_lowered_until_each_sequence_is_alone(share: bool) -> None:
    """Every new budget makes another cut, and nothing is tried twice."""
    random = Random(0)
    for _ in range(200):
        sequences = [
            TokenSequence.of_answer(
                tuple(range(n := random.choice([1, 5, 40]))), (n,) * random.randint(1, 60)
            )
            for _ in range(random.randint(1, 9))
        ]
        lengths = [one.length for one in sequences]
        tokens: int | None = random.randint(1, 300)
        cut, cuts = partial(micro_batches, sequences, shared_prefix=share), []
        while tokens is not None:
            cuts.append(cut(tokens))
            tokens = halved(tokens, lengths, cut)
        assert all(one != other for one, other in pairwise(cuts))
        assert all(len(members) == 1 for members in cuts[-1])


LOWERED, ALLOWED = BudgetChange(5, 64, 32), BudgetChange(4, 64, 128, allowed=True)
HALVED = BudgetChange(7, 128, 64)


@pytest.mark.parametrize(
    ("setting", "was", "recorded", "made"),
    [
        (64, None, [LOWERED], [LOWERED]),
        (128, 64, [LOWERED], [ALLOWED]),
        (128, 64, [ALLOWED, HALVED], [ALLOWED, HALVED]),
        (256, 64, [ALLOWED, HALVED], [BudgetChange(4, 64, 256, allowed=True)]),
        (64, None, [ALLOWED, HALVED], []),
        (64, None, [LOWERED, ALLOWED, HALVED], [LOWERED]),
        (128, None, [ALLOWED, HALVED], [ALLOWED, HALVED]),
    ],
)
def test_changes_recorded_under_another_setting_are_not_made_again(
    setting: int, was: int | None, recorded: list[BudgetChange], made: list[BudgetChange]
) -> None:
    """A run that goes on after update 4."""
    budget = MicrobatchBudget(setting)
    budget.go_on(4, recorded, was)
    assert budget.changes == made
    assert budget.at(4) == setting


def test_within_an_optimiser_step_it_ends_too(
    make_trainer: MakeTrainer, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    groups = make_groups(trainer)
    monkeypatch.setattr(AdamW, "step", out_of_memory)
    with pytest.raises(
        OutOfMemoryError, match="in the middle of an update, of which nothing is kept"
    ):
        train_on_groups(trainer, groups, GRPO, trainer.policy.flow.exact)
    assert not trainer.is_whole and trainer.budget.changes == []
