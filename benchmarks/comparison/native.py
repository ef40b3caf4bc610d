"""Isobit's own engine through its public interface; log-probabilities are recorded in the timed
run, since it cannot do without them.
"""

import importlib.metadata
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.comparison.card import measure_card, versions
from benchmarks.comparison.cases import CASES, MAX_SEQUENCES, WARM_UP_TOKENS, Case, random_prompts
from benchmarks.comparison.rows import RowWriter, card_memory_gib
from isobit.config.tables import PrecisionConfig, RolloutConfig
from isobit.models.config import model_shape
from isobit.models.policy import Policy, random_masters
from isobit.models.policy_share import PolicyShare, SampledPolicy
from isobit.models.tensor_parallel import check_ranks
from isobit.parallel.launched import end_with_launcher, is_launched
from isobit.parallel.world import ALONE, World
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import Request, generate
from isobit.rollout.native import NativeEngine
from isobit.run.launch import launch
from isobit.run.rank import as_rank


def run_native(mode: str, shape: str, cases: Sequence[str], out: Path, started_at: float) -> None:
    """Time each case once, after a run of the same prompts with a few new tokens; ``started_at`` is
    when the process began.
    """
    before_card = perf_counter()
    card = measure_card()
    started_at += perf_counter() - before_card
    writer = RowWriter(out, "native", mode, shape, card, native_versions())
    _time_cases(mode, shape, cases, writer, started_at, ALONE)


def run_shared(
    mode: str, shape: str, cases: Sequence[str], out: Path, started_at: float, ranks: int
) -> None:
    """The same of an engine that so many GPUs share, in as many processes, which this one starts
    unless it is one of them; the first one writes.
    """
    box = end_with_launcher()
    if not is_launched():
        launch(["-m", "benchmarks.rollout", *sys.argv[1:]], ranks)
        return
    writer = None
    if os.environ["RANK"] == "0":  # before this process has a GPU; the others wait for it
        writer = RowWriter(out, f"native-tp{ranks}", mode, shape, measure_card(), native_versions())
    with as_rank(box) as world:
        check_ranks(ranks, world)
        _time_cases(mode, shape, cases, writer, started_at, world)


def _time_cases(
    mode: str,
    shape: str,
    cases: Sequence[str],
    writer: RowWriter | None,
    started_at: float,
    world: World,
) -> None:
    policy, engine = start(mode, shape, world)
    startup = perf_counter() - started_at
    if writer is not None:
        print(f"first token {startup:.1f} s after the start of the process", flush=True)
    for name in cases:
        case = CASES[name]
        prompts = random_prompts(case, policy.config.vocab_size)
        warm_up = seconds_to_complete(engine, prompts, min(WARM_UP_TOKENS, case.new_tokens))
        seconds = seconds_to_complete(engine, prompts, case.new_tokens)
        if writer is None:
            continue
        writer.write(
            case=name,
            log_probs=True,
            seconds=seconds,
            tokens_per_s=case.counted_tokens / seconds,
            startup_s=startup,
            warm_up_s=warm_up,
            memory_gib=card_memory_gib(),
            torch_peak_gib=torch.cuda.max_memory_allocated() / 2**30,
            stats=asdict(engine.stats),
        )


def start(mode: str, shape: str, world: World = ALONE) -> tuple[SampledPolicy, NativeEngine]:
    """Random weights made on the card, or this rank's share of them, an engine over them, and its
    first token.
    """
    config, precision = model_shape(shape), PrecisionConfig.model_validate(mode)
    device = world.own_device(torch.device("cuda"))
    masters = random_masters(config, 0, device)
    policy = (
        Policy(config, precision, masters, device, trainable=False)
        if world.size == 1
        else PolicyShare(config, precision, masters, world, device)
    )
    engine = NativeEngine(
        policy,
        RolloutConfig(max_sequences=MAX_SEQUENCES, max_batched_tokens=16384, kv_memory_gib=None),
        None,
        seed=0,
    )
    seconds_to_complete(engine, random_prompts(Case(1, 16, 1), policy.config.vocab_size), 1)
    return policy, engine


def seconds_to_complete(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], new_tokens: int
) -> float:
    """Seconds until all completions are on the host, log-probabilities included."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=1.0)
    requests = [
        Request(Prompt(f"bench/{i}", "", tuple(ids)), 0, 1, sampling)
        for i, ids in enumerate(prompts)
    ]
    began = perf_counter()
    completions = generate(engine, requests)
    seconds = perf_counter() - began
    for (completion,) in completions:
        assert len(completion.token_ids) == len(completion.log_probs) == new_tokens
        assert all(map(math.isfinite, completion.log_probs))
    return seconds


def describe_card() -> dict[str, Any]:
    """What a row says of the card and of our versions on it."""
    return {"card": measure_card(), "versions": native_versions()}


def native_versions() -> dict[str, str]:
    """torch, triton and DeepGEMM."""
    try:
        deep_gemm = importlib.metadata.version("sgl-deep-gemm")
    except importlib.metadata.PackageNotFoundError:
        deep_gemm = "not installed"
    return versions() | {"sgl-deep-gemm": deep_gemm}
