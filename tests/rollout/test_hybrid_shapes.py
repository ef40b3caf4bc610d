"""Hybrids of any shape draw what training computes, bit for bit: heads of odd sizes, every width of
the convolution, layers in any order, experts, adapters, prompts that end around the ends of chunks,
and an engine that is short of pages and of carries and whose samples have several turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from isobit.config.model_shape import HYBRIDS, SHARING, Family
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.operands import DeltaShape
from isobit.kernels.spec.delta_rule import Chunks, DeltaCarries
from isobit.memory.cache_size import CacheSize, pages_for
from isobit.models.config import Lora, ModelConfig
from isobit.models.family_keys import Experts
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import Scorer
from isobit.records.packing import lay_end_to_end, pack
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from tests.models.policies import disturbed
from tests.rollout.test_drafts import delayed
from tests.rollout.test_open_engine import check_empty
from tests.rollout.test_parked import play
from tests.suites import examples

CONTEXT = 320
PAGE = 64
"""Tokens of a page, and of a chunk of a delta rule."""
LENGTHS = (1, 1, 2, 3, 15, 16, 17, 40, 62, 63, 64, 65, 66, 100, 127, 128, 129, 191, 192, 200)
"""Of prompts."""
LARGE_DIMS = (48, 63, 64, 65, 96, 127, 128, 200, 256)
"""Of heads of a delta rule; the others are up to 40."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what it is asked for, and what its engine has."""

    config: ModelConfig
    seed: int
    sharpness: float
    requests: tuple[Request, ...]
    turns: int
    rollout: RolloutConfig
    size: CacheSize
    pipelined: bool


def shape(random: Random, family: Family) -> ModelConfig:
    """At least one layer of each kind, but for a tenth, in which all layers have attention."""
    layers = random.randint(2, 4)
    full = {random.randrange(layers)}
    full |= {layer for layer in range(layers) if random.random() < 0.25}
    full = full - {0} if len(full) == layers and random.random() < 0.9 else full
    kv_heads, head_dim = random.choice([1, 2, 3]), random.choice([2, 8, 20, 32, 64])
    key_heads = random.choice([1, 2, 3])
    key_dim, value_dim = (
        random.choice([random.randint(1, 40), random.choice(LARGE_DIMS)]) for _ in "kv"
    )
    config = ModelConfig(
        family,
        random.choice([50, 128, 131]),
        random.choice([random.randint(1, 160), 128, 256]),
        random.choice([random.randint(1, 160), 128, 256]),
        layers,
        kv_heads * random.choice([1, 2, 4]),
        kv_heads,
        head_dim,
        CONTEXT,
        random.choice([1e-5, 1e-6]),
        random.choice([1e4, 1e7]),
        tied_embeddings=random.random() < 0.5,
        partial_rotary_factor=random.choice(
            [share for share in (0.25, 0.5, 1.0) if head_dim * share % 2 == 0]
        ),
        experts=experts(random, family, layers),
        delta=DeltaShape(
            key_heads,
            key_heads * random.randint(1, 4),
            key_dim,
            value_dim,
            random.choice([2, 3, 4, 4, 5, 9, 16]),
        ),
        delta_layers=tuple(layer for layer in range(layers) if layer not in full),
    )
    targets = [name for name in config.lora_targets if random.random() < 0.5]
    if not targets or random.random() < 0.5:
        return config
    return replace(config, lora=Lora(random.randint(1, 9), 16.0, tuple(targets)))


def experts(random: Random, family: Family, layers: int) -> Experts | None:
    if family not in SHARING:
        return None
    count = random.randint(1, 6)
    has_dense = family == "qwen3_next" and random.random() < 0.5
    return Experts(
        count,
        random.randint(1, count),
        random.randint(1, 140),
        renormalise=family != "qwen3_next" or random.random() < 0.5,
        dense_layers=(random.randrange(layers),) if has_dense else (),
        shared_size=random.randint(1, 140),
    )


def drawn_case(seed: int, family: Family, preset: Preset) -> Case:
    """The seed decides about everything, evenly: Hypothesis would mostly draw what is small."""
    random = Random(f"{seed} {family} {preset}")
    config, turns = shape(random, family), random.choice([1, 1, 3])
    sampling = SamplingParams(
        random.choice([1, 5, 20, 70]) + 30 * (turns - 1),
        random.choice([0.0, 0.7, 1.0, 1.0]),
        stop_token_ids=tuple(range(0, config.vocab_size, 5)) if turns > 1 else (),
    )
    wanted: list[Request] = []
    for place in range(random.randint(1, 4)):
        token_ids = random.choices(range(config.vocab_size), k=random.choice(LENGTHS))
        prompt = Prompt(f"p/{place}", "", tuple(token_ids))
        wanted.append(Request(prompt, 0, random.randint(1, 3), sampling))
    longest = max(one.max_length(CONTEXT) for one in wanted)
    pages = pages_for(longest, PAGE) + random.choice([0, 0, 1, 30])
    rollout = RolloutConfig(
        kv_pages=pages,
        max_sequences=random.choice([1, 2, 3, 12]),
        max_batched_tokens=random.choice([12, 17, 37, 64, 90, 129, 400]),
        speculation=random.choice([0, 0, 3]),
    )
    size = CacheSize(pages, random.choice([2, 3, 5, 30]))
    sharpness = random.choice([1.0, 4.0, 8.0])
    return Case(config, seed, sharpness, tuple(wanted), turns, rollout, size, random.random() < 0.5)


def policy_of(case: Case, preset: Preset) -> Policy:
    """Sharper than a fresh model, with outliers, and with rates of decay between none and all."""
    policy = disturbed(random_policy(case.config, PrecisionConfig(preset=preset), case.seed))
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith(("proj.weight", "embed_tokens.weight")):
                master.mul_(case.sharpness)
            if name.endswith("input_norm.weight"):
                master[::37] += 20.0
            if name.endswith("a_log"):
                master.uniform_(-8, 2, generator=generator)
    policy.publish()
    return policy


def played(case: Case, policy: Policy) -> tuple[list[Completion], EngineStats]:
    """All samples to their ends, and what the engine did."""
    make = delayed if case.pipelined else None
    engine = NativeEngine(policy, case.rollout, None, case.seed, make, size=case.size)
    made, stats = play(engine, case.requests, vocab=case.config.vocab_size, turns=case.turns)
    check_empty(engine)
    return [*made.values()], stats


def trained(policy: Policy, drawn: Sequence[TokenSequence]) -> torch.Tensor:
    """The log-probabilities of the forward whose backward a step takes."""
    batch = lay_end_to_end(drawn)
    run = PackedPass(policy, batch.token_ids, batch.positions, batch.lengths, recompute="none")
    hidden = run.forward()[batch.rows]
    head, weights = policy.decoder.lm_head, policy.weights("training")
    return head.token_log_probs(weights, hidden, batch.targets, batch.temperatures)[0]


def difference(case: Case, policy: Policy) -> int:
    """How many of the recorded log-probabilities are not those of training."""
    drawn = [one.sequence for one in played(case, policy)[0]]
    recorded = lay_end_to_end(drawn).recorded_log_probs
    return int((recorded != trained(policy, drawn)).sum())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
@settings(max_examples=examples(12), deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_what_is_drawn_is_what_training_computes(preset: Preset, family: Family, seed: int) -> None:
    case = drawn_case(seed, family, preset)
    policy = policy_of(case, preset)
    drawn = [one.sequence for one in played(case, policy)[0]]
    recorded = lay_end_to_end(drawn).recorded_log_probs
    assert torch.equal(recorded, trained(policy, drawn))
    scorer = Scorer(policy)
    for batch in pack(drawn, 600, shared_prefix=True):
        assert torch.equal(batch.recorded_log_probs, scorer.score(batch).log_probs)


@pytest.mark.exhaustive
def test_states_that_are_lost_between_two_forwards_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mutant: a carry has all but the state in front of its chunk."""
    case = drawn_case(1, "qwen3_5_text", "bf16")
    policy, exact = policy_of(case, "bf16"), DeltaCarries.write
    assert difference(case, policy) == 0

    def write(
        self: DeltaCarries, carries: torch.Tensor, chunks: Chunks, which: torch.Tensor
    ) -> None:
        exact(self, carries, chunks, which)
        self.states[carries[which]] = 0

    monkeypatch.setattr(DeltaCarries, "write", write)
    assert difference(case, policy) > 20
