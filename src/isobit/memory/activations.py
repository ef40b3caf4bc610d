"""Bytes that the forward and backward of a micro-batch take on a GPU beside weights and gradients
(``isobit.models.hopper_training``).

C hidden size, I intermediate size, V vocabulary, H query and G KV heads of D numbers, Q = (H + 2 G)
D, T tokens.  q(n) = n + n / 32 bytes are n numbers in E4M3 with an FP32 scale for each 128.

    saved by a layer, a token:
      none              2 C + x(C) + 2 Q + encoded + 2 H D + 4 H + x(H D) + 2 C + MLP
      mlp               the same without MLP = 4 I + x(C) + x(I)
      full              2 C
      encoded           H D + 4 H + 3 G D + 2 G                     E4M3, with V as FP16 copies; or 2 Q in BF16
      x(n)              q(n): an input as WGrad reads it; or 2 n in BF16, and none for H D, which is
                        the output itself

    what passes, the largest of (in bytes a token, but for products with V and C I):
      lm_head, forward  6 C T + 4 V rows                            a part of the logits: about 1 GiB
      lm_head, backward 6 C T + (6 V + 4 C) rows                    logits and their gradient: 2 GiB
      layer, forward    T (6 C + a norm and q(I) as read) and what the layer made and does not save
      layer, backward   T (4 C + what is computed again + the larger of)
                          MLP           2 I + 2 q(2 I) + 4 C, and 2 C I once: gradients quantised
                                        twice, the matrix transposed
                          attention     2 C + 4 H D + (4 H D + 4 G D + 8 H) + 4 G D, less 2 C + MLP,
                                        which is done

Sizes are those of the kernels' own tensors; the tests run the real passes over tensors without
storage and count.
"""

from dataclasses import dataclass

from isobit.config.schema import Recompute
from isobit.kernels.hopper.head_parts import BYTES_A_LOGIT, backward_rows, forward_rows
from isobit.models.config import ModelConfig
from isobit.precision.flow import PrecisionFlow
from isobit.precision.formats import BLOCK


def saved_bytes(shape: ModelConfig, flow: PrecisionFlow, recompute: Recompute, tokens: int) -> int:
    """What all layers keep for the backward of a micro-batch."""
    return tokens * sum(
        _Layer.of(shape, flow, layer).saved(recompute) for layer in range(shape.num_layers)
    )


def passing_bytes(
    shape: ModelConfig, flow: PrecisionFlow, recompute: Recompute, tokens: int
) -> dict[str, int]:
    """What is there for a while beside the saved activations, by the moment; one follows the
    other.
    """
    hidden, vocabulary = shape.hidden_size, shape.vocab_size
    layers = [_Layer.of(shape, flow, layer) for layer in range(shape.num_layers)]
    matrix = max(layer.transposed for layer in layers)
    backward_logits = (BYTES_A_LOGIT * vocabulary + 4 * hidden) * min(
        tokens, backward_rows(vocabulary)
    )
    return {
        "lm_head, forward": 6 * hidden * tokens
        + 4 * vocabulary * min(tokens, forward_rows(vocabulary)),
        "lm_head, backward": 6 * hidden * tokens + backward_logits,
        "a layer, forward": tokens * max(layer.forward(recompute) for layer in layers),
        "a layer, backward": tokens * max(layer.backward(recompute) for layer in layers) + matrix,
    }


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes a token of the tensors of one layer."""

    stream: int
    """The residual stream, or a gradient of it."""
    norm: int
    """In E4M3 as the next linear reads it, beside BF16."""
    qkv: int
    attended: int
    """Q, K and V as encoded, the output and the log-sum-exps."""
    qkv_input: int
    out_input: int
    gate_up: int
    mlp_inputs: int
    activation: int
    """The input of down_proj in E4M3, as FProp reads it, beside BF16."""
    mlp_gradients: int
    attention_gradients: int
    transposed: int
    """Bytes once: the largest matrix that DGrad transposes."""

    @classmethod
    def of(cls, shape: ModelConfig, flow: PrecisionFlow, layer: int) -> "_Layer":
        """The layer of that number."""
        hidden, mlp, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        queries, keys = shape.num_heads * dim, shape.num_kv_heads * dim
        sites = {name: flow.training.linear(layer, name) for name in shape.shape.linears}
        scaled = flow.training.attention_format(layer) == "e4m3"
        encoded = (
            queries + 4 * shape.num_heads + 3 * keys + 2 * shape.num_kv_heads
            if scaled
            else 2 * (queries + 2 * keys)
        )

        def read(name: str, numbers: int) -> int:  # by FProp, beside BF16
            return _quantised(numbers) if sites[name].forward == "e4m3" else 0

        def kept(name: str, numbers: int) -> int:  # for WGrad
            return _quantised(numbers) if sites[name].wgrad == "e4m3" else 2 * numbers

        def gradient(name: str, numbers: int) -> int:  # of an output, as DGrad and WGrad read it
            site = sites[name]
            if site.forward != "e4m3":
                return 2 * numbers
            return (
                2 * _quantised(numbers)
                if site.wgrad == "e4m3"
                else _quantised(numbers) + 2 * numbers
            )

        padded = (
            4 * queries + 4 * keys + 8 * shape.num_heads
        )  # copies in which every sequence is whole tiles
        return cls(
            stream=2 * hidden,
            norm=max(read("qkv_proj", hidden), read("gate_up_proj", hidden)),
            qkv=2 * (queries + 2 * keys),
            attended=encoded + 2 * queries + 4 * shape.num_heads,
            qkv_input=kept("qkv_proj", hidden),
            out_input=kept("o_proj", queries) if sites["o_proj"].wgrad == "e4m3" else 0,
            gate_up=4 * mlp,
            mlp_inputs=kept("gate_up_proj", hidden) + kept("down_proj", mlp),
            activation=read("down_proj", mlp),
            mlp_gradients=2 * mlp + gradient("gate_up_proj", 2 * mlp) + 4 * hidden,
            attention_gradients=2 * hidden + 4 * queries + padded + 4 * keys,
            transposed=max(
                [
                    linear.out_features * linear.in_features
                    for n, linear in shape.shape.linears.items()
                    if read(n, 1)
                ],
                default=0,
            ),
        )

    def saved(self, recompute: Recompute) -> int:
        if recompute == "full":
            return self.stream
        attention = 2 * self.stream + self.qkv_input + self.qkv + self.attended + self.out_input
        return attention if recompute == "mlp" else attention + self.gate_up + self.mlp_inputs

    def forward(self, recompute: Recompute) -> int:
        """Beside what it saves."""
        streams = (
            3 * self.stream
        )  # before the layer, or what was added to it; what attention adds; what the MLP adds
        if recompute == "none":
            return streams + self.norm + self.activation
        norm = self.norm or self.stream
        mlp = norm + self.gate_up + (self.activation or self.gate_up // 2)
        return streams + mlp if recompute == "mlp" else streams + mlp + norm + self.attended

    def backward(self, recompute: Recompute) -> int:
        """Beside what it saved."""
        again = self.saved("none") - self.saved(recompute)
        mlp = self.stream + self.gate_up + self.mlp_inputs  # gone when attention's turn comes
        return 2 * self.stream + again + max(self.mlp_gradients, self.attention_gradients - mlp)


def _quantised(numbers: int) -> int:
    return numbers + numbers * 4 // BLOCK
