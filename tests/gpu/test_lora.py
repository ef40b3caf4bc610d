"""On a GPU too, adapters are part of one function of rollout and training, and learn."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import Preset, named_precision
from isobit.config.training import Recompute
from isobit.kernels.operands import AdapterGradients, AdapterWeight, LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.models.adapter_delivery import check_delivered
from isobit.models.adapters import drawn_adapters
from isobit.models.config import Lora
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.models.saving import save_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.precision.flow import Site
from isobit.proof.verify import VerifyOptions, verify_policy
from isobit.starter import starter_folder
from isobit.util.errors import MismatchError
from tests.gpu.conftest import SHAPES
from tests.gpu.kernels import GPU, IS_HOPPER
from tests.models.policies import whole_batch
from tests.rollout.test_adapters import adapters_of, check_together

ALL = Lora(8, 16.0, LORA_TARGETS)
SOME = Lora(33, 7.0, ("k_proj", "v_proj", "up_proj"), rslora=True)
LENGTHS = (1, 18, 67, 300)
OPTIONS = VerifyOptions(prompts=6, samples=2, max_new_tokens=16)


BATCHES = (*range(1, 301, 13), 2, 16, 17, 63, 64, 65, 128, 129, 256, 300, 512, 513)
"""Rows that are taken of ``TRAINED``."""
TRAINED = 2100
LARGE = ("qkv of the 8B shape", "gate and up", "a long sum")
"""Products whose parts are summed first in some of ``BATCHES``."""
PRODUCTS = {
    "one target": (16, 1100, 200, ((0, 200),)),
    "qkv of the 8B shape": (32, 4096, 6144, ((0, 4096), (4096, 5120), (5120, 6144))),
    "gate and up": (32, 4096, 24576, ((0, 12288), (12288, 24576))),
    "a long sum": (64, 12288, 4096, ((0, 4096),)),
    "odd sizes, with a gap": (33, 576, 960, ((0, 576), (768, 960))),
}
"""Rank, columns of x and of y, and the targets' columns of y."""


def adapter_of(name: str, device: str = "cuda") -> tuple[AdapterWeight, int, int]:
    """And the columns of x and y."""
    rank, k, n, targets = PRODUCTS[name]
    down, up = (Site(f"o_proj.lora_{kind}", "adapter", "bf16") for kind in "AB")
    a = normal(rank * len(targets), k) * k**-0.5
    b = normal(sum(stop - start for start, stop in targets), rank)
    return (
        AdapterWeight(
            LinearWeight(down, a.to(device)),
            LinearWeight(up, b.to(device)),
            tuple(slice(*one) for one in targets),
            1.7,
        ),
        k,
        n,
    )


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    adapter, k, n = adapter_of(name)
    x, y = normal(TRAINED, k).cuda(), normal(TRAINED, n).cuda()
    low, whole = GPU.adapter_low(x, adapter), y.clone()
    saved = GPU.add_adapter(whole, x, adapter, save=True)
    assert saved is not None and torch.equal(saved, low) and low.any()
    ways = set[bool]()
    for rows in BATCHES:
        for first in (0, TRAINED - rows):
            part = slice(first, first + rows)
            assert torch.equal(GPU.adapter_low(x[part].contiguous(), adapter), low[part])
            for save in (False, True):
                ours = y[part].clone()
                made = GPU.add_adapter(ours, x[part].contiguous(), adapter, save)
                assert torch.equal(ours, whole[part]), (rows, save)
                if not save:
                    ways.add(made is None)
    assert ways == ({True, False} if name in LARGE else {True})


@pytest.mark.skipif(not IS_HOPPER, reason="only Hopper's kernels begin early")
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("rows", [1, 32, 256, 1100])
@pytest.mark.parametrize("name", LARGE)
def test_kernels_that_begin_early_read_what_is_complete(
    name: str, rows: int, save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph, whose launches leave no gap, where memory is used again from one linear to the
    next, and y is made just before.
    """
    adapter, k, n = adapter_of(name)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, given = (
        torch.randn(6, rows, columns, generator=generator, device="cuda").bfloat16()
        for columns in (k, n)
    )
    made = torch.zeros_like(given)

    def linears() -> list[torch.Tensor]:
        for x, start, y in zip(inputs, given, made, strict=True):
            torch.mul(start, 2, out=y)
            GPU.add_adapter(y, x, adapter, save)
        return [GPU.adapter_low(x, adapter) for x in inputs]

    monkeypatch.setattr(GPU.products, "overlaps", False)
    low, expected = linears(), made.clone()
    monkeypatch.setattr(GPU.products, "overlaps", True)
    linears()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linears()
    for _ in range(20):
        graph.replay()
        assert torch.equal(made, expected)
    assert all(map(torch.equal, found, low))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 37, 600])
def test_the_backward_is_as_near_to_fp64_as_the_specification(name: str, tokens: int) -> None:
    adapter, k, n = adapter_of(name)
    on_cpu, *_ = adapter_of(name, "cpu")
    x, dy, dx = normal(tokens, k), normal(tokens, n), normal(tokens, k)
    low = specification.adapter_low(x, on_cpu)
    exact = exact_gradients(dy, x, low, dx, on_cpu)
    given = (dy, x, low, dx)
    theirs = gradients_of(specification, given, on_cpu)
    ours = gradients_of(GPU, tuple(one.cuda() for one in given), adapter)
    again = gradients_of(GPU, tuple(one.cuda() for one in given), adapter)
    for mine, other, their, right in zip(ours, again, theirs, exact, strict=True):
        assert torch.equal(mine, other)
        allowed = 1.2 * (their.double() - right).norm() + 1e-5 * right.norm()
        assert (mine.cpu().double() - right).norm() <= allowed


def gradients_of(
    module: Any, given: Sequence[torch.Tensor], adapter: AdapterWeight
) -> tuple[torch.Tensor, ...]:
    """-> dX, and the gradients of A and B, which were ones before."""
    dy, x, low, dx = given
    dx, matrices = dx.clone(), (adapter.down.matrix, adapter.up.matrix)
    grads = [torch.ones(one.shape, device=x.device) for one in matrices if torch.is_tensor(one)]
    module.adapter_backward(dy, x, low, dx, adapter, AdapterGradients(*grads))
    return dx, *grads


def exact_gradients(
    dy: torch.Tensor, x: torch.Tensor, low: torch.Tensor, dx: torch.Tensor, adapter: AdapterWeight
) -> tuple[torch.Tensor, ...]:
    """In FP64, without rounding."""
    a, b = adapter.down.matrix, adapter.up.matrix
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    d_low, d_up = torch.zeros(low.shape).double(), torch.zeros(b.shape).double()
    for place, columns, rows in adapter.targets():
        d = dy[:, columns].double()
        d_up[rows] = d.t() @ low[:, place].double()
        d_low[:, place] = d @ b[rows].double()
    d_low *= adapter.scale
    return dx.double() + d_low @ a.double(), 1 + d_low.t() @ x.double(), 1 + d_up


def policy_of(shape: str, preset: Preset, lora: Lora = ALL, device: str = "cuda") -> Policy:
    """With adapters that are not zero, and the same numbers on every device."""
    config = replace(SHAPES[shape], lora=lora)
    drawn = ((name, one.to(device)) for name, one in random_masters(config, 0))
    masters = drawn_adapters(drawn, config, 0)
    policy = Policy(config, named_precision(preset), masters, device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.parameters():
            master.add_((0.05 * torch.randn(master.shape, generator=generator)).to(master))
    policy.publish()
    return policy


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_no_log_probability_differs(shape: str, preset: Preset) -> None:
    model = SHAPES[shape]
    is_routed = model.experts is not None and model.experts.shared_size is None
    of_experts = LORA_TARGETS[4:] if is_routed else ()
    targets = tuple(name for name in model.lora_targets if name not in of_experts)
    result = verify_policy(policy_of(shape, preset, Lora(8, 16.0, targets)), OPTIONS)
    assert result.comparison.tokens_differing == 0
    assert result.missing == () and result.comparison.tokens_compared > 2_000


@pytest.mark.parametrize("preset", ["fp8-linear", "int8-linear", "fp8"])
def test_any_rank_and_targets_are_exact(preset: Preset) -> None:
    assert verify_policy(policy_of("qwen3", preset, SOME), OPTIONS).exit_code == 0


def gradients(policy: Policy, recompute: Recompute) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(policy.config.vocab_size, (2, sum(LENGTHS)), generator=generator)
    batch = whole_batch(ids, LENGTHS, targets)
    scored = ScoredPass(policy, batch, recompute)
    scores = scored.forward()
    assert torch.equal(scores.log_probs, Scorer(policy).score(batch).log_probs)
    scored.backward(torch.linspace(-1, 1, len(scores.log_probs)))
    found = {name: one.grad for name, one in policy.masters.items() if one.grad is not None}
    assert set(found) == {name for name in policy.masters if "lora_" in name} != set()
    return {name: gradient.cpu() for name, gradient in found.items()}


@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("shape", ["qwen3", "qwen2", "smollm2"])
def test_adapters_alone_have_gradients_which_are_right(shape: str, preset: Preset) -> None:
    """Within twice the error that the CPU's arithmetic of the flow has against FP32's."""
    found = gradients(policy_of(shape, preset), "none")
    again = gradients(policy_of(shape, preset), "full")
    cpu = gradients(policy_of(shape, preset, device="cpu"), "none")
    exact = gradients(policy_of(shape, "fp32", device="cpu"), "none")
    for name, expected in exact.items():
        assert torch.equal(found[name], again[name]), name
        allowed = 2 * (cpu[name] - expected).norm()
        assert (found[name] - expected).norm() <= allowed, name


def test_a_publication_is_one_rounding() -> None:
    policy = policy_of("qwen3", "fp8")
    joined = policy.joined
    assert joined is not None and joined.are_read(policy)
    for name in joined.places:
        held = policy.weights("rollout").linears[name.removesuffix(".weight")].matrix
        assert isinstance(held, torch.Tensor)
        assert torch.equal(held, policy.masters[name].detach().bfloat16())
    check_delivered(policy)
    joined.published[5] += 1
    with pytest.raises(MismatchError, match="rollout reads another"):
        check_delivered(policy)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_adapters_in_one_batch_draw_what_each_draws_alone(preset: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = replace(SHAPES["qwen3"], tokenizer_size=None)
    save_policy(random_policy(config, "bf16", 0), base, tokenizer_from=starter_folder())
    folders = adapters_of(base, tmp_path)
    check_together(base, folders, preset, "cuda", ("direct", "captured"))
