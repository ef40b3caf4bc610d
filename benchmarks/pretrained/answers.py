"""Greedy answers to questions, by Isobit in ``fp32`` and by transformers in FP32."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.pretrained.results import write_result
from isobit.api import generate
from isobit.data.tokenizer import load_tokenizer, stop_token_ids

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
    """Two answers to one question."""

    question: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    gap: float | None
    """Between the two best logits of transformers where the answers part; None where they do
    not.
    """

    @property
    def equal(self) -> bool:
        """Token by token."""
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


def run(folder: Path, questions: int, new_tokens: int, out: Path) -> None:
    """Print each answer, and write the counts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compared = compare_answers(folder, QUESTIONS[:questions], new_tokens)
    for one in compared:
        print(f"{'=' if one.equal else 'X'} {one.question} {tokenizer.decode(one.ours)!r}")
    write_result(
        out,
        "answers-cpu",
        {
            "questions": len(compared),
            "equal": sum(one.equal for one in compared),
            "tokens": sum(len(one.ours) for one in compared),
            "gaps": [one.gap for one in compared if one.gap is not None],
        },
    )
