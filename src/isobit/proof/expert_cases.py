"""The cases of ``isobit.proof.cases`` about mixtures of experts: the router, and the experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.operands import ExpertGradients, LinearInput, LinearWeight
from isobit.kernels.routing import Routing
from isobit.kernels.spec import experts as experts_module
from isobit.kernels.spec import linear as linear_module
from isobit.kernels.spec import pointwise
from isobit.kernels.spec.quantise import (
    publish,
    snap_rows,
)
from isobit.precision.quant_tensor import (
    DTYPES,
    Format,
)
from isobit.proof.cases import BF16, ROWS, Case, normal, plain_swiglu, wide
from isobit.proof.doctor_findings import require_equal
from isobit.proof.linear_cases import linear_site


def router(renormalise: bool = True, dtype: torch.dtype = BF16) -> Case:
    """The weights of a token's experts, by rank."""
    x, weight = 0.1 * wide(ROWS, 301, dtype=dtype), wide(24, 301, seed=1, dtype=dtype)
    dy = normal(ROWS, 5, seed=2)

    def route(rows: Tensor) -> Routing:
        return experts_module.route(x[rows], weight, 5, renormalise)

    def plain(x: Tensor, router: Tensor) -> Tensor:
        logits = x @ router.t()
        return logits.topk(5)[0].softmax(-1) if renormalise else logits.softmax(-1).topk(5)[0]

    def gradients() -> dict[str, Tensor]:
        grad, routing = torch.zeros(weight.shape), route(torch.arange(ROWS))
        given = dy, x, routing, weight, renormalise, None, grad
        return {"x": experts_module.route_backward(*given), "router": grad}

    return Case(
        "the router",
        {"x": snap_rows(x), "router": snap_rows(weight)},
        plain,
        lambda rows: route(rows).weights,
        tolerance=1e-5,
        gradients=gradients,
        dy=dy,
    )


EXPERTS, IDLE = 6, 4
"""The number of experts, and the first that no token goes to."""


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """Tokens and the experts of a layer, of sizes that fill no blocks."""

    x: Tensor
    routing: Routing
    gate_up: LinearWeight
    down: LinearWeight
    masters: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, format: Format) -> "ExpertsCase":
        dtype = DTYPES["fp32" if format == "fp32" else "bf16"]
        x = normal(ROWS, 200, dtype=dtype)
        routing = experts_module.route(x, normal(EXPERTS, 200, seed=1, dtype=dtype), 3, True)
        chosen = (routing.experts[:, :1] + torch.arange(3).int()) % IDLE
        masters, weights = [], []
        for parts, columns in (((72, 72) * EXPERTS, 200), ((200,) * EXPERTS, 72)):
            masters.append(0.1 * normal(sum(parts), columns, seed=columns))
            site = linear_site(format, parts)
            weights.append(LinearWeight(site, publish(site, masters[-1])))
        routing = Routing(chosen, routing.weights, routing.logits)
        return cls(x, routing, weights[0], weights[1], (masters[0], masters[1]))

    def rows(self, index: Tensor) -> Tensor:
        """The output for these tokens alone."""
        routing = Routing(*(x[index] for x in self._routing()))
        read = linear_module.linear_input(self.x[index], self.gate_up.site).read
        return experts_module.experts(read, routing, self.gate_up, self.down)

    def _routing(self) -> Sequence[Tensor]:
        return self.routing.experts, self.routing.weights, self.routing.logits

    def dense(self) -> Tensor:
        """Every expert as a linear over all tokens, summed by rank."""
        outputs = []
        for index in range(EXPERTS):
            wide, narrow = (
                experts_module.one_expert(weight, index, EXPERTS)[0]
                for weight in (self.gate_up, self.down)
            )
            read = linear_module.linear_input(self.x, wide.site).read
            inner = pointwise.swiglu(linear_module.linear(read, wide))
            read = linear_module.linear_input(inner, narrow.site).read
            outputs.append(linear_module.linear(read, narrow).float())
        stacked, total = torch.stack(outputs, 1), torch.zeros(ROWS, 200)
        for rank, chosen in enumerate(self.routing.experts.long().unbind(1)):
            total += self.routing.weights[:, rank, None] * stacked[torch.arange(ROWS), chosen]
        return total.to(self.x.dtype)

    def backward(self, dy: Tensor) -> dict[str, Tensor]:
        """The gradients by name, those of the matrices added to zeros."""
        read = linear_module.linear_input(self.x, self.gate_up.site).read
        given = LinearInput(read, self.x), self.routing, self.gate_up, self.down
        y, saved = experts_module.experts_saving(*given)
        require_equal("experts that save and that do not", y, self.rows(torch.arange(ROWS)))
        grads = ExpertGradients(*(torch.zeros_like(master) for master in self.masters))
        dx, d_weights = experts_module.experts_backward(dy, saved, *given[1:], grads)
        return {"x": dx, "gate_up": grads.gate_up, "down": grads.down, "weights": d_weights}


def experts(format: Format) -> Case:
    """Each expert is a linear with its own matrix, to the bit."""
    case = ExpertsCase.of(format)
    return Case("the experts", {}, case.dense, case.rows, tolerance=0.0)


def expert_gradients(format: Format = "fp32") -> Case:
    """Gradients of the rows, of the matrices and of the weights of the routing."""
    case = ExpertsCase.of(format)
    dy = normal(ROWS, 200, seed=5, dtype=case.x.dtype)
    chosen = case.routing.experts.long()

    def plain(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        matrices = gate_up.view(EXPERTS, -1, 200), down.view(EXPERTS, 200, -1)
        y = torch.zeros_like(x)
        for rank, index in enumerate(chosen.unbind(1)):
            inner = plain_swiglu(torch.einsum("trc,tc->tr", matrices[0][index], x))
            out = torch.einsum("trc,tc->tr", matrices[1][index], inner)
            y = y + weights[:, rank, None] * out
        return y

    gate_up, down = case.masters
    return Case(
        "the experts",
        {"x": case.x, "gate_up": gate_up, "down": down, "weights": case.routing.weights},
        plain,
        gradients=lambda: case.backward(dy),
        dy=dy,
    )
