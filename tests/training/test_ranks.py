"""Updates by several processes have the bits of one: masters, moments, published weights, figures;
whatever the format of the moments, the flow and the number of micro-batches.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.algorithms.objective import LossOutputs, Shares
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import PrecisionConfig
from isobit.config.training import TrainingConfig
from isobit.memory.retry import within_memory
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.decoder import Layer
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy, random_policy
from isobit.parallel.gradient_sum import Slots
from isobit.parallel.world import ALONE, World
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.training.advantage_estimator import score_sequences
from isobit.training.rounds import Rounds
from isobit.training.trainer import Trainer
from tests.models.policies import delta_nets
from tests.training.conftest import INT8_BEFORE
from tests.worlds import in_world

SHAPE: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_positions": 512,
    "rms_epsilon": 1e-6,
    "rope_theta": 10000.0,
}
MODELS = {
    "tied": ModelConfig(family="qwen3", tied_embeddings=True, **SHAPE),
    "untied with biases": ModelConfig(family="qwen2", tied_embeddings=False, **SHAPE),
    "mixture": ModelConfig(
        family="qwen3_moe", tied_embeddings=True, experts=Experts(4, 2, 128, True), **SHAPE
    ),
    "sinks and biases": ModelConfig(
        family="gpt_oss", tied_embeddings=False, experts=Experts(4, 2, 64, True), **SHAPE
    ),
    "hybrid": ModelConfig(
        family="qwen3_5_text", tied_embeddings=True, **SHAPE, **delta_nets("qwen3_5_text", 2)
    ),
    "adapters": ModelConfig(
        family="qwen2", tied_embeddings=False, lora=Lora(48, 96.0, LORA_TARGETS), **SHAPE
    ),
}
CASES = [
    {"model": "tied", "preset": "fp8", "moments": "fp32"},
    {"model": "tied", "preset": "fp8", "moments": "fp8"},
    {"model": "untied with biases", "preset": "bf16", "moments": "bf16"},
    {"model": "untied with biases", "preset": "fp8-rollout", "moments": "fp8"},
    {"model": "mixture", "preset": "fp8", "moments": "bf16"},
    {"model": "untied with biases", "preset": "int8", "moments": "fp8"},
    {"model": "mixture", "preset": "int8", "moments": "fp32"},
    {"model": "adapters", "preset": "fp8", "moments": "fp8"},
    {"model": "adapters", "preset": "int8", "moments": "fp32"},
    {"model": "mixture", "preset": "fp8", "moments": "fp32", "samples": 3},
    {"model": "untied with biases", "preset": "int8", "moments": "bf16", "samples": 5},
    {"model": "tied", "preset": INT8_BEFORE, "moments": "fp8"},
    {"model": "mixture", "preset": INT8_BEFORE, "moments": "fp32"},
    {"model": "sinks and biases", "preset": "fp8", "moments": "fp8"},
    {"model": "sinks and biases", "preset": "int8", "moments": "bf16", "samples": 3},
    {"model": "hybrid", "preset": "bf16", "moments": "fp8"},
    {"model": "hybrid", "preset": "int8", "moments": "fp32"},
]
STEPS = 3


def sequences(count: int, seed: int, samples: int = 1) -> list[TokenSequence]:
    """Random prompts, of which each has so many answers."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(300, (count,), generator=generator).tolist()

    found, prompt = [], list[int]()
    for number in range(count):
        prompt = ids(4 + number % 3) if number % samples == 0 else prompt
        answer = ids(5 + 7 * number % 31)
        log_probs = torch.rand(len(answer), generator=generator).neg().sub(5).tolist()
        sequence = TokenSequence.of_answer(prompt, answer, log_probs, [1] * len(answer))
        found.append(sequence.with_columns(advantages=[1.0, -1.0, 0.25][number % 3]))
    return found


def make_trainer(case: dict[str, Any], world: World) -> Trainer:
    policy = random_policy(
        MODELS[case["model"]],
        PrecisionConfig.model_validate(case["preset"]),
        7,
        world.own_device(torch.device(case.get("device", "cpu"))),
        world=world,
        slots=Slots(case.get("slots", 1), case.get("hosts", 1)),
    )
    settings: dict[str, Any] = {
        "tokens_per_microbatch": 64,
        "slots": policy.slots.count,
        "learning_rate": 1e-3,
        "moments": case["moments"],
        "max_grad_norm": 0.5,
        **case.get("training", {}),
    }
    config = TrainingConfig.model_validate(settings)
    return Trainer(policy, config, total_updates=STEPS, seed=3)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def whole(trainer: Trainer, name: str, kind: str) -> torch.Tensor:
    """A moment of a master, of all ranks."""
    world = trainer.policy.world
    own = trainer.moments()[f"{name}.{kind}"].cpu()
    if own.dim() == 0:
        return own
    places, found = trainer.policy.ownership.places, world.all_gather(own)
    return torch.cat([found[places.index(place)] for place in range(world.size)])


def state(trainer: Trainer) -> dict[str, str]:
    policy = trainer.policy
    masters = {name: digest([policy.whole_master(name)]) for name in policy.masters}
    moments = {
        key: digest([whole(trainer, *key.rsplit(".", 1))]) for key in sorted(trainer.moments())
    }
    published = {
        f"{side} {name}": digest([linear.matrix.values, linear.matrix.scales])
        if not isinstance(linear.matrix, torch.Tensor)
        else digest([linear.matrix])
        for side in ("rollout", "training")
        for name, linear in policy.weights(side).linears.items()
    }
    weights = policy.weights("training")
    plain = {name: digest([held]) for name, held in weights.plain.items()}
    plain["lm_head"] = digest(weights.lm_head.tensors)
    return masters | moments | published | plain


def train(world: World, cases: Sequence[dict[str, Any]]) -> list[Any]:
    """Each case: what it left, and the figures of its updates."""
    torch.set_num_threads(1)
    algorithm, found = build_algorithm(GrpoConfig()), []
    for case in cases:
        trainer, samples = make_trainer(case, world), case.get("samples", 1)
        batches = [
            pack(sequences(7 + step, step, samples), 64, shared_prefix=samples > 1)
            for step in range(STEPS)
        ]
        figures = [trainer.update(one, algorithm, compare=True).metrics for one in batches]
        found.append([state(trainer), figures])
    return found


@pytest.fixture(scope="module")
def one_process() -> list[Any]:
    return train(ALONE, CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits_do_not_depend_on_the_number_of_processes(size: int, one_process: list[Any]):
    for rank, found in enumerate(in_world(size, "tests.training.test_ranks:train", CASES)):
        for case, (ours, figures), (expected, expected_figures) in zip(
            CASES, found, one_process, strict=True
        ):
            differing = [name for name in expected if ours[name] != expected[name]]
            assert not differing, (case, rank, differing)
            assert figures == expected_figures, (case, rank)


class LocalSum:
    """The mutant: each rank adds up its own micro-batches, and the sums of all ranks are added at
    the end, as an all-reduce would.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sums, self._microbatch = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def __call__(self, name: str) -> torch.Tensor:
        return self._microbatch.setdefault(name, torch.zeros(self._policy.shapes[name]))

    def begin_round(self, active: int) -> None:
        self._microbatch.clear()

    def done(self, group: int) -> None:
        pass

    def end_round(self) -> None:
        for name, made in self._microbatch.items():
            self._sums.setdefault(name, torch.zeros_like(made)).add_(made)

    def finish(self) -> None:
        pass

    def release(self) -> None:
        self._sums.clear()

    def reduce(self) -> None:
        for name, master in self._policy.masters.items():
            sums = self._policy.world.all_gather(self._sums[name])
            master.grad = torch.stack(sums).sum(0)[self._policy.rows(name)].contiguous()


def _local_sum(policy: Policy) -> LocalSum:
    return LocalSum(policy)


def train_with_all_reduce(world: World, case: dict[str, Any]) -> Any:
    squares = Rounds.squares

    def reduced(self: Rounds) -> list[float]:
        gradient: Any = self._policy.gradient
        gradient.reduce()
        return squares(self)

    make, Rounds.squares = Policy._gradient_sum, reduced
    Policy._gradient_sum = _local_sum  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return train(world, [case])[0]
    finally:
        Policy._gradient_sum, Rounds.squares = make, squares


@pytest.mark.exhaustive
def test_an_all_reduce_is_caught(one_process: list[Any]):
    """It gives one process's bits in one process, and others in two."""
    expected = one_process[0]
    assert train_with_all_reduce(ALONE, CASES[0]) == expected
    found = in_world(2, "tests.training.test_ranks:train_with_all_reduce", CASES[0])
    differing = [name for name, value in found[0][0].items() if value != expected[0][name]]
    assert any(name.endswith(".weight") for name in differing)


class Spoilt:
    """The algorithm's loss, but for one micro-batch, where it is no number."""

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        return build_algorithm(GrpoConfig()).shares(batches)

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        made = build_algorithm(GrpoConfig()).loss(scores, batch, shares)
        is_spoilt = batch.token_ids[0] == sequences(9, 1)[4].token_ids[0]
        return replace(made, loss=made.loss * float("nan")) if is_spoilt else made


def starved_update(trainer: Trainer, world: World, at_call: int) -> list[Any]:
    """An update in which the last rank runs out of memory in one of its layers' backwards, and can
    make no gradient until the attempt is over: its figures, and the budgets that it led to.
    """
    original, zeros_like, calls = PackedPass._layer_backward, torch.zeros_like, [0]
    is_full = [False]

    def check() -> None:
        if is_full[0]:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has ..")

    def once(self: PackedPass, layer: Layer, d: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        is_full[0] |= calls[0] == at_call and world.rank == world.size - 1
        check()
        return original(self, layer, d)

    def zeros(x: torch.Tensor, **options: Any) -> torch.Tensor:
        check()
        return zeros_like(x, **options)

    def attempt(tokens: int) -> Any:
        algorithm, is_full[0] = build_algorithm(GrpoConfig()), False
        return trainer.update(pack(sequences(9, 0), tokens), algorithm).metrics

    PackedPass._layer_backward, torch.zeros_like = once, zeros
    try:
        figures = within_memory(trainer, [one.length for one in sequences(9, 0)], attempt)
    finally:
        PackedPass._layer_backward, torch.zeros_like = original, zeros_like
    return [figures, [change.new for change in trainer.budget.changes]]


def fail(world: World, _: Any) -> list[Any]:
    """Rank 1 runs out of memory in its second backward, then in a forward; and a loss that is not
    finite there.
    """
    torch.set_num_threads(1)
    trainer = make_trainer(CASES[0], world)
    log = starved_update(trainer, world, at_call=4)
    log.append(trainer.update(pack(sequences(9, 1), 32), Spoilt()).skipped)
    log.append(state(trainer))
    return log


def test_what_one_rank_cannot_do_none_does():
    expected = fail(ALONE, None)
    assert expected[1], "the budget was lowered"
    assert expected[2] == "the loss is nan"
    for found in in_world(2, "tests.training.test_ranks:fail"):
        assert found == expected


def starve_at_once(world: World, at_call: int) -> list[Any]:
    torch.set_num_threads(1)
    return starved_update(make_trainer(CASES[0], world), world, at_call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at_call", [1, 2])
def test_no_rank_waits_for_one_without_memory_for_its_first_gradients(at_call: int):
    expected = starve_at_once(ALONE, at_call)
    assert expected[1], "the budget was lowered"
    target = "tests.training.test_ranks:starve_at_once"
    assert in_world(2, target, at_call, timeout=60) == [expected] * 2


def starve_alone(world: World, _: Any) -> list[Any]:
    trainer, calls = make_trainer(CASES[0], world), list[int]()

    def attempt(tokens: int) -> None:
        calls.append(tokens)
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has ..")

    if world.rank == 1:
        with pytest.raises(torch.OutOfMemoryError):
            within_memory(trainer, [9, 9], attempt)
    return calls


def test_a_rank_does_not_try_again_alone():
    """Others know nothing of it: a smaller attempt would wait for them, and they for the first."""
    assert in_world(2, "tests.training.test_ranks:starve_alone") == [[], [64]]


def score(world: World, _: Any) -> list[Any]:
    torch.set_num_threads(1)
    trainer = make_trainer(CASES[4], world)
    made = score_sequences(trainer.scorer, sequences(5, 1), 40, world)
    return [
        [column.tolist() for column in (one.log_probs, one.routings) if column is not None]
        for one in made
    ]


def test_scores_are_shared_out():
    expected = score(ALONE, None)
    assert all(found == expected for found in in_world(3, "tests.training.test_ranks:score"))
