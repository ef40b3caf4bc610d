"""Checks, before a run begins, that rewards can use the reference answers and the columns of its
prompts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from isobit.config.reward import DEFAULT_FUNCTION, RewardConfig
from isobit.data.tasks import TASK_COLUMN
from isobit.records.text import Prompt
from isobit.rewards.graders import REFERENCES
from isobit.rewards.graders.text import UnusableReferenceError, references
from isobit.rewards.signatures import Columns, columns_of, missing_columns
from isobit.util.errors import RewardError


def check_references(
    reward: RewardConfig | None, sets: Mapping[str, Sequence[Prompt]]
) -> Sequence[str]:
    """A line for each set of prompts and each grader that cannot use some of the references.

    Raises ``RewardError`` where a set has none that can be used, or a prompt no such column, or
    where tasks' own scorers are to grade prompts that come from none.
    """
    parts = {} if reward is None else reward.named()
    lines: list[str] = []
    if any(part.function == DEFAULT_FUNCTION for part in parts.values()):
        for name, prompts in sets.items():
            _check_tasks(name, prompts)
    for grader, column in dict.fromkeys(
        (part.function, part.options.get("column", "answer"))
        for part in parts.values()
        if part.function in REFERENCES
    ):
        for name, prompts in sets.items():
            lines += _unusable(grader, column, name, prompts)
    return lines


def check_columns(reward: str, columns: Columns, sets: Mapping[str, Sequence[Prompt]]) -> None:
    """Raise ``RewardError`` where prompts have not the columns that the function ``reward`` takes,
    with the first set that has such prompts, and the first of them.
    """
    for name, prompts in sets.items() if columns else ():
        missing, number, first = "", 0, None
        for prompt in prompts:
            if lacking := missing_columns(columns, prompt):
                missing, first = missing or lacking, first or prompt
                number += lacking == missing
        if first is not None:
            raise RewardError(
                f"the reward {reward!r} takes {missing}, which {number:,} of the {len(prompts):,} "
                f"prompts of {name} do not have, the first is {first.id}; {columns_of(first)}; "
                "rename the column in the data, or write a function that takes it by its name there"
            )


def _check_tasks(name: str, prompts: Sequence[Prompt]) -> None:
    others = [prompt.id for prompt in prompts if TASK_COLUMN not in prompt.row]
    if others:
        raise RewardError(
            f"reward.function is {DEFAULT_FUNCTION!r}, the default, which is the own scorer of a "
            f"reasoning-gym task, and {len(others):,} of the {len(prompts):,} prompts of {name} "
            f"come from none, the first is {others[0]}; name another grader, such as exact_match "
            "or math_verify, a function of yours, or 'none' to learn from a teacher alone"
        )


def _unusable(grader: str, column: str, name: str, prompts: Sequence[Prompt]) -> Sequence[str]:
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    for prompt in prompts:
        try:
            references(prompt, column, grader, REFERENCES[grader])
        except UnusableReferenceError as error:
            kinds[error.kind] += 1
            first.setdefault(error.kind, str(error))
    if not kinds:
        return ()
    unusable = sum(kinds.values())
    counted = " and ".join(f"{number:,} {kind}" for kind, number in kinds.items())
    examples = "; ".join(first.values())
    if unusable == len(prompts):
        raise RewardError(
            f"{grader} can use none of the {unusable:,} references of {name} ({counted}): "
            f"{examples}; name the column with the answers in reward.options.column"
        )
    return (
        f"references of {name} for {grader}: {counted} of {len(prompts):,} "
        f"({unusable / len(prompts):.1%}); their completions fail and are left out: {examples}",
    )
