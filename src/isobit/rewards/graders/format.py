"""Whether a completion has the layout that is asked for: 1 or 0."""

from isobit.records.text import Completion, Prompt
from isobit.rewards.graders.regex import compiled

THINK_AND_ANSWER = (
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
)
"""``<think>..</think><answer>..</answer>``, each once, with nothing around them."""


def score(prompt: Prompt, completion: Completion, pattern: str = THINK_AND_ANSWER) -> float:
    """1.0 if all of the completion matches ``pattern``, in which a dot is any character.

    What `isobit.rewards.graders.regex` says about time holds here too.  Raises ``RewardError`` for
    what is no regular expression.
    """
    del prompt  # every grader is given one
    return float(compiled(pattern).fullmatch(completion.text) is not None)
