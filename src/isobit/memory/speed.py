"""An estimate of how fast a model samples and trains on a GPU, from measured rows.

``speed.json`` holds the rows, each with the file and line of ``benchmarks/results`` that it is
taken from and the card that it was measured on; ``python -m benchmarks.memory speed`` writes it.
A duration is taken to be a sum over what a phase does,

    products        operations of matrix products, by format
    attention       operations over the keys, by format
    routed          elements that are sent to experts
    bytes           weights and keys that a decode step reads
    layers          layers that a decode step launches, and
    sparse layers   those of them with experts

and the seconds that each of these takes are the ones that fit the rows best. Decode steps, forwards
without a backward (prompts, and models that only score) and forwards with a backward have
coefficients of their own.  INT8 counts as FP8 times what its own rows, which are few, took longer,
and so does INT8 with DGrad in FP8 and WGrad in BF16, whose passes take 1.05 times those of INT8.
On a card without rows each second counts as often as its data sheet's peak of that kind is below
that of the card of the rows (``isobit.memory.cards``); launches take as long.
Whole steps of reinforcement learning, which nothing is fitted to, say how far an estimate is off
(``MeasuredSpeed.error``).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.kernels.backend import support
from isobit.memory.cards import MEASURED, Card
from isobit.models.config import ModelConfig
from isobit.models.decoder import LM_HEAD, build_decoder, decoder_shape
from isobit.models.shapes import model_shape
from isobit.precision.flow import Graph, PrecisionFlow, build_flow
from isobit.precision.quant_tensor import EIGHT_BITS, Format
from isobit.records.packing import answers_within
from isobit.util.terminal import counted

ROWS = Path(__file__).with_name("speed.json")
Row = Mapping[str, Any]
Work = Mapping[str, float]
"""What a phase does, by the names above."""
PORTABLE_SHARE, PORTABLE_DECODE = 0.59, 0.98
"""The share of the speed of Hopper's kernels that the portable ones reached on an H200, 8B in INT8
(benchmarks/results/portable): in a training pass, and in decode of 32 sequences, which waits for
weights.
"""
_AGAIN: Mapping[Recompute, float] = {"none": 0.0, "mlp": 0.25, "full": 0.5}
"""The share of its elements that a layer sends to experts, or reads from them, once more."""


@dataclass(frozen=True, slots=True)
class SpeedShape:
    """A model in one flow, by what its time depends on."""

    config: ModelConfig
    flow: PrecisionFlow

    @classmethod
    def named(cls, name: str, precision: str) -> "SpeedShape":
        config = model_shape(name)
        chosen = PrecisionConfig.model_validate(precision)
        return cls(config, build_flow(chosen, decoder_shape(config)))

    def products(self, graph: Graph, first_of_mlp: bool = False) -> dict[str, float]:
        """Operations of a forward per token by format, without lm_head; or those of the MLPs' first
        linear alone, which ``recompute = "mlp"`` repeats.
        """
        operations = {"e4m3": 0.0, "bf16": 0.0}
        for site, numbers, share in self._matrices():
            if not first_of_mlp or site.endswith(("gate_proj", "up_proj")):
                operations[_rate(graph.site(site).forward)] += 2 * numbers * share
        return operations

    @property
    def has_int8(self) -> bool:
        return self._multiplies_in("int8")

    @property
    def has_e4m3(self) -> bool:
        return self._multiplies_in("e4m3")

    def _multiplies_in(self, format: Format) -> bool:
        sites = (*self.flow.rollout.sites, *self.flow.training.sites)
        return any(site.kind in ("linear", "head") and site.forward == format for site in sites)

    @property
    def head(self) -> float:
        """Operations of lm_head per token."""
        config = self.config
        return 0.0 if config.score_head else 2.0 * config.vocab_size * config.hidden_size

    def head_rate(self, graph: Graph) -> str:
        """The format whose rate lm_head's forward has."""
        return _rate(graph.site(LM_HEAD).forward)

    def attention(self, graph: Graph, length: float) -> dict[str, float]:
        """Operations of a forward per token, in sequences of ``length``."""
        config, operations = self.config, {"e4m3": 0.0, "bf16": 0.0}
        for layer in range(config.num_layers):
            if layer in config.delta_layers:
                continue
            keys = min(length / 2, config.window(layer) or length)
            operations[_rate(graph.attention_format(layer))] += (
                4 * keys * config.num_heads * config.head_dim
            )
        if config.delta is not None:
            # by token: the state read twice and added to, and half a chunk of keys and of updates
            rule = config.delta
            numbers = 3 * rule.key_dim * rule.value_dim + 64 * (rule.key_dim + rule.value_dim)
            operations["bf16"] += 2 * len(config.delta_layers) * rule.value_heads * numbers
        return operations

    @property
    def sparse_layers(self) -> int:
        return sum(map(self.config.is_sparse, range(self.config.num_layers)))

    @property
    def routed(self) -> float:
        """Elements per token that are sent to experts."""
        experts = self.config.experts
        top_k = 0 if experts is None else experts.top_k
        return float(top_k * self.config.hidden_size * self.sparse_layers)

    def weight_bytes(self, tokens: float) -> float:
        """What a forward of so many tokens reads of the weights; of experts those that are met."""
        total = self.head / (2 if self.flow.rollout.site(LM_HEAD).forward == "int8" else 1)
        for site, numbers, share in self._matrices():
            met = 1 - (1 - share) ** tokens if share < 1 else 1.0
            total += (
                met * numbers * (1 if self.flow.rollout.site(site).forward in EIGHT_BITS else 2)
            )
        return total

    def _matrices(self) -> tuple[tuple[str, int, float], ...]:
        return _matrices_of(self.config)


@cache
def _matrices_of(config: ModelConfig) -> tuple[tuple[str, int, float], ...]:
    """Site, numbers, and the share of them that a token meets."""
    share = 1.0 if config.experts is None else config.experts.top_k / config.experts.count
    return tuple(
        (name.rpartition(".")[0], prod(master.shape), share if ".experts." in name else 1.0)
        for name, master in build_decoder(config).masters().items()
        if master.kind == "matrix"
    )


def _rate(format: Format) -> str:
    """The format whose measured rate a format has: INT8 that of E4M3 (``Rates.int8``)."""
    return "e4m3" if format in EIGHT_BITS else "bf16"


def forward_work(
    shape: SpeedShape, graph: Graph, tokens: float, length: float, head_tokens: float
) -> Work:
    """A forward of ``tokens`` tokens in sequences of ``length``, with logits of some of them."""
    work = {f"products {form}": tokens * one for form, one in shape.products(graph).items()}
    work[f"products {shape.head_rate(graph)}"] += shape.head * head_tokens
    for form, one in shape.attention(graph, length).items():
        work[f"attention {form}"] = tokens * one
    return work | {"routed": tokens * shape.routed}


def training_work(
    shape: SpeedShape, tokens: float, length: float, recompute: Recompute, rows: float = 1.0
) -> Work:
    """Forward and backward, with what is computed again; ``rows`` of each token are computed by all
    but attention and the head (``isobit.models.shared_prefix``).
    """
    graph, again = shape.flow.training, 1 if recompute == "full" else 0
    repeated = shape.products(graph, first_of_mlp=True) if recompute == "mlp" else {}
    work = {
        f"products {form}": rows * tokens * ((3 + again) * one + repeated.get(form, 0.0))
        for form, one in shape.products(graph).items()
    }
    work[f"products {shape.head_rate(graph)}"] += shape.head * tokens
    work["products bf16"] += 2 * shape.head * tokens
    for form, one in shape.attention(graph, length).items():
        work[f"attention {form}"] = tokens * (3 + again) * one
    return work | {"routed": (1 + _AGAIN[recompute]) * rows * tokens * shape.routed}


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decode steps of sequences that all begin with ``prompt`` tokens and get ``new`` ones."""

    steps: Mapping[int, float]
    """Decode steps, by the number of sequences in them."""
    keys: float
    """Tokens in the cache, summed over the sequences of all steps."""

    @classmethod
    def of(cls, sequences: int, prompt: float, new: int, most: int, cached: float) -> "Decoding":
        """The steps of ``sequences`` with at most ``most`` at once and ``cached`` tokens in the
        cache: sequences that it does not hold wait, and go on where they stopped.
        """
        tick = max(1, new // 64)
        waiting, running = sequences, list[int]()
        steps, keys = Counter[int](), 0.0
        while waiting or running:
            fresh = min(waiting, most - min(most, len(running)))
            running += [0] * fresh
            waiting -= fresh
            active, held = 0, 0.0
            for done in running[:most]:
                held += prompt + done + tick
                if active and held > cached:
                    break
                active += 1
            steps[active] += tick
            keys += tick * (active * (prompt + tick / 2) + sum(running[:active]))
            running = [done + tick for done in running[:active]] + running[active:]
            running = [done for done in running if done < new]
        return cls(steps, keys)

    def work(self, shape: SpeedShape) -> Work:
        sizes, total = support("cuda").sizes, sum(self.steps.values())
        tokens = sum(count * steps for count, steps in self.steps.items())
        read = self.keys * sizes.page_bytes(shape.config, shape.flow) / sizes.page_tokens
        read += tokens * sizes.carry_bytes(shape.config, shape.flow)
        read += sum(steps * shape.weight_bytes(count) for count, steps in self.steps.items())
        products = shape.products(shape.flow.rollout)
        work = {f"products {form}": tokens * one for form, one in products.items()}
        work[f"products {shape.head_rate(shape.flow.rollout)}"] += tokens * shape.head
        layers = total * shape.config.num_layers
        return work | {
            "bytes": read,
            "layers": layers,
            "sparse layers": total * shape.sparse_layers,
        }


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a unit of each kind of work."""

    seconds: Work
    error: float
    """The largest deviation from a row that was fitted, as a share of its time."""
    int8: float = 1.0
    """How much longer the rows in INT8 took, on average, than as much work in FP8."""

    def time(self, work: Work, shape: SpeedShape, card: Card | None = None) -> float:
        """Seconds on a card; None is that of the rows."""
        if card is not None and card.e4m3_as_fp16 and not shape.has_int8:
            work = _in_fp16(work)
        slower = {} if card is None else _slower(card)
        taken = sum(
            self.seconds.get(name, 0.0) * size * slower.get(name, 1.0)
            for name, size in work.items()
        )
        return taken * self.int8 if shape.has_int8 else taken


def _in_fp16(work: Work) -> Work:
    """The same work with products in FP16 for those in E4M3; BF16's take as long."""
    products = work.get("products bf16", 0.0) + work.get("products e4m3", 0.0)
    return {**work, "products bf16": products, "products e4m3": 0.0}


def _slower(card: Card) -> Work:
    """How many times as long a unit of each kind of work takes as on the card of the rows."""
    sheet, base = card.sheet, MEASURED.sheet
    if sheet is None or base is None:
        return {}
    portable = card.has_slower_products
    products, steps = (1 / PORTABLE_SHARE, 1 / PORTABLE_DECODE) if portable else (1.0, 1.0)
    in_16_bits = products * base.fp16 / sheet.fp16
    bandwidth = base.bandwidth / sheet.bandwidth
    return {
        "products e4m3": products * base.int8 / sheet.int8,
        "products bf16": in_16_bits,
        "attention e4m3": in_16_bits,  # whose second product is in FP16
        "attention bf16": in_16_bits,
        "routed": bandwidth,
        "bytes": steps * bandwidth,
        "layers": steps,
        "sparse layers": steps,
    }


def _fit(rows: Sequence[tuple[SpeedShape, Work, float]]) -> Rates:
    """The rates, none below 0, with the least squares of the relative errors; INT8's factor is what
    they leave of its rows.
    """
    rates = _fitted([(work, taken) for shape, work, taken in rows if not shape.has_int8])
    int8 = [taken / rates.time(work, shape) for shape, work, taken in rows if shape.has_int8]
    return replace(rates, int8=fmean(int8)) if int8 else rates


def _fitted(rows: Sequence[tuple[Work, float]]) -> Rates:
    names = sorted({name for work, _ in rows for name, size in work.items() if size})
    table = torch.tensor(
        [[work.get(name, 0.0) / taken for name in names] for work, taken in rows],
        dtype=torch.float64,
    )
    scale, kept = table.max(0).values, list(range(len(names)))
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    while True:
        part = table[:, kept] / scale[kept]
        solution = torch.linalg.lstsq(part, ones, driver="gelsd").solution[:, 0]
        if bool((solution >= 0).all()):
            break
        kept.pop(int(solution.argmin()))
    seconds = {names[i]: float(solution[n] / scale[i]) for n, i in enumerate(kept)}
    error = float((part @ solution - 1).abs().max())
    return Rates(seconds, error)


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The rates of all phases, and the card of their rows."""

    card: str
    decode: Rates
    forward: Rates
    training: Rates
    rank_factor: float
    """How much longer a round of micro-batches takes on several GPUs than on one."""
    ranks: int
    """The most GPUs that were measured."""
    other_s: float
    """Seconds of the rest of a step per trained token."""
    error: float
    """The largest deviation of an estimate from a whole step that was measured, as a share."""


@cache
def measured_speed() -> MeasuredSpeed:
    """What ``speed.json`` says."""
    rows: dict[str, list[Row]] = {}
    for row in json.loads(ROWS.read_text(encoding="utf-8")):
        rows.setdefault(row["phase"], []).append(row)

    def fit(phase: str, work: Callable[[Row, SpeedShape], tuple[Work, float]]) -> Rates:
        shapes = [SpeedShape.named(row["shape"], row["mode"]) for row in rows[phase]]
        pairs = zip(shapes, rows[phase], strict=True)
        return _fit([(shape, *work(row, shape)) for shape, row in pairs])

    forward = fit("forward", lambda row, shape: (_forward_of(row, shape), row["seconds"]))
    ranks = {row["ranks"]: row["seconds"] for row in rows["round"]}
    other = rows["other"][0]
    return MeasuredSpeed(
        card=" and ".join(sorted({row["card"] for phase in rows.values() for row in phase})),
        decode=fit("rollout", lambda row, shape: _decode_of(row, shape, forward)),
        forward=forward,
        training=fit(
            "training",
            lambda row, shape: (
                training_work(shape, row["tokens"], row["length"], row["recompute"]),
                row["seconds"],
            ),
        ),
        rank_factor=ranks[max(ranks)] / ranks[1],
        ranks=max(ranks),
        other_s=other["seconds"] / other["tokens"],
        error=max(
            (abs(row["estimated_s"] / row["seconds"] - 1) for row in rows.get("whole", ())),
            default=0.0,
        ),
    )


def _forward_of(row: Row, shape: SpeedShape) -> Work:
    return forward_work(
        shape, shape.flow.training, row["tokens"], row["length"], row["head_tokens"]
    )


def _decode_of(row: Row, shape: SpeedShape, forward: Rates) -> tuple[Work, float]:
    """A rollout's decode steps: its prompts take what the forwards say."""
    count, prompt, new = row["requests"], row["prompt_tokens"], row["new_tokens"]
    prompts = forward_work(shape, shape.flow.rollout, count * prompt, prompt, count)
    decoding = Decoding.of(count, prompt, new, count, float("inf"))
    return decoding.work(shape), row["seconds"] - forward.time(prompts, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step of training asks of the GPUs."""

    shape: SpeedShape
    sequences: int
    """Sequences that are trained on."""
    length: float
    """Tokens of each, on average."""
    rows: float = 1.0
    """Rows of each token in training: below 1 where prompts are shared."""
    recompute: Recompute = "none"
    epochs: int = 1
    trainers: int = 1
    idle: float = 0.0
    """Share of the trainers' time in which some of them have no micro-batch."""
    prompts: int = 0
    """Prompts that are sampled from; 0 in a step without a rollout."""
    prompt_tokens: float = 0.0
    samples: int = 1
    new_tokens: int = 0
    most_at_once: int = 256
    cached_tokens: float = float("inf")
    """The capacity of a sampler's KV cache."""
    samplers: int = 1
    sharing: int = 1
    """How many of these share an engine, a part of each matrix and of the cache on each."""
    beside: bool = False
    """Whether the samplers are other GPUs than the trainers, and work at the same time."""
    scored: tuple[SpeedShape, ...] = ()
    """Models that score every token, the policy itself among them if it is asked once more."""


def rows_of_a_token(
    training: TrainingConfig, budget: int, prompt: float, new: int, replayed: int = 0
) -> float:
    """Rows of a token of a step whose micro-batches have ``budget`` rows; 1 where no prompt is
    shared, as those of what is ``replayed`` are not.
    """
    if not training.shared_prefix:
        return 1.0
    samples = training.samples_per_prompt
    prompts = -(-samples // answers_within(budget, round(prompt), new))
    fresh = training.prompts_per_step * samples
    rows = training.prompts_per_step * (prompts * prompt + samples * new)
    return (rows + replayed * (prompt + new)) / ((fresh + replayed) * (prompt + new))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and tokens a second of all GPUs together."""

    rollout: float
    scoring: float
    training: float
    other: float
    beside: bool
    generated: int
    trained: float
    has_int8: bool = False
    """Whether some of the work is in INT8."""
    has_e4m3: bool = False
    sharing: int = 1
    work: StepWork | None = None
    """What the time is of."""

    @property
    def total(self) -> float:
        learning = self.scoring + self.training
        both = max(self.rollout, learning) if self.beside else self.rollout + learning
        return both + self.other

    @property
    def generated_per_s(self) -> float:
        return self.generated / self.rollout if self.rollout else 0.0

    @property
    def trained_per_s(self) -> float:
        return self.trained / self.training

    def as_json(self) -> dict[str, float]:
        return {
            "step_s": self.total,
            "rollout_s": self.rollout,
            "scoring_s": self.scoring,
            "training_s": self.training,
            "generated_tokens_per_s": self.generated_per_s,
            "trained_tokens_per_s": self.trained_per_s,
        }


def estimate_step(work: StepWork, card: Card | None = None) -> StepTime:
    """The time of a step if every completion has all its new tokens, on a card or that of the
    rows.
    """
    speed, shape = measured_speed(), work.shape
    rollout = 0.0
    if work.prompts:
        own = -(-work.prompts // (work.samplers // work.sharing))
        sequences, graph = own * work.samples, shape.flow.rollout
        prompts = forward_work(
            shape, graph, own * work.prompt_tokens, work.prompt_tokens, sequences
        )
        decoding = Decoding.of(
            sequences, work.prompt_tokens, work.new_tokens, work.most_at_once, work.cached_tokens
        )
        steps = _cut(decoding.work(shape), work.sharing)
        rollout = speed.forward.time(_cut(prompts, work.sharing), shape, card)
        rollout += speed.decode.time(steps, shape, card)
    tokens = work.sequences * work.length
    own_tokens = tokens / work.trainers
    passes = training_work(shape, own_tokens * work.epochs, work.length, work.recompute, work.rows)
    training = speed.training.time(passes, shape, card) / (1 - work.idle)
    if work.trainers > 1:
        training *= speed.rank_factor
    scoring = sum(
        speed.forward.time(
            forward_work(one, one.flow.training, own_tokens, work.length, own_tokens), one, card
        )
        for one in work.scored
    )
    return StepTime(
        rollout,
        scoring,
        training,
        speed.other_s * own_tokens,
        work.beside,
        work.prompts * work.samples * work.new_tokens,
        tokens * work.epochs,
        any(one.has_int8 for one in (shape, *work.scored)),
        any(one.has_e4m3 for one in (shape, *work.scored)),
        work.sharing,
        work,
    )


def _cut(work: Work, ranks: int) -> Work:
    """The part of one of so many ranks: all but the number of a layer's operations."""
    return {name: one if "layers" in name else one / ranks for name, one in work.items()}


def describe_step(step: StepTime, steps: int | None, card: Card, processes: int) -> list[str]:
    """Lines on a step's time, that of so many steps, and what the estimate rests on."""
    speed = measured_speed()
    parts = {"rollout": step.rollout, "scoring": step.scoring, "training": step.training}
    each = ", ".join(f"{name} {_seconds(time)}" for name, time in parts.items() if time)
    run = "" if steps is None else f"; {_hours(steps * step.total)} for {counted(steps, 'steps')}"
    tokens = [f"{step.trained_per_s:,.0f} trained"]
    if step.generated:
        tokens.insert(0, f"{step.generated_per_s:,.0f} generated")
    notes = [] if step.work is None else _of_completions(step.work)
    notes += [
        f"from rows measured on an {speed.card}, where estimates of whole steps came within "
        f"{speed.error:.0%}"
    ]
    if step.has_int8:
        longer = {"decode": speed.decode, "forward": speed.forward, "training": speed.training}
        factors = ", ".join(f"{rates.int8:.2f} ({phase})" for phase, rates in longer.items())
        notes.append(f"INT8 as FP8 times {factors}, by few rows of one shape")
    if card.name.lower() not in speed.card.lower():
        notes += _scaled(card)
    if card.has_slower_products:
        notes.append(
            f"portable kernels as on an {MEASURED.name}: products at {PORTABLE_SHARE} of the speed "
            f"of Hopper's, all else of decode at {PORTABLE_DECODE}"
        )
    if card.e4m3_as_fp16 and step.has_e4m3:
        notes.append("products in E4M3 count as such of FP16, which they are there")
    if step.sharing > 1:
        notes.append(
            f"messages between the {step.sharing} GPUs that share an engine come on top, and were "
            "not measured"
        )
    if processes > speed.ranks:
        notes.append(f"as {speed.ranks} GPUs scale, the most that were measured")
    return [
        f"time, estimated: {_seconds(step.total)} a step ({each}){run}",
        f"  tokens a second: {', '.join(tokens)}",
        *(f"  {note}" for note in notes),
        "  loading, grading, evaluation and checkpoints come on top",
    ]


def _of_completions(work: StepWork) -> list[str]:
    """What is sampled in a step, as long as it may be."""
    completions, prompt = work.prompts * work.samples, f"prompts of {work.prompt_tokens:,.0f}"
    said = f"if all {completions:,} completions have {work.new_tokens:,} tokens, behind {prompt}"
    return [said] if completions else []


def _scaled(card: Card) -> list[str]:
    """What the time of a card without rows rests on."""
    unlike = f"no row is of a card like this one ({card.name})"
    if (sheet := card.sheet) is None:
        return [f"{unlike}, whose bandwidth may be another"]
    tera = 1e12
    return [
        f"{unlike}: they are scaled by data sheets, to {sheet.bandwidth / tera:.3g} TB/s, "
        f"{sheet.int8 / tera:,.0f} TOPS in INT8 and {sheet.fp16 / tera:,.0f} TFLOPS in FP16"
    ]


def _seconds(time: float) -> str:
    if time < 0.001:
        return "less than 1 ms"
    return f"{time:.2g} s" if time < 10 else f"{time:,.0f} s"


def _hours(time: float) -> str:
    if time < 90:
        return f"{time:.2g} s"
    return f"{time / 60:.0f} minutes" if time < 5400 else f"{time / 3600:,.1f} hours"
