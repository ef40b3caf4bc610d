"""Run in Triton's interpreter by test_interpreted.py: routing and dispatch."""

import torch

from isobit.kernels.routing import RouterLoss, Routing, sequence_means
from isobit.kernels.spec import experts as specification
from isobit.kernels.triton.dispatch import combine, gather, make_dispatch
from isobit.kernels.triton.experts import choose, route_backward

HIDDEN = 24


def check_choice(logits: torch.Tensor, top_k: int, renormalise: bool) -> Routing:
    """The specification's, from logits of small integers that often tie."""
    routing = choose(logits, top_k, renormalise)
    one = torch.eye(logits.shape[1]).bfloat16()
    expected = specification.route(logits.bfloat16(), one, top_k, renormalise)
    assert torch.equal(expected.logits, logits)
    assert torch.equal(routing.experts, expected.experts)
    assert torch.allclose(routing.weights, expected.weights, rtol=1e-5)
    return routing


def check_places(routing: Routing, height: int | None) -> None:
    """Each choice stands behind the earlier ones of its expert; its row has its token's numbers."""
    (tokens, top_k), count = routing.experts.shape, routing.logits.shape[1]
    dispatch = make_dispatch(routing.experts, count, height)
    sizes = torch.bincount(routing.experts.flatten().long(), minlength=count)
    groups = (sizes + 127) // 128
    firsts = (groups.cumsum(0) - groups) * 128 if height is None else torch.arange(count) * height
    seen, labels = [0] * count, torch.full((dispatch.rows,), -1)
    for token in range(tokens):
        for rank in range(top_k):
            expert = int(routing.experts[token, rank])
            place = int(firsts[expert]) + seen[expert]
            seen[expert] += 1
            labels[place] = expert
            assert int(dispatch.places[token, rank]) == place
    assert torch.equal(dispatch.counts.long(), sizes)
    if dispatch.experts is not None:
        assert torch.equal(dispatch.experts.long(), labels)
        assert torch.equal(dispatch.starts[1:].long(), groups.cumsum(0))
    x = torch.randn(tokens, HIDDEN).bfloat16()
    rows = gather(x, dispatch, pads=True).values
    expected = torch.zeros(dispatch.rows, HIDDEN).bfloat16()
    expected[dispatch.places.long()] = x[:, None]
    assert torch.equal(rows, expected)
    total = torch.zeros(tokens, HIDDEN)
    for rank in range(top_k):
        total += routing.weights[:, rank, None] * x.float()
    made = combine(rows, dispatch, routing.weights).float()
    assert torch.allclose(made, total, rtol=0.01, atol=1e-6)  # it does not round to BF16 as a GPU


def check_gradient(count: int, top_k: int, renormalise: bool) -> None:
    """The specification's."""
    lengths = (3, 1, 8)
    x, router = torch.randn(12, HIDDEN).bfloat16(), torch.randn(count, HIDDEN).bfloat16()
    routing = specification.route(x, router, top_k, renormalise)
    d_weights, loss = torch.randn(12, top_k), RouterLoss(sequence_means(lengths), 0.3, 0.2)
    made = []
    for backward in (route_backward, specification.route_backward):
        grad = torch.ones_like(router, dtype=torch.float32)
        d_x = backward(d_weights, x, routing, router, renormalise, loss, grad)
        made.append((d_x.float(), grad))
    for ours, theirs in zip(*made, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.01, atol=1e-4)


def main() -> None:
    """One block of tokens and two; numbers of experts that are no powers of two."""
    torch.manual_seed(0)
    for tokens, count, top_k in ((3, 5, 3), (70, 9, 2)):
        for renormalise in (True, False):
            logits = torch.randint(-3, 4, (tokens, count)).float()
            routing = check_choice(logits, top_k, renormalise)
            check_gradient(count, top_k, renormalise)
        for height in (None, 256):
            check_places(routing, height)
