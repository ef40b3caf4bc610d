"""Tokens per second of rollout and training on a CPU, beside a plain FP32 transformers loop of the
same shape in the same run.

    python -m benchmarks.cpu [--threads 2] [--precision fp8] [--out benchmarks/results/cpu.json]

The shape is that of the first prototype of the CPU arithmetic: hidden 128, 4 layers, vocabulary
128, MLP 256 or 384, random weights. Rollout: prompts of 16 tokens, 64 new tokens each, sampled at
temperature 1 over the full vocabulary with log-probabilities recorded, the whole engine timed.
Training: sequences of 80 tokens, packed; forward, GRPO loss and backward, no optimiser. Every
figure is the best of several rounds, and the rounds of all rows take turns, so that a busy machine
hurts all of them alike. ``prototype`` is the rate that the prototype reached for that row on two
idle AVX-512 cores.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

# isort: off
import isobit  # noqa: F401 (sets how OpenMP spins, before torch is imported)

# isort: on
from benchmarks.cases import make_requests
from benchmarks.common import make_parser, write_json
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import ScoredPass
from isobit.records.batch import PackedBatch
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 128, 4, 4, 4, 32
PROMPT_TOKENS, NEW_TOKENS = 16, 64
SEQUENCE_TOKENS = PROMPT_TOKENS + NEW_TOKENS
PROTOTYPE = {
    ("rollout, 64 sequences", 256): 6500,
    ("rollout, 64 sequences", 384): 6100,
    ("rollout, 256 sequences", 256): 11000,
    ("rollout, 256 sequences", 384): 10200,
    ("training, 3,200 tokens", 256): 7400,
    ("training, 3,200 tokens", 384): 6600,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to time: ``work`` handles ``tokens`` tokens a call."""

    name: str
    mlp: int
    tokens: int
    work: Callable[[], object]


def make_config(mlp: int) -> ModelConfig:
    return ModelConfig(
        "qwen3", VOCABULARY, HIDDEN, mlp, LAYERS, HEADS, KV_HEADS, HEAD_DIM, 512, 1e-6, 1e4, True
    )


def isobit_rows(mlp: int, precision: PrecisionConfig) -> list[Row]:
    policy = random_policy(make_config(mlp), precision, seed=0)
    return make_rows(
        mlp, partial(rollout_work, policy), training_work(policy, 3200 // SEQUENCE_TOKENS)
    )


def make_rows(
    mlp: int, rollout: Callable[[int], Callable[[], object]], training: Callable[[], object]
) -> list[Row]:
    """``rollout`` makes the work for a number of sequences."""
    rows = [Row(f"rollout, {n} sequences", mlp, n * NEW_TOKENS, rollout(n)) for n in (64, 256)]
    return [*rows, Row("training, 3,200 tokens", mlp, 3200, training)]


def rollout_work(policy: Policy, sequences: int) -> Callable[[], object]:
    rollout = RolloutConfig(max_sequences=sequences, max_batched_tokens=4096)
    engine = NativeEngine(policy, rollout, None, seed=0)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (sequences, PROMPT_TOKENS), generator=generator)
    requests = make_requests(prompts.tolist(), NEW_TOKENS)
    return lambda: generate(engine, requests)


def training_work(policy: Policy, sequences: int) -> Callable[[], object]:
    algorithm = build_algorithm(GrpoConfig())
    batch = make_batch(sequences)
    (shares,) = algorithm.shares([batch])

    def work() -> None:
        scored = ScoredPass(policy, batch, "none")
        scores = scored.forward()
        log_probs = scores.log_probs.requires_grad_()
        on_policy = replace(batch, old_log_probs=log_probs.detach())
        loss = algorithm.loss(scores, on_policy, shares).loss
        scored.backward(*torch.autograd.grad(loss, log_probs))
        for master in policy.parameters():
            master.grad = None

    return work


def make_batch(sequences: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = sequences * SEQUENCE_TOKENS
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    offsets = torch.arange(PROMPT_TOKENS - 1, SEQUENCE_TOKENS - 1)
    rows = (torch.arange(sequences)[:, None] * SEQUENCE_TOKENS + offsets).view(-1)
    count = rows.numel()
    return PackedBatch(
        token_ids=ids,
        positions=torch.arange(SEQUENCE_TOKENS).repeat(sequences),
        lengths=(SEQUENCE_TOKENS,) * sequences,
        rows=rows,
        targets=ids[rows + 1],
        sequence=torch.arange(sequences).repeat_interleave(NEW_TOKENS),
        temperatures=torch.ones(count),
        recorded_log_probs=torch.zeros(count),
        old_log_probs=torch.zeros(count),
        advantages=torch.randn(count, generator=generator),
    )


def transformers_rows(mlp: int) -> list[Row]:
    """The plain loop: generate with a KV cache, and forward + backward of the mean log-probability,
    FP32, SDPA.
    """
    model = Qwen3ForCausalLM(Qwen3Config(**make_config(mlp).to_hf())).float().eval()
    generation = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
    )
    prompts = {
        n: torch.randint(1, VOCABULARY, (n, PROMPT_TOKENS)) for n in (64, 256)
    }  # 0 is transformers' padding here
    sequences = torch.randint(0, VOCABULARY, (3200 // SEQUENCE_TOKENS, SEQUENCE_TOKENS))

    def generate(n: int) -> Callable[[], object]:
        return lambda: model.generate(prompts[n], generation_config=generation)  # pyright: ignore[reportAttributeAccessIssue]

    def train() -> None:
        log_probs = model(sequences).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
        log_probs.gather(2, sequences[:, PROMPT_TOKENS:, None]).mean().backward()
        model.zero_grad()

    return make_rows(mlp, generate, train)


def measure(rows: list[Row], rounds: int) -> list[float]:
    """Tokens per second of each row: the best round, after one that warms up."""
    best = [0.0] * len(rows)
    for round_index in range(rounds + 1):
        for i, row in enumerate(rows):
            started_at = perf_counter()
            row.work()
            if round_index:
                best[i] = max(best[i], row.tokens / (perf_counter() - started_at))
    return best


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = PrecisionConfig.model_validate(arguments.precision)
    ours = [row for mlp in (256, 384) for row in isobit_rows(mlp, precision)]
    theirs = [row for mlp in (256, 384) for row in transformers_rows(mlp)]
    rates = measure(ours + theirs, arguments.rounds)
    machine = (
        f"{platform.processor() or platform.machine()}, {arguments.threads} threads, "
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
    print(f"{machine}, flow {arguments.precision}; tokens per second")
    print(
        f"{'':24} {'MLP':>4} {'isobit':>8} {'of prototype':>13} {'transformers FP32':>18} "
        f"{'isobit / transformers':>22}"
    )
    results = []
    for row, rate, plain in zip(ours, rates[: len(ours)], rates[len(ours) :], strict=True):
        share = rate / PROTOTYPE[row.name, row.mlp]
        print(
            f"{row.name:24} {row.mlp:4} {rate:8.0f} {share:12.0%} {plain:18.0f} "
            f"{rate / plain:22.2f}",
            flush=True,
        )
        figures = {"row": row.name, "mlp": row.mlp, "tokens_per_s": rate, "of_prototype": share}
        results.append(figures | {"transformers_tokens_per_s": plain})
    result = {"machine": machine, "precision": arguments.precision, "rows": results}
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
