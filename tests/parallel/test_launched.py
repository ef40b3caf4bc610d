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
    with pytest.raises(ConfigError, match="RANK and MASTER_PORT are not set"):
        take_place({"WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        take_place({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500"})


WHOLE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; expected a whole number, 0 or more: start"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'; expected a whole number, 0 or more: start"),
        ({"RANK": "x"}, "RANK is 'x'; expected a whole number, 0 to 1: start"),
        ({"RANK": "2"}, "RANK is '2'; expected a whole number, 0 to 1: start"),
        ({"RANK": "-1"}, "RANK is '-1'; expected"),
        ({"LOCAL_RANK": "a"}, "LOCAL_RANK is 'a'; expected a whole number, 0 to 1: start"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2'; expected a whole number, 0 to 1: start"),
        (
            {"SLURM_LOCALID": "?"},
            r"SLURM_LOCALID is '\?'; expected a whole number, 0 or more: start",
        ),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'; expected a whole number, 0 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; expected"),
        ({"TORCHELASTIC_RESTART_COUNT": "often"}, "TORCHELASTIC_RESTART_COUNT is 'often'"),
    ],
)
def test_a_word_that_is_no_number_of_its_kind(wrong: dict[str, str], message: str) -> None:
    take_place({**WHOLE, "SLURM_LOCALID": "5"})
    environment = {**WHOLE, **wrong}
    assert is_launched(environment)
    with pytest.raises(ConfigError, match=message):
        take_place(environment)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS"])
def test_a_word_of_slurm_that_is_no_number(name: str) -> None:
    environment = {**STEP, name: "many"}
    assert is_launched(environment)
    with pytest.raises(ConfigError, match=r" is 'many'; expected a whole number"):
        take_place(environment)


def test_a_step_of_slurm_without_a_place_on_its_host() -> None:
    """The first GPU that the process sees is its own."""
    environment = {name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}
    take_place(environment)
    assert rank_of_host(environment) == 0
