"""Whether a regular expression of Python's ``re`` matches a completion: 1 or 0.

An expression whose repetitions nest, as in ``(a+)+b``, can take time exponential in the length of
the text.  Nothing here bounds that: the deadline of the grading pool does.
"""

import re
from functools import lru_cache

from isobit.errors import RewardError
from isobit.records.text import Completion, Prompt


def score(prompt: Prompt, completion: Completion, pattern: str, full: bool = False) -> float:
    """1.0 if ``pattern`` is found in the completion, with ``full`` if it matches all of it.

    Raises ``RewardError`` for what is no regular expression.
    """
    del prompt  # every grader is given one
    expression = compiled(pattern)
    found = (expression.fullmatch if full else expression.search)(completion.text)
    return float(found is not None)


@lru_cache(maxsize=64)
def compiled(pattern: str) -> re.Pattern[str]:
    """``pattern``, in which a dot is any character.  Raises ``RewardError``."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"{pattern!r} is no regular expression: {error}") from error
