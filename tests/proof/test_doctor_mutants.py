"""Every kernel made a little wrong on purpose is found, by the line of its name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from isobit.kernels import noise
from isobit.kernels.backend import backend_of
from isobit.kernels.operands import OutputGradient
from isobit.kernels.spec import (
    attention,
    experts,
    head,
    int8_backward,
    linear,
    pointwise,
    qkv,
    quantise,
)
from isobit.kernels.spec import backend as spec_backend
from isobit.kernels.spec.attention import PackedAttention
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, QuantTensor
from isobit.proof import cases, doctor, doctor_quantisers
from isobit.proof.doctor import _int8_backward, _verify_starter, gradient_checks, kernel_checks
from isobit.proof.doctor_findings import Check, Finding
from isobit.proof.doctor_quantisers import quantiser_checks
from isobit.proof.verify import VerifyOptions
from tests.proof.faults import TorchWith, exp2_in_attention, rollouts_attention_in_fp32

Patch = pytest.MonkeyPatch


def failures(checks: list[Check]) -> dict[str, Finding]:
    found = {check.name: check.find() for check in checks}
    assert all(finding.fix for finding in found.values() if finding.status != "pass")
    return {name: finding for name, finding in found.items() if finding.status == "fail"}


@pytest.mark.exhaustive
def test_kernels_as_they_are_pass() -> None:
    assert failures([*quantiser_checks(), *kernel_checks((1, 2)), *gradient_checks((1, 2))]) == {}


def round_scales_late(patch: Patch) -> None:
    # Amax of 448 times a power of two gets twice its scale.
    patch.setattr(quantise, "_ROUND_UP_ABOVE_1_75", 0x1FFFFE)


def no_floor(patch: Patch) -> None:
    patch.setattr(quantise, "AMAX_FLOOR", 2.0**-126)


def truncate_values(patch: Patch) -> None:
    exact = quantise._to_e4m3
    # Rounds twice.
    patch.setattr(
        quantise, "_to_e4m3", lambda scaled, *groups: exact(scaled.bfloat16().float(), *groups)
    )


def keep_nan_blocks(patch: Patch) -> None:
    patch.setattr(quantise, "E8M0_NAN_BYTE", 254)


@pytest.mark.parametrize("mutate", [round_scales_late, no_floor, truncate_values, keep_nan_blocks])
def test_wrong_quantisers(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    found = failures(quantiser_checks())
    assert {"quantise 1x128", "quantise 128x1", "quantise Q, K and V"} & set(found)
    assert all(
        "stored is" in finding.detail or "Error" in finding.detail for finding in found.values()
    )


def test_a_wrong_quantiser_of_blocks_alone(monkeypatch: Patch) -> None:
    exact = quantise.quantise_blocks
    monkeypatch.setattr(
        quantise, "quantise_blocks", lambda x, scales: exact(x * (1 + 2.0**-6), scales)
    )
    assert list(failures(quantiser_checks())) == ["quantise 128x128"]


def rounds_away_from_zero(patch: Patch) -> None:
    exact = quantise.round_to_int8

    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = exact(x)[1]
        inverse = 127 / x.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
        away = (x * inverse).abs().add(0.5).floor().copysign(x).nan_to_num(0, 0, 0)
        return away.to(torch.int8).masked_fill(scales.isnan()[..., None], 0), scales

    patch.setattr(quantise, "round_to_int8", rounded)


def divides_by_the_scale(patch: Patch) -> None:
    exact = quantise.round_to_int8

    def divided(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = exact(x)[1]
        values = (x / scales[..., None]).round().nan_to_num(0.0, 0.0, 0.0)
        return values.to(torch.int8), scales

    patch.setattr(quantise, "round_to_int8", divided)


def sums_in_another_order(patch: Patch) -> None:
    def hadamard(x: torch.Tensor, size: int) -> torch.Tensor:
        blocks = x.reshape(*x.shape[:-1], -1, size)
        for _ in range(size.bit_length() - 1):
            a, b = blocks.chunk(2, -1)  # the farthest first
            blocks = torch.stack([a + b, a - b], -1).flatten(-2)
        return blocks.view(x.shape)

    patch.setattr(quantise, "hadamard", hadamard)


@pytest.mark.parametrize(
    "mutate", [rounds_away_from_zero, divides_by_the_scale, sums_in_another_order]
)
def test_wrong_quantisers_of_int8(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert list(failures(quantiser_checks())) == ["quantise INT8"]


def test_inexact_products_of_torch_are_a_warning(monkeypatch: Patch) -> None:
    for module in (spec_backend, doctor_quantisers):
        monkeypatch.setattr(module, "has_int8_products", lambda: True)
        monkeypatch.setattr(module, "int_mm_is_exact", lambda: False)
    (found,) = [one for one in quantiser_checks() if one.name == "INT8 products of torch"]
    finding = found.find()
    assert finding.status == "warn" and "the bits are the same" in finding.fix


def test_a_wrong_decoder_and_a_wrong_grid(monkeypatch: Patch) -> None:
    exact = quantise.decode_e4m3
    monkeypatch.setattr(
        quantise, "decode_e4m3", lambda values: exact(values).nan_to_num().clamp(min=-440.0)
    )
    monkeypatch.setattr(quantise, "GRID_BITS", 21)
    assert set(failures(quantiser_checks())) == {"E4M3 bytes to numbers", "snap to the grid"}


def gemm_in_fp32(patch: Patch) -> None:
    patch.setattr(
        linear,
        "_block_product",
        lambda a, b, k: a[:, 128 * k :][:, :128].float() @ b[:, 128 * k :][:, :128].float().t(),
    )


def gemm_of_bf16_by_a_library(patch: Patch) -> None:
    patch.setattr(linear, "grid_gemm_nt", lambda a, b: a.float() @ b.float().t())


def linear_that_sees_its_batch(patch: Patch) -> None:
    exact = linear.fp8_gemm_nt
    patch.setattr(
        linear, "fp8_gemm_nt", lambda a, b: exact(a, b) * (1 + 2.0**-7 * (len(a.values) == 1))
    )


def int8_linear_that_sees_its_batch(patch: Patch) -> None:
    exact = linear.int8_gemm_nt
    patch.setattr(
        linear, "int8_gemm_nt", lambda a, b: exact(a, b) * (1 + 2.0**-7 * (len(a.values) == 1))
    )


def integers_that_saturate(patch: Patch) -> None:
    """As sums of pairs in 16 bits do on a CPU without VNNI."""
    exact = linear.integer_product
    patch.setattr(linear, "integer_product", lambda a, b: exact(a, b).clamp(-(2**15), 2**15 - 1))


def int8_scales_in_the_wrong_order(patch: Patch) -> None:
    def product(a: Int8Rows, b: Int8Rows) -> torch.Tensor:
        return linear.integer_product(a.values, b.values).float() * b.scales * a.scales[:, None]

    patch.setattr(linear, "int8_gemm_nt", product)


def norm_that_forgets_epsilon(patch: Patch) -> None:
    exact = pointwise.rms_norm
    patch.setattr(pointwise, "rms_norm", lambda x, weight, epsilon: exact(x, weight, 0.05))


def norm_that_is_split_over_threads(patch: Patch) -> None:
    exact = pointwise.row_sum
    patch.setattr(
        pointwise,
        "row_sum",
        lambda x: exact(x) if torch.get_num_threads() == 1 else exact(x.flip(-1)),
    )


def rotation_backwards(patch: Patch) -> None:
    exact = qkv.rotate
    patch.setattr(qkv, "rotate", lambda x, table: exact(x, table.backward()))


def hadamard_without_its_last_step(patch: Patch) -> None:
    exact = quantise.hadamard
    patch.setattr(quantise, "hadamard", lambda x, size: exact(x, size // 2))


def hadamard_by_a_library_for_one_row(patch: Patch) -> None:
    exact = quantise.hadamard
    patch.setattr(
        quantise,
        "hadamard",
        lambda x, size: exact(x, size) if len(x) > 1 else x @ exact(torch.eye(size), size),
    )


def silu_of_torch(patch: Patch) -> None:
    def forward(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate.contiguous()) * up

    patch.setattr(pointwise, "swiglu", forward)


def router_in_bf16(patch: Patch) -> None:
    patch.setattr(experts, "grid_gemm_nt", lambda a, b: (a @ b.t()).float())


def experts_in_the_wrong_order(patch: Patch) -> None:
    exact = experts.sum_of_ranks
    patch.setattr(experts, "sum_of_ranks", lambda values: exact(values.flip(-1)))


def wrong_exp_on_both_sides_of_attention(patch: Patch) -> None:
    patch.setattr(attention, "torch", TorchWith(exp=lambda x: torch.exp(x * 1.01)))


def scalar_head_of_one_row_by_a_library(patch: Patch) -> None:
    exact = head.scalar_head
    patch.setattr(
        head,
        "scalar_head",
        lambda hidden, weight: exact(hidden, weight) if len(hidden) > 1 else hidden @ weight,
    )


def log_softmax_of_torch_for_one_row(patch: Patch) -> None:
    exact = head.log_softmax

    def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        return (
            exact(logits, temperatures)
            if len(logits) > 1
            else torch.log_softmax(logits / temperatures[:, None], -1)
        )

    patch.setattr(head, "log_softmax", log_softmax)


def another_noise(patch: Patch) -> None:
    patch.setattr(noise, "_MULTIPLIER_2", noise._MULTIPLIER_1)


def a_draw_with_noise_by_row(patch: Patch) -> None:
    exact = head.draw
    patch.setattr(
        head,
        "draw",
        lambda log_probs, keys, positions: exact(log_probs, torch.arange(len(keys)), positions),
    )


def exp_that_depends_on_its_place(patch: Patch) -> None:
    exact = torch.exp
    patch.setattr(torch, "exp", lambda x: exact(x).index_fill_(0, torch.tensor(0), 0.5))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        (gemm_in_fp32, "cpu: GEMM in BF16"),
        (gemm_in_fp32, "cpu: GEMM in E4M3"),
        (gemm_of_bf16_by_a_library, "cpu: GEMM in BF16"),
        (linear_that_sees_its_batch, "cpu: linear in E4M3"),
        (int8_linear_that_sees_its_batch, "cpu: linear in INT8"),
        (integers_that_saturate, "cpu: GEMM in INT8"),
        (int8_scales_in_the_wrong_order, "cpu: GEMM in INT8"),
        (norm_that_forgets_epsilon, "cpu: RMSNorm"),
        (norm_that_is_split_over_threads, "cpu: RMSNorm"),
        (rotation_backwards, "cpu: rotary positions"),
        (hadamard_without_its_last_step, "cpu: Hadamard matrix"),
        (hadamard_by_a_library_for_one_row, "cpu: Hadamard matrix"),
        (silu_of_torch, "cpu: SwiGLU"),
        (router_in_bf16, "cpu: router"),
        (experts_in_the_wrong_order, "cpu: experts"),
        (exp2_in_attention, "cpu: attention in BF16"),
        (wrong_exp_on_both_sides_of_attention, "cpu: attention in E4M3"),
        (rollouts_attention_in_fp32, "cpu: attention in BF16"),
        (scalar_head_of_one_row_by_a_library, "cpu: scalar head"),
        (log_softmax_of_torch_for_one_row, "cpu: log-softmax"),
        (another_noise, "cpu: sampling"),
        (a_draw_with_noise_by_row, "cpu: sampling"),
        (exp_that_depends_on_its_place, "cpu: exp, log and rsqrt"),
    ],
)
def test_wrong_kernels(mutate: Callable[[Patch], None], name: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    found = failures([check for check in kernel_checks((1, 2)) if check.name == name])
    assert list(found) == [name] and "Error" not in found[name].detail


def silu_of_torch_by_rows(patch: Patch) -> None:
    """A number's bits depend on its column alone, so that no batch shows it."""

    def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    patch.setattr(pointwise, "gated", gated)


def test_an_operation_that_depends_on_the_column(monkeypatch: Patch) -> None:
    silu_of_torch_by_rows(monkeypatch)
    (found,) = failures([c for c in kernel_checks((1, 2)) if c.name == "cpu: SwiGLU"]).values()
    assert "SwiGLU of columns: rows in batches of 1 and of 1003" in found.detail


def larger(x: Any) -> Any:
    """1% more of the first gradient that a backward returns."""
    if isinstance(x, tuple):
        return (larger(x[0]), *x[1:])
    if isinstance(x, OutputGradient):
        return OutputGradient(larger(x.rows), x.tokens)
    if isinstance(x, QuantTensor | Int8Rows | Int8Parts):
        return replace(x, scales=x.scales * 1.01)
    return x * 1.01


BACKWARDS: list[tuple[Any, str, int | None, str]] = [
    (linear, "dgrad", None, "linear in E4M3"),
    (linear, "dgrad", None, "linear in BF16"),
    (linear, "wgrad", 2, "linear in E4M3"),
    (linear, "wgrad", 2, "linear in BF16"),
    (linear, "output_gradient", None, "linear in E4M3"),
    (linear, "input_saved", None, "linear in E4M3"),
    (linear, "dgrad", None, "linear with a backward in INT8"),
    (linear, "wgrad", 2, "linear with a backward in INT8"),
    (linear, "quantise_parts", None, "linear with a backward in INT8"),
    (linear, "transposed_parts", None, "linear with a backward in INT8"),
    (linear, "balanced_rows", None, "linear with a backward in INT8"),
    (pointwise, "rms_norm_backward", None, "RMSNorm"),
    (pointwise, "rms_norm_backward", 5, "RMSNorm"),
    (qkv, "rms_norm_backward", None, "Q, K and V"),
    (qkv, "rms_norm_backward", 5, "Q, K and V"),
    (qkv, "rotate", None, "Q, K and V"),
    (qkv, "hadamard", None, "Q, K and V before 8 bits"),
    (PackedAttention, "backward", None, "attention"),
    (pointwise, "swiglu_backward", None, "SwiGLU"),
    (experts, "experts_backward", None, "experts"),
    (experts, "swiglu_gradient", None, "experts"),
    (experts, "wgrad", 2, "experts"),
    (experts, "route_backward", None, "experts"),
    (experts, "route_backward", 6, "experts"),
    (pointwise, "embedding_backward", 2, "embedding"),
    (head, "token_log_probs_backward", None, "log-prob"),
    (head, "token_log_probs_backward", 5, "log-prob"),
    (head, "scalar_head_backward", None, "scalar head"),
    (head, "scalar_head_backward", 3, "scalar head"),
]
"""Of what, which function, the argument that it adds to (None: what it returns), and the check."""


@pytest.mark.few(12)
@pytest.mark.parametrize(("owner", "name", "target", "check"), BACKWARDS)
def test_a_backward_that_is_one_percent_wrong(
    owner: Any, name: str, target: int | None, check: str, monkeypatch: Patch
) -> None:
    exact = getattr(owner, name)

    def wrong(*arguments: Any) -> Any:
        made = exact(*arguments)
        if target is None:
            return larger(made)
        arguments[target].mul_(1.01)
        return made

    monkeypatch.setattr(owner, name, wrong)
    name = f"cpu: gradients of {check}"
    found = failures([one for one in gradient_checks((1,)) if one.name == name])
    assert list(found) == [name] and "Error" not in found[name].detail


def no_balance(patch: Patch) -> None:
    ones = torch.ones(cases.ROWS)
    patch.setattr(int8_backward, "balance", lambda dy, x: (ones, ones))


def keep_tokens_of_zeros(patch: Patch) -> None:
    """Their other side sets the scale of every row."""
    exact = int8_backward.balance

    def balance(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = exact(dy, x)
        return left.where(left != 0, 1.0), right.where(right != 0, 1.0)

    patch.setattr(int8_backward, "balance", balance)


def one_matrix_for_all_parts(patch: Patch) -> None:
    """As if nothing were fused, of dY alone."""
    exact = linear.quantise_parts

    def quantised(dy: torch.Tensor, parts: tuple[int, ...]) -> Int8Parts:
        one = exact(dy, (sum(parts),))
        return Int8Parts(one.values, one.scales.repeat(len(parts), 1), parts)

    patch.setattr(linear, "quantise_parts", quantised)


@pytest.mark.parametrize("mutate", [no_balance, keep_tokens_of_zeros, one_matrix_for_all_parts])
def test_a_wrong_backward_in_int8(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    name = "cpu: gradients of linear with a backward in INT8"
    assert list(failures([one for one in gradient_checks((1,)) if one.name == name])) == [name]


@pytest.mark.parametrize("product", ["dgrad", "wgrad"])
def test_a_back_end_whose_backward_in_int8_differs_in_a_bit(product: str) -> None:
    specification = backend_of(torch.device("cpu"))

    class Other:
        """The specification, with a bit of one product changed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(specification, name)

        def dgrad(self, *arguments: Any) -> torch.Tensor:
            made = specification.dgrad(*arguments)
            if product == "dgrad":
                made.view(torch.int16)[5, 7] ^= 1
            return made

        def wgrad(self, dy: Any, x: Any, grad: torch.Tensor, site: Any) -> None:
            specification.wgrad(dy, x, grad, site)
            if product == "wgrad":
                grad.view(torch.int32)[5, 7] ^= 1

    other: Any = Other()
    found = Check("other", partial(_int8_backward, other), "fix").find()
    assert found.status == "fail" and "1 of " in found.detail
    assert Check("same", partial(_int8_backward, specification), "fix").find().status == "pass"


@pytest.mark.exhaustive
def test_a_starter_model_that_differs_in_one_bit(monkeypatch: Patch) -> None:
    exact = head.log_softmax

    def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        log_probs = exact(logits, temperatures)
        log_probs[0] = torch.nextafter(log_probs[0], torch.tensor(-torch.inf))
        return log_probs

    monkeypatch.setattr(head, "log_softmax", log_softmax)
    monkeypatch.setattr(doctor, "_SMALL", VerifyOptions(prompts=1, samples=2, max_new_tokens=2))
    finding = Check("starter", _verify_starter, "fix").find()
    assert finding.status == "fail" and "log-probabilities differ" in finding.detail
