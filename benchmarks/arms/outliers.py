"""Activation outliers planted in a model that computes the same function: a stress for FP8.

    w_norm[c] 2^k,   W[:, c] 2^-k    for every matrix W that reads that norm's output

One channel c of each 128 gets them, so that each group of activations that shares a scale has one.
Powers of two change no mantissa, in BF16 neither.  E4M3 has 18 binary orders of magnitude for all
numbers of a group, and what lies at the lower end loses bits: on SmolLM2, log-probabilities of
``fp8-rollout`` are as far from the trainer's with 2^14 as without (1.6 and 1.75 nats at most over
1,512 tokens of ``isobit verify`` on a CPU), and four times as far (7.0) with 2^17.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

EXPONENT = 17
EVERY, FIRST = 128, 5
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Of each norm of a layer."""


def plant(model: Path, to: Path, exponent: int = EXPONENT) -> None:
    """Copy a model folder of the Llama family, whose weights are one file, with outliers of
    2^``exponent``.
    """
    shutil.copytree(model, to, dirs_exist_ok=True)
    tensors = load_file(to / "model.safetensors")
    factor = 2.0**exponent
    for name, weight in tensors.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        for reader in READERS.get(norm, ()):
            tensors[f"{layer}.{reader}.weight"][:, FIRST::EVERY] /= factor
        if norm in READERS:
            weight[FIRST::EVERY] *= factor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
