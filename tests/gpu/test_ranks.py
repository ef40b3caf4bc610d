"""Two GPUs train to the bits of one: slices travel by copy engines, owners add them."""

from typing import Any

import pytest
import torch

from isobit.parallel.world import ALONE
from tests.training.test_ranks import CASES, train
from tests.worlds import in_world

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TRAIN = "tests.training.test_ranks:train"
ON_GPUS: list[dict[str, Any]] = [{**case, "device": "cuda"} for case in CASES]
NAMES = [f"{number}-{case['model']}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", ON_GPUS, ids=NAMES)
def test_bits_do_not_depend_on_the_number_of_gpus(case: dict[str, Any]):
    """One case a test: where its kernels are to be compiled first, that takes most of its time."""
    ((expected, expected_figures),) = train(ALONE, [case])
    for rank, found in enumerate(in_world(2, TRAIN, [case], gpus=True)):
        ((ours, figures),) = found
        differing = [name for name in expected if ours[name] != expected[name]]
        assert not differing, (rank, differing)
        assert figures == expected_figures, rank


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_slots_do_not_depend_on_the_number_of_gpus(number: int):
    """The two GPUs as one host, and in every second case as two."""
    case = {**ON_GPUS[number], "slots": 2}
    expected = train(ALONE, [case])
    argument = [{**case, "hosts": 1 + number % 2}]
    for rank, found in enumerate(in_world(2, TRAIN, argument, gpus=True)):
        assert found == expected, rank
