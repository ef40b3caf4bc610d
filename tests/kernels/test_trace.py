import pytest
import torch

from isobit.kernels.trace import is_observed, observe, observing, rounded

Seen = list[tuple[str, torch.Tensor, torch.Tensor | None]]


def recorder(seen: Seen):
    return lambda name, values, scales: seen.append((name, values, scales))


def fail_after(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_an_observer_sees_the_tensors_themselves_under_their_joined_names():
    seen: Seen = []
    values, scales = torch.ones(2, 3), torch.ones(2)
    with observing(recorder(seen)):
        assert observe(values, "layers", 2, "rope.q") is values
        assert observe(values, "norm", scales=scales) is values
    assert [(name, a is values, b) for name, a, b in seen] == [
        ("layers.2.rope.q", True, None),
        ("norm", True, scales),
    ]


def test_nothing_is_done_where_nobody_observes():
    class Name(str):
        def __str__(self) -> str:
            raise AssertionError("a name was joined")

    values = torch.ones(1)
    assert not is_observed()
    assert observe(values, Name("layers")) is values


def test_the_innermost_observer_counts_and_an_error_ends_its_turn():
    outer: Seen = []
    inner: Seen = []
    with observing(recorder(outer)):
        with pytest.raises(ZeroDivisionError), observing(recorder(inner)):
            fail_after(observe(torch.ones(1), "a"))
        observe(torch.ones(1), "b")
    assert ([name for name, *_ in outer], [name for name, *_ in inner]) == (["b"], ["a"])
    assert not is_observed()


def test_what_a_result_was_rounded_from_is_shown_first_and_once():
    seen: Seen = []
    exact = torch.tensor([1.0001])
    with observing(recorder(seen)):
        result = observe(rounded(exact, torch.bfloat16), "norm")
        observe(result, "again")
        observe(rounded(exact, torch.float32), "fp32")
    assert [(name, values is exact) for name, values, _ in seen] == [
        ("norm.unrounded", True),
        ("norm", False),
        ("again", False),
        ("fp32", True),
    ]
    assert torch.equal(rounded(exact, torch.bfloat16), result)
