"""The decoder in FP32 computes what transformers' own models compute: logits and gradients, for
random small configurations.
"""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def fuse_tensors(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors under the checkpoint's names -> under the masters' names, with q, k, v and gate, up
    put together.
    """
    masters = build_decoder(config).masters()
    return {
        name: torch.cat([tensors[part] for part in master.parts])
        for name, master in masters.items()
    }


@st.composite
def configurations(draw: st.DrawFn) -> Any:
    family = draw(st.sampled_from(sorted(CONFIGS)))
    kv_heads, repeat, head_dim = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([8, 16, 32])),
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e4, 1e6]))}
    if family == "llama" and draw(st.booleans()):
        rope |= {"rope_type": "llama3"} | LLAMA3
    hidden = draw(
        st.sampled_from([24, 48, 120, 144, 264])
    )  # Llama's configuration asks for a multiple of the heads
    return CONFIGS[family](
        vocab_size=draw(st.sampled_from([50, 128])),
        hidden_size=hidden,
        intermediate_size=draw(st.sampled_from([48, 128, 200])),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=kv_heads * repeat,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=rope,
        initializer_range=draw(st.sampled_from([0.02, 0.15])),
        attn_implementation="eager",
    )


def as_policy(model: Any) -> Policy:
    config = ModelConfig.from_hf(
        model.config.to_dict() | {"architectures": [type(model).__name__]}, "test"
    )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Policy(config, PrecisionConfig(preset="fp32"), fuse_tensors(config, tensors))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations(), st.integers(0, 1000))
def test_logits_and_gradients(hf_config: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    policy = as_policy(model)
    lengths = (70, 3)
    ids = torch.randint(0, hf_config.vocab_size, (sum(lengths),))
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = PackedPass(policy, ids, positions, lengths, recompute="none")
    hidden, head, weights = packed.forward(), policy.decoder.lm_head, policy.weights("training")
    logits = [model(part[None]).logits[0] for part in ids.split(lengths)]
    ours = head.logits(weights, hidden)
    torch.testing.assert_close(ours, torch.cat(logits), atol=1e-4, rtol=1e-4)
    targets = torch.randint(0, hf_config.vocab_size, (sum(lengths),))
    temperatures = torch.ones(sum(lengths))
    d_loss = torch.full_like(temperatures, -1 / sum(lengths))
    packed.backward(head.backward(weights, policy.gradient, hidden, targets, temperatures, d_loss))
    torch.nn.functional.cross_entropy(torch.cat(logits), targets).backward()
    theirs = fuse_tensors(
        policy.config, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    )
    for name, master in policy.masters.items():
        assert master.grad is not None
        scale = theirs[name].abs().max().clamp(min=1e-3)
        assert (master.grad - theirs[name]).abs().max() <= 1e-4 * scale, name
