"""The pass over packed sequences, forward and backward, against autograd of a plain decoder: the
very pass that a GPU runs.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import pytest
import torch
from torch.nn import functional

from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import Recompute
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.decoder import Layer
from isobit.models.layers import Gradient, Weights
from isobit.models.mlp import Mlp
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.records.batch import PackedBatch
from tests.memory import meta_memory
from tests.models.policies import delta_nets, disturbed

LENGTHS = (5, 17, 1, 40, 131)
TOKENS = sum(LENGTHS)
LEVELS: tuple[Recompute, ...] = get_args(Recompute)
MIXED = PrecisionConfig(
    preset="fp8", wgrad="bf16", first_layers_bf16=1, modules_bf16=("layers.2.o_proj",)
)
FLOWS = {
    **{
        name: PrecisionConfig.model_validate(name)
        for name in ("fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8")
    },
    "int8 before": PrecisionConfig(preset="int8", dgrad="fp8", wgrad="bf16"),
    "mixed": MIXED,
}
EXHAUSTIVE = pytest.mark.exhaustive
Gradients = dict[str, torch.Tensor]
ScalarHead = Literal["value", "score"]


class OtherGradients(NamedTuple):
    """The loss's by the scores beside the log-probabilities."""

    entropies: torch.Tensor
    values: torch.Tensor


def make(
    family: Family,
    precision: PrecisionConfig,
    tied: bool = False,
    kv_heads: int = 2,
    head: ScalarHead | None = None,
) -> Policy:
    """Three layers whose linears fill blocks of 128, and norms and biases that do something."""
    dim = 64 if kv_heads == 2 else 32
    sizes = 64, 128, 256, 3, 4, kv_heads, dim, 256, 1e-6, 1e4, tied
    config = ModelConfig(family, *sizes, **delta_nets(family, 3))
    config = replace(config, score_head=head == "score", value_head=head == "value")
    return disturbed(random_policy(config, precision, seed=0))


def make_batch(vocab_size: int) -> tuple[PackedBatch, torch.Tensor]:
    """A batch that learns from two rows of three, and the gradient of its log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.arange(TOKENS) % 3 > 0).nonzero().squeeze(1)
    nothing = torch.zeros(len(rows))
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[rows]
    batch = PackedBatch(
        token_ids=torch.randint(vocab_size, (TOKENS,), generator=generator),
        positions=torch.cat([torch.arange(n) for n in LENGTHS]),
        lengths=LENGTHS,
        rows=rows,
        targets=torch.randint(vocab_size, (len(rows),), generator=generator),
        sequence=sequence,
        temperatures=torch.linspace(0.6, 1.4, len(rows)),
        recorded_log_probs=nothing,
        old_log_probs=nothing,
        advantages=nothing,
    )
    return batch, torch.randn(len(rows), generator=generator) / len(rows)


class PlainDecoder:
    """The equations of ``isobit.models.decoder`` in torch's own operations and one dtype."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.config = policy.config
        self.masters = {
            name: master.detach().to(dtype).requires_grad_()
            for name, master in policy.masters.items()
        }
        frequencies = torch.arange(256).double()[:, None] * inverse_frequencies(policy.config)
        self.cos, self.sin = (x.to(dtype) for x in (frequencies.cos(), frequencies.sin()))

    def linear(self, x: torch.Tensor, path: str) -> torch.Tensor:
        return functional.linear(
            x, self.masters[f"{path}.weight"], self.masters.get(f"{path}.bias")
        )

    def norm(self, x: torch.Tensor, path: str) -> torch.Tensor:
        weight = self.masters.get(f"{path}.weight")
        return x if weight is None else functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        (x1, x2), n = x.chunk(2, -1), x.shape[0]
        cos, sin = self.cos[:n, None], self.sin[:n, None]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    def attention(self, a: torch.Tensor, path: str) -> torch.Tensor:
        """Of one sequence."""
        heads, groups = self.config.num_heads, self.config.num_kv_heads
        qkv = self.linear(a, f"{path}.qkv_proj").view(len(a), heads + 2 * groups, -1)
        q, k, v = qkv.split([heads, groups, groups], 1)
        q, k = self.rotate(self.norm(q, f"{path}.q_norm")), self.norm(k, f"{path}.k_norm")
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (self.rotate(k), v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear(out.transpose(0, 1).reshape(len(a), -1), f"{path}.o_proj")

    def hidden_states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of one sequence."""
        h = self.masters["embed_tokens.weight"][token_ids]
        for layer in range(self.config.num_layers):
            path = f"layers.{layer}"
            h = h + self.attention(self.norm(h, f"{path}.input_norm"), path)
            b = self.norm(h, f"{path}.post_attention_norm")
            gate, up = self.linear(b, f"{path}.gate_up_proj").chunk(2, -1)
            h = h + self.linear(functional.silu(gate) * up, f"{path}.down_proj")
        return self.norm(h, "norm")

    def scores(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """The log-probabilities of the batch's targets, the entropies, and the values."""
        hidden = torch.cat(
            [self.hidden_states(ids) for ids in batch.token_ids.split(list(batch.lengths))]
        )[batch.rows]
        head = self.masters.get("lm_head.weight", self.masters["embed_tokens.weight"])
        logits = hidden @ head.t() / batch.temperatures.to(head.dtype)[:, None]
        found = logits.log_softmax(-1)
        scores = {
            "log_probs": found.gather(1, batch.targets[:, None])[:, 0],
            "entropies": -(found.exp() * found).sum(-1),
        }
        for name in ("value_head.weight", "score.weight"):
            if name in self.masters:
                scores["values"] = (hidden @ self.masters[name].t())[:, 0]
        return scores

    def gradients(
        self, batch: PackedBatch, d_log_probs: torch.Tensor, others: OtherGradients | None = None
    ) -> tuple[torch.Tensor, Gradients]:
        """The log-probabilities of the batch's targets, and the gradients of every master."""
        scores, d = self.scores(batch), {"log_probs": d_log_probs}
        d |= {} if others is None else others._asdict()
        found = torch.autograd.grad(
            [scores[name] for name in d],
            list(self.masters.values()),
            [given.to(scores[name].dtype) for name, given in d.items()],
        )
        return scores["log_probs"].detach(), dict(zip(self.masters, found, strict=True))


def gradients(
    policy: Policy,
    recompute: Recompute = "none",
    passes: int = 1,
    others: OtherGradients | None = None,
) -> Gradients:
    """What the passes left in the masters, which are clean again."""
    batch, d_log_probs = make_batch(policy.config.vocab_size)
    for _ in range(passes):
        scored = ScoredPass(policy, batch, recompute)
        scored.forward()
        scored.backward(d_log_probs, *(others or ()))
    found = {name: master.grad for name, master in policy.masters.items()}
    for master in policy.parameters():
        master.grad = None
    assert all(gradient is not None for gradient in found.values()), "every master has one"
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "a KV head for each"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gradients_are_those_of_autograd(family: Family, kv_heads: int, tied: bool) -> None:
    """Against FP64, with the same decoder in FP32 as the yardstick; FP32 throughout, where the only
    difference is rounding.
    """
    policy = make(family, PrecisionConfig(preset="fp32"), tied, kv_heads)
    batch, d_log_probs = make_batch(64)
    log_probs, exact = PlainDecoder(policy, torch.float64).gradients(batch, d_log_probs)
    _, yardstick = PlainDecoder(policy, torch.float32).gradients(batch, d_log_probs)
    ours = gradients(policy)
    torch.testing.assert_close(
        Scorer(policy).score(batch).log_probs.double(), log_probs, rtol=0, atol=5e-6
    )
    assert list(ours) == list(exact) == list(policy.masters)
    for name, gradient in exact.items():
        assert ours[name].dtype == torch.float32
        assert error(ours[name], gradient) < 3 * error(yardstick[name], gradient) + 1e-6, name


@pytest.mark.few(2)
@pytest.mark.parametrize("flow", [name for name in FLOWS if name != "fp32"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gradients_in_lower_precision_are_near_those(family: Family, flow: str) -> None:
    policy = make(family, FLOWS[flow])
    _, exact = PlainDecoder(policy, torch.float64).gradients(*make_batch(64))
    least = 0.999 if flow == "bf16" else 0.95  # E4M3 is worst for the few numbers of a head's norm
    for name, ours in gradients(policy).items():
        cosine = torch.cosine_similarity(ours.flatten().double(), exact[name].flatten(), 0)
        assert cosine > least, (name, float(cosine))
        assert float(ours.norm() / exact[name].norm()) == pytest.approx(1, abs=0.1), name


@pytest.mark.few(1)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "olmo2", "gemma3_text", "qwen3_5_text"])
def test_computing_again_changes_no_bit(family: Family, flow: str) -> None:
    policy = make(family, FLOWS[flow], tied=True)
    saved, *again = (gradients(policy, level) for level in LEVELS)
    for other in again:
        assert all(torch.equal(saved[name], other[name]) for name in saved)


@pytest.mark.few(1)
@pytest.mark.parametrize("flow", FLOWS)
def test_gradients_of_two_passes_add_up(flow: str) -> None:
    """One addition of one finished sum an element: twice the gradient to the bit.  A tied embedding
    has two sums a pass.
    """
    policy = make("qwen3", FLOWS[flow])
    once, twice = gradients(policy), gradients(policy, passes=2)
    assert all(torch.equal(twice[name], once[name] + once[name]) for name in once)


@pytest.mark.few(2)
@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("flow", FLOWS)
def test_the_forward_has_the_bits_of_the_decoder(flow: str, recompute: Recompute) -> None:
    policy = make("qwen3", FLOWS[flow])
    batch, _ = make_batch(64)
    graph, weights = policy.flow.training, policy.weights("training")
    attend = policy.backend.packed_attention(graph, LENGTHS, batch.positions)
    plain = policy.decoder.hidden_states(weights, batch.token_ids, attend)
    saving = PackedPass(policy, batch.token_ids, batch.positions, LENGTHS, recompute).forward()
    assert torch.equal(saving, plain)
    scores, passed = Scorer(policy).score(batch), ScoredPass(policy, batch, recompute).forward()
    assert torch.equal(scores.log_probs, passed.log_probs)
    assert torch.equal(scores.entropies, passed.entropies)


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["fp32", "fp8", "int8"])
def test_a_sequence_has_no_say_in_the_forward_of_another(preset: Preset) -> None:
    policy = make("qwen3", PrecisionConfig(preset=preset))
    batch, _ = make_batch(64)
    whole = PackedPass(policy, batch.token_ids, batch.positions, LENGTHS, "none").forward()
    for ids, part, n in zip(
        batch.token_ids.split(LENGTHS), whole.split(LENGTHS), LENGTHS, strict=True
    ):
        alone = PackedPass(policy, ids, torch.arange(n), (n,), "none").forward()
        assert torch.equal(alone, part)


class OtherMlp(Mlp):
    """An MLP that saves something of its own."""

    def saving_forward(self, weights: Weights, h: Any, x: Any, routes: Any) -> Any:
        h, x, saved = super().saving_forward(weights, h, x, routes)
        return h, x, {"saved": saved}

    def again(self, weights: Weights, h: Any, x: Any) -> Any:
        return {"saved": super().again(weights, h, x)}

    def backward(
        self, weights: Weights, gradient: Gradient, saved: Any, d: Any, routes: Any
    ) -> Any:
        return super().backward(weights, gradient, saved["saved"], d, routes)


@pytest.mark.few(2)
@pytest.mark.parametrize("recompute", LEVELS)
def test_what_an_mlp_saves_is_its_own_matter(recompute: Recompute) -> None:
    """A pass gives back to a unit what that has saved, whatever it is."""
    policy = make("qwen3", FLOWS["bf16"])
    expected = gradients(policy)
    layers = tuple(
        Layer(layer.attention, OtherMlp(policy.config, index))
        for index, layer in enumerate(policy.decoder.layers)
    )
    policy.decoder = replace(policy.decoder, layers=layers)
    found = gradients(policy, recompute)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_pass_is_taken_back_once_and_holds_nothing_then() -> None:
    policy = make("qwen3", FLOWS["bf16"])
    batch, d_log_probs = make_batch(64)
    scored = ScoredPass(policy, batch, "none")
    with pytest.raises(AssertionError, match="the forward comes first"):
        scored.backward(d_log_probs)
    scored.forward()
    scored.backward(d_log_probs)
    with pytest.raises(AssertionError, match="the forward comes first"):
        scored.backward(d_log_probs)
    assert not scored._pass._saved and scored._pass._last_h is None


@pytest.mark.parametrize(
    "family", ["olmo3", *(pytest.param(one, marks=EXHAUSTIVE) for one in ("granite", "phi3"))]
)
def test_a_gpu_is_asked_for_tensors_of_the_right_shapes(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without launching a kernel: norms behind blocks, for example, are made although the linear
    that reads the residual stream has 8 bits.
    """
    meta_memory.without_launches(monkeypatch)
    config = ModelConfig(family, 64, 256, 256, 2, 4, 4, 64, 256, 1e-6, 1e4, True)
    config = replace(config, partial_rotary_factor=0.75 if family == "phi3" else 1.0)
    for preset in ("fp8", "int8"):
        policy = meta_memory.meta_policy(config, PrecisionConfig.model_validate(preset))
        for recompute in LEVELS:
            assert meta_memory.micro_batch_bytes(policy, (128, 70), recompute)["peak"] > 0
