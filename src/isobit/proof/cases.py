"""The operations of the CPU specification on random inputs, each with its definition: what the
doctor runs on a user's machine, and what the tests run at more sizes and formats.

Two things are asked of a result.  It must be batch invariant: a row has the same bits alone, in
another batch and in another order.  And it must be right: what is exact equals integer arithmetic,
and the rest equals the definition in FP64 to within a few roundings, so that an error which rollout
and training share is seen as well.

A gradient has no other side whose bits it must share, so an error in a backward would show nowhere
else.  Every gradient is compared by itself with automatic differentiation of the definition in
FP64: one that is off by 1% is found.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.kernels.operands import QkvGradients, QkvTransform, RopeTable
from isobit.kernels.spec import head as head_module
from isobit.kernels.spec import pointwise, qkv, quantise
from isobit.kernels.spec.quantise import publish_head
from isobit.precision.flow import Site
from isobit.proof.doctor_findings import require_close, require_equal

ROWS = 130
FP32, BF16 = torch.float32, torch.bfloat16
OF_VALUES = {FP32: 1e-6, BF16: 5e-3}
OF_GRADIENTS = {FP32: 1e-4, BF16: 5e-3}
"""Tolerances by the dtype of a result, relative to the largest number: sums in another order, and
one rounding to BF16.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on given inputs."""

    name: str
    inputs: Mapping[str, Tensor]
    """The arguments of ``plain``."""
    plain: Callable[..., Tensor]
    """The definition in torch's own operations, in the dtype of the inputs; the results of all
    rows.
    """
    rows: Callable[[Tensor], Tensor] | None = None
    """int64 [n] -> [n, ...]: what the kernel gives for these rows of the inputs, taken as one
    batch.
    """
    count: int = ROWS
    is_elementwise: bool = False
    """Whether a row is a single number, whose place in a vector register may matter."""
    tolerance: float | None = None
    """The tolerance of ``rows``, relative to the largest number; 0 where bits must be equal, None
    for that of its dtype.
    """
    gradients: Callable[[], Mapping[str, Tensor]] | None = None
    """The gradients of the backward by the name of the input, added to zeros where it adds."""
    dy: Tensor = field(default_factory=lambda: torch.ones(()))
    """The gradient of the result of ``plain``."""
    gradient_tolerance: float | None = None

    def results(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The outputs of the definition, computed in ``dtype``."""
        return self.plain(**{name: x.to(dtype) for name, x in self.inputs.items()})

    def exact_gradients(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The gradients of the definition by automatic differentiation, computed in ``dtype``."""
        leaves = {
            name: x.detach().to(dtype).requires_grad_(x.is_floating_point())
            for name, x in self.inputs.items()
        }
        with torch.enable_grad():
            y = self.plain(**leaves)
            made = torch.autograd.grad(y, list(leaves.values()), self.dy.to(y.dtype))
        return dict(zip(leaves, made, strict=True))


def check_rows(case: Case, sizes: Iterable[int] = (1, 7, 64)) -> Tensor:
    """The results of all rows.  Raises Fault unless they have the same bits in batches of these
    sizes and in other orders, and unless they are right.
    """
    assert case.rows is not None
    everything = torch.arange(case.count)
    whole = case.rows(everything)
    for size in sizes:
        parts = torch.cat([case.rows(part) for part in everything.split(size)])
        require_equal(f"{case.name}: rows in batches of {size} and of {case.count}", parts, whole)
    orders = {"in reverse order": everything.flip(0)}
    if case.is_elementwise:
        orders |= {f"from place {n} on": everything.roll(-n) for n in range(1, 18)}
        orders["eight times"] = everything.repeat(8)
    for name, order in orders.items():
        require_equal(f"{case.name}: rows {name} and in order", case.rows(order), whole[order])
    if case.tolerance == 0:
        require_equal(f"{case.name} and its definition", whole, case.plain(**case.inputs))
    else:
        tolerance = case.tolerance or OF_VALUES[whole.dtype]
        require_close(case.name, whole, case.results(), tolerance)
    return whole


def check_gradients(case: Case) -> None:
    """Raises Fault unless every gradient is that of the definition."""
    assert case.gradients is not None
    exact = case.exact_gradients()
    for name, ours in case.gradients().items():
        tolerance = case.gradient_tolerance or OF_GRADIENTS[ours.dtype]
        require_close(f"the gradient of {case.name} for {name}", ours, exact[name], tolerance)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, spread: float = 1.0) -> Tensor:
    """Numbers over a wide range: a normal number times e to the power of another times ``spread``
    (exp2 would depend on the number of threads).
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * (spread * torch.randn(shape, generator=generator)).exp()).to(dtype)


def elementwise(name: str, function: Callable[[float], float], dtype: torch.dtype = FP32) -> Case:
    """A function of torch, whose results must not depend on the place of a number in its tensor."""
    x = torch.linspace(-30.0, 3.0, 1003)
    numbers = (x if name == "exp" else x.double().exp()).to(dtype)
    return Case(
        name if dtype == FP32 else f"{name} in FP64",
        {"x": numbers},
        lambda x: torch.tensor([function(number) for number in x.tolist()]).double(),
        lambda rows: getattr(torch, name)(numbers[rows]),
        len(numbers),
        is_elementwise=True,
        tolerance=1e-6,
    )


def rms_norm(width: int = 5003, dtype: torch.dtype = FP32) -> Case:
    """Rows wider than one sum; the residual stream's gradient is taken off again."""
    h, weight = wide(ROWS, width, dtype=dtype), 1 + 0.3 * normal(width, seed=1)
    weight, dy = weight.to(dtype), normal(ROWS, width, seed=2, dtype=dtype)

    def gradients() -> dict[str, Tensor]:
        grad, passed = torch.zeros(width), normal(ROWS, width, seed=3, dtype=dtype)
        alone = pointwise.rms_norm_backward(dy, h, weight, 1e-6, None, grad)
        both = pointwise.rms_norm_backward(dy, h, weight, 1e-6, passed, torch.zeros(width))
        require_equal("RMSNorm's backward with and without a residual", both, alone + passed)
        return {"h": alone, "weight": grad}

    return Case(
        "RMSNorm",
        {"h": h, "weight": weight},
        plain_norm,
        lambda rows: pointwise.rms_norm(h[rows], weight, 1e-6),
        gradients=gradients,
        dy=dy,
    )


def plain_norm(h: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(h, h.shape[-1:], weight, 1e-6)


def swiglu(width: int = 301, dtype: torch.dtype = FP32) -> Case:
    """Rows of an odd width."""
    gate_up, dy = wide(ROWS, 2 * width, dtype=dtype), normal(ROWS, width, seed=1, dtype=dtype)

    def gradients() -> dict[str, Tensor]:
        product = pointwise.swiglu_backward(dy, gate_up, Site("case", "linear", "fp32")).rows
        assert isinstance(product, Tensor)
        return {"gate_up": product}

    return Case(
        "SwiGLU",
        {"gate_up": gate_up},
        plain_swiglu,
        lambda rows: pointwise.swiglu(gate_up[rows]),
        gradients=gradients,
        dy=dy,
    )


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu_columns() -> Case:
    """The numbers of one row, at any place of it."""
    gate_up = wide(2, 1003)
    return Case(
        "SwiGLU of columns",
        {"gate_up": gate_up},
        lambda gate_up: plain_swiglu(gate_up.flatten()),
        lambda columns: pointwise.swiglu(gate_up[:, columns].reshape(1, -1))[0],
        gate_up.shape[1],
        is_elementwise=True,
    )


def rope_table(head_dim: int) -> tuple[RopeTable, Tensor]:
    """The table of ``ROWS`` positions, and its angles in FP64, [ROWS, head_dim / 2]."""
    frequencies = torch.exp(torch.linspace(0.0, -9.0, head_dim // 2, dtype=torch.float64))
    return RopeTable.build(frequencies, ROWS), torch.arange(ROWS)[:, None] * frequencies


def plain_rotation(x: Tensor, angles: Tensor) -> Tensor:
    """x [ROWS, heads, D] by ``angles`` [ROWS, D / 2]."""
    cos, sin = (part[:, None].to(x.dtype) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotation() -> Case:
    """Rotary positions of three heads, which may stand at any place."""
    table, angles = rope_table(64)
    heads = wide(ROWS, 3, 64)

    def rows(index: Tensor) -> Tensor:
        turned = qkv.rotate(heads[index], table.rows(index))
        moved = qkv.rotate(heads[index].roll(1, 1), table.rows(index))
        require_equal("the rotation of a head at other places", moved, turned.roll(1, 1))
        return turned

    return Case("the rotation", {"x": heads}, lambda x: plain_rotation(x, angles), rows)


def hadamard_matrix(head_dim: int) -> Tensor:
    """FP64, by Sylvester's construction, one block beside the other."""
    block, pair = torch.ones(1, 1).double(), torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    while head_dim % (2 * len(block)) == 0:
        block = torch.kron(pair, block)
    return torch.block_diag(*[block] * (head_dim // len(block)))


def hadamard(head_dim: int = 64) -> Case:
    """Heads times a Hadamard matrix."""
    heads, matrix = wide(ROWS, 3, head_dim), hadamard_matrix(head_dim)
    return Case(
        "the Hadamard matrix",
        {"x": heads},
        lambda x: x @ matrix.to(x.dtype),
        lambda rows: quantise.hadamard(heads[rows], qkv.hadamard_size(head_dim)),
    )


def transformed_qkv(
    norms: bool = True, bias: bool = True, is_rotated: bool = False, dtype: torch.dtype = FP32
) -> Case:
    """Bias, norms of Q and K, rotary positions and, before 8 bits, the Hadamard matrix."""
    heads, dim = (4, 2, 2), 32
    width = sum(heads) * dim
    table, angles = rope_table(dim)
    inputs = {"x": wide(ROWS, width, dtype=dtype)}
    if norms:
        inputs |= {n: 1 + 0.3 * normal(dim, seed=s) for n, s in (("q_norm", 1), ("k_norm", 2))}
    if bias:
        inputs["bias"] = normal(width, seed=3)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    of = inputs.get
    weights = of("q_norm"), of("k_norm"), of("bias")
    transform = QkvTransform(4, 2, dim, table.cos, table.sin, 1e-6, *weights, hadamard=is_rotated)
    dy = normal(ROWS, sum(heads), dim, seed=4, dtype=dtype)

    def plain(
        x: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x if bias is None else x + bias).view(ROWS, -1, dim).split(heads, 1)
        if q_norm is not None and k_norm is not None:
            q, k = plain_norm(q, q_norm), plain_norm(k, k_norm)
        q, k = plain_rotation(q, angles), plain_rotation(k, angles)
        if is_rotated:
            matrix = hadamard_matrix(dim).to(x.dtype)
            q, k = q @ matrix / dim, k @ matrix
        return torch.cat([q, k, v], 1)

    def gradients() -> dict[str, Tensor]:
        made = {name: torch.zeros(inputs[name].shape) for name in inputs if name != "x"}
        grads = QkvGradients(made.get("q_norm"), made.get("k_norm"), made.get("bias"))
        dq, dk, dv = dy.split(heads, 1)
        x, positions = inputs["x"], torch.arange(ROWS)
        return {"x": qkv.qkv_backward(dq, dk, dv, x, transform, positions, grads), **made}

    return Case(
        "Q, K and V",
        inputs,
        plain,
        lambda rows: torch.cat(
            qkv.transform_qkv(0, inputs["x"][rows], transform, table.rows(rows)), 1
        ),
        tolerance=OF_VALUES[dtype],
        gradients=gradients,
        dy=dy,
        gradient_tolerance=OF_GRADIENTS[dtype],
    )


def embedding(tokens: int = ROWS, dtype: torch.dtype = FP32) -> Case:
    """A table whose rows are read more than once."""
    ids, dy = torch.arange(tokens) * 7 % 23, normal(tokens, 64, dtype=dtype)

    def gradients() -> dict[str, Tensor]:
        grad = torch.zeros(30, 64)
        pointwise.embedding_backward(dy, ids, grad)
        return {"table": grad}

    table = normal(30, 64, seed=1, dtype=dtype)
    return Case(
        "the embedding",
        {"table": table},
        lambda table: table[ids],
        lambda rows: pointwise.embedding(ids[rows], table),
        tokens,
        tolerance=0.0,
        gradients=gradients,
        dy=dy,
    )


def scalar_head(width: int = 5003, dtype: torch.dtype = FP32) -> Case:
    """A value or a score of hidden states wider than one sum."""
    hidden, weight, d = wide(ROWS, width, dtype=dtype), normal(width, seed=1), normal(ROWS, seed=2)
    weight = weight.to(dtype)

    def gradients() -> dict[str, Tensor]:
        grad = torch.zeros(width)
        return {
            "hidden": head_module.scalar_head_backward(hidden, weight, d, grad),
            "weight": grad,
        }

    return Case(
        "the scalar head",
        {"hidden": hidden, "weight": weight},
        lambda hidden, weight: hidden @ weight,
        lambda rows: head_module.scalar_head(hidden[rows], weight),
        gradients=gradients,
        dy=d,
    )


def log_softmax(width: int = 5003) -> Case:
    """Log-softmax over an odd vocabulary that takes two sums."""
    logits, temperatures = wide(ROWS, width), torch.linspace(0.5, 2.0, ROWS)
    return Case(
        "log-softmax",
        {"logits": logits},
        lambda logits: torch.log_softmax(logits / temperatures.to(logits)[:, None], -1),
        lambda rows: head_module.log_softmax(logits[rows], temperatures[rows]),
    )


def token_log_probs(
    dtype: torch.dtype = FP32,
    of_log_probs: bool = True,
    of_entropies: bool = True,
    in_int8: bool = False,
) -> Case:
    """Log-probabilities and entropies, and the gradients of either or both; one row is nearly
    certain. The gradients of an INT8 head are those of the table, at INT8's logits.
    """
    hidden, table = normal(ROWS, 64, dtype=dtype), (0.3 * normal(501, 64, seed=1)).to(dtype)
    weight = publish_head(Site("lm_head", "head", "int8" if in_int8 else "bf16"), table)
    hidden[3] = 40 * weight.table[7]
    of_int8 = None
    if weight.int8 is not None:
        x, w = quantise.quantise_int8(hidden), weight.int8
        of_int8 = x.values.double() @ w.values.double().t() * x.scales[:, None] * w.scales
    targets, temperatures = torch.arange(ROWS) * 7 % 501, torch.linspace(0.5, 1.5, ROWS)
    dy = normal(ROWS, 2, seed=2) * torch.tensor([of_log_probs, of_entropies])

    def plain(hidden: Tensor, head: Tensor) -> Tensor:
        product = hidden @ head.t()
        if of_int8 is not None:
            product = product + (of_int8.to(product) - product.detach())
        log_probs = torch.log_softmax(product / temperatures.to(hidden)[:, None], -1)
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        return torch.stack([chosen, -(log_probs.exp() * log_probs).sum(-1)], 1)

    def gradients() -> dict[str, Tensor]:
        grad = torch.zeros(501, 64)
        d, d_entropies = dy.unbind(1)
        made = head_module.token_log_probs_backward(
            hidden, weight, targets, temperatures, d, grad, d_entropies if of_entropies else None
        )
        return {"hidden": made, "head": grad}

    return Case(
        "log-probabilities",
        {"hidden": hidden, "head": weight.table},
        plain,
        lambda rows: torch.stack(
            head_module.token_log_probs(hidden[rows], weight, targets[rows], temperatures[rows]), 1
        ),
        gradients=gradients,
        dy=dy,
    )


def splitmix64(seed: int, index: int) -> int:
    """Output number ``index`` + 1 of the generator in plain Python: what the sampling noise is made
    of.
    """
    whole = (1 << 64) - 1
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) & whole
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & whole
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & whole
    return bits ^ bits >> 31


def noise() -> Case:
    """The generator of the noise, against plain Python."""
    keys = torch.arange(ROWS) * 0x1234567890ABCDE
    expected = [[splitmix64(key, i) for i in range(4)] for key in keys.tolist()]
    return Case(
        "the noise",
        {},
        lambda: torch.tensor(expected, dtype=torch.uint64).view(torch.int64),
        lambda rows: head_module.splitmix64(keys[rows, None], torch.arange(4)[None]),
        tolerance=0.0,
    )


def draw() -> Case:
    """The token of the largest sum of log-probability and Gumbel noise, from plain Python."""
    log_probs = torch.log_softmax(wide(ROWS, 51), -1)
    keys, positions = torch.arange(ROWS) * 0x1234567890ABCDE, torch.arange(ROWS)

    def gumbel(row: int, entry: int) -> float:
        bits = splitmix64(splitmix64(int(keys[row]), row), entry)
        return -math.log(-math.log((bits >> 11 | 1) / 2**53))

    return Case(
        "the draw",
        {"log_probs": log_probs},
        lambda log_probs: torch.tensor(
            [
                max(range(51), key=lambda entry: row[entry] + gumbel(i, entry))
                for i, row in enumerate(log_probs.tolist())
            ]
        ),
        lambda rows: head_module.draw(log_probs[rows], keys[rows], positions[rows]),
        tolerance=0.0,
    )
