"""Digests come back as they were written, and any byte of weights, masters or moments changes its
own checksum.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.parallel.world import Alone
from isobit.records.text import Group, Prompt
from isobit.run.loop import train
from isobit.run.resolved import resolve
from isobit.run.rl_run import RlRun, prepare_rl
from isobit.store import state
from isobit.store.checkpoint import read_checkpoint
from isobit.store.state import (
    StateDigest,
    StepDigests,
    checkpoint_digest,
    read_digests,
    state_digest,
)
from isobit.util.errors import MismatchError

MakeConfig = Callable[..., RunConfig]


def flip(tensor: torch.Tensor, place: int) -> None:
    tensor.detach().view(-1).view(torch.uint8)[place] ^= 1


@pytest.mark.few(2)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_any_byte_of_what_an_update_leaves_counts(
    moments: str, make_config: MakeConfig, write_reward: Callable[[str], str]
) -> None:
    reward = write_reward("return float(completion.token_ids[0] % 2)")
    config = make_config(reward, training={"moments": moments, "steps": 1})
    train(config)
    line = read_digests(config.output)[1]
    assert line is not None
    checkpoint = read_checkpoint(config.output / "checkpoints" / "step_000001")
    found = checkpoint_digest(checkpoint)
    assert found == {"masters": line.left.masters, "moments": line.left.moments}

    run = prepare_rl(resolve(config))
    begun = state_digest(run)
    assert begun.moments == "0" * 16, "of none"
    state.restore(checkpoint, run)
    assert state_digest(run) == line.left
    assert begun.weights != line.left.weights and begun.masters != line.left.masters
    for kind, tensor in (
        ("masters", run.model.policy.masters["layers.0.down_proj.weight"]),
        ("moments", run.trainer.moments()["norm.weight.exp_avg_sq"]),
        ("weights", run.model.policy.weights("training").plain["norm.weight"]),
    ):
        flip(tensor, 5)
        changed = state_digest(run)
        assert [
            name
            for name in ("weights", "masters", "moments")
            if getattr(changed, name) != getattr(line.left, name)
        ] == [kind]
        flip(tensor, 5)
    assert state_digest(run) == line.left


class TwoRanks(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: tuple[int, ...] = (0, 1)

    def all_gather(self, mine: list[int]) -> list[list[int]]:
        return [mine, [mine[0], mine[1] ^ 1]]


def test_a_rank_that_reads_other_weights_is_named(make_config: MakeConfig) -> None:
    run: RlRun = prepare_rl(resolve(make_config()))
    state_digest(run)
    run.model.policy.world = TwoRanks()
    with pytest.raises(MismatchError, match="published weights of rank 1 are not those of rank 0"):
        state_digest(run)


def test_a_run_without_digests_is_told_apart(tmp_path: Path) -> None:
    assert read_digests(tmp_path) == {}


LEFT = StateDigest("0" * 16, "1" * 16, "2" * 16)


def lines(count: int) -> list[StepDigests]:
    return [
        StepDigests.of(step, [Group(Prompt(f"train/{step}", "", (1,)), 0, [])], LEFT)
        for step in range(1, count + 1)
    ]


def write(root: Path, written: list[bytes]) -> None:
    (root / "digests.jsonl").write_bytes(b"".join(written))


def test_lines_come_back(tmp_path: Path) -> None:
    made = lines(3)
    write(tmp_path, [one.line() for one in made])
    assert read_digests(tmp_path) == {one.step: one for one in made}
    assert len({one.tokens for one in made}) == 3


def test_a_damaged_line_keeps_its_step(tmp_path: Path) -> None:
    made = [one.line() for one in lines(5)]
    for place, broken in ((0, b"{\n"), (2, made[2].replace(b"tokens", b"t")), (4, made[4][:30])):
        made[place] = broken
    write(tmp_path, made)
    found = read_digests(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert [step for step, line in sorted(found.items()) if line is None] == [1, 3, 5]
