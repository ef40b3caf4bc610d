"""The replay buffer: what it keeps, drops and draws, and that it goes on where it was."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.algorithm import ReplayConfig
from isobit.records.sequence import COLUMNS, GIVEN, TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.training.replay_buffer import ReplayBuffer
from tests.sequences import turns_of


def judged(*sequences: TokenSequence, advantage: float = 1.0, reward: float = 0.5) -> list[Group]:
    """Each as the completion of a group of its own that the length limit cut."""
    completions = [Completion(sequence, "", "length") for sequence in sequences]
    return [
        Group(Prompt("", "", ()), 0, [one], [reward], advantages=[advantage]) for one in completions
    ]


def answer(version: int = 1, tokens: int = 3, name: int = 7) -> TokenSequence:
    return TokenSequence.of_answer(
        [5, 6],
        [name, *range(tokens - 1)],
        [-0.1 * (1 + x) for x in range(tokens)],
        [version] * tokens,
        0.7,
    )


def named(count: int) -> list[Group]:
    return judged(*[answer(name=name) for name in range(count)])


def buffer(seed: int = 0, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(ReplayConfig.model_validate({"fraction": 0.5, **settings}), seed)


def filled(count: int, **settings: Any) -> ReplayBuffer:
    made = buffer(**settings)
    made.keep(named(count), version=1)
    return made


def draws(made: ReplayBuffer, count: int, fresh: int) -> list[list[int]]:
    """Of as many steps that add nothing."""
    found = []
    for _ in range(count):
        found.append(names(made.draw(fresh, version=1)))
        made.keep([], version=1)
    return found


def names(groups: Sequence[Group]) -> list[int]:
    return [group.completions[0].token_ids[0] for group in groups]


def test_a_completion_comes_back_as_it_was_sampled() -> None:
    several_turns = turns_of(
        token_ids=(1, 2, 3, 4, 5, 6),
        loss_mask=(False, True, False, False, True, True),
        log_probs=(0.0, -0.5, 0.0, 0.0, -1.5, -2.5),
        weights_versions=(GIVEN, 3, GIVEN, GIVEN, 4, 4),
        temperature=0.5,
    )
    for sequence in (answer(), several_turns):
        made = buffer()
        columns = {column.name: 1 for column in COLUMNS if not column.replayed}
        made.keep(judged(sequence.with_columns(**columns), advantage=-0.25), version=4)
        expected = judged(replace(sequence, fresh=False), advantage=-0.25)
        assert made.draw(1, version=4) == expected


def test_what_is_not_learnt_from_is_not_kept() -> None:
    made = buffer()
    first, second, third = (answer(name=name) for name in range(3))
    completions = [Completion(one, "", "stop") for one in (first, second, third)]
    rewards, advantages = [0.5, None, 1.0], [-0.25, None, 0.25]
    prompt = Prompt("", "", ())
    made.keep([Group(prompt, 0, completions, rewards, advantages=advantages)], version=1)
    assert [(g.rewards, g.advantages) for g in made.draw(3, version=1)] == [
        ([0.5], [-0.25]),
        ([1.0], [0.25]),
    ]
    assert names(made.draw(3, version=1)) == [0, 2]
    assert {g.completions[0].finish_reason for g in made.draw(3, version=1)} == {"stop"}


@pytest.mark.parametrize(
    ("fraction", "fresh", "expected"), [(0.5, 4, 4), (0.25, 6, 2), (0.75, 2, 6), (0.5, 40, 20)]
)
def test_the_batch_has_the_share_asked_for_or_all_there_is(
    fraction: float, fresh: int, expected: int
) -> None:
    assert len(filled(20, fraction=fraction).draw(fresh, version=1)) == expected


def test_a_draw_is_without_replacement_and_in_the_order_of_the_run() -> None:
    drawn = names(filled(20).draw(12, version=1))
    assert drawn == sorted(set(drawn))


def test_every_draw_is_another_and_a_function_of_the_seed() -> None:
    first, again, other = filled(40), filled(40), filled(40, seed=1)
    found = draws(first, 5, fresh=10)
    assert draws(again, 5, fresh=10) == found
    assert len({tuple(draw) for draw in found}) == 5
    assert names(other.draw(10, version=1)) != found[0]


def test_a_step_that_is_done_again_draws_the_same() -> None:
    made = filled(40)
    assert made.draw(10, version=1) == made.draw(10, version=1)


def test_a_uniform_draw_prefers_nobody() -> None:
    made = filled(10)
    counts = Counter(name for draw in draws(made, 400, fresh=3) for name in draw)
    assert set(counts) == set(range(10))
    assert all(80 < count < 160 for count in counts.values())  # 120 expected, 9.2 a deviation


def test_by_advantage_large_ones_come_more_often_and_zeros_never() -> None:
    made = buffer(sampling="advantage")
    advantages = enumerate((0.0, 1.0, -3.0))
    made.keep([judged(answer(name=n), advantage=a)[0] for n, a in advantages], version=1)
    counts = Counter(name for draw in draws(made, 400, fresh=1) for name in draw)
    assert counts[0] == 0
    assert 2.0 < counts[2] / counts[1] < 4.5


def test_the_stale_are_dropped() -> None:
    made = buffer(max_staleness=2)
    made.keep(judged(*[answer(version, name=version) for version in (1, 2, 3)]), version=3)
    assert names(made.draw(9, version=3)) == [1, 2, 3]
    assert names(made.draw(9, version=5)) == [3]
    made.keep([], version=5)
    assert len(made) == 1


def test_the_oldest_go_where_the_bytes_are_too_many() -> None:
    small = buffer(max_mib=2000 / (1 << 20))
    small.keep(judged(*[answer(name=name, tokens=50) for name in range(20)]), version=1)
    assert small.num_bytes <= 2000
    drawn = names(small.draw(20, version=1))
    assert drawn == list(range(20 - len(drawn), 20))


def test_thirteen_bytes_a_token_beside_the_ids() -> None:
    short, long = buffer(), buffer()
    short.keep(judged(answer(tokens=10)), version=1)
    long.keep(judged(answer(tokens=1010)), version=1)
    assert long.num_bytes - short.num_bytes == 1000 * (4 + 13)


def test_a_restored_buffer_draws_what_the_other_would_have_drawn() -> None:
    made = filled(30, sampling="advantage")
    draws(made, 3, fresh=10)
    tensors = {name: tensor.clone() for name, tensor in made.tensors().items()}
    restored = buffer(sampling="advantage")
    restored.restore(made.state(), tensors)
    assert (len(restored), restored.num_bytes) == (len(made), made.num_bytes)
    for other in (made, restored):
        other.keep(judged(answer(name=99)), version=1)
    assert restored.draw(10, version=1) == made.draw(10, version=1)
    assert all(torch.equal(made.tensors()[name], x) for name, x in restored.tensors().items())


def test_an_empty_buffer_can_be_stored_too() -> None:
    made, restored = buffer(), buffer()
    restored.restore(made.state(), made.tensors())
    assert restored.draw(4, version=1) == []
