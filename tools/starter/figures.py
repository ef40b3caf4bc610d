"""What the starter model can do: greedy accuracy, and how often each style of answer is sampled and
right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from isobit.config.data import DataConfig, JsonlData
from isobit.config.rollout import RolloutConfig
from isobit.data.prompts import build_prompts
from isobit.models.policy import Policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import RolloutEngine, generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.starter.tasks import correct_answer, is_worked_out
from tools.starter.tokenizer import EOS_ID

MAX_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares of held-out problems, from 0 to 1."""

    problems: int
    greedy_accuracy: float
    greedy_worked_out: float
    """Greedy answers that are worked out."""
    sampled_worked_out: float
    """Answers worked out when sampling at temperature 1; the two below are of the same samples."""
    worked_out_accuracy: float
    guess_accuracy: float

    def __str__(self) -> str:
        return (
            f"{self.problems} held-out problems: greedy {self.greedy_accuracy:.1%} right "
            f"({self.greedy_worked_out:.1%} worked out); "
            f"sampled {self.sampled_worked_out:.1%} worked out, of which "
            f"{self.worked_out_accuracy:.1%} right, "
            f"guesses {self.guess_accuracy:.1%} right"
        )


def measure(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    problems_file: Path,
    limit: int | None = None,
) -> Figures:
    """Answer the problems of a JSONL file twice, greedily and at temperature 1, one completion
    each.
    """
    source = JsonlData(path=problems_file, limit=limit)
    prompts = build_prompts(
        "held_out", source, tokenizer, DataConfig(train=source), policy.config.max_positions
    )
    engine = NativeEngine(
        policy, RolloutConfig(max_new_tokens=MAX_ANSWER_TOKENS), tokenizer, seed=0
    )
    greedy, sampled = (_answer(engine, prompts, temperature) for temperature in (0.0, 1.0))
    worked_out = [pair for pair in sampled if is_worked_out(pair[1].text)]
    guessed = [pair for pair in sampled if not is_worked_out(pair[1].text)]
    return Figures(
        problems=len(prompts),
        greedy_accuracy=_accuracy(greedy),
        greedy_worked_out=sum(is_worked_out(completion.text) for _, completion in greedy)
        / len(greedy),
        sampled_worked_out=len(worked_out) / len(sampled),
        worked_out_accuracy=_accuracy(worked_out),
        guess_accuracy=_accuracy(guessed),
    )


def _answer(
    engine: RolloutEngine, prompts: Sequence[Prompt], temperature: float
) -> list[tuple[Prompt, Completion]]:
    sampling = SamplingParams(MAX_ANSWER_TOKENS, temperature=temperature, stop_token_ids=(EOS_ID,))
    groups = generate(engine, [Request(prompt, 0, 1, sampling) for prompt in prompts])
    return [(prompt, completion) for prompt, (completion,) in zip(prompts, groups, strict=True)]


def _accuracy(answers: Sequence[tuple[Prompt, Completion]]) -> float:
    return sum(correct_answer(prompt, completion) for prompt, completion in answers) / max(
        1, len(answers)
    )
