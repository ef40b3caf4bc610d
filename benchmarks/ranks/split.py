"""Whole steps with the trainer on one GPU and the rollouter on another (``cluster.rollouters = 1``,
``async.lag = 1``), beside which ``steps`` has the synchronous ones of two.

While the trainer learns from a batch, the rollouter samples the next by the weights of before; then
the batch travels to the trainer, and the published weights to the rollouter.  As in a run, but that
rewards are random and nobody compares a few samples of each batch with the trainer's forward.
"""

from collections.abc import Mapping
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.comparison.device import allocate_in_pages
from benchmarks.comparison.rows import Row
from benchmarks.ranks.digests import published_digest
from benchmarks.ranks.writing import Sitting
from benchmarks.rl_steps.cases import WARM_UP_TOKENS, Case
from benchmarks.rl_steps.native import ROLLOUT, Loop, requests_of
from isobit.config.tables import PrecisionConfig
from isobit.models.config import ModelConfig, model_shape
from isobit.models.policy import random_policy
from isobit.records.kept_groups import groups_of, groups_value
from isobit.records.text import Group
from isobit.rollout.engine import Request, generate
from isobit.rollout.native import NativeEngine
from isobit.run.rollouters import Rollouters

STEPS = 3


def run_split(sitting: Sitting, case: Case, settings: dict[str, Any]) -> None:
    """A row: the median of three steps, and each one's seconds."""
    assert sitting.world.size == 2, "one rank trains and one samples"
    rollouters, config = Rollouters(sitting.world, rollouters=1), model_shape(sitting.shape)
    mode, device = sitting.mode, sitting.device
    row: Row = {}
    with rollouters.errors_shared():
        if rollouters.is_rollouter:
            serve(rollouters, mode, config, device)
        else:
            row = train(
                rollouters,
                Loop(mode, config, settings, case.length, device, world=rollouters.mine),
                case,
            )
    sitting.rows().write(
        kind="split", sequences=case.sequences, new_tokens=case.new_tokens, **settings, **row
    )


def train(rollouters: Rollouters, loop: Loop, case: Case) -> Row:
    """The trainer's steps; the first batch is sampled before them."""
    loop.warm_up_training(case)
    rollouters.update_weights(loop.policy)
    for warm_up in (
        Case(case.prompts, case.samples, case.prompt_tokens, WARM_UP_TOKENS),
        Case(1, case.sequences, case.length - WARM_UP_TOKENS, WARM_UP_TOKENS),
    ):
        _begin(rollouters, warm_up)
        rollouters.receive_result()
    _begin(rollouters, case)
    batch, _ = _finished(rollouters, loop, case)
    steps: list[dict[str, float]] = []
    for _ in range(STEPS):
        began = _now()
        _begin(rollouters, case)
        loop.learn(batch)
        learnt = _now()
        batch, rollout = _finished(rollouters, loop, case)
        taken = _now()
        rollouters.update_weights(loop.policy)
        ended = _now()
        steps.append(
            {
                "seconds": ended - began,
                "training_s": learnt - began,
                "rollout_s": rollout,
                "waiting_s": taken - learnt,
                "weights_s": ended - taken,
            }
        )
    middle = {name: median(step[name] for step in steps) for name in steps[0]}
    return {**middle, "steps": steps, "published": published_digest(loop.policy)}


def serve(rollouters: Rollouters, mode: str, config: ModelConfig, device: str) -> None:
    """The rollouter, until the trainer is done."""
    if device != "cpu":
        allocate_in_pages()
    own = rollouters.whole.own_device(torch.device(device))
    precision = PrecisionConfig.model_validate(mode)
    policy = random_policy(config, precision, 0, own, trainable=False, world=rollouters.mine)
    engine, random, visit = NativeEngine(policy, ROLLOUT, None, seed=0), Random(0), 0  # noqa: S311 (no secret)
    while (command := rollouters.receive_command(lambda: None))["do"] != "end":
        if command["do"] == "take weights":
            rollouters.transfer_weights(policy)
            continue
        visit += 1
        case = Case(*command["case"])
        requests = requests_of(case, config.vocab_size, visit)
        rollouters.send_result(lambda asked=requests: _sampled(engine, asked, random))


def _sampled(engine: NativeEngine, requests: list[Request], random: Random) -> dict[str, Any]:
    began = _now()
    groups = [
        Group(request.prompt, request.visit, samples, [random.random() for _ in samples])
        for request, samples in zip(requests, generate(engine, requests), strict=True)
    ]
    return {"batch": groups_value(groups), "seconds": _now() - began}


def _begin(rollouters: Rollouters, case: Case) -> None:
    sizes = case.prompts, case.samples, case.prompt_tokens, case.new_tokens
    rollouters.send_command({"do": "sample", "case": sizes})


def _finished(rollouters: Rollouters, loop: Loop, case: Case) -> tuple[list[Group], float]:
    """The batch, drawn by weights of before, and the seconds that it took."""
    value: Mapping[str, Any] = rollouters.receive_result()
    requests = requests_of(case, loop.policy.config.vocab_size, 0)
    prompts = {request.prompt.id: request.prompt for request in requests}
    return groups_of(value["batch"], prompts.__getitem__, fresh=False), value["seconds"]


def _now() -> float:
    """When all that the device was asked for is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
