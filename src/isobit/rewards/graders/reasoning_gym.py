"""The scorers of reasoning-gym's tasks.

A prompt's row holds the task's entry and, under ``reasoning_gym``, the name, size, seed and options
from which the task is built again. The answer is the stripped text of the last
``<answer>...</answer>`` after the thinking, or all that stands there.

Refused are scorers that execute the model's answer (``eval``, sympy's parser), that use as much
memory as it asks for, or that reward any text. For some others the answer must have the form in
FORMS. An answer on which a scorer fails, or takes too long, scores 0 and is counted.
"""

import json
import math
import re
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from isobit.data.tasks import TASK_COLUMN, create_task
from isobit.records.text import Completion, Prompt
from isobit.rewards.counts import count
from isobit.rewards.deadline import DeadlineError, deadline
from isobit.rewards.graders.text import closed, last_tagged, visible
from isobit.util.errors import RewardError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

EXECUTES_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Tasks whose scorer executes the answer, by ``eval`` or sympy's ``parse_expr`` (0.1.25)."""

EXPANDS_ANSWERS = frozenset({"rubiks_cube"})
"""Tasks whose scorer repeats a part as often as the answer says: ``R999999999``."""

PAYS_FOR_ANY_ANSWER = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks whose ``score_answer`` gives 1 for wrong answers: ``coin_flip`` compares the digits that
both have (0 equals 0.375; and 1e99999999 takes forever), ``game_of_life_halting`` tests whether the
text is empty.
"""

NUMBER = r"[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,2})?"
FORMS = {
    # ``nan`` is at no distance from any number
    "complex_arithmetic": re.compile(r"[\d+\-.ijeE() ]{1,200}", re.ASCII),
    # the first number of a text is the answer, its sign aside: ``9^9^9`` is as good as 9
    "gsm_symbolic": re.compile(r"\D{0,1000}(?<!-)\d{1,30}(?:\.\d{1,30})?\D{0,1000}", re.ASCII),
    # whatever holds no number is right where there is no solution
    "polynomial_equations": re.compile(rf"(?:{NUMBER}(?:\s*,\s*{NUMBER}){{0,50}})?", re.ASCII),
    # text without a variable is a conclusion from anything
    "propositional_logic": re.compile("[\\s()¬∧∨→↔]{0,500}[A-Z][A-Z\\s()¬∧∨→↔]{0,500}"),  # noqa: RUF001
    # a car moves as many steps as the answer says, one after the other
    "rush_hour": re.compile(r"(?:[^+-]|[+-](?!\d{3})){0,2000}"),
}
"""The form of a task's answers; another one scores 0."""

LONGEST = 10_000
"""Characters of an answer, besides four times those of the task's own answer."""


def score(
    prompt: Prompt, completion: Completion, seconds: float = 5.0, read_thinking: bool = False
) -> float:
    """The task's own score of the completion's final answer, in most tasks within 0 and 1.

    ``seconds`` bounds the scorer in the main thread; elsewhere the grading pool's deadline does.
    Raises ``RewardError`` for a prompt of no reasoning-gym task and for a refused scorer; and what
    the scorer raises if it raises on the task's own answer too.
    """
    identity = prompt.row.get(TASK_COLUMN)
    if identity is None:
        raise RewardError(
            f"prompt {prompt.id} comes from no reasoning-gym task; name another reward.function"
        )
    entry = {name: value for name, value in prompt.row.items() if name != TASK_COLUMN}
    task = _task(json.dumps(identity, sort_keys=True))
    text = visible(prompt, completion, "reasoning_gym", read_thinking)
    tagged = last_tagged(closed(text, completion))
    answer = (text if tagged is None else tagged).strip()
    if tagged is None and not answer and completion.text.strip():
        return 0.0  # all was thinking; some scorers pay for an empty answer
    if (beyond := _beyond(answer, entry, identity)) is not None:
        count(f"reasoning_gym: {beyond}")
        return 0.0
    return _scored(task, answer, entry, seconds)


def _beyond(answer: str, entry: dict[str, Any], identity: dict[str, Any]) -> str | None:
    """What is wrong with the answer before it is scored."""
    if len(answer) > LONGEST + 4 * len(str(entry.get("answer"))):
        return "length"
    source = entry.get("metadata", {}).get("source_dataset", identity["task"])
    form = FORMS.get(source)
    return "form" if form is not None and form.fullmatch(answer) is None else None


def _scored(task: "ProceduralDataset", answer: str, entry: dict[str, Any], seconds: float) -> float:
    try:
        with deadline(seconds):
            value = float(task.score_answer(answer, deepcopy(entry)))  # one writes into its entry
    except DeadlineError:
        count("reasoning_gym: time limit")
        return 0.0
    except Exception:  # scorers raise almost anything on text that they do not expect
        task.score_answer(entry.get("answer"), deepcopy(entry))  # the task's fault if this raises
        count("reasoning_gym: scorer raised")
        return 0.0
    if not math.isfinite(value):
        count("reasoning_gym: not finite")
        return 0.0
    return value


@cache
def _task(identity: str) -> "ProceduralDataset":
    fields: dict[str, Any] = json.loads(identity)
    tasks = {fields["task"], *(part.get("name") for part in fields["options"].get("datasets", ()))}
    dangers = {
        "executes the model's answer as Python": EXECUTES_ANSWERS,
        "expands the model's answer without a bound": EXPANDS_ANSWERS,
        "gives full marks for wrong answers": PAYS_FOR_ANY_ANSWER,
    }
    for danger, dangerous in dangers.items():
        if refused := sorted(tasks & dangerous):
            raise RewardError(
                f"reasoning-gym's scorer of {', '.join(map(repr, refused))} {danger}; "
                "write a reward function that only reads it, and name it in reward.function"
            )
    return create_task(
        fields["task"], size=fields["size"], seed=fields["seed"], options=fields["options"]
    )
