"""An example of a reward function, for ``your_data.toml``."""

from isobit.records.text import Completion, Prompt


def reward(prompt: Prompt, completion: Completion) -> float:
    """1 for an answer that ends in the right number, half of that where it goes on to the length
    limit.
    """
    if not completion.text.strip().endswith(str(prompt.row["answer"])):
        return 0.0
    return 1.0 if completion.finish_reason == "stop" else 0.5
