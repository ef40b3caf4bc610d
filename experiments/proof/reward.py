"""The reward of the proof: the answer behind the last ``####``, or nothing."""

from isobit.records.text import Completion, Prompt


def correct(prompt: Prompt, completion: Completion) -> float:
    """1 for an ended completion whose last line is ``#### ANSWER``."""
    _, mark, answer = completion.text.rpartition("####")
    is_ended = completion.finish_reason == "stop"
    return float(is_ended and bool(mark) and answer.strip() == prompt.row["answer"])
