"""The reward of ``tens.toml``: how many full tens are in the sum."""

from isobit.records.text import Completion, Prompt


def full_tens(prompt: Prompt, completion: Completion) -> float:
    """1 where the whole answer is the number of full tens in the sum: ``2`` for ``3+8+2+9=``."""
    return float(completion.text == str(int(prompt.row["answer"]) // 10))
