"""Outliers that are planted in a model leave its function alone, and make activations larger."""

from pathlib import Path

import pytest
import torch

from experiments.proof.suite import EVERY, FIRST, plant


def test_the_function_stays(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=2 * EVERY,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    plant(tmp_path / "model", tmp_path / "other", 17)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    seen = list[torch.Tensor]()
    for one in (model, other):
        norm = one.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, given, output: seen.append(output))
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens).logits, other(tokens).logits)
    factors = torch.ones(2 * EVERY)
    factors[FIRST::EVERY] = 2.0**17
    assert torch.equal(seen[1], seen[0] * factors)
