"""Sample completions for the page, token by token, shaded by the log-probability that was recorded
when they were sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from isobit.observe.report.numbers import MINUS, cut, in_a_line, number_text
from isobit.records.rounding import are_level, settled

T = TypeVar("T")
Line = Mapping[str, Any]
"""A line of ``completions.jsonl``."""
MOST_PROMPTS = 8
"""Prompts shown of each source."""
MOST_TOKENS = 6000
"""Tokens shown on the page; what does not fit is cut and counted."""
MOST_OTHERS = 60
"""Rows of each source's table of further completions."""
MOST_CHARACTERS = 4000
"""Shown of a prompt, or of a completion that was logged without its tokens."""
_TOKEN_CHARACTERS = 80
_SHORT = 160
"""Characters of a text in the table of further completions."""

SHADES = (-0.1, -0.5, -1.0, -2.0, -4.0)
"""Log-probabilities, in nats, below which a token gets the next darker shade."""


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    log_prob: str
    """The log-probability as text."""
    shade: int
    """0 to ``len(SHADES)``; the less likely, the higher."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    step: int
    reward: str
    finish: str
    length: str
    text: str
    """Shown where there are no tokens."""
    tokens: tuple[Token, ...]
    left_out: int
    """Tokens at the end that are not shown."""
    verdict: str
    """``good`` for rewards of 1 or more, ``bad`` for 0 or less and for none, else empty."""
    above: str
    """Its reward against the mean of its group; empty where it is alone."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and its completions, by step."""

    prompt_id: str
    prompt: str
    answer: str
    """The dataset's own; empty where there is none."""
    answers: tuple[ShownAnswer, ...]


@dataclass(frozen=True, slots=True)
class ShownSource:
    """Problems of the training data or of one evaluation set."""

    name: str
    problems: tuple[Problem, ...]
    shown: int
    logged: int
    others: tuple[tuple[str, str, str, str], ...]
    """Step, prompt, completion and reward of those that are not among the problems, cut short."""


def choose_samples(lines: Sequence[Line]) -> list[ShownSource]:
    """The completions for the page, of all that were logged: of training, whole groups that are
    spread over the run; of an evaluation set, the first and the last answer to its first problems.
    """
    by_source = _grouped([line for line in lines if isinstance(line.get("step"), int)], "source")
    budget = MOST_TOKENS // max(1, len(by_source))
    return [_source(name, logged, budget) for name, logged in by_source.items()]


def _grouped(lines: Sequence[Line], *keys: str) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault("\n".join(str(line.get(key, "")) for key in keys), []).append(line)
    return found


def _source(name: str, logged: Sequence[Line], budget: int) -> ShownSource:
    if name == "train":
        groups = _spread(list(_grouped(logged, "step", "prompt_id").values()), MOST_PROMPTS)
    else:
        problems = list(_grouped(logged, "prompt_id").values())[:MOST_PROMPTS]
        groups = [lines if len(lines) < 2 else [lines[0], lines[-1]] for lines in problems]
    chosen = [line for group in groups for line in group]
    share = budget // max(1, len(chosen))
    taken = {id(line) for line in chosen}
    others = _spread([line for line in logged if id(line) not in taken], MOST_OTHERS)
    return ShownSource(
        "training" if name == "train" else name,
        tuple(
            Problem(
                prompt_id,
                cut(str(lines[0].get("prompt", "")), MOST_CHARACTERS),
                cut(str(lines[0].get("answer", "")), MOST_CHARACTERS),
                tuple(_answer(line, share) for line in lines),
            )
            for prompt_id, lines in _grouped(chosen, "prompt_id").items()
        ),
        len(chosen),
        len(logged),
        tuple(
            (
                str(one["step"]),
                in_a_line(str(one.get("prompt", "")), _SHORT),
                in_a_line(str(one.get("completion", "")), _SHORT),
                _reward(one),
            )
            for one in others
        ),
    )


def _spread(lines: Sequence[T], most: int) -> list[T]:
    """Evenly spread over the lines, the first and the last included."""
    if len(lines) <= most:
        return list(lines)
    return [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]


def _reward(line: Line) -> str:
    reward = line.get("reward")
    return number_text(reward) if isinstance(reward, int | float) else "failed"


def _answer(line: Line, most_tokens: int) -> ShownAnswer:
    texts, log_probs = line.get("token_texts"), line.get("log_probs")
    tokens = ()
    if isinstance(texts, list) and isinstance(log_probs, list):
        tokens = tuple(map(_token, texts[:most_tokens], log_probs))
    reward, length = line.get("reward"), line.get("tokens")
    number = settled(reward, 0.0, 1.0) if isinstance(reward, int | float) else 0.0  # failed: bad
    return ShownAnswer(
        step=line["step"],
        reward=_reward(line),
        finish="cut by the length limit" if line.get("finish_reason") == "length" else "",
        length=f"{length} tokens" if isinstance(length, int) else "",
        text=cut(str(line.get("completion", "")), MOST_CHARACTERS),
        tokens=tokens,
        left_out=max(0, length - len(tokens)) if tokens and isinstance(length, int) else 0,
        verdict="good" if number >= 1 else "bad" if number <= 0 else "",
        above=_above(reward, line.get("group_rewards")),
    )


def _above(reward: Any, of_group: Any) -> str:
    if not isinstance(reward, int | float) or not isinstance(of_group, list):
        return ""
    valid = [one for one in of_group if isinstance(one, int | float)]
    if len(valid) < 2:
        return ""
    mean = fmean(valid)
    above = reward - mean
    if are_level((reward, mean)):
        return "level with its group's mean"
    return f"{'+' if above > 0 else ''}{number_text(above)} to its group's mean"


def _token(text: Any, log_prob: Any) -> Token:
    is_number = isinstance(log_prob, int | float)
    shade = sum(log_prob < limit for limit in SHADES) if is_number else 0
    words = f"{log_prob:.4f} nats".replace("-", MINUS) if is_number else "not finite"
    return Token(str(text)[:_TOKEN_CHARACTERS].replace("\n", "\u21b5\n"), words, shade)
