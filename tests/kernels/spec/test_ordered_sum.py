"""A sum in the order of its addends, which another order does not give."""

import torch

from isobit.kernels.spec.ordered_sum import add_in_order


def test_addends_are_added_one_after_the_other() -> None:
    total = torch.tensor([1e8, 1.0, -1e8])
    addends = [torch.tensor([4.0, 1e8, 3.0]), torch.tensor([4.0, -1e8, 3.0])]
    kept = total
    add_in_order(total, addends)
    assert kept is total
    assert total.tolist() == [1e8, 0.0, -1e8]
    assert (addends[0] + addends[1] + torch.tensor([1e8, 1.0, -1e8])).tolist() != total.tolist()
    add_in_order(total, [])
    assert total.tolist() == [1e8, 0.0, -1e8]
