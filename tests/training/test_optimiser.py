"""The schedule's values, AdamW against its formula, and the clip of the gradient's norm."""

import math
from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.training import Moments, TrainingConfig
from isobit.kernels.backend import backend_of
from isobit.parallel.ownership import Ownership
from isobit.training.optimiser import build_optimiser, clip_gradients, gradient_norm, learning_rate

SPEC = backend_of(torch.device("cpu"))


def config(**settings: float | str) -> TrainingConfig:
    return TrainingConfig.model_validate({"learning_rate": 0.1, **settings})


def norm_of(parameters: Iterable[torch.nn.Parameter]) -> float:
    return gradient_norm(SPEC.gradient_squares([x.grad for x in parameters if x.grad is not None]))


def test_constant_schedule_with_warmup() -> None:
    settings = config(warmup_updates=3)
    assert [learning_rate(update, settings, 6) for update in range(6)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    )


def test_cosine_schedule_without_warmup_falls_towards_zero() -> None:
    settings = config(schedule="cosine")
    expected = [0.1 * 0.5 * (1 + math.cos(math.pi * update / 4)) for update in range(4)]
    assert [learning_rate(update, settings, 4) for update in range(4)] == pytest.approx(expected)
    assert expected[0] == 0.1
    assert expected[2] == pytest.approx(0.05)


def test_cosine_schedule_after_warmup() -> None:
    rates = [
        learning_rate(update, config(schedule="cosine", warmup_updates=2), 6) for update in range(6)
    ]
    assert rates[:3] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert rates[4] == pytest.approx(0.05)
    assert all(rate > 0 for rate in rates)


def test_linear_schedule_after_warmup() -> None:
    settings = config(schedule="linear", warmup_updates=2)
    rates = [learning_rate(update, settings, 6) for update in range(7)]
    assert rates == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.075, 0.05, 0.025, 0.0])


def test_a_warmup_as_long_as_the_run_is_defined() -> None:
    assert learning_rate(4, config(schedule="cosine", warmup_updates=4), 4) == pytest.approx(0.1)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    updates=st.integers(1, 60),
    ratio=st.floats(0, 1),
    share=st.floats(0, 1),
)
def test_schedules_are_those_of_transformers_after_the_warmup(
    schedule: str, updates: int, ratio: float, share: float
) -> None:
    """In the warmup transformers begins at 0, and an update of Isobit is one step ahead."""
    from transformers import get_scheduler

    least = share * 0.1 if schedule != "constant" else 0.0
    kind = "constant_with_warmup" if schedule == "constant" else schedule
    more: dict[str, float] = {}
    if least and schedule == "cosine":
        kind, more = "cosine_with_min_lr", {"min_lr": least}
    elif least:
        kind, more = "polynomial", {"lr_end": least, "power": 1.0}
    warmup = math.ceil(ratio * updates)
    if least == 0.1:  # transformers' polynomial refuses it
        return
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = get_scheduler(kind, theirs, warmup, updates, scheduler_specific_kwargs=more)
    ours = config(schedule=schedule, warmup_ratio=ratio, min_learning_rate=least)
    for update in range(updates):
        rate = learning_rate(update, ours, updates)
        if update >= warmup:
            assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15)
        else:
            assert rate == pytest.approx(0.1 * (update + 1) / (warmup + 1))
        theirs.step()
        if update + 1 < updates:  # transformers divides by 0 after a run that is all warmup
            scheduler.step()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_smallest_rate_is_reached_after_the_last_update(schedule: str) -> None:
    settings = config(schedule=schedule, min_learning_rate=0.02)
    rates = [learning_rate(update, settings, 10) for update in range(11)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (0.1, 0.02)


def test_adamw_against_its_formula_and_only_matrices_decay() -> None:
    settings = config(weight_decay=0.5)
    matrix = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    vector = torch.nn.Parameter(torch.tensor([3.0]))
    optimiser = build_optimiser({"matrix": matrix, "vector": vector}, settings, SPEC)
    start = {matrix: matrix.detach().double(), vector: vector.detach().double()}
    gradients = {
        matrix: [torch.tensor([[0.1, -0.2]]), torch.tensor([[0.3, 0.1]])],
        vector: [torch.tensor([0.5]), torch.tensor([-0.5])],
    }
    rates = [0.1, 0.05]
    for step, rate in enumerate(rates):
        for parameter in (matrix, vector):
            parameter.grad = gradients[parameter][step].clone()
        optimiser.learning_rate = rate
        optimiser.step()
    for parameter, decay in ((matrix, 0.5), (vector, 0.0)):
        x, m, v = start[parameter], torch.zeros(()), torch.zeros(())
        for step, rate in enumerate(rates, start=1):
            g = gradients[parameter][step - 1].double()
            m = settings.beta1 * m + (1 - settings.beta1) * g
            v = settings.beta2 * v + (1 - settings.beta2) * g**2
            corrected = (m / (1 - settings.beta1**step)) / (
                (v / (1 - settings.beta2**step)).sqrt() + settings.adam_epsilon
            )
            x = x * (1 - rate * decay) - rate * corrected
        torch.testing.assert_close(parameter.detach().double(), x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 1, 4), (2, 3, 4), (2, 1, 3, 2)])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_a_master_of_any_shape_moves_and_decays_from_two_axes_on(
    shape: tuple[int, ...], moments: Moments
) -> None:
    settings = config(weight_decay=0.5, moments=moments)
    moved = list[torch.Tensor]()
    for grad in (0.0, 1.0):
        master = torch.nn.Parameter(torch.ones(shape))
        master.grad = torch.full(shape, grad)
        optimiser = build_optimiser({"one": master}, settings, SPEC)
        optimiser.learning_rate = 0.1
        optimiser.step()
        moved.append(master.detach())
    decay = 0.05 if len(shape) > 1 else 0.0
    torch.testing.assert_close(moved[0], torch.full(shape, 1 - decay))
    torch.testing.assert_close(moved[1], torch.full(shape, 0.9 - decay))


@pytest.mark.parametrize("small", ["bf16", "fp8"])
def test_small_moments_follow_fp32_ones_and_their_rounding_is_the_seeds(small: str) -> None:
    def train(moments: str, seed: int = 0, steps: int = 10) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        target, parameter = (
            torch.randn(64, 64, generator=generator),
            torch.nn.Parameter(torch.zeros(64, 64)),
        )
        optimiser = build_optimiser(
            {"w": parameter}, config(moments=moments, learning_rate=0.01), SPEC, seed
        )
        for _ in range(steps):
            parameter.grad = (
                parameter.detach() - target + 0.1 * torch.randn(64, 64, generator=generator)
            )
            optimiser.step()
        return parameter.detach() - target

    wide, narrow = (train(moments, steps=300) for moments in ("fp32", small))
    assert float(narrow.norm() / wide.norm()) == pytest.approx(1, abs=0.05)
    one, again, other = train(small), train(small), train(small, seed=1)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_gradients_are_scaled_together_down_to_the_largest_norm() -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(1)),
        torch.nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    norm = norm_of(parameters)
    assert norm == 5.0
    masters = dict(zip("abc", parameters, strict=True))
    optimiser = build_optimiser(masters, TrainingConfig(), SPEC)
    clip_gradients(optimiser, norm, max_norm=10.0)
    assert optimiser.clip == 1.0
    clip_gradients(optimiser, norm, max_norm=1.0)
    assert optimiser.clip * norm == pytest.approx(1.0, rel=1e-5)
    optimiser.step()
    assert optimiser.clip == 1.0  # it was for one step


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_a_clip_in_the_step_has_the_bits_of_one_before_it(
    moments: Moments, max_norm: float
) -> None:
    def train(clip_before: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(32, 32, generator=generator))
        optimiser = build_optimiser(
            {"w": parameter}, TrainingConfig(moments=moments, learning_rate=1e-2), SPEC
        )
        for step in range(4):
            parameter.grad = torch.randn(32, 32, generator=generator)
            if step == 3:  # a step without a clip takes none from the one before
                optimiser.step()
                continue
            norm = norm_of([parameter])
            if clip_before:
                torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, torch.tensor(norm))
            else:
                clip_gradients(optimiser, norm, max_norm)
            optimiser.step()
        return parameter.detach()

    assert torch.equal(train(clip_before=True), train(clip_before=False))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_norm_shows_what_is_not_finite(value: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, value])
    assert not math.isfinite(norm_of([parameter]))


SHAPES = {"wide": (512, 64), "short": (300, 64), "vector": (200,), "value_head.weight": (1, 64)}


def train_rows(
    moments: Moments, cuts: Mapping[str, Sequence[int]], rank: int
) -> dict[str, torch.Tensor]:
    """Masters and moments of the rows that a rank owns, after three steps of the gradients of the
    whole.
    """
    generator = torch.Generator().manual_seed(3)

    def of_all(scale: float) -> dict[str, torch.Tensor]:
        return {
            name: scale
            * torch.randn(shape, generator=generator)[cuts[name][rank] :][
                : cuts[name][rank + 1] - cuts[name][rank]
            ]
            for name, shape in SHAPES.items()
        }

    masters = {name: torch.nn.Parameter(rows.clone()) for name, rows in of_all(1.0).items()}
    first_rows = {name: bounds[rank] for name, bounds in cuts.items()}
    optimiser = build_optimiser(
        masters, config(moments=moments), SPEC, 7, "value_head.weight", 2.0, first_rows
    )
    for step in range(3):
        for name, grad in of_all(10.0**-step).items():
            masters[name].grad = grad
        clip_gradients(optimiser, 3.0, 1.0)
        optimiser.learning_rate = 0.01
        optimiser.step()
    state = {
        f"{name}.{kind}": value
        for name, master in masters.items()
        for kind, value in optimiser.state[master].items()
    }
    return {name: master.detach() for name, master in masters.items()} | state


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_rows_move_as_they_do_in_the_whole(moments: Moments, size: int) -> None:
    whole = train_rows(moments, {name: (0, shape[0]) for name, shape in SHAPES.items()}, 0)
    cuts = Ownership.of(SHAPES, {}, size).cuts
    assert all(cuts[name][1] for name in ("wide", "short"))  # these are cut
    ranks = [train_rows(moments, cuts, rank) for rank in range(size)]
    for name, value in whole.items():
        mine = [rank[name] for rank in ranks]  # of a rank without rows, empty ones
        if name.endswith(".step"):
            assert all(int(one) == int(value) == 3 for one in mine)
        else:
            assert torch.equal(torch.cat(mine).view(torch.uint8), value.view(torch.uint8)), name
    assert any(not one.numel() for one in (rank["value_head.weight"] for rank in ranks))
    assert set(ranks[0]) == set(ranks[-1]) == set(whole)
