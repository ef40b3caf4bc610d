"""The simulation of a free schedule keeps to what must be so."""

from experiments import free_schedule
from experiments.free_schedule import LONGEST, decode_s, simulate


def test_a_synchronous_step_takes_at_least_its_longest_sample_and_a_free_one_less() -> None:
    times = [simulate(staleness, seed=0, steps=4) for staleness in (0, 2)]
    tokens = free_schedule.GROUPS * free_schedule.SAMPLES * free_schedule.MEAN
    floor = tokens / max(free_schedule.TOKENS_PER_S)
    assert floor < times[1] < times[0] < LONGEST * decode_s(free_schedule.PLACES)
