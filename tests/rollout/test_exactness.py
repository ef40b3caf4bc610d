"""What the engine records is what the training forward computes, bit for bit, however the engine
had to go about it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.spec.attention import PackedAttention
from isobit.models.policy import Policy, random_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.engine_stats import Progress
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.util.errors import NonFiniteError
from tests.tiny import tiny_model

TINY = tiny_model(vocab_size=96, num_layers=2)
TIGHT: dict[str, Any] = {"kv_pages": 4, "max_batched_tokens": 37}
"""Room for one sequence and a bit: prompts come in chunks, samples lose their pages."""


@cache
def policy_of(preset: Preset, seed: int = 0, attention: Any = None) -> Policy:
    """Sharper than a fresh model, so that tokens and neighbours matter."""
    policy = random_policy(TINY, PrecisionConfig(preset=preset, attention=attention), seed)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith("proj.weight") or name == "embed_tokens.weight":
                master.mul_(6)
    policy.publish()
    return policy


def requests(temperature: float = 1.0, **sampling: Any) -> list[Request]:
    """Prompts that end before, on and after the bounds of pages, one of them longer than two."""
    generator = torch.Generator().manual_seed(3)
    made: list[Request] = []
    for index, (length, samples, new) in enumerate(
        [(50, 3, 20), (64, 2, 12), (63, 2, 4), (3, 2, 25), (140, 2, 9)]
    ):
        token_ids = tuple(
            torch.randint(0, TINY.vocab_size, (length,), generator=generator).tolist()
        )
        made.append(
            Request(
                Prompt(f"p/{index}", "", token_ids),
                0,
                samples,
                SamplingParams(new, temperature, **sampling),
            )
        )
    return made


def generate_with(
    policy: Policy, wanted: list[Request], **sizes: Any
) -> tuple[list[list[Completion]], NativeEngine]:
    engine = NativeEngine(policy, RolloutConfig(**sizes), None, seed=0)
    return generate(engine, wanted), engine


def trainer_log_probs(
    policy: Policy, wanted: list[Request], groups: list[list[Completion]]
) -> torch.Tensor:
    """The training forward over all sequences in one packed batch, at the recorded temperatures:
    FP32 [N].
    """
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    temperatures: list[float] = []
    for request, group in zip(wanted, groups, strict=True):
        for completion in group:
            sequence = [*request.prompt.token_ids, *completion.token_ids]
            first = len(ids) + len(request.prompt.token_ids)
            rows += range(first - 1, len(ids) + len(sequence) - 1)
            temperatures += [completion.sequence.temperature] * len(completion.token_ids)
            ids += sequence
            positions += range(len(sequence))
            lengths.append(len(sequence))
    with torch.no_grad():
        weights = policy.weights("training")
        places = torch.tensor(positions)
        attend = PackedAttention(policy.flow.training, tuple(lengths), places)
        hidden = policy.decoder.hidden_states(weights, torch.tensor(ids), attend)
        targets = torch.tensor([ids[row + 1] for row in rows])
        return policy.decoder.lm_head.token_log_probs(
            weights, hidden[torch.tensor(rows)], targets, torch.tensor(temperatures)
        )[0]


def recorded_log_probs(groups: list[list[Completion]]) -> torch.Tensor:
    return torch.tensor(
        [log_prob for group in groups for completion in group for log_prob in completion.log_probs]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("preset", "attention"),
    [
        *((name, None) for name in ("fp8", "fp8-linear", "int8", "int8-linear", "bf16", "fp32")),
        ("fp8", "int8"),
        ("int8", "fp8"),
    ],
)
def test_recorded_log_probabilities_are_those_of_the_training_forward(
    preset: Preset, attention: str | None
):
    policy, wanted = policy_of(preset, attention=attention), requests()
    groups, engine = generate_with(policy, wanted, **TIGHT)
    assert engine.stats.preemptions > 0 and engine.stats.recomputed_tokens > 0
    assert engine.stats.chunks > 0
    assert engine.stats.copied_pages > 0
    recorded = recorded_log_probs(groups)
    assert recorded.std() > 0.5
    assert torch.equal(recorded, trainer_log_probs(policy, wanted, groups))


def test_a_flow_with_two_functions_is_told_apart():
    policy, wanted = policy_of("fp8-rollout"), requests()
    groups, _ = generate_with(policy, wanted)
    assert not policy.flow.exact
    assert (
        recorded_log_probs(groups) != trainer_log_probs(policy, wanted, groups)
    ).float().mean() > 0.5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_sampling_does_not_touch_what_is_recorded(sampling: dict[str, Any]):
    policy, wanted = policy_of("fp8"), requests(**sampling)
    groups, _ = generate_with(policy, wanted)
    assert torch.equal(recorded_log_probs(groups), trainer_log_probs(policy, wanted, groups))


@pytest.mark.exhaustive
def test_completions_do_not_depend_on_the_engines_sizes_or_on_the_order_of_requests():
    policy, wanted = policy_of("fp8"), requests()
    roomy, engine = generate_with(policy, wanted)
    assert engine.stats.preemptions == 0
    for sizes in (TIGHT, {"max_sequences": 2}, {"max_batched_tokens": 16, "kv_pages": 3}):
        assert generate_with(policy, wanted, **sizes)[0] == roomy
    assert generate_with(policy, wanted[::-1], kv_pages=5)[0] == roomy[::-1]
    alone = [generate_with(policy, [request])[0][0] for request in wanted[:2]]
    assert alone == roomy[:2]


def publish_once(policy: Policy) -> Callable[[Progress], None]:
    """A callback of ``generate`` that publishes larger weights once, in the middle."""
    version = policy.version

    def publish(progress: Progress) -> None:
        if progress.generated_tokens > 40 and policy.version == version:
            with torch.no_grad():
                for master in policy.masters.values():
                    master.mul_(1.5)
            policy.publish()

    return publish


def test_after_a_publication_nothing_of_the_old_weights_is_left():
    policy, wanted = random_policy(TINY, PrecisionConfig(preset="fp8"), 1), requests()
    engine = NativeEngine(policy, RolloutConfig(), None, seed=0)
    groups = generate(engine, wanted, publish_once(policy))
    assert engine.stats.weight_changes == 1
    recorded, new = recorded_log_probs(groups), trainer_log_probs(policy, wanted, groups)
    assert 0 < (recorded != new).sum() <= engine.stats.generated_tokens // 2  # those drawn before
    last = torch.tensor([len(c.token_ids) for group in groups for c in group]).cumsum(0) - 1
    ends_later = torch.tensor([len(c.token_ids) > 12 for group in groups for c in group])
    assert torch.equal(recorded[last[ends_later]], new[last[ends_later]])
    again = generate(engine, wanted)
    assert torch.equal(recorded_log_probs(again), trainer_log_probs(policy, wanted, again))


def test_nan_weights_are_an_error_and_leave_no_nan_in_the_pages():
    policy, wanted = random_policy(TINY, PrecisionConfig(preset="fp8"), 2), requests()
    long, short = (
        wanted[4:],
        [wanted[3], wanted[0]],
    )  # the shortest does not overwrite all that its neighbour makes it read
    engine = NativeEngine(policy, RolloutConfig(kv_pages=6), None, seed=0)
    expected = generate(engine, short)
    master = policy.masters["layers.0.qkv_proj.weight"]
    good = master.detach().clone()
    with torch.no_grad():
        master[250] = torch.nan  # a row of V
        policy.publish()
        with pytest.raises(NonFiniteError):
            generate(engine, long)
        master.copy_(good)
        policy.publish()
    assert torch.equal(recorded_log_probs(generate(engine, short)), recorded_log_probs(expected))
