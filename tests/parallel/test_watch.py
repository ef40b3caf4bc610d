"""Who is found out, when, and who is not."""

from dataclasses import replace

from isobit.parallel.watch import Diagnosis, Limits, Sign

COMPUTES = Sign("box", "m", 100, 1, 1, "training", True, 10.0, None)
WAITS = replace(COMPUTES, process=101, waits_for="all_gather_rows")


def seconds_until(
    first: Sign, second: Sign, are_heard: bool = True, second_is_heard: bool = True
) -> tuple[int, str]:
    """How long two ranks may stay as they are, and what is said then; 4000 s for ever."""
    diagnosis = Diagnosis(Limits(), (0, 1))
    for now in range(4000):
        signs = {
            0: replace(first, number=now if are_heard else 0),
            1: replace(second, number=now if are_heard and second_is_heard else 0),
        }
        verdict = diagnosis.look(now, signs, [])
        if verdict is not None:
            return now, verdict.text
    return 4000, ""


def test_who_waits_is_not_late_and_who_computes_is() -> None:
    found, text = seconds_until(WAITS, COMPUTES)
    assert found == 62
    assert text == "rank 1 (box, process 100) has been silent in training for 62 s: ended"


def test_three_times_the_slowest_of_any_rank() -> None:
    assert seconds_until(replace(WAITS, slowest=50.0), COMPUTES)[0] == 150
    elsewhere = replace(WAITS, slowest=50.0, phase="rollout")
    assert seconds_until(elsewhere, COMPUTES)[0] == 62


def test_a_phase_for_the_first_time_may_take_long() -> None:
    found, text = seconds_until(WAITS, replace(COMPUTES, knows_phase=False, phase="loading"))
    assert (found, "in loading" in text) == (1800, True)


def test_a_rank_without_a_sign_is_found_first_though_another_makes_no_progress() -> None:
    found, text = seconds_until(COMPUTES, COMPUTES, second_is_heard=False)
    assert (found, text.split(" (")[0]) == (60, "rank 1")


def test_ranks_that_have_come_apart() -> None:
    found, text = seconds_until(WAITS, replace(WAITS, waits_for="all_gather"))
    assert found == 60
    assert "rank 0 (box) for all_gather_rows, rank 1 (box) for all_gather" in text
    assert seconds_until(WAITS, WAITS)[0] == 600
    found, text = seconds_until(WAITS, replace(WAITS, has_left=True))
    assert (found, text.endswith("rank 1 has left")) == (60, True)


def test_progress_is_all_it_takes() -> None:
    diagnosis = Diagnosis(Limits(), (0, 1))
    for now in range(1000):
        late = replace(COMPUTES, number=now, beats=now // 61)
        assert diagnosis.look(now, {0: replace(WAITS, number=now), 1: late}, []) is None


def test_a_process_that_is_gone() -> None:
    look = Diagnosis(Limits(), (0, 1)).look
    verdict = look(0, {0: WAITS, 1: COMPUTES}, [1])
    assert verdict is not None and not verdict.is_to_end
    assert verdict.text == "rank 1 (box, process 100) has ended in training without a word"
    assert look(1, {0: WAITS, 1: replace(COMPUTES, has_left=True)}, [1]) is None


def test_a_rank_that_never_gave_a_sign() -> None:
    diagnosis = Diagnosis(Limits(), (0, 1))
    assert diagnosis.look(0, {0: WAITS}, []) is None
    assert diagnosis.look(59, {0: WAITS}, []) is None
    verdict = diagnosis.look(60, {0: replace(WAITS, number=2)}, [])
    assert verdict is not None and verdict.text == "rank 1 has given no sign since the start"
