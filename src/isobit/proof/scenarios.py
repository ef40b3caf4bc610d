"""The workload of ``isobit verify``: random prompts, the scenarios in which the engine completes
them, and the packings in which the training forward scores the same tokens again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import pages_for
from isobit.models.policy import Policy
from isobit.models.policy_share import PolicyShare
from isobit.models.published import SIDES
from isobit.precision.quant_tensor import Side
from isobit.records.batch import PackedBatch
from isobit.records.packing import pack
from isobit.records.sequence import COLUMN, TokenSequence
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.requests import Request

RESULT_TOKENS = 16
"""Tokens of a tool's result: prompts end around the bounds of pages, so that results cross them."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One setting of the engine, and the counts of ``EngineStats`` that must not be zero under
    it.
    """

    name: str
    rollout: RolloutConfig
    must_happen: tuple[str, ...] = ()
    ties_routers: bool = False
    """Whether the experts' logits tie, in groups of one more than a token has experts."""
    turns: int = 1
    """Each completion is drawn in so many turns at most: up to ``RESULT_TOKENS`` of a result stand
    behind each but the last, as in episodes with tools.
    """
    publishes: bool = False
    """Whether other weights are published behind half of the turns, while K and V of the samples
    are parked (``other_weights``).
    """

    @property
    def weights(self) -> int:
        """The number of weights that draw, one after the other."""
        return 2 if self.publishes else 1

    @property
    def draws(self) -> tuple[float | bool, ...]:
        """What decides which tokens are drawn, beside the requests."""
        rollout = self.rollout
        settings = rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p
        return (*settings, self.ties_routers, self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """Random prompts and the limit of each one's completions."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: tuple[int, ...]
    samples: int
    page_tokens: int
    """Tokens of a page of the cache whose bounds the lengths are around."""
    vocab_size: int

    @property
    def longest(self) -> int:
        return max(
            len(prompt.token_ids) + limit
            for prompt, limit in zip(self.prompts, self.max_new_tokens, strict=True)
        )

    def requests(self, scenario: Scenario) -> list[Request]:
        """Requests to the engine; each completion ends at its own limit, never at a stop token but
        where it has several turns, which end with every second token of the vocabulary.
        """
        rollout, several = scenario.rollout, scenario.turns > 1
        further = (scenario.turns - 1) * RESULT_TOKENS
        stops = tuple(range(0, self.vocab_size, 2)) if several else ()
        return [
            Request(
                prompt,
                0,
                self.samples,
                SamplingParams(
                    limit + further,
                    rollout.temperature,
                    rollout.top_k,
                    rollout.top_p,
                    rollout.min_p,
                    stop_token_ids=stops,
                ),
                comes_back=several,
            )
            for prompt, limit in zip(self.prompts, self.max_new_tokens, strict=True)
        ]


def build_workload(
    vocab_size: int,
    context: int,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    seed: int,
    page_tokens: int,
) -> Workload:
    """Random prompts that leave room for ``max_new_tokens`` in the context."""
    random = Random(seed)  # noqa: S311 (no secret)
    longest = context - max_new_tokens
    lengths = _prompt_lengths(page_tokens)
    made, limits = [], []
    for index in range(prompts):
        shortest, most = lengths[index % len(lengths)]
        length = min(random.randint(shortest, most), longest)
        made.append(
            Prompt(
                f"verify/{index}", "", tuple(random.randrange(vocab_size) for _ in range(length))
            )
        )
        limits.append(random.randint(max_new_tokens // 2, max_new_tokens))
    return Workload(tuple(made), tuple(limits), samples, page_tokens, vocab_size)


def engine_scenarios(workload: Workload) -> tuple[Scenario, ...]:
    limit = max(workload.max_new_tokens)
    few_pages = pages_for(workload.longest, workload.page_tokens)
    return (
        Scenario(
            "roomy",
            RolloutConfig(max_new_tokens=limit, max_batched_tokens=4096),
            ("shared_pages", "copied_pages"),
        ),
        Scenario(
            "few pages",
            RolloutConfig(max_new_tokens=limit, kv_pages=few_pages),
            ("preemptions", "recomputed_tokens"),
        ),
        Scenario(
            "small chunks", RolloutConfig(max_new_tokens=limit, max_batched_tokens=40), ("chunks",)
        ),
        Scenario("two sequences", RolloutConfig(max_new_tokens=limit, max_sequences=2)),
        Scenario("greedy", RolloutConfig(max_new_tokens=limit, temperature=0.0)),
        Scenario(
            "few pages, small chunks, temperature 0.7",
            RolloutConfig(
                max_new_tokens=limit,
                temperature=0.7,
                kv_pages=few_pages,
                max_batched_tokens=56,
                max_sequences=8,
            ),
            ("preemptions", "chunks", "shared_pages"),
        ),
        Scenario(
            "truncated, temperature 1.3",
            RolloutConfig(max_new_tokens=limit, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
        ),
        Scenario("tied routers", RolloutConfig(max_new_tokens=limit), ties_routers=True),
        Scenario(
            "turns with results",
            RolloutConfig(max_new_tokens=limit),
            ("kept_tokens", "weight_changes"),
            turns=4,
            publishes=True,
        ),
    )


@contextmanager
def tied_routers(*policies: Policy | PolicyShare) -> Iterator[None]:
    """A block in which the rows of every published router are equal, as their biases are, in
    groups of one more than a token has experts.
    """
    changed: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
    for policy in policies:
        assert policy.config.experts is not None, "only a mixture of experts has routers"
        size = policy.config.experts.top_k + 1
        sides: Sequence[Side] = SIDES if isinstance(policy, Policy) else ("rollout",)
        for plain in (policy.weights(side).plain for side in sides):
            for name in [name for name in plain if ".router." in name]:
                rows = torch.arange(plain[name].shape[0], device=plain[name].device)
                changed.append((plain, name, plain[name]))
                plain[name] = plain[name].detach()[rows - rows % size].contiguous()
    try:
        yield
    finally:
        for plain, name, router in reversed(changed):
            plain[name] = router


@contextmanager
def other_weights(*policies: Policy | PolicyShare) -> Iterator[None]:
    """A block in which others are published: every norm's are 1.25 times as large, so that K and V
    of every layer are others.  Written in place and counted, as by a publication.
    """
    held = {
        id(plain[name]): plain[name]
        for policy in policies
        for side in (SIDES if isinstance(policy, Policy) else ("rollout",))
        for plain in [policy.weights(side).plain]
        for name in plain
        if name.endswith("norm.weight")
    }
    before = [(norm, norm.detach().clone()) for norm in held.values()]

    def publish(factor: float) -> None:
        with torch.no_grad():
            for norm, values in before:
                norm.copy_(values * factor)
        for policy in policies:
            policy.version += 1

    publish(1.25)
    try:
        yield
    finally:
        publish(1.0)


def drawn_by(samples: Sequence[TokenSequence], version: int) -> list[TokenSequence]:
    """The samples with tokens that the weights of a version drew, up to the last such token; only
    those are in the loss mask.
    """
    masks = [sample.loss_mask & (sample.weights_versions == version) for sample in samples]
    return [up_to(one, mask) for one, mask in zip(samples, masks, strict=True) if mask.any()]


def up_to(sample: TokenSequence, mask: NDArray[np.bool_]) -> TokenSequence:
    """A sample up to the last token of a mask, which is its loss mask then."""
    end = int(mask.nonzero()[0][-1]) + 1
    columns = {
        name: None if (whole := getattr(sample, name)) is None else whole[:end].copy()
        for name in ("token_ids", *COLUMN)
    }
    return replace(sample, loss_mask=mask[:end].copy(), drawn=None, **columns)


def packings(
    samples: Sequence[TokenSequence], seed: int
) -> Iterator[tuple[str, list[PackedBatch]]]:
    """The same samples in several packings, by name."""
    yield "alone", pack(samples, 1)
    yield "300 tokens", pack(samples, 300)
    yield "2048 tokens", pack(samples, 2048)
    yield "shared prefixes", pack(samples, 2048, shared_prefix=True)
    yield (
        "random neighbours",
        [
            batch
            for part in _random_parts(samples, seed)
            for batch in pack(part, sum(s.length for s in part))
        ],
    )


def _prompt_lengths(page: int) -> tuple[tuple[int, int], ...]:
    """Ranges of prompt lengths, in tokens, taken in turn, for pages of ``page`` tokens."""
    return (
        (1, page // 4),
        (page - 6, page),  # completions grow into a second page,
        (page - 6, page),  # those of two prompts at about the same time
        (page + 1, page + 16),  # a full page to share and a partial one to copy
        (2 * page, 3 * page),
    )


def _random_parts(samples: Sequence[TokenSequence], seed: int) -> Iterator[list[TokenSequence]]:
    """The samples in a random order, cut into runs of 2 to 9."""
    random = Random(seed)  # noqa: S311 (no secret)
    shuffled = random.sample(list(samples), len(samples))
    while shuffled:
        size = random.randint(2, 9)
        yield shuffled[:size]
        shuffled = shuffled[size:]
