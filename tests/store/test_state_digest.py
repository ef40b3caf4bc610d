"""What an update leaves, as checksums: any byte of weights, masters or moments changes its own, and
a checkpoint's files have those of the run that wrote them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isobit.config.run import RunConfig
from isobit.errors import MismatchError
from isobit.parallel.world import Alone
from isobit.run.rl.loop import train
from isobit.run.rl.setup import RlRun, prepare_rl
from isobit.store.checkpoint import state
from isobit.store.checkpoint.format import read_checkpoint
from isobit.store.state_digest import checkpoint_digest, state_digest
from isobit.store.step_digests import read_digests

MakeConfig = Callable[..., RunConfig]


def flip(tensor: torch.Tensor, place: int) -> None:
    tensor.detach().view(-1).view(torch.uint8)[place] ^= 1


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

    run = prepare_rl(config)
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
    """A process alone that hears of another one with other published weights."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: tuple[int, ...] = (0, 1)

    def messages(self, mine: list[int]) -> list[list[int]]:
        return [mine, [mine[0], mine[1] ^ 1]]


def test_a_rank_that_reads_other_weights_is_named(make_config: MakeConfig) -> None:
    run: RlRun = prepare_rl(make_config())
    state_digest(run)
    run.model.policy.world = TwoRanks()
    with pytest.raises(MismatchError, match="published weights of rank 1 are not those of rank 0"):
        state_digest(run)


def test_a_run_without_digests_is_told_apart(tmp_path: Path) -> None:
    assert read_digests(tmp_path) == {}
