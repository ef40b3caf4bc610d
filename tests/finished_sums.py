"""Every operation of a back end that adds to the gradient of a master, for a test that each adds
one finished sum (``others``: those that do not).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import (
    ExpertGradients,
    LinearInput,
    LinearWeight,
    QkvGradients,
    QkvTransform,
    RopeTable,
)
from isobit.kernels.routing import RouterLoss, sequence_means
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import DTYPES, Format

FORMATS: list[tuple[Format, Format]] = [("e4m3", "e4m3"), ("e4m3", "bf16"), ("bf16", "bf16")]
"""Of a linear's forward and of its WGrad."""


@dataclass(frozen=True)
class Size:
    """Of a micro-batch and of a layer."""

    tokens: int
    hidden: int
    heads: tuple[int, int, int]
    """Of queries, of keys, and numbers of one."""
    vocabulary: int
    experts: tuple[int, int, int]
    """How many, how many a token, and numbers of one."""

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the projection."""
        queries, keys, dim = self.heads
        return queries * dim, keys * dim, keys * dim


SMALL = Size(77, 320, (3, 1, 64), 200, (9, 2, 80))
"""Short blocks along every side, and experts without tokens."""
WHOLE = Size(300, 256, (2, 2, 64), 384, (4, 2, 128))


@dataclass(frozen=True)
class Operation:
    """Adds to gradients of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    add: Callable[[Sequence[torch.Tensor]], object]


class Case:
    """The operations of a back end at one size, on random numbers."""

    def __init__(self, backend: Backend, size: Size, activations: Format = "bf16") -> None:
        self.backend, self.size = backend, size
        self.activations: Format = activations
        self._generator = torch.Generator(backend.device).manual_seed(size.tokens)

    def drawn(self, *shape: int) -> torch.Tensor:
        """FP32 of many magnitudes, and a column of zeros with signs."""
        x = self._normal(*shape) * torch.exp(2 * self._normal(*shape[:-1], 1))
        x[..., -1] = torch.copysign(torch.zeros_like(x[..., -1]), x[..., -1])
        return x

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.backend.device)

    def _integers(self, below: int) -> torch.Tensor:
        """One a token."""
        shape, device = (self.size.tokens,), self.backend.device
        return torch.randint(0, below, shape, generator=self._generator, device=device)

    def narrow(self, *shape: int) -> torch.Tensor:
        """In the format between operators."""
        return self.drawn(*shape).to(DTYPES[self.activations])

    def published(self, forward: Format, wgrad: Format, *parts: int, columns: int) -> LinearWeight:
        site = Site("w", "linear", forward, "power_of_two", forward, wgrad, parts)
        return LinearWeight(site, self.backend.publish(site, self.drawn(sum(parts), columns)))

    def wgrad(self, forward: Format, wgrad: Format) -> Operation:
        backend, (rows, columns) = self.backend, (sum(self.size.qkv), self.size.hidden)
        site = Site("w", "linear", forward, "power_of_two", forward, wgrad, self.size.qkv)
        x = backend.linear_input(self.narrow(self.size.tokens, columns), site, save=True).saved
        dy = backend.output_gradient(self.narrow(self.size.tokens, rows), site).tokens
        assert x is not None
        return Operation(((rows, columns),), lambda grads: backend.wgrad(dy, x, grads[0], site))

    def experts(self, forward: Format, wgrad: Format) -> Operation:
        backend, size = self.backend, self.size
        count, top_k, width = size.experts
        gate_up = self.published(forward, wgrad, *[width] * (2 * count), columns=size.hidden)
        down = self.published(forward, wgrad, *[size.hidden] * count, columns=width)
        x, dy = self.narrow(size.tokens, size.hidden), self.narrow(size.tokens, size.hidden)
        router = self.narrow(count, size.hidden) / size.hidden**0.5
        router[-1] = router[0]  # of equal logits the lower comes first: the last is hardly chosen
        routing = backend.route(x, router, top_k, True)
        read = LinearInput(backend.linear_input(x, gate_up.site).read, x)
        saved = backend.experts_saving(read, routing, gate_up, down)[1]

        def add(grads: Sequence[torch.Tensor]) -> object:
            into = ExpertGradients(*grads)
            return backend.experts_backward(dy, saved, routing, gate_up, down, into)

        return Operation(((2 * count * width, size.hidden), (count * size.hidden, width)), add)

    def router(self, renormalise: bool) -> Operation:
        backend, size = self.backend, self.size
        count, top_k, _ = size.experts
        x = self.narrow(size.tokens, size.hidden)
        router = self.narrow(count, size.hidden) / size.hidden**0.5
        routing, d = backend.route(x, router, top_k, renormalise), self.drawn(size.tokens, top_k)
        means = sequence_means((size.tokens - 5, 5)).to(x.device)
        loss = RouterLoss(means, 0.3, 0.2) if renormalise else None

        def add(grads: Sequence[torch.Tensor]) -> object:
            return backend.route_backward(d, x, routing, router, renormalise, loss, grads[0])

        return Operation(((count, size.hidden),), add)

    def norm(self) -> Operation:
        backend, shape = self.backend, (self.size.tokens, self.size.hidden)
        dy, h, residual = (self.narrow(*shape) for _ in range(3))
        weight = self.narrow(self.size.hidden)

        def add(grads: Sequence[torch.Tensor]) -> object:
            return backend.rms_norm_backward(dy, h, weight, 1e-6, residual, grads[0])

        return Operation(((self.size.hidden,),), add)

    def qkv(self) -> Operation:
        (queries, keys, dim), tokens = self.size.heads, self.size.tokens
        frequencies = 1e4 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
        rope = RopeTable.build(frequencies, tokens)
        cos, sin = (x.to(self.backend.device) for x in (rope.cos, rope.sin))
        width = sum(self.size.qkv)
        weights = self.narrow(dim), self.narrow(dim), self.narrow(width)
        transform = QkvTransform(queries, keys, dim, cos, sin, 1e-6, *weights)
        d = [self.narrow(tokens, heads, dim) for heads in (queries, keys, keys)]
        qkv = self.narrow(tokens, width)
        positions = torch.arange(tokens, device=qkv.device)

        def add(grads: Sequence[torch.Tensor]) -> object:
            into = QkvGradients(*grads)
            return self.backend.qkv_backward(d[0], d[1], d[2], qkv, transform, positions, into)

        return Operation(((dim,), (dim,), (width,)), add)

    def embedding(self) -> Operation:
        backend, size = self.backend, self.size
        d = self.narrow(size.tokens, size.hidden)
        ids, shape = self._integers(20), (size.vocabulary, size.hidden)
        return Operation((shape,), lambda grads: backend.embedding_backward(d, ids, grads[0]))

    def scalar_head(self) -> Operation:
        backend, size = self.backend, self.size
        hidden, weight = self.narrow(size.tokens, size.hidden), self.narrow(size.hidden)
        d = self.drawn(size.tokens)

        def add(grads: Sequence[torch.Tensor]) -> object:
            return backend.scalar_head_backward(hidden, weight, d, grads[0])

        return Operation(((size.hidden,),), add)

    def head(self) -> Operation:
        """In one part: more than one are added one by one, as ``Backend`` says."""
        backend, size = self.backend, self.size
        hidden = self.narrow(size.tokens, size.hidden) / 16
        table = self.narrow(size.vocabulary, size.hidden) / 16
        head = backend.publish_head(Site("lm_head", "head", "bf16"), table)
        targets, ones = self._integers(size.vocabulary), torch.ones(size.tokens).to(hidden.device)
        d, d_entropies = self.drawn(size.tokens), self.drawn(size.tokens)

        def add(grads: Sequence[torch.Tensor]) -> object:
            return backend.token_log_probs_backward(
                hidden, head, targets, ones, d, grads[0], d_entropies
            )

        return Operation(((size.vocabulary, size.hidden),), add)

    def operations(self) -> dict[str, Operation]:
        """All of them by name."""
        wide: list[tuple[Format, Format]] = [("fp32", "fp32")]
        formats = wide if self.activations == "fp32" else FORMATS
        return {
            **{f"wgrad {one}": self.wgrad(*one) for one in formats},
            **{f"experts {one}": self.experts(*one) for one in formats},
            "router": self.router(False),
            "router, renormalised, with losses": self.router(True),
            "norm": self.norm(),
            "qkv": self.qkv(),
            "embedding": self.embedding(),
            "scalar head": self.scalar_head(),
            "head": self.head(),
        }


def adds_one_finished_sum(operation: Operation, device: torch.device) -> bool:
    """Whether what is added to A is what is added to zeros, in one addition; and whether a sum that
    began with +0 holds no -0, so that an addition of zeros changes nothing.
    """
    generator = torch.Generator(device).manual_seed(1)
    finished = [torch.zeros(shape, device=device) for shape in operation.shapes]
    operation.add(finished)
    for grad in finished:
        assert grad.isfinite().all()
        assert grad.any()
        if (grad.view(torch.int32) == -(2**31)).any():
            return False
    starts = [torch.randn(x.shape, generator=generator, device=device) * x.std() for x in finished]
    for start in starts:
        start.view(-1)[::7] = 0.0
    grads = [start.clone() for start in starts]
    operation.add(grads)
    return all(
        torch.equal(grad.view(torch.int32), (start + one).view(torch.int32))
        for grad, start, one in zip(grads, starts, finished, strict=True)
    )


def others(case: Case) -> list[str]:
    """The operations that do not."""
    made = case.operations().items()
    return [name for name, one in made if not adds_one_finished_sum(one, case.backend.device)]
