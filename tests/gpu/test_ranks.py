"""Two GPUs train to the bits of one: slices travel by copy engines, owners add them."""

from typing import Any

import pytest
import torch

from isobit.parallel.world import ALONE
from tests.training.test_ranks import CASES, train
from tests.worlds import in_world

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPUS: list[dict[str, Any]] = [{**case, "device": "cuda"} for case in CASES]


def test_bits_do_not_depend_on_the_number_of_gpus():
    expected = train(ALONE, ON_GPUS)
    found = in_world(2, "tests.training.test_ranks:train", ON_GPUS, gpus=True)
    for rank, of_rank in enumerate(found):
        for case, (ours, figures), (theirs, their_figures) in zip(
            ON_GPUS, of_rank, expected, strict=True
        ):
            differing = [name for name in theirs if ours[name] != theirs[name]]
            assert not differing, (case, rank, differing)
            assert figures == their_figures, (case, rank)


@pytest.mark.parametrize("hosts", [1, 2])
def test_slots_do_not_depend_on_the_number_of_gpus(hosts: int):
    """The two GPUs as one host, and as two."""
    cases = [{**case, "slots": 2} for case in ON_GPUS]
    expected = train(ALONE, cases)
    argument = [{**case, "hosts": hosts} for case in cases]
    for rank, of_rank in enumerate(
        in_world(2, "tests.training.test_ranks:train", argument, gpus=True)
    ):
        for case, ours, theirs in zip(cases, of_rank, expected, strict=True):
            assert ours == theirs, (case, rank)
