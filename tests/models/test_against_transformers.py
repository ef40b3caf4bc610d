"""The decoder in FP32 computes what transformers' own models compute: logits, gradients and greedy
tokens of every family, for random small configurations, to positions beyond the context that they
were pretrained with.

Logits may be apart by 1e-4 of the largest of them, a gradient by 1e-4 of its tensor's largest
element: with weights of 0.15, FP32 itself is off by 2e-5 of the largest.  With gated delta nets it
is off by more, so that theirs are computed in FP64.  A greedy token must be theirs wherever their
two largest logits are more than 0.01 apart.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.models.config import Lora, ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.families import FAMILIES
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import published_tensors
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from tests.suites import examples

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DENSE: tuple[Family, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "phi3",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "qwen3_5_text",
)
MIXTURES: tuple[Family, ...] = (
    "mixtral", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip
ORIGINAL, LENGTHS = 32, (70, 3)
"""The context before any stretch, and the lengths of the packed sequences."""
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "truncate": False, "mscale": 1.5}
    | {"mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8},
]
CLOSE_ROUTES = 1e-5
"""Where the last expert chosen is not further above the first one left, rounding may choose."""
CLOSE_LOGITS = 0.01
OFFSET = "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
"""Families whose norms multiply by 1 + their weights."""
QUICK = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@st.composite
def configurations(draw: st.DrawFn, families: Sequence[Family]) -> "PreTrainedConfig":
    """Sizes that are no multiples of 128, windows, scalings and experts where there are some."""
    from transformers import AutoConfig  # here: its configurations take 3 s of each worker

    family: Family = draw(st.sampled_from(sorted(families)))
    is_hybrid = FAMILIES[family].is_hybrid
    layers = draw(st.integers(1 + is_hybrid, 2 + is_hybrid))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    rope = draw(st.sampled_from(SCALINGS)) | {"rope_theta": draw(st.sampled_from([1e4, 1e6]))}
    if rope["rope_type"] in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = ORIGINAL
    values: dict[str, Any] = {
        "vocab_size": draw(st.sampled_from([50, 128])),
        # Llama's configuration asks for a multiple of the heads
        "hidden_size": draw(st.sampled_from([24, 48, 120, 144, 264])),
        "intermediate_size": draw(st.sampled_from([48, 128, 200])),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16, 20, 32])),
        "max_position_embeddings": 256,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": rope,
        "initializer_range": draw(st.sampled_from([0.02, 0.15])),
        "attn_implementation": "eager",
        "pad_token_id": None,  # whose row would have no gradient
    }
    windows = FAMILIES[family].windows
    window = draw(st.sampled_from([None, 1, 7, 40, 300]))
    if windows == "every layer":
        values["sliding_window"] = window
    elif windows == "upper layers" and window is not None:
        values |= {"use_sliding_window": True, "sliding_window": window}
        values["max_window_layers"] = draw(st.integers(0, 2))
    if family in MIXTURES:
        values |= draw(experts(family))
    if family == "smollm3":
        values["no_rope_layers"] = draw(st.sampled_from([None, [0, 1], [1, 0], [0, 0]]))
        values["no_rope_layer_interval"] = draw(st.integers(1, 3))
    if windows == "layer types":
        values |= draw(layer_types(family, layers, rope)) | {"sliding_window": window or 7}
    own: dict[str, st.SearchStrategy[dict[str, Any]]] = {
        "gemma3_text": st.fixed_dictionaries(
            {"query_pre_attn_scalar": st.sampled_from([values["head_dim"], 9, 168])}
        ),
        "phi3": fused(values["num_attention_heads"]),
        "granite": multipliers(),
    }
    if is_hybrid:
        own[family] = delta_nets(layers, values["head_dim"], rope)
    values |= draw(own[family]) if family in own else {}
    return AutoConfig.for_model(family, **values)


@st.composite
def layer_types(
    draw: st.DrawFn, family: Family, layers: int, rope: dict[str, Any]
) -> dict[str, Any]:
    """Layers with a window and without, each kind with its rotary positions."""
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    found: dict[str, Any] = {"layer_types": draw(st.lists(kinds, min_size=layers, max_size=layers))}
    if FAMILIES[family].has_two_ropes:
        thetas = [rope["rope_theta"]] if family == "olmo3" else [1e4, 1e6]
        plain = {"rope_type": "default", "rope_theta": draw(st.sampled_from(thetas))}
        rope.pop("truncate", None)  # transformers looks for it beside the two tables
        found["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
    return found


@st.composite
def delta_nets(draw: st.DrawFn, layers: int, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Of Qwen3.5: some layers, but not all, with a gated delta rule.  Each multiplies gradients, so
    that with weights of 0.15 FP32 is off by more than is allowed.
    """
    kinds = ["linear_attention", "full_attention"]
    others = st.lists(st.sampled_from(kinds), min_size=layers - 2, max_size=layers - 2)
    kinds = draw(st.permutations([*kinds, *draw(others)]))
    heads = draw(st.sampled_from([1, 2, 3]))
    partials = [one for one in (1.0, 0.75, 0.5, 0.25) if head_dim * one % 2 == 0]
    partial = draw(st.sampled_from(partials))
    return {
        "initializer_range": 0.05,
        "rope_parameters": rope | {"partial_rotary_factor": partial},
        "layer_types": kinds,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * draw(st.sampled_from([1, 2, 4])),
        "linear_key_head_dim": draw(st.sampled_from([8, 12, 32])),
        "linear_value_head_dim": draw(st.sampled_from([8, 20, 32])),
        "linear_conv_kernel_dim": draw(st.sampled_from([2, 3, 4])),
    }


def multipliers() -> st.SearchStrategy[dict[str, float]]:
    """Of Granite."""
    return st.fixed_dictionaries(
        {
            "embedding_multiplier": st.sampled_from([1.0, 0.3, 12.0]),
            "attention_multiplier": st.sampled_from([1.0, 0.015625, 0.4]),
            "residual_multiplier": st.sampled_from([1.0, 0.22, 1.7]),
            "logits_scaling": st.sampled_from([1.0, 0.7, 16.0]),
        }
    )


@st.composite
def fused(draw: st.DrawFn, heads: int) -> dict[str, Any]:
    """Of Phi-3: LongRoPE with a context that makes sequences take one list of factors, and heads of
    which a part is turned.
    """
    head_dim, partial = draw(st.sampled_from([(8, 1.0), (16, 0.75), (20, 0.6), (32, 0.5)]))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e4, 1e6]))}
    original, pairs = draw(st.sampled_from([2, 256])), int(head_dim * partial) // 2
    if draw(st.booleans()):
        factors = st.lists(st.floats(1, 30), min_size=pairs, max_size=pairs)
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope |= {"short_factor": draw(factors), "long_factor": draw(factors)}
        rope |= draw(st.sampled_from([{}, {"factor": 4.0}, {"attention_factor": 1.3}]))
    return {
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "rope_parameters": rope | {"partial_rotary_factor": partial},
        "original_max_position_embeddings": original,
    }


@st.composite
def experts(draw: st.DrawFn, family: Family) -> dict[str, Any]:
    count = draw(st.integers(2, 6))
    values = {"num_experts_per_tok": draw(st.integers(1, count)), "experts_implementation": "eager"}
    if family in ("mixtral", "gpt_oss"):
        return values | {"num_local_experts": count}
    values |= {
        "num_experts": count,
        "moe_intermediate_size": draw(st.sampled_from([24, 40, 136])),
    }
    if family in ("qwen3_5_moe_text", "qwen3_next"):
        values["shared_expert_intermediate_size"] = draw(st.sampled_from([24, 56, 136]))
    if family == "qwen3_5_moe_text":
        return values
    return values | {
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.sampled_from([1, 1, 2])),
        "mlp_only_layers": draw(st.sampled_from([[], [0], [1]])),
    }


def checkpoint_tensors(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a module of transformers holds -> under the names of a checkpoint.

    The module holds all experts of a layer in one tensor, gate above up: [E, 2 I, C] and [E, C, I];
    of gpt-oss transposed, rows of gate and of up in turn.
    """
    names = FAMILIES[config.family].experts
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        block, _, matrix = name.partition(".mlp.experts.")
        if names is None or not (matrix or name.endswith(".mlp.gate.weight")):
            found[name] = tensor
        elif names.is_stacked:
            kind = "bias" if matrix.endswith("bias") else "weight"
            rows = tensor if kind == "bias" else tensor.transpose(1, 2)
            parts = {"down_proj": rows}
            if matrix.startswith("gate_up"):
                parts = {"gate_proj": rows[:, 0::2], "up_proj": rows[:, 1::2]}
            for part, experts_of_part in parts.items():
                for index, expert in enumerate(experts_of_part):
                    found[f"{block}.mlp.experts.{index}.{part}.{kind}"] = expert
        elif not matrix:
            found[name.replace(".mlp.", f".{names.block}.")] = tensor
        else:
            parts = [names.down] if matrix == "down_proj" else [names.gate, names.up]
            for index, expert in enumerate(tensor):
                for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    found[f"{block}.{names.block}.experts.{index}.{part}.weight"] = rows
    return found


def fuse_tensors(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a module of transformers holds -> under the masters' names, with q, k, v and gate, up
    put together.
    """
    named, masters = checkpoint_tensors(config, tensors), build_decoder(config).masters()
    return {
        name: torch.cat([named[part] for part in (*master.parts, *master.adapter)])
        for name, master in masters.items()
    }


def random_model(config: "PreTrainedConfig", seed: int) -> Any:
    """transformers' model, FP32, with biases and norms that show."""
    torch.manual_seed(seed)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight", "sinks")):
            is_plain = "linear_attn" in name or config.model_type not in OFFSET
            centre = float("norm" in name and is_plain)
            # so that the clamps of gpt-oss are reached
            spread = 5.0 if name.endswith("gate_up_proj_bias") else 0.3
            torch.nn.init.normal_(parameter, mean=centre, std=spread)
    return model


def described(model: Any) -> ModelConfig:
    return ModelConfig.from_hf(
        model.config.to_dict() | {"architectures": [type(model).__name__]}, "test"
    )


Adapters = Mapping[str, torch.Tensor]
"""A and B by PEFT's names."""


def add_adapters(model: Any, lora: Lora, seed: int) -> Adapters:
    """Let the targets of transformers' model add s B A x to what they make, with s B A about half
    as large as their matrices, whatever the rank and s, so that FP32 is hardly further off.
    """
    generator, added = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()

    def drawn(size: float, *shape: int) -> torch.Tensor:
        return (size * torch.randn(shape, generator=generator)).requires_grad_()

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in lora.targets:
            a = drawn(0.15, lora.rank, module.in_features)
            b = drawn(0.15 / (lora.scale * lora.rank**0.5), module.out_features, lora.rank)
            path = f"base_model.model.{name}"
            added |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}

            def add(_: Any, x: Any, y: Any, a: Any = a, b: Any = b) -> torch.Tensor:
                return y + lora.scale * (x[0] @ a.t() @ b.t())

            module.register_forward_hook(add)
    return added


def as_policy(model: Any, lora: Lora | None = None, added: Adapters | None = None) -> Policy:
    config = replace(described(model), lora=lora)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors |= {name: tensor.detach() for name, tensor in (added or {}).items()}
    return Policy(config, PrecisionConfig(preset="fp32"), fuse_tensors(config, tensors))


def theirs(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    """transformers' logits of sequences, each alone, end to end [T, V].  Skips a draw in which
    rounding decides which expert a token goes to.
    """
    # without a single router transformers fails where their logits are asked for
    routers = (".mlp.gate.weight", ".mlp.router.weight")
    routed = any(name.endswith(routers) for name, _ in model.named_parameters())
    logits = []
    for ids in sequences:
        given = model(ids[None], **({"output_router_logits": True} if routed else {}))
        logits.append(given.logits[0])
        for routes in given.router_logits if routed else ():
            top, count = routes.sort(-1, descending=True).values, model.config.num_experts_per_tok
            gaps = top[:, count - 1 : count] - top[:, count : count + 1]
            assume(not bool((gaps < CLOSE_ROUTES).any()))
    return torch.cat(logits)


def check_greedy(tokens: torch.Tensor, logits: torch.Tensor) -> None:
    """int64 [T] are the largest of their logits [T, V], wherever the second is not close."""
    best = logits.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > CLOSE_LOGITS
    assert torch.equal(tokens[clear], best.indices[clear, 0])


@settings(max_examples=examples(30), deadline=None, suppress_health_check=QUICK)
@given(configurations(DENSE), st.integers(0, 1000))
def test_logits_and_gradients(hf_config: "PreTrainedConfig", seed: int) -> None:
    check_logits_and_gradients(hf_config, seed)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=QUICK)
@given(configurations(MIXTURES), st.integers(0, 1000))
def test_logits_and_gradients_of_mixtures(hf_config: "PreTrainedConfig", seed: int) -> None:
    check_logits_and_gradients(hf_config, seed)


def check_logits_and_gradients(
    hf_config: "PreTrainedConfig", seed: int, lora: Lora | None = None
) -> None:
    model = random_model(hf_config, seed)
    added = {} if lora is None else add_adapters(model, lora, seed)
    policy = as_policy(model, lora, added)
    ids, targets = torch.randint(0, policy.config.vocab_size, (2, sum(LENGTHS)))
    is_wide = policy.config.delta is not None
    if is_wide:
        model.double()
        for tensor in added.values():
            tensor.data = tensor.data.double()
    with InFp64() if is_wide else nullcontext():
        expected = theirs(model, list(ids.split(LENGTHS)))
        torch.nn.functional.cross_entropy(expected, targets).backward()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    packed = PackedPass(policy, ids, positions, LENGTHS, recompute="none")
    hidden, head, weights = packed.forward(), policy.decoder.lm_head, policy.weights("training")
    ours = head.logits(weights, hidden)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    check_greedy(ours.argmax(-1), expected.detach())
    temperatures = torch.ones(sum(LENGTHS))
    d_loss = torch.full_like(temperatures, -1 / sum(LENGTHS))
    packed.backward(head.backward(weights, policy.gradient, hidden, targets, temperatures, d_loss))
    gradients = fuse_tensors(
        policy.config,
        {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in (*model.named_parameters(remove_duplicate=False), *added.items())
        },
    )
    for name, master in policy.masters.items():
        assert master.grad is not None
        scale = gradients[name].abs().max().clamp(min=1e-3)
        assert (master.grad - gradients[name]).abs().max() <= 1e-4 * scale, name


class InFp64(TorchFunctionMode):
    """A block in which a model in FP64 stays in it where its code asks for FP32. With delta rules
    after each other theirs in FP32 is off by 1e-4, too, so that both together may be off by more.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **named)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=QUICK)
@given(configurations((*DENSE, *MIXTURES)), st.integers(0, 1000))
def test_greedy_tokens_of_the_engine(hf_config: "PreTrainedConfig", seed: int) -> None:
    check_engine(hf_config, seed)


def test_layers_with_and_without_rotary_positions() -> None:
    """A forward has both, whichever comes first."""
    from transformers import AutoConfig

    for layers in ([0, 1, 0], [1, 0, 1]):
        config = AutoConfig.for_model(
            "smollm3", vocab_size=50, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
            no_rope_layers=layers, initializer_range=0.15, pad_token_id=None,
            attn_implementation="eager",
        )  # fmt: skip
        check_logits_and_gradients(config, 0)
        check_engine(config, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_a_quarter_of_each_head_is_turned(family: str) -> None:
    """As in the published models, whose norms of heads keep their elements apart."""
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"experts_implementation": "eager"}
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24)
    config = AutoConfig.for_model(
        family, vocab_size=50, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        **(sizes if family in MIXTURES else {}), rope_parameters=rope, tie_word_embeddings=False,
        initializer_range=0.05, pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    check_logits_and_gradients(config, 0)
    check_engine(config, 0)


def test_gemma_in_bf16_scales_embeddings_and_norms_as_they_do() -> None:
    """The root of 300, 17.32, is 17.375 in BF16, and 1 + weight is rounded nowhere; what goes to
    another engine is the weight again.
    """
    from transformers.models.gemma3 import modeling_gemma3 as gemma3

    config = ModelConfig("gemma3_text", 64, 300, 48, 1, 2, 1, 20, 128, 1e-6, 1e6, True)
    policy, ids, name = random_policy(config, "bf16", 0), torch.arange(64), "norm.weight"
    with torch.no_grad():
        policy.masters[name].normal_(std=0.3)
    policy.publish()
    weights, weight = policy.weights("training"), policy.masters[name].detach().bfloat16()
    table = gemma3.Gemma3TextScaledWordEmbedding(64, 300, 0, 300**0.5).bfloat16()
    table.weight.data = weights.plain["embed_tokens.weight"]
    hidden = policy.decoder.embedding.forward(weights, ids)
    assert torch.equal(hidden, table(ids))
    assert torch.equal(weights.plain[name], 1.0 + weight.float())
    norm = gemma3.Gemma3RMSNorm(300)
    norm.weight.data = weight
    ours = policy.decoder.norm.final(weights, hidden, None)[1]
    torch.testing.assert_close(ours, norm(hidden), atol=0, rtol=2**-8)
    assert (ours == norm(hidden)).float().mean() > 0.99
    assert torch.equal(dict(published_tensors(policy))[f"model.{name}"], weight)


def test_gpt_oss_in_bf16_is_as_near_as_theirs() -> None:
    """To FP32, with every expert chosen, so that rounding decides no route."""
    from transformers import AutoConfig

    hf_config = AutoConfig.for_model(
        "gpt_oss", vocab_size=128, hidden_size=96, intermediate_size=72, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        sliding_window=16, num_local_experts=3, num_experts_per_tok=3, initializer_range=0.1,
        attn_implementation="eager", experts_implementation="eager", pad_token_id=None,
    )  # fmt: skip
    model = random_model(hf_config, 0)
    model.bfloat16().float()
    policy, ids = as_policy(model), torch.randint(0, 128, (90,))
    rounded = Policy(policy.config, PrecisionConfig(preset="bf16"), policy.masters)
    hidden = PackedPass(rounded, ids, torch.arange(90), (90,), recompute="none").forward()
    ours = rounded.decoder.lm_head.logits(rounded.weights("training"), hidden)
    with torch.no_grad():
        exact = model(ids[None]).logits[0]
        others = model.bfloat16()(ids[None]).logits[0].float()
    assert (ours - exact).norm() <= (others - exact).norm() <= 0.02 * exact.norm()


def check_engine(hf_config: "PreTrainedConfig", seed: int, lora: Lora | None = None) -> None:
    """Over the pages of the KV cache: each token is theirs after the same tokens before it."""
    model = random_model(hf_config, seed)
    policy = as_policy(model, lora, {} if lora is None else add_adapters(model, lora, seed))
    prompts = [
        torch.randint(0, policy.config.vocab_size, (n,)) for n in (ORIGINAL + 13, 3, ORIGINAL - 2)
    ]
    engine = NativeEngine(policy, RolloutConfig(), None, seed=0)
    wanted = [
        Request(Prompt(f"p/{n}", "", tuple(ids.tolist())), 0, 1, SamplingParams(24, temperature=0))
        for n, ids in enumerate(prompts)
    ]
    for ids, [completion] in zip(prompts, generate(engine, wanted), strict=True):
        tokens = torch.tensor(completion.token_ids)
        assert len(tokens) == 24
        with torch.no_grad():
            logits = theirs(model, [torch.cat([ids, tokens])])
        check_greedy(tokens, logits[len(ids) - 1 : -1])
