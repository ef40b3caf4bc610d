"""Groups that were kept or sent are those that were sampled and graded, column by column."""

from dataclasses import replace

import numpy as np

from isobit.parallel.world import decode, encode
from isobit.records.sequence import GIVEN, TokenSequence
from isobit.records.text import Completion, FinishReason, Group, Prompt
from isobit.records.wire import completions_of, completions_value, groups_of, groups_value
from tests.sequences import turns_of

PROMPTS = {name: Prompt(name, f"text of {name}", (5, 6), {"answer": 1}) for name in ("a/0", "a/1")}
TURNS = turns_of(
    token_ids=(1, 2, 3, 4, 5, 6),
    loss_mask=(False, True, False, False, True, True),
    log_probs=(0.0, -0.5, 0.0, 0.0, -1.5, -2.5),
    weights_versions=(GIVEN, 3, GIVEN, GIVEN, 4, 4),
    temperature=0.5,
)


def completion(text: str, reason: FinishReason, **columns: object) -> Completion:
    answer = (7, 8, 9)
    sequence = TokenSequence.of_answer((5, 6), answer, (-0.25, -0.0, -1.5), (2, 2, 3), 0.7)
    return Completion(replace(sequence, **columns), text, reason)


def groups() -> list[Group]:
    cut = {"truncated_log_probs": np.array([0.0, 0.0, -0.125, 0.0, -0.5], np.float32)}
    routed = {"routings": np.array([0, 0, -(1 << 62), 5, (1 << 62) + 1])}
    turns = replace(TURNS, turn_rewards=np.array([0, 0.1, 0, 0, 0, np.nan]))
    empty = Completion(TokenSequence.of_answer((5, 6), ()), "", "aborted")
    stopped = replace(completion("ä🙂\n", "stop", **cut), stop_string="</answer>")
    first = [stopped, completion("", "length", **routed), empty]
    parts = {"format": [1.0, None, 0.1], "answer": [0.0, 1 / 3, None]}
    return [
        Group(PROMPTS["a/1"], 3, first, [1.0, None, 0.1], parts),
        Group(PROMPTS["a/0"], 0, [Completion(turns, "x", "stop")], [0.5], {}, baseline=-0.75),
    ]


def test_groups_come_back_whole_through_a_message() -> None:
    value = decode(encode(groups_value(groups())))
    assert groups_of(value, PROMPTS.__getitem__) == groups()


def test_what_is_learnt_from_later_is_no_longer_fresh() -> None:
    (first, *_) = groups_of(groups_value(groups()), PROMPTS.__getitem__, fresh=False)
    assert [one.sequence.fresh for one in first.completions] == [False] * 3
    whole = [replace(one.sequence, fresh=True) for one in first.completions]
    assert whole == [one.sequence for one in groups()[0].completions]


def test_no_completions_are_a_value_too() -> None:
    assert completions_of(decode(encode(completions_value([])))) == []
