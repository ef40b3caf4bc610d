"""Measurements on W ranks for ``benchmarks.parallel``.  Micro-batches are the same whatever W is,
so the bits are too, which SHA-256 digests of published bytes and masters show.

    links       what an 8B policy sends, alone on the links: ``exchange`` (each rank sends every
                other the rows of a layer's FP32 gradient that it owns), ``add`` (the owner's
                ordered sum) and ``gather`` (published bytes); medians over repeats behind a barrier
    training    one update: seconds a round are forward and backward, with what the backward does
                not hide of the exchange
    steps       whole steps, by the loop of ``benchmarks.end_to_end``
    split       steps with the trainer on one GPU and the rollouter on another (``cluster.rollouters
                = 1``, ``async.lag = 1``): the rollouter samples the next batch from the weights
                before the update, then the batch and the new weights change places

Seconds come from CUDA events on rank 0.  Gradients may also go by NCCL's own kernels, as between
hosts, which shows what copy engines are worth.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.cases import WARM_UP_TOKENS, PassCase, StepCase, precision_of
from benchmarks.common import Row, allocate_in_pages, published_tensors
from benchmarks.parallel import RankRows, Sitting
from benchmarks.passes import Phases, measured
from benchmarks.rl_steps import ROLLOUT, Loop, requests_of
from isobit.config.training import TrainingConfig
from isobit.memory.activations import published_bytes
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.shapes import model_shape
from isobit.parallel.exchanges import Exchanges
from isobit.parallel.parts import Parts
from isobit.parallel.processes import Processes
from isobit.parallel.world import World
from isobit.records.text import Group
from isobit.records.wire import groups_of, groups_value
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.run.rollouters import Question, Rollouters
from isobit.training.supervised import SupervisedObjective
from isobit.training.trainer import Trainer

REPEATS = 7


def run_links(sitting: Sitting) -> None:
    """Rows ``exchange``, ``add`` and ``gather``."""
    rows, world = sitting.rows(), sitting.world
    own, shape = world.own_device(torch.device(sitting.device)), model_shape(sitting.shape)
    precision = precision_of(sitting.mode)
    policy = random_policy(shape, precision, 0, own, trainable=False, world=world)
    for kind, numbers, work in (
        ("exchange", *layer_exchange(policy, world)),
        ("add", *ordered_add(policy, world)),
        ("gather", *published_gather(policy, world)),
    ):
        seconds = [timed(world, work, own) for _ in range(REPEATS)][1:]
        middle = median(seconds)
        rows.write(kind=kind, bytes=numbers, seconds=middle, gb_per_s=numbers / middle / 1e9)


def timed(world: World, work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call that all ranks begin together."""
    phases = Phases(on_gpu=device.type == "cuda")
    world.barrier("the others")
    phases.start()
    work()
    return sum(phases.stop().values())


def layer_exchange(policy: Policy, world: World) -> tuple[int, Callable[[], None]]:
    """Returns the bytes that one rank sends, and a function that exchanges them."""
    names = policy.decoder.backward_groups()[1]
    owned = [[policy.ownership.rows(name, rank) for name in names] for rank in range(world.size)]
    made = {name: torch.randn(policy.shapes[name], device=policy.device) for name in names}
    by_name = [policy.ownership.numbers(policy.shapes, [name]) for name in names]
    sizes = [list(of_rank) for of_rank in zip(*by_name, strict=True)]
    series = world.exchanges(max(map(sum, sizes)), policy.device)
    send = [
        [made[name][rows] for name, rows in zip(names, owned[rank], strict=True)]
        for rank in range(world.size)
    ]
    comes = [[] if rank == world.rank else sizes[world.rank] for rank in range(world.size)]
    sent = 4 * sum(sum(sizes[rank]) for rank in range(world.size) if rank != world.rank)

    def exchange() -> None:
        series.start(send, comes).wait()

    return sent, exchange


def ordered_add(policy: Policy, world: World) -> tuple[int, Callable[[], None]]:
    """-> the bytes that the sum of a layer's own rows reads and writes, and the sum."""
    names = policy.decoder.backward_groups()[1]
    totals, addends = [], []
    for name in names:
        rows = policy.rows(name)
        shape = (rows.stop - rows.start, *policy.shapes[name][1:])
        totals.append(torch.zeros(shape, device=policy.device))
        addends.append([torch.randn(shape, device=policy.device) for _ in range(world.size)])

    def add() -> None:
        for total, slices in zip(totals, addends, strict=True):
            policy.backend.add_in_order(total, slices)

    return 4 * (world.size + 2) * sum(total.numel() for total in totals), add


def published_gather(policy: Policy, world: World) -> tuple[int, Callable[[], None]]:
    """Returns the bytes that arrive at a rank, and a function that gathers them."""
    whole = published_bytes(policy.config, policy.flow, policy.backend.sizes)
    return whole * (world.size - 1) // world.size, lambda: policy._published.gather(
        world, policy.ownership.cuts
    )


_THREADS = 8


def published_digest(policy: Policy) -> str:
    """The digest of all tensors that the training side reads, in the order of their names."""
    tensors = published_tensors(policy.weights("training"))
    return _joined(tensors[name] for name in sorted(tensors))


def master_digest(policy: Policy) -> str:
    """Of all FP32 masters, whole, in the order of the forward; all ranks together."""
    return _joined(policy.whole_master(name) for name in policy.masters)


def _joined(tensors: Iterable[torch.Tensor]) -> str:
    """Of the digests of tensors, which are copied to the host one by one and hashed side by
    side.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [pool.submit(_digest, tensor.detach().cpu()) for tensor in tensors]
        return hashlib.sha256(b"".join(part.result() for part in parts)).hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).digest()


def without_copy_engines() -> None:
    """Use NCCL's own kernels instead of copy engines for the rest of this process."""

    def none(*_: object) -> tuple[Exchanges | None, str]:
        return None, "the benchmark compares the two"

    Processes._peer_copies = none  # pyright: ignore[reportAttributeAccessIssue]


_TIMED = 3


def run_training(
    world: World, case: PassCase, microbatches: int, out: Path, note: str, device: str = "cuda"
) -> None:
    """A row: medians over updates of so many micro-batches, after one of ``world.size``."""
    own, phases = world.own_device(torch.device(device)), Phases(on_gpu=device == "cuda")
    policy, trainer = _trainer(world, case, own, phases)
    batches = case.batches(microbatches)
    trainer.update(batches[: world.size], SupervisedObjective())
    if own.type == "cuda":
        torch.cuda.reset_peak_memory_stats(own)
    found = []
    for _ in range(_TIMED):
        world.barrier("the others")
        phases.start()
        trainer.update(batches, SupervisedObjective())
        found.append(phases.stop())
    seconds = median(sum(one.values()) for one in found)
    middle = {name: median(one[name] for one in found) for name in found[0]}
    rounds = -(-len(batches) // world.size)
    arriving, gather = published_gather(policy, world)
    gathers = [timed(world, gather, own) for _ in range(5)]
    RankRows(world, out, case.mode, case.shape).write(
        kind="training",
        case=str(case),
        note=note,
        microbatches=len(batches),
        rounds=rounds,
        seconds=seconds,
        phases_s=middle,
        round_s=(middle["forward"] + middle["backward"]) / rounds,
        tokens_per_s=len(batches) * case.tokens / seconds,
        peak_gib=torch.cuda.max_memory_allocated(own) / 2**30 if own.type == "cuda" else None,
        gather_s=median(gathers),
        gather_bytes=arriving,
    )


def _trainer(
    world: World, case: PassCase, device: torch.device, phases: Phases
) -> tuple[Policy, Trainer]:
    precision = precision_of(case.mode)
    policy = random_policy(case.config, precision, 0, device, world=world)
    config = TrainingConfig(moments="bf16", recompute=case.recompute, learning_rate=5e-5)
    return policy, Trainer(policy, config, total_updates=1000, timing=phases)


def run_digests(
    world: World, case: PassCase, microbatches: int, out: Path, device: str = "cuda"
) -> None:
    """Rows: the digests after an update of an odd number of micro-batches, so that a rank idles in
    the last round.
    """
    own = world.own_device(torch.device(device))
    policy, trainer = _trainer(world, case, own, Phases(on_gpu=device == "cuda"))
    figures = trainer.update(case.batches(microbatches), SupervisedObjective())
    RankRows(world, out, case.mode, case.shape).write(
        kind="digests",
        case=str(case),
        microbatches=microbatches,
        loss=figures.metrics["loss"],
        grad_norm=figures.metrics["grad_norm"],
        published=published_digest(policy),
        masters=master_digest(policy),
    )


def run_timed(sitting: Sitting, case: StepCase, settings: dict[str, Any]) -> None:
    """A row: one timed step behind a warm-up."""
    rows, loop = sitting.rows(), _loop(sitting, case, settings)
    row = measured(lambda: loop.time(case))
    rows.write(kind="step", sequences=case.sequences, new_tokens=case.new_tokens, **settings, **row)


def run_proof(sitting: Sitting, case: StepCase, settings: dict[str, Any]) -> None:
    """A row after each of three steps: digests of what was published, and of the completions; at
    the end of the masters, too.
    """
    rows, loop = sitting.rows(), _loop(sitting, case, settings)
    for step in range(1, 4):
        figures = loop.step(case)
        sizes = {"sequences": case.sequences, "new_tokens": case.new_tokens}
        digests = {"published": published_digest(loop.policy)}
        masters = master_digest(loop.policy) if step == 3 else None
        rows.write(kind="proof", step=step, **sizes, **figures, **digests, masters=masters)


def _loop(sitting: Sitting, case: StepCase, settings: dict[str, Any]) -> Loop:
    shape, world = model_shape(sitting.shape), sitting.world
    return Loop(sitting.mode, shape, settings, case.length, sitting.device, world=world)


STEPS = 3


def run_split(sitting: Sitting, case: StepCase, settings: dict[str, Any]) -> None:
    """A row: the median of three steps, and each one's seconds."""
    assert sitting.world.size == 2, "one rank trains and one samples"
    rollouters, config = Rollouters(Parts(sitting.world, 1)), model_shape(sitting.shape)
    mode, device = sitting.mode, sitting.device
    row: Row = {}
    with rollouters.errors_shared():
        if rollouters.is_rollouter:
            serve(rollouters, mode, config, device)
        else:
            loop = Loop(mode, config, settings, case.length, device, world=rollouters.mine)
            row = train(rollouters, loop, case)
    sitting.rows().write(
        kind="split", sequences=case.sequences, new_tokens=case.new_tokens, **settings, **row
    )


def train(rollouters: Rollouters, loop: Loop, case: StepCase) -> Row:
    """The trainer's steps; the first batch is sampled before them."""
    loop.warm_up_training(case)
    for warm_up in (
        StepCase(case.prompts, case.samples, case.prompt_tokens, WARM_UP_TOKENS),
        StepCase(1, case.sequences, case.length - WARM_UP_TOKENS, WARM_UP_TOKENS),
    ):
        _begin(rollouters, loop, warm_up)
        rollouters.receive(loop.policy)
    _begin(rollouters, loop, case)
    batch, _ = _finished(rollouters, loop, case)
    _begin(rollouters, loop, case)
    steps: list[dict[str, float]] = []
    for _ in range(STEPS):
        began = _now()
        loop.learn(batch)
        learnt = _now()
        batch, rollout = _finished(rollouters, loop, case)
        taken = _now()
        _begin(rollouters, loop, case)  # the new weights go with it
        ended = _now()
        step = {"seconds": ended - began, "training_s": learnt - began, "rollout_s": rollout}
        steps.append(step | {"waiting_s": taken - learnt, "weights_s": ended - taken})
    _finished(rollouters, loop, case)
    middle = {name: median(step[name] for step in steps) for name in steps[0]}
    return {**middle, "steps": steps, "published": published_digest(loop.policy)}


def serve(rollouters: Rollouters, mode: str, config: ModelConfig, device: str) -> None:
    """The rollouter, until the trainer is done."""
    if device != "cpu":
        allocate_in_pages()
    own = rollouters.whole.own_device(torch.device(device))
    precision = precision_of(mode)
    policy = random_policy(config, precision, 0, own, trainable=False, world=rollouters.mine)
    engine, random, visit = NativeEngine(policy, ROLLOUT, None, seed=0), Random(0), 0  # noqa: S311 (no secret)
    while (asked := rollouters.wait(policy, lambda: None)) is not None:
        visit += 1
        requests = requests_of(StepCase(*asked["case"]), config.vocab_size, visit)
        rollouters.answer(lambda asked=requests: _sampled(engine, asked, random))


def _sampled(engine: NativeEngine, requests: list[Request], random: Random) -> dict[str, Any]:
    began = _now()
    groups = [
        Group(request.prompt, request.visit, samples, [random.random() for _ in samples])
        for request, samples in zip(requests, generate(engine, requests), strict=True)
    ]
    return {"batch": groups_value(groups), "seconds": _now() - began}


def _begin(rollouters: Rollouters, loop: Loop, case: StepCase) -> None:
    sizes = case.prompts, case.samples, case.prompt_tokens, case.new_tokens
    rollouters.ask(loop.policy, Question({"case": sizes}))


def _finished(rollouters: Rollouters, loop: Loop, case: StepCase) -> tuple[list[Group], float]:
    """The batch, drawn by weights of before, and the seconds that it took."""
    value: Mapping[str, Any] = rollouters.receive(loop.policy)
    requests = requests_of(case, loop.policy.config.vocab_size, 0)
    prompts = {request.prompt.id: request.prompt for request in requests}
    return groups_of(value["batch"], prompts.__getitem__, fresh=False), value["seconds"]


def _now() -> float:
    """The time once the device has finished its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
