"""The rules of a schedule: which weights sample which batch where it is written beforehand; that no
step is late and no token too old where it is recorded; and that a line is read as it was written.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.records.schedule import Schedule
from isobit.store.schedule_record import ScheduledStep, ScheduleRecord

NAMES = st.tuples(st.text(max_size=4), st.integers(0, 9))


@given(ahead=st.integers(0, 5), steps=st.integers(1, 9))
def test_what_is_written_beforehand_is_sampled_by_weights_of_so_many_steps(
    ahead: int, steps: int
) -> None:
    schedule = Schedule(ahead, 3, steps)
    sampled_by = dict[int, int]()
    for done in range(steps):
        for batch in range(1, schedule.batches_begun(done) + 1):
            sampled_by.setdefault(batch, done)
        assert schedule.groups_begun(done) == 3 * len(sampled_by)
    assert sampled_by == {batch: max(batch - 1 - ahead, 0) for batch in range(1, steps + 1)}


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 4),
    lowered=st.none() | st.tuples(st.integers(2, 8), st.integers(0, 3)),
    per_step=st.integers(1, 4),
    steps=st.integers(1, 8),
    data=st.data(),
)
def test_whatever_ends_first_no_step_is_late_and_each_group_is_learnt_from_once(
    staleness: int,
    lowered: tuple[int, int] | None,
    per_step: int,
    steps: int,
    data: st.DataObject,
) -> None:
    """Also where a run is resumed with a smaller bound, to which older groups do not keep."""
    schedule = Schedule(staleness, per_step, steps)
    begun, learnt = 0, list[int]()
    open_groups: list[tuple[int, int, bool]] = []  # number, begun_after, is_whole
    for step in range(1, steps + 1):
        if lowered is not None and lowered[0] == step:
            schedule = Schedule(min(staleness, lowered[1]), per_step, steps)
        while True:
            while begun < schedule.groups_begun(step - 1) and data.draw(st.booleans()):
                open_groups.append((begun, step - 1, False))
                begun += 1
            chosen = schedule.chosen(step, [(after, whole) for _, after, whole in open_groups])
            if chosen is not None:
                break
            half_done = [place for place, one in enumerate(open_groups) if not one[2]]
            if not half_done:  # only too few groups can be the reason
                assert len(open_groups) < per_step
                assert begun < schedule.groups_begun(step - 1)
                open_groups.append((begun, step - 1, False))
                begun += 1
                continue
            place = data.draw(st.sampled_from(half_done))
            open_groups[place] = (*open_groups[place][:2], True)
        assert len(chosen) == per_step
        for place in chosen:
            number, after, is_whole = open_groups[place]
            assert is_whole
            assert 0 <= step - 1 - after <= staleness
            learnt.append(number)
        open_groups = [one for place, one in enumerate(open_groups) if place not in chosen]
    assert sorted(learnt) == list(range(steps * per_step))
    assert open_groups == []
    if staleness == 0:
        assert learnt == sorted(learnt)


@given(
    step=st.integers(1, 99),
    learns=st.lists(NAMES, max_size=3, unique=True),
    drawn=st.dictionaries(NAMES, st.lists(st.integers(0, 99), max_size=3), max_size=3),
    compared=st.lists(
        st.tuples(st.text(max_size=4), *[st.integers(0, 9)] * 2, st.integers(1, 9)), max_size=3
    ),
)
def test_a_line_is_read_as_it_was_written(
    step: int,
    learns: list[tuple[str, int]],
    drawn: dict[tuple[str, int], list[int]],
    compared: list[tuple[str, int, int, int]],
) -> None:
    counts = {name: tuple(of_name) for name, of_name in drawn.items() if name not in learns}
    written = ScheduledStep(step, tuple(learns), counts, tuple(compared))
    assert ScheduledStep.of_line(written.line()) == written
    assert ScheduleRecord(print, [written.line()]).recorded(step, len(learns)) == written


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "learns": [], "drawn": [], "compared": []}\n',
        b'{"step": 1}\n',
        b'{"step": "one", "learns": [], "drawn": [], "compared": []}\n',
        b'{"step": 1, "learns": [["a"]], "drawn": [], "compared": []}\n',
        b'{"step": 1, "learns": [], "drawn": 3, "compared": []}\n',
        b'{"step": 1, "learns": [], "drawn": [], "compared": [["a", 0, 0, null]]}\n',
        *(
            f'{{"step": 1, "learns": {of}, "drawn": {drawn}, "compared": {compared}}}\n'.encode()
            for of, drawn, compared in (
                ('[["a", 0], ["a", 0]]', "[]", "[]"),
                ('[["a", 0], ["b", 0]]', '[["b", 0, [1]]]', "[]"),
                ('[["a", 0], ["b", 0]]', '[["c", 0, [1]], ["c", 0, [2]]]', "[]"),
                ('[["a", 0], ["b", 0]]', '[["c", 0, [1, -1]]]', "[]"),
                ('[["a", 0], ["b", 0]]', "[]", '[["a", 0, 0, 0]]'),
                ('[["a", 0], ["b", 0]]', '[["c", 0, [1e999]]]', "[]"),
                ('[["a", 0]]', "[]", "[]"),
                ('[["a", 0], ["b", 0], ["c", 0]]', "[]", "[]"),
                ("[]", "[]", "[]"),
            )
        ),
    ],
)
def test_a_line_that_is_not_the_step_is_dropped_and_said(line: bytes) -> None:
    said = list[str]()
    record = ScheduleRecord(said.append, [line])
    assert record.recorded(1, groups=2) is None
    assert not record.is_ahead and len(said) == 1
