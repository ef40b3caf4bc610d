"""How near the FP8 backward is to the exact one, and what it costs that it repeats its bits.

    python -m experiments.gradients cosines [--device cuda] [--layers 24] [--steps 300] [--out FILE]
    python -m experiments.gradients determinism [--out FILE]

cosines       a model of 24 layers is trained a little in the ``fp8`` flow; then its gradients over
              8,192 fresh tokens are held, matrix by matrix, against the exact backward of the same
              forward bits (``experiments.exact_backward``), at their own size and at 1e-12, and
              against plain FP32; each linear is held against the exact one alone, too.  Bars: 0.995
              every matrix, 0.998 their mean, 0.9985 a linear alone.  Also on a CPU, where only
              small sizes end soon (``--device cpu --layers 3 --steps 4 --length 128``)
determinism   the gradients of an 8B shape twice, and the time of a pass against one with PyTorch's
              fastest attention and embedding backward

The model is trained first because gradients of random weights say little about those of a model
that has learnt.  Its text is a chain in which each token has four successors of unequal likelihood;
of every 64 tokens the second half repeats the first.

PyTorch has faster forms that add in any order for attention (cuDNN's and flash's) and the embedding
(atomics).  The price of determinism is what a pass would save with those in the place of ours:

    price = [layers * (ours - fastest attention) + (ours - atomic embedding)] / (pass - that)
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_backward import DIM, HEADS, KV_HEADS, backward_row, seconds
from benchmarks.cases import PassCase
from benchmarks.common import Row, run_command
from benchmarks.passes import add_gradients, free_memory, make_pass, measured, time_pass
from experiments.exact_backward import Alone, cosine, cosines, exact_backward, plain_gradients
from isobit.config.precision import PrecisionConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.backend import backend_of
from isobit.kernels.operands import LinearWeight
from isobit.kernels.triton.pointwise import embedding_backward
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import ScoredPass
from isobit.precision.flow import Site
from isobit.records.batch import PackedBatch
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("cosines")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--layers", type=int, default=24)
    command.add_argument("--sequences", type=int, default=8)
    command.add_argument("--length", type=int, default=1024)
    command.add_argument("--steps", type=int, default=300, help="of the training before")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=hold_cosines)
    command = commands.add_parser("determinism")
    command.add_argument("--out", type=Path)
    command.set_defaults(run=determinism)
    return parser


def hold_cosines(arguments: argparse.Namespace) -> None:
    card = _describe_card() if arguments.device == "cuda" else {}
    size = Size(arguments.layers, arguments.sequences, arguments.length, arguments.steps)
    _show(card | compare(size, arguments.device), arguments.out)


def determinism(arguments: argparse.Namespace) -> None:
    _show(_describe_card() | measure_determinism(), arguments.out)


def _describe_card() -> dict[str, Any]:
    from benchmarks.rollout_engines import describe_card

    return describe_card()


def _show(found: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(found, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n")


VOCABULARY = 512
HALF = 32
LIKELIHOODS = (0.55, 0.25, 0.15, 0.05)
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Size:
    layers: int = 24
    sequences: int = 8
    length: int = 1024
    steps: int = 300

    @property
    def config(self) -> ModelConfig:
        """Eight query heads and four KV heads of 64."""
        return ModelConfig(
            "qwen3",
            VOCABULARY,
            512,
            1536,
            self.layers,
            8,
            4,
            64,
            self.length,
            1e-6,
            1e4,
            tied_embeddings=False,
        )


def trained_policy(size: Size, device: str) -> tuple[Policy, list[float]]:
    """An ``fp8`` policy after ``size.steps`` steps of AdamW in its own flow, and the loss of each
    step.
    """
    policy = random_policy(size.config, PrecisionConfig(preset="fp8"), seed=0, device=device)
    config = TrainingConfig(
        learning_rate=LEARNING_RATE,
        warmup_updates=WARM_UP_STEPS,
        schedule="cosine",
        max_skipped_updates=1,
    )
    trainer = Trainer(policy, config, total_updates=size.steps)
    losses = [
        trainer.update([batch_of(size, step)], SupervisedObjective()).metrics["loss"]
        for step in range(size.steps)
    ]
    return policy, losses


def batch_of(size: Size, number: int) -> PackedBatch:
    """Batch ``number`` of the text; every token but the first of a sequence is predicted."""
    (batch,) = pack_pairs(
        [((first,), rest) for first, *rest in text(size, number).tolist()],
        size.sequences * size.length,
    )
    return batch


def text(size: Size, number: int) -> torch.Tensor:
    """int64 [sequences, length]."""
    successors = torch.randint(
        VOCABULARY, (VOCABULARY, len(LIKELIHOODS)), generator=torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(number + 1)
    choices = torch.multinomial(
        torch.tensor(LIKELIHOODS),
        size.sequences * size.length,
        replacement=True,
        generator=generator,
    )
    choices = choices.view(size.sequences, size.length)
    tokens = torch.empty_like(choices)
    tokens[:, 0] = torch.randint(VOCABULARY, (size.sequences,), generator=generator)
    for at in range(1, size.length):
        is_repeat = at // HALF % 2 == 1
        tokens[:, at] = (
            tokens[:, at - HALF] if is_repeat else successors[tokens[:, at - 1], choices[:, at]]
        )
    return tokens


SMALLEST, MEAN, ALONE = 0.995, 0.998, 0.9985
TINY = 1e-12
"""The root mean square of all gradients where they are small."""
WORST = 10

Gradients = dict[str, torch.Tensor]


def compare(size: Size, device: str) -> dict[str, Any]:
    policy, losses = trained_policy(size, device)
    batch = batch_of(size, size.steps)
    log_probs, ours = gradients(policy, batch)
    with exact_backward(policy) as alone:
        exact_log_probs, exact = gradients(policy, batch)
    factor = TINY / root_mean_square(exact)
    _, tiny = gradients(policy, batch, factor)
    with exact_backward(policy) as alone_tiny:
        _, tiny_exact = gradients(policy, batch, factor)
    assert torch.equal(log_probs, exact_log_probs), "both have one forward"
    fp32_loss, fp32 = plain_gradients(policy, text(size, size.steps).to(device))
    found = {
        "size": asdict(size),
        "losses": {
            "first": losses[0],
            "last": losses[-1],
            "of_the_batch": -float(log_probs.mean()),
            "of_the_batch_in_fp32": fp32_loss,
        },
        "exact": summary(ours, exact),
        "tiny": {"root_mean_square": root_mean_square(tiny_exact), **summary(tiny, tiny_exact)},
        "fp32": summary(ours, fp32),
        "alone": {
            "in_the_model": smallest(alone),
            "in_the_model_tiny": smallest(alone_tiny),
            "random": random_linear(device, 1.0),
            "random_tiny": random_linear(device, TINY),
        },
    }
    return found | {"bars": bars(found)}


def bars(found: dict[str, Any]) -> dict[str, bool]:
    every, mean = f"every matrix at least {SMALLEST}", f"mean at least {MEAN}"
    alone = [value for pair in found["alone"].values() for value in pair.values()]
    return {
        every: found["exact"]["smallest"] >= SMALLEST,
        mean: found["exact"]["mean"] >= MEAN,
        f"{every}, gradients of {TINY:g}": found["tiny"]["smallest"] >= SMALLEST,
        f"{mean}, gradients of {TINY:g}": found["tiny"]["mean"] >= MEAN,
        f"one linear alone at least {ALONE}": min(alone) >= ALONE,
    }


def smallest(alone: Alone) -> dict[str, float]:
    """The smallest cosine over the linears of a model, each alone."""
    return {"dx": min(dx for dx, _ in alone.values()), "dw": min(dw for _, dw in alone.values())}


def gradients(
    policy: Policy, batch: PackedBatch, factor: float = 1.0
) -> tuple[torch.Tensor, Gradients]:
    """Log-probabilities of the targets, and the gradients of ``factor`` times the mean of their
    negatives, by master.
    """
    scored = ScoredPass(policy, batch, "none")
    log_probs = scored.forward().log_probs
    scored.backward(torch.full_like(log_probs, -factor / log_probs.numel()))
    return log_probs, take_gradients(policy)


def take_gradients(policy: Policy) -> Gradients:
    """Gradients by master; the masters have none afterwards."""
    found = {
        name: master.grad for name, master in policy.masters.items() if master.grad is not None
    }
    for master in policy.parameters():
        master.grad = None
    assert found.keys() == policy.masters.keys()
    return found


def summary(ours: Gradients, others: Gradients) -> dict[str, Any]:
    """Cosines of the matrices: the smallest, the mean and the worst ten."""
    found = {
        name: cosine(gradient, others[name])
        for name, gradient in ours.items()
        if gradient.ndim == 2
    }
    worst = sorted(found, key=lambda name: found[name])[:WORST]
    return {
        "matrices": len(found),
        "smallest": found[worst[0]],
        "mean": fmean(found.values()),
        "worst": {name: found[name] for name in worst},
    }


def root_mean_square(found: Gradients) -> float:
    """Over all elements of all gradients."""
    squares = sum(float(gradient.double().square().sum()) for gradient in found.values())
    return (squares / sum(gradient.numel() for gradient in found.values())) ** 0.5


def random_linear(device: str, size: float) -> dict[str, float]:
    """A linear by itself, 512 x 1536 over 4,096 tokens: normal operands, the rows of dY of
    different sizes around ``size``.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    backend = backend_of(torch.device(device))
    site = Site("alone", "linear", "e4m3", dgrad="e4m3", wgrad="e4m3")
    weight = LinearWeight(site, backend.publish(site, (normal(512, 1536) * 0.02).to(device)))
    dy, x = normal(4096, 512) * normal(4096, 1).exp() * size, normal(4096, 1536)
    operands = dy.bfloat16().to(device), x.bfloat16().to(device)
    dx_cosine, dw_cosine = cosines(*operands, weight, backend)
    return {"dx": dx_cosine, "dw": dw_cosine}


SHAPE = "qwen3-8b"
CASES = (PassCase("fp8", 4096, 2, "none", SHAPE), PassCase("fp8", 16384, 1, "mlp", SHAPE))
BYTES_LENGTH = 4096
_BACK_ENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def measure_determinism() -> dict[str, Any]:
    return {
        "bytes": measured(same_bytes),
        "price": [measured(lambda case=case: price(case)) for case in CASES],
    }


def same_bytes() -> Row:
    """Gradients of the whole model, twice, and what differs."""
    policy = random_policy(
        PassCase("fp8", BYTES_LENGTH, 1, "none", SHAPE).config,
        PrecisionConfig(preset="fp8"),
        seed=0,
        device="cuda",
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(policy.config.vocab_size, (BYTES_LENGTH,), generator=generator).cuda()
    weights = torch.randn(BYTES_LENGTH - 1, generator=generator).cuda() / BYTES_LENGTH

    def gradients() -> dict[str, torch.Tensor]:
        add_gradients(policy, ids[None], weights, "none")
        found = {
            name: master.grad for name, master in policy.masters.items() if master.grad is not None
        }
        for master in policy.parameters():
            master.grad = None
        return found

    first, second = gradients(), gradients()
    differing = sum(
        int((first[name].view(torch.int32) != second[name].view(torch.int32)).sum())
        for name in policy.masters
    )
    return {"numbers": sum(gradient.numel() for gradient in first.values()), "differing": differing}


def price(case: PassCase) -> Row:
    """The pass, the operations that could be faster, and what they would save."""
    whole = time_pass(case, make_pass(case))["seconds"]
    free_memory()
    ours = float(str(backward_row("fp8", case.sequences, case.length)["ms"]))
    others = {
        name: _try(lambda backend=backend: sdpa_ms(backend, case))
        for name, backend in _BACK_ENDS.items()
    }
    known = [ms for ms in others.values() if isinstance(ms, float)]
    ours_embedding, atomic_embedding = embedding_ms(case)
    saved = (
        (case.config.num_layers * (ours - min(known)) + ours_embedding - atomic_embedding) * 1e-3
        if known
        else None
    )
    return {
        "length": case.length,
        "sequences": case.sequences,
        "recompute": case.recompute,
        "pass_s": whole,
        "attention_ms": {"ours": ours, **others},
        "embedding_ms": {"ours": ours_embedding, "atomic": atomic_embedding},
        "price": None if saved is None else saved / (whole - saved),
    }


def sdpa_ms(backend: SDPBackend, case: PassCase) -> float:
    """PyTorch's backward of causal attention in BF16: the faster of KV heads as they are and
    repeated beforehand.
    """
    found = [
        _try(lambda repeated=repeated: _sdpa_ms(backend, case, repeated))
        for repeated in (False, True)
    ]
    times = [ms for ms in found if isinstance(ms, float)]
    if not times:
        raise RuntimeError(found[0])
    return min(times)


def _sdpa_ms(backend: SDPBackend, case: PassCase, repeated: bool) -> float:
    def heads(count: int) -> torch.Tensor:
        return torch.randn(
            case.sequences,
            count,
            case.length,
            DIM,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=True,
        )

    q, k, v = heads(HEADS), *(heads(HEADS if repeated else KV_HEADS) for _ in range(2))
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)
        d_output = torch.randn_like(output)
        return (
            seconds(lambda: torch.autograd.grad(output, (q, k, v), d_output, retain_graph=True))
            * 1e3
        )


def embedding_ms(case: PassCase) -> tuple[float, float]:
    """Milliseconds of our embedding backward, and of one with FP32 atomics."""
    config = case.config
    ids = case.token_ids().view(-1).cuda()
    d = torch.randn(case.tokens, config.hidden_size, device="cuda").bfloat16()
    grad = torch.zeros(config.vocab_size, config.hidden_size, device="cuda")
    return seconds(lambda: embedding_backward(d, ids, grad)) * 1e3, seconds(
        lambda: grad.index_add_(0, ids, d.float())
    ) * 1e3


def _try(work: Callable[[], float]) -> float | str:
    """The figure, or why there is none."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
