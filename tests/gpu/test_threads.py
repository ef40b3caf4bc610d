"""Several runs in one process, each in a thread with a stream of its own, make the bits that each
makes alone: while one captures its steps, others launch, allocate, give memory back and wait.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Event

import pytest
import torch

from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.triton.memory import CapturedGraph
from isobit.models.policy import Policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer

MakePolicy = Callable[..., Policy]
Left = tuple[list[list[list[Completion]]], list[torch.Tensor]]
PRESETS = ("fp8", "bf16", "fp8-linear")
STEPS = 4
UPDATES = 30
SIZES = 1, 2, 4, 8, 16
"""Samples of a prompt: a graph each."""
POOL = 32
"""Streams of torch."""
LONG = 500
"""Launches in a step: a millisecond and more in which another thread launches, too."""


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("shape", ["qwen3", "smollm2"])
def test_threads_leave_what_each_run_leaves_alone(shape: str, make_policy: MakePolicy) -> None:
    alone = [run(partial(make_policy, shape, preset), None) for preset in PRESETS]
    together = Barrier(len(PRESETS), timeout=120.0)
    with ThreadPoolExecutor(len(PRESETS)) as pool:
        begun = [
            pool.submit(run, partial(make_policy, shape, preset), together) for preset in PRESETS
        ]
        beside = [one.result() for one in begun]
    for (drawn, masters), (drawn_alone, masters_alone) in zip(beside, alone, strict=True):
        assert drawn == drawn_alone, "tokens and log-probabilities"
        assert all(torch.equal(a, b) for a, b in zip(masters, masters_alone, strict=True))
        assert drawn[0] != drawn[-1], "it has learnt"


@pytest.mark.parametrize("preset", PRESETS)
def test_training_beside_captures_leaves_what_it_leaves_alone(
    preset: Preset, make_policy: MakePolicy
) -> None:
    """A launch that goes into another thread's graph is not computed, and nothing says so: the
    gradient is short of it.
    """
    alone, trained = masters_of(make_policy("smollm2", preset)), Event()

    def capture() -> int:
        with torch.cuda.stream(torch.cuda.Stream()):
            policy = make_policy("smollm2", "fp8", trainable=False)
            engine, turns = NativeEngine(policy, RolloutConfig(kv_pages=200), None, seed=1), 0
            while not trained.is_set() or turns * len(SIZES) < POOL:
                for size in SIZES:
                    generate(engine, requests(size, max_new_tokens=3))
                engine.release()
                turns += 1
            return turns

    with ThreadPoolExecutor(1) as pool:
        turns = pool.submit(capture)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                beside = masters_of(make_policy("smollm2", preset))
        finally:
            trained.set()
        assert turns.result() > 0
    for update, (one, other) in enumerate(zip(alone, beside, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), update


def test_no_thread_captures_what_another_launches() -> None:
    """torch deals 32 streams out again and again."""
    are_captured = Event()

    def launch() -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            counted, turns = torch.zeros((), device="cuda"), 0
            while not are_captured.is_set():
                counted += 1
                turns += 1
                torch.cuda.current_stream().synchronize()
            return counted.item() == turns > 0

    def capture(turn: int) -> torch.Tensor:
        def step() -> tuple[torch.Tensor, ...]:
            number = torch.full((), float(turn), device="cuda")
            for _ in range(LONG):
                number = number + 1
            return (number,)

        return CapturedGraph(step, None).replay()[0].clone()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(launch)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = [capture(turn).item() for turn in range(2 * POOL)]
        finally:
            are_captured.set()
        assert other.result()
    assert found == [turn + LONG for turn in range(2 * POOL)]


@pytest.mark.parametrize("stream", [torch.cuda.default_stream, torch.cuda.Stream])
def test_a_step_that_fails_as_it_is_captured_leaves_the_stream_as_it_was(
    stream: Callable[[], torch.cuda.Stream],
) -> None:
    runs: list[torch.Tensor] = []

    def step() -> tuple[torch.Tensor, ...]:
        runs.append(torch.ones(3, device="cuda") + 1)
        if len(runs) == 2:
            raise ValueError("in the capture")
        return (runs[-1],)

    with torch.cuda.stream(stream()):
        with pytest.raises(ValueError, match="in the capture"):
            CapturedGraph(step, None)
        assert (torch.ones(3, device="cuda") + 2).sum().item() == 9.0
        assert CapturedGraph(step, None).replay()[0].tolist() == [2.0, 2.0, 2.0]


def run(make: Callable[[], Policy], together: Barrier | None) -> Left:
    """Steps of a rollout, after which the engine gives all back, and an update; all threads begin a
    step at the same time.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        policy = make()
        engine = NativeEngine(policy, RolloutConfig(kv_pages=200), None, seed=1)
        trainer = Trainer(policy, TrainingConfig(learning_rate=1e-3), total_updates=STEPS)
        drawn: list[list[list[Completion]]] = []
        for step in range(STEPS):
            if together is not None:
                together.wait()
            drawn.append(generate(engine, requests()))
            engine.release()
            batches = pack_pairs(examples(step), 2048)
            metrics = trainer.update(batches, SupervisedObjective())
            assert metrics.skipped is None, metrics.skipped
        masters = [master.detach().clone() for master in policy.masters.values()]
        policy.backend.synchronize()  # another stream compares them
        return drawn, masters


def masters_of(policy: Policy) -> list[list[torch.Tensor]]:
    """After each of many updates."""
    trainer = Trainer(policy, TrainingConfig(learning_rate=1e-3), total_updates=UPDATES)
    left: list[list[torch.Tensor]] = []
    for update in range(UPDATES):
        metrics = trainer.update(pack_pairs(examples(update), 2048), SupervisedObjective())
        assert metrics.skipped is None, metrics.skipped
        left.append([master.detach().clone() for master in policy.masters.values()])
    policy.backend.synchronize()
    return left


def requests(samples: int = 8, max_new_tokens: int = 64) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(1000, (n,), generator=generator).tolist()) for n in (5, 130)]
    sampling = SamplingParams(max_new_tokens)
    return [
        Request(Prompt(f"p{i}", "", ids), 0, samples, sampling) for i, ids in enumerate(prompts)
    ]


def examples(seed: int) -> list[tuple[tuple[int, ...], list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1000, (n,), generator=generator).tolist() for n in (300, 900, 700)]
    return [((first,), rest) for first, *rest in rows]
