"""Run in Triton's interpreter by test_interpreted.py: a whole model on the portable back end.  What
is sampled, in chunks of prompts and decoded, has the log-probabilities of training's forward, and
those and the gradients are as near to FP32's as the specification's are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from isobit.config.lora import LORA_TARGETS, SHARED_GATE
from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.kernels.backend import Backend
from isobit.kernels.spec.backend import SpecBackend
from isobit.kernels.spec.quantise import publish, republish
from isobit.kernels.triton import experts, int8_backward, quantise, sampling
from isobit.kernels.triton import int8 as products
from isobit.kernels.triton.backend import TritonBackend
from isobit.memory.cache_size import CacheSize
from isobit.models import policy as policy_module
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.precision.quant_tensor import E4M3
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.runner import PolicyRunner
from isobit.training.comparison import Comparison
from tests.kernels.comparison import relative_error
from tests.kernels.hopper.interpreted_int8_backward import turned
from tests.kernels.triton.interpreted_attention import prepare as prepare_attention
from tests.kernels.triton.interpreted_products import amax_bits
from tests.kernels.triton.interpreted_products import prepare as prepare_products
from tests.models.policies import delta_nets, disturbed, whole_batch
from tests.rollout.test_drafts import Knowing, guess, known_of

DENSE = ModelConfig("qwen3", 72, 64, 96, 1, 2, 1, 64, 256, 1e-6, 1e4, tied_embeddings=False)
ADAPTED = replace(DENSE, lora=Lora(4, 8.0, LORA_TARGETS))
PHI = replace(DENSE, family="phi3", num_kv_heads=2, head_dim=96)
GEMMA = replace(
    DENSE, family="gemma3_text", num_layers=2, head_dim=256, sliding_window=3,
    windowless_layers=(1,), window_rope_theta=100.0,
)  # fmt: skip
MIXED = replace(DENSE, family="qwen3_moe", experts=Experts(4, 2, 40, renormalise=True))
GPT_OSS = replace(MIXED, family="gpt_oss", num_layers=2, sliding_window=3, windowless_layers=(1,))
HYBRID = replace(DENSE, family="qwen3_5_text", num_layers=2, **delta_nets("qwen3_5_text", 2))
HYBRID_EXPERTS = replace(
    HYBRID, family="qwen3_next", experts=Experts(4, 2, 40, renormalise=True, shared_size=40)
)
SHARED_ADAPTED = replace(HYBRID_EXPERTS, lora=Lora(4, 8.0, (*LORA_TARGETS[4:], SHARED_GATE)))
LENGTHS = (3, 4)
PROMPTS = ((5, 7, 9, 11, 13), (5, 8))
OVER_A_CHUNK = ((5, 8), tuple(range(3, 66)))
NEW_TOKENS = 3
RUNNERS: dict[str, Callable[[Any, CacheSize], Any]] = {
    "direct": PolicyRunner,
    "captured": lambda policy, size: GraphRunner(policy, size, 4),
}


@triton.jit
def _gumbel(seed, index):
    """Without the library's logarithm of 1 + x, which the interpreter lacks."""
    odd = (sampling.splitmix64(seed, index.to(tl.uint64)) >> 11) | 1
    return -tl.log(-tl.log(odd.to(tl.float32) * (1.0 / (1 << 53)) * 0.999))


_launched = interpreter.GridExecutor.__call__


def _without_e4m3(executor: Any, *given: Any, **named: Any) -> Any:
    """Cards before sm_89 have no kernel that takes E4M3: it is bytes."""
    values = (*given, *named.values())
    assert not any(isinstance(one, torch.Tensor) and one.dtype == E4M3 for one in values)
    return _launched(executor, *given, **named)


class Interpreted(TritonBackend):
    """On the host, whose steps are not captured and whose memory is not its own."""

    is_asynchronous = False
    capture: Any = SpecBackend.capture
    to_host: Any = SpecBackend.to_host
    synchronize: Any = SpecBackend.synchronize

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.memory: Any = None
        self.publish: Any = publish  # the same bytes, in a hundredth of the time
        self.republish: Any = republish


def prepare() -> None:
    prepare_products()
    prepare_attention()
    int8_backward.transposed_parts = experts.transposed_parts = turned
    quantise.amax_bits = amax_bits
    products.cut_up = (
        products.tiles
    )  # of few tokens too, which no bit depends on, in a tenth of the time
    sampling._gumbel = _gumbel
    executor: Any = interpreter.GridExecutor
    executor.__call__ = _without_e4m3


def policy_of(
    make: Callable[[torch.device], Backend], config: ModelConfig, preset: Preset
) -> Policy:
    policy_module.backend_of = make
    torch.manual_seed(0)
    return disturbed(random_policy(config, preset, 0))


def check_sampled(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    batched: int = 4,
    runners: Sequence[str] = tuple(RUNNERS),
) -> None:
    """By the runners, whose tokens are the same."""
    sampling_of = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8)
    requests = [
        Request(Prompt(str(i), "", ids), 0, 1, sampling_of) for i, ids in enumerate(prompts)
    ]
    rollout = RolloutConfig(max_sequences=4, max_batched_tokens=batched, kv_pages=6)
    scorer, drawn = Scorer(policy), dict[str, list[TokenSequence]]()
    for name in runners:
        made = generate(NativeEngine(policy, rollout, None, 0, RUNNERS[name]), requests)
        drawn[name] = [one.sequence for completions in made for one in completions]
        batch = lay_end_to_end(drawn[name])
        found = Comparison.of_batch(batch, scorer.score(batch))
        assert found.tokens_compared == NEW_TOKENS * len(prompts)
        assert not found.differs, (name, found)
    ids = [[list(one.token_ids) for one in sequences] for sequences in drawn.values()]
    assert all(one == ids[0] for one in ids)


def check_guessed(policy: Policy, prompts: Sequence[tuple[int, ...]], new: int) -> None:
    """Guesses change nothing, also where some are wrong."""
    requests = [
        Request(Prompt(str(i), "", ids), 0, 1, SamplingParams(new)) for i, ids in enumerate(prompts)
    ]
    rollout = RolloutConfig(max_sequences=4, max_batched_tokens=80, kv_pages=6)
    expected = generate(NativeEngine(policy, rollout, None, 0, RUNNERS["direct"]), requests)
    engine = NativeEngine(policy, rollout, None, 0, RUNNERS["captured"])
    guess(engine, Knowing(known_of(requests, expected), 0.7, policy.config.vocab_size, 4))
    assert generate(engine, requests) == expected
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 0


def scored(policy: Policy) -> Sequence[torch.Tensor]:
    """The log-probabilities of fixed tokens, and the gradients of all masters."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(policy.config.vocab_size, (sum(LENGTHS),), generator=generator)
    for master in policy.parameters():
        master.grad = torch.zeros_like(master)
    one = ScoredPass(policy, whole_batch(ids, LENGTHS, ids.roll(1)), "none")
    log_probs = one.forward().log_probs
    one.backward(torch.randn(len(ids), generator=generator))
    return [log_probs, *(master.grad for master in policy.parameters() if master.grad is not None)]


def check(config: ModelConfig, preset: Preset, runners: Sequence[str] = tuple(RUNNERS)) -> None:
    prepare()
    ours = policy_of(Interpreted, config, preset)
    check_sampled(ours, runners=runners)
    theirs, exact = (policy_of(lambda _: SpecBackend(), config, one) for one in (preset, "fp32"))
    made = [scored(policy) for policy in (ours, theirs, exact)]
    names = "log-probabilities", *ours.shapes
    errors, yardsticks = (
        torch.tensor([relative_error(one, true) for one, true in zip(side, made[2], strict=True)])
        for side in made[:2]
    )
    # a gradient of a norm is a few numbers, whose roundings differ
    allowed = 1.5 * yardsticks + 1e-3
    assert (errors <= allowed).all(), list(zip(names, errors, yardsticks, strict=True))
    assert errors.mean() <= 1.1 * yardsticks.mean() + 1e-3, (errors, yardsticks)


def quick() -> None:
    check(DENSE, "bf16", ["captured"])


def bf16() -> None:
    check(DENSE, "bf16")


def fp8() -> None:
    check(DENSE, "fp8")


def int8() -> None:
    check(DENSE, "int8")


def adapters() -> None:
    check(ADAPTED, "int8")


def phi() -> None:
    check(PHI, "int8")


def gemma() -> None:
    check(GEMMA, "int8")


def gpt_oss() -> None:
    check(GPT_OSS, "int8")


def gpt_oss_in_fp8() -> None:
    """What is sampled alone: in E4M3 the gradients of two sinks a layer tell nothing."""
    prepare()
    check_sampled(policy_of(Interpreted, GPT_OSS, "fp8"))


def experts_in_int8() -> None:
    check(MIXED, "int8")


def experts_in_fp8() -> None:
    check(MIXED, "fp8")


def hybrid() -> None:
    check(HYBRID, "bf16")


def hybrid_with_experts() -> None:
    check(HYBRID_EXPERTS, "bf16")


def adapters_of_a_shared_expert() -> None:
    check(SHARED_ADAPTED, "int8")


def hybrid_over_a_chunk() -> None:
    """What is sampled alone: a prompt that ends in front of a chunk's last token, in parts."""
    prepare()
    check_sampled(policy_of(Interpreted, HYBRID, "bf16"), OVER_A_CHUNK, 40)


def hybrid_guesses() -> None:
    prepare()
    check_guessed(policy_of(Interpreted, HYBRID, "bf16"), OVER_A_CHUNK, 8)
