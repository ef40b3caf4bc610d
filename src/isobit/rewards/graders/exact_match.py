"""Whether the answer is the column's text, character by character: 1 or 0."""

from isobit.records.text import Completion, Prompt
from isobit.rewards.extract import cell, final_answer


def score(
    prompt: Prompt,
    completion: Completion,
    column: str = "answer",
    ignore_case: bool = False,
    strip: bool = True,
) -> float:
    r"""1.0 if the completion's last ``\boxed{..}``, else its last ``<answer>``, else all of it, is
    what ``column`` holds.

    ``strip`` ignores white space around both, ``ignore_case`` their case.  Look-alikes of other
    alphabets are other characters.  Raises ``RewardError`` for a missing column.
    """
    expected = str(cell(prompt, column, "exact_match"))
    given = final_answer(completion.text)
    if strip:
        given, expected = given.strip(), expected.strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)
