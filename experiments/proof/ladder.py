"""A ladder of models for the question of docs/proof.md at other sizes: one family (Qwen3's shape)
and one tokenizer, from random weights, fine-tuned in BF16 on worked out solutions of five tasks.

    gsm, multiply     as in ``experiments.proof.suite``
    convert           reasoning-gym's ``base_conversion`` up to 10^6, by way of base ten: powers of
                      the first base are added up, then divided by the second
    factors           ``prime_factorization`` up to 10^4, by dividing by one prime after the other
    lcm               ``lcm`` of two numbers up to 10^4, by Euclid's algorithm

    python -m experiments.proof ladder DIR --size 27m        # text and tokenizer, then the start

All end with ``#### ANSWER``.  A start is DIR/start-SIZE, and goes on where it was interrupted.  Its
fine-tuning ends with the first evaluation in which it solves ``ENOUGH`` of ``multiply``, and
DIR/start-SIZE/start.json says how many updates that took, what it solves, and its weights' SHA-256.

    ROWS/starts/SIZE.json.xz    how a start answers in several flows, without training: of each its
                                scores, and what ``isobit flows`` measures of its distributions
                                over the solutions of the same problems
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from experiments.proof import rows, runs
from experiments.proof.suite import (
    HYBRID,
    LADDER,
    SEED_STEP,
    Changes,
    Row,
    Run,
    arms_of,
    rows_of,
    write_lines,
)
from isobit import load_config
from isobit.commands.flows import compare_flows, read_flow
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import SftConfig
from isobit.parallel.world import ALONE
from isobit.run.sft import OpenSftRun, open_run, update_once
from isobit.store.directory import write_json

SOLUTIONS = 20_000
"""Rows of each task."""
VOCABULARY = 2048
ENOUGH = 0.3
"""Of ``multiply``, at which fine-tuning ends: a start is to solve a fifth to a half.  From one that
solved a fifth, 7 of 15 runs of ``27m`` ended below 5%, of ``bf16`` too (README.md).
"""
FIRST = 300
"""Updates before the first evaluation: no size has solved a product before, and answers of a model
that has learnt little are long.
"""
PAD, END = "<pad>", "<end>"


@dataclass(frozen=True)
class Size:
    """A decoder of Qwen3's family, with tied embeddings."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    steps: int
    learning_rate: float
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``from_scratch``."""

    @property
    def parameters(self) -> int:
        """Of the layers' matrices: embeddings and norms are in 8 bits in no flow."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.mlp)

    def words(self) -> dict[str, Any]:
        """The keys of its fine-tuning that the recipe leaves open."""
        return {
            "from_scratch.hidden_size": self.hidden,
            "from_scratch.intermediate_size": self.mlp,
            "from_scratch.num_layers": self.layers,
            "from_scratch.num_heads": self.heads,
            "from_scratch.num_kv_heads": self.kv_heads,
            "from_scratch.head_dim": self.head_dim,
            "training.steps": self.steps,
            "training.learning_rate": self.learning_rate,
            **{f"from_scratch.{key}": value for key, value in self.more.items()},
        }


SIZES: dict[str, Size] = {
    "27m": Size(512, 1536, 8, 8, 4, 64, 520, 1e-3),
    "108m": Size(576, 1536, 30, 9, 3, 64, 600, 6e-4),  # SmolLM2-135M, with fewer embeddings
    "443m": Size(1024, 3072, 28, 16, 8, 128, 600, 4e-4),  # Qwen3-0.6B, likewise
    "1.1b": Size(2048, 6144, 22, 16, 8, 128, 600, 3e-4),  # Qwen3-1.7B with 22 of 28 layers
}
"""By the parameters, with those of embeddings; ``steps`` is how many updates they may take."""
HYBRID_SIZE = Size(
    *(512, 1536, 8, 8, 4, 64, 800, 1e-3),
    {
        "family": "qwen3_5_text",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
)
"""``27m`` with gated delta nets in six of eight layers and gated attention in two, 28.4 million
parameters in all; no size of the ladder.
"""
STARTS_OF: Mapping[str, Size] = {**SIZES, HYBRID: HYBRID_SIZE}
"""What a start is made of, by the name behind ``start-``."""
PRETRAINED = "SmolLM2-135M"
PARAMETERS = {PRETRAINED: SIZES["108m"].parameters} | {
    size: one.parameters for size, one in SIZES.items()
}
"""Of a size's layers; ``108m`` is the shape of ``PRETRAINED`` with other embeddings."""


def write_text(directory: Path) -> None:
    """``ladder.solutions.jsonl`` and the tokenizer's folder, the same bytes each time."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = list(solutions(SOLUTIONS))
    write_lines(directory / "ladder.solutions.jsonl", rows)
    write_tokenizer(rows, directory / "tokenizer")


def solutions(count: int) -> Iterator[Row]:
    """So many of each task, a task after another."""
    yield from rows_of("gsm", "solutions", count)
    yield from rows_of("multiply", "solutions", count)
    for name, work in (("base_conversion", _convert), ("prime_factorization", _factors)):
        yield from _rows(name, work, count)
    yield from _rows("lcm", _lcm, count)


_OPTIONS: dict[str, dict[str, int]] = {
    "base_conversion": {"max_value": 10**6},
    "prime_factorization": {"max_value": 10**4},
    "lcm": {"max_value": 10**4},
}


def _rows(name: str, work: Callable[[dict[str, Any]], str], count: int) -> Iterator[Row]:
    import reasoning_gym

    entries = reasoning_gym.create_dataset(name, size=count, seed=SEED_STEP, **_OPTIONS[name])
    for entry in entries:
        answer, prompt = str(entry["answer"]), str(entry["question"]).strip()
        yield {
            "prompt": f"{prompt}\nThink step by step, and end with #### and the answer.",
            "completion": f"{work(entry['metadata'])}\n#### {answer}",
            "answer": answer,
        }


def _convert(made: dict[str, Any]) -> str:
    source, target, text = made["source_base"], made["target_base"], made["source_repr"]
    lines, value = list[str](), 0
    for digit in text:
        own = int(digit, 36)
        lines.append(f"{value}*{source}+{own}={value * source + own}")
        value = value * source + own
    digits = ""
    while True:
        rest = value % target
        name = "0123456789abcdefghijklmnopqrstuvwxyz"[rest]
        lines.append(f"{value}/{target}={value // target} rest {rest}: write {name}")
        digits, value = name + digits, value // target
        if not value:
            return "\n".join(lines)


def _factors(made: dict[str, Any]) -> str:
    value, prime, lines = int(made["number"]), 2, list[str]()
    while prime * prime <= value:
        if value % prime:
            lines.append(f"{value}/{prime}: rest {value % prime}")
            prime = next(
                n for n in range(prime + 1, 2 * prime + 1) if all(n % d for d in range(2, n))
            )
        else:
            lines.append(f"{value}/{prime}={value // prime}")
            value //= prime
    return "\n".join([*lines, f"{value} is prime"])


def _lcm(made: dict[str, Any]) -> str:
    first, second = made["numbers"]
    a, b, lines = first, second, list[str]()
    while b:
        lines.append(f"{a}={a // b}*{b}+{a % b}")
        a, b = b, a % b
    lines += [f"gcd={a}", f"{first}/{a}={first // a}", f"{first // a}*{second}={made['result']}"]
    return "\n".join(lines)


def write_tokenizer(rows: list[Row], folder: Path) -> None:
    """Byte pairs of the text, with each digit a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        (row[key] for row in rows for key in ("prompt", "completion")), trainer
    )
    folder.mkdir(parents=True, exist_ok=True)
    described = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END)
    described.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # as every release of transformers says
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train_start(config: SftConfig) -> int:
    """``isobit sft`` until the model solves enough, begun or resumed.  The exit status, which is 1
    where it never does.
    """
    told = Path(config.output) / "start.json"
    if told.is_file():
        print(f"{told} is there: this start is finished")
        return 0
    with open_run(config, None, True, ALONE, ()) as opened:
        steps = iter(opened.steps())
        while not (solved := _enough(opened)):
            if (step := next(steps, None)) is None:
                print(f"no evaluation in which {config.output} solved {ENOUGH:.0%} of multiply")
                return 1
            due = step >= FIRST and opened.run.evaluates_after(step)
            update_once(opened, step, due)
            if due:
                opened.evaluate_if_due(step)
            opened.save_if_due(step)
        opened.save_model()
    weights = Path(config.output) / "model" / "model.safetensors"
    write_json(told, {**solved, "sha256": sha256(weights.read_bytes()).hexdigest()})
    print(told.read_text(encoding="utf-8"))
    return 0


def _enough(opened: OpenSftRun) -> dict[str, float]:
    """Updates by the last evaluation and what it solved, where some evaluation had enough."""
    figures = opened.log.evaluation_figures()
    for at in sorted(figures):
        if figures[at].get("eval/multiply/accuracy", 0.0) >= ENOUGH:
            solved = {name: value for name, value in figures[at].items() if "accuracy" in name}
            return {"updates": max(figures), **solved}
    return {}


# How a start answers without training.


def _flow_of(said: str) -> PrecisionConfig:
    """A preset's name, or a table as TOML has it."""
    return read_flow(tomllib.loads(f"flow = {said}")["flow"] if said.startswith("{") else said)


FLOWS: Mapping[str, PrecisionConfig] = {
    arm: _flow_of(changes["precision"])
    for arm, changes in arms_of(LADDER + "27m").items()
    if "corrections" not in changes and arm != "int8-backward"
}
"""Arms that are one function, with their precision; the forward of ``int8-backward`` is that of
``int8``.
"""
BASE = "bf16"
STARTS = "starts"
Starts = Mapping[str, Mapping[str, Any]]
"""Size -> what its file in ``STARTS`` holds."""


def task_of(size: str) -> str:
    return "multiply" if size == PRETRAINED else LADDER + size


def answer_start(
    directory: Path,
    size: str,
    changes: Changes,
    arms: Sequence[str] = tuple(FLOWS),
    problems: int | None = None,
) -> Path:
    """Answer and score held-out problems with an untrained start in ``BASE`` and those of ``arms``
    that its row lacks, in this process; -> DIR/rows/starts/SIZE.json.xz.  ``size`` is one of
    ``PARAMETERS``.  With ``problems``, so many, of which the first are those of the runs; an arm
    that answered fewer answers anew.  Raises ValueError where the row is of other weights, and as
    ``with_flows``.
    """
    run = Run(task_of(size), BASE, 0)
    more = {} if problems is None else _asked(directory / "data", run, problems)
    words = runs.words_of({**runs.places_of(run, directory), **run.shared, **more, **changes})
    folder = directory / run.start / "model"
    out = directory / "rows" / STARTS / f"{size}{rows.SUFFIX}"
    kept = rows.read_row(out) if out.is_file() else None
    answered = {} if kept is None else kept["flows"]
    enough = 1 if problems is None else problems
    lacking = [a for a in arms if a not in answered or len(answered[a]["scores"]) < enough]
    start = rows.weights_sha256(folder)
    if kept is not None:
        _must_be_of(kept, start)
        if not lacking:
            return out
    config = load_config(runs.recipe_of(run.problems), words)
    others = [FLOWS[arm] for arm in lacking if arm != BASE]
    found = compare_flows(folder, config, others, answers="completion")
    names = {precision.name: arm for arm, precision in FLOWS.items()}
    base = found.flows[0].closeness
    row = {
        "start": start,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "flows": {
            names[one.name]: {
                "accuracy": None if one.result is None else one.result.accuracy,
                "scores": list(one.scores),
                "tokens": found.tokens,
                "closeness": None if one.closeness is None else asdict(one.closeness),
                "perplexity_of_base": None if base is None else base.perplexity,
                "generated_tokens_per_s": one.generated_per_s,
            }
            for one in found.flows
            if one.problem is None
        },
    }
    kept = rows.read_row(out) if out.is_file() else None  # of another process, meanwhile
    rows.write_row(out, row if kept is None else with_flows(kept, row))
    return out


def _asked(data: Path, run: Run, problems: int) -> dict[str, str]:
    """The settings by which it answers so many problems, written where they are missing."""
    path = data / f"{run.problems}.held_out-{problems}.jsonl"
    if not path.is_file():
        write_lines(path, rows_of(run.problems, "held_out", problems))
    return {"data.eval.held_out.path": str(path), "data.eval.held_out.limit": str(problems)}


def _must_be_of(kept: Mapping[str, Any], start: Mapping[str, str]) -> None:
    if kept["start"] != start:
        raise ValueError(
            f"the row is of a start whose SHA-256 is {kept['start']}, this start's is {start}: "
            "make the start of that row again, or move the row away"
        )


def with_flows(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A start's row with the flows of another that it lacks, or that answered more problems there.
    Raises ValueError unless flows that both have answered alike what both were asked.
    """
    flows = dict(kept["flows"])
    for arm, ours in found["flows"].items():
        theirs = flows.setdefault(arm, ours)
        both = min(len(ours["scores"]), len(theirs["scores"]))
        if ours["scores"][:both] != theirs["scores"][:both]:
            raise ValueError(
                f"{arm} answers otherwise than in the row, from the same weights: flows that were "
                "measured apart cannot be compared; move the row away and measure all of them"
            )
        if len(ours["scores"]) > both:
            flows[arm] = ours
    return {**kept, "flows": {arm: flows[arm] for arm in FLOWS if arm in flows}}


def read_starts(folder: Path) -> Starts:
    """Of the sizes that were answered without training.  Raises ValueError for a file that cannot
    be read.
    """
    found = folder / STARTS
    return {
        size: rows.read_row(path)
        for size in PARAMETERS
        if (path := found / f"{size}{rows.SUFFIX}").is_file()
    }
