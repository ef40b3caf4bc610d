"""The words of launchers."""

import pytest

from isobit.parallel.launched import first_host, is_launched, rank_of_host, restarts, take_place
from isobit.util.errors import ConfigError

STEP = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2",
}  # fmt: skip


def test_a_step_of_slurm_has_torchs_words() -> None:
    environment = dict(STEP)
    assert is_launched(environment)
    assert rank_of_host(environment) == 1
    take_place(environment)
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
    }
    assert environment["MASTER_ADDR"] == "gpu07"
    assert 10_000 <= int(environment["MASTER_PORT"]) < 30_000
    other = {**STEP, "SLURM_STEP_ID": "3"}
    take_place(other)
    assert other["MASTER_PORT"] != environment["MASTER_PORT"]


def test_what_the_user_sets_stays() -> None:
    environment = {**STEP, "MASTER_ADDR": "10.0.0.1"}
    take_place(environment)
    assert environment["MASTER_ADDR"] == "10.0.0.1"


def test_a_batch_script_is_no_step() -> None:
    """There SLURM_PROCID is 0, but nobody else was started."""
    assert not is_launched({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"})
    assert not is_launched({})
    assert not is_launched({**STEP, "SLURM_STEP_NUM_TASKS": "1"})
    assert is_launched({"WORLD_SIZE": "2"})
    assert not is_launched({**STEP, "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("rack[2,3]-n[04-05]", "rack2-n04"),
    ],
)
def test_the_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_how_often_torchrun_has_started_all_again() -> None:
    assert [restarts({}), restarts({"TORCHELASTIC_RESTART_COUNT": "3"})] == [0, 3]


def test_half_of_the_words() -> None:
    with pytest.raises(ConfigError, match="RANK and MASTER_PORT is not set"):
        take_place({"WORLD_SIZE": "2", "MASTER_ADDR": "here"})
