"""``isobit verify --shape``: the proof of exactness at the size of a real model, with random
weights made on the device.

The workload is ragged: prompts from one token to almost the longest length, spread evenly on a
logarithmic scale, with several samples each and completions that end at different steps.  The cache
has too few pages for the whole workload, and a forward takes fewer tokens than the long prompts
have.  So sequences share pages, are cut into chunks, are preempted and computed again, while decode
batches of every size run.

``outliers`` plants what real weights have and random ones lack: a few columns of every matrix
thirty times as large as the others, norms with large entries, and biases of K (where the family has
any) that are much larger than its values.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch

from isobit.config.base import Device
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.models.config import ModelConfig
from isobit.models.folder import choose_device
from isobit.models.policy import Policy, random_masters
from isobit.models.policy_share import PolicyShare
from isobit.models.scorer import Scorer
from isobit.models.shapes import model_shape
from isobit.parallel.world import ALONE, World
from isobit.proof.scenarios import Scenario, Workload
from isobit.proof.verify import ScenarioResult, VerifyResult, run_scenario
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.records.text import Prompt
from isobit.rollout.runner import page_tokens_of
from isobit.util.errors import ConfigError

_OUTLIER_EVERY, _OUTLIER = 101, 30.0
_MAX_BATCHED_TOKENS = 4096
_PACKED_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class FullSizeOptions:
    """The size of the check: by default 256 sequences of up to 8,192 tokens and some 215,000
    sampled ones.
    """

    prompts: int = 64
    samples: int = 4
    max_new_tokens: int = 1100
    """Length of the longest completion; the others end anywhere between half of it and this."""
    longest: int = 8192
    """Tokens of the longest sequence."""
    seed: int = 0
    outliers: bool = False


def verify_shape(
    shape: str,
    precision: PrecisionConfig,
    device: Device,
    options: FullSizeOptions,
    on_scenario: Callable[[ScenarioResult], None] | None = None,
    world: World = ALONE,
) -> VerifyResult:
    """Check random weights of a named shape.  Ranks of ``world`` sample together, each with its
    share of the weights, and each compares with the forward of all of them.

    Raises ConfigError for a shape that is not known, a device that is not there, or options that
    leave no room for prompts.
    """
    config = model_shape(shape)
    if options.max_new_tokens >= min(options.longest, config.max_positions):
        raise ConfigError(
            f"max_new_tokens is {options.max_new_tokens}; sequences of {options.longest} tokens "
            "leave no room for prompts"
        )
    where = world.own_device(choose_device(device, config, precision))

    def masters() -> Iterator[tuple[str, torch.Tensor]]:
        drawn = random_masters(config, options.seed, where)
        return with_outliers(drawn, config) if options.outliers else drawn

    policy, shared = Policy(config, precision, masters(), where, trainable=False), None
    if world.size > 1:
        shared = PolicyShare(config, precision, masters(), world, where)
    workload = ragged_workload(config.vocab_size, options, page_tokens_of(policy))
    scorer = Scorer(policy)
    result = run_scenario(_scenario(workload), workload, scorer, options.seed, _packings, shared)
    if on_scenario is not None:
        on_scenario(result)
    return VerifyResult(policy.flow.name, (result,))


def ragged_workload(vocab_size: int, options: FullSizeOptions, page_tokens: int) -> Workload:
    """Random prompts, their lengths spread evenly over the orders of magnitude, the longest one as
    long as it may be.
    """
    random = Random(options.seed)  # noqa: S311 (no secret)
    most = options.longest - options.max_new_tokens
    lengths = [
        most,
        *(round(math.exp(random.uniform(0, math.log(most)))) for _ in range(options.prompts - 1)),
    ]
    prompts = [
        Prompt(f"verify/{i}", "", tuple(random.randrange(vocab_size) for _ in range(n)))
        for i, n in enumerate(lengths)
    ]
    limits = [random.randint(options.max_new_tokens // 2, options.max_new_tokens) for _ in prompts]
    return Workload(
        tuple(prompts),
        (options.max_new_tokens, *limits[1:]),
        options.samples,
        page_tokens,
        vocab_size,
    )


def with_outliers(
    masters: Iterator[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same masters, changed in place."""
    for name, tensor in masters:
        if tensor.ndim == 2 and name.endswith("_proj.weight"):
            tensor[:, ::_OUTLIER_EVERY] *= _OUTLIER
        elif name.endswith("qkv_proj.bias"):
            keys = slice(
                config.num_heads * config.head_dim,
                (config.num_heads + config.num_kv_heads) * config.head_dim,
            )
            tensor[keys] = _OUTLIER * torch.linspace(
                -1, 1, config.num_kv_heads * config.head_dim, device=tensor.device
            )
        elif tensor.ndim == 1:
            tensor[::_OUTLIER_EVERY] = _OUTLIER / 3
        yield name, tensor


def _scenario(workload: Workload) -> Scenario:
    """The engine gets two fifths of the pages that the workload would take without sharing, which
    is less than its samples need with sharing.
    """
    tokens = sum(
        (len(p.token_ids) + n) * workload.samples
        for p, n in zip(workload.prompts, workload.max_new_tokens, strict=True)
    )
    rollout = RolloutConfig(
        max_new_tokens=max(workload.max_new_tokens),
        max_sequences=len(workload.prompts) * workload.samples,
        max_batched_tokens=_MAX_BATCHED_TOKENS,
        kv_pages=max(tokens * 2 // 5, 2 * workload.longest) // workload.page_tokens,
    )
    return Scenario(
        "ragged, few pages",
        rollout,
        ("shared_pages", "copied_pages", "chunks", "preemptions", "recomputed_tokens"),
    )


def _packings(samples: list[TokenSequence], _seed: int) -> Iterator[tuple[str, list[PackedBatch]]]:
    yield "alone", pack(samples, 1)
    yield f"{_PACKED_TOKENS} tokens", pack(samples, _PACKED_TOKENS)
