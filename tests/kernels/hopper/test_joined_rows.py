"""Gathered rows have the layout that products read: scales group by group, padded to 4 tokens."""

import pytest
import torch

from isobit.kernels.hopper.linear import joined_rows
from isobit.kernels.hopper.quantise import QuantRows
from isobit.precision.quant_tensor import E4M3


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 64])
def test_scales_lie_as_a_quantiser_leaves_them(tokens: int):
    values = torch.zeros(tokens, 300).to(E4M3)
    scales = torch.arange(3.0 * tokens).view(3, tokens)
    made, expected = joined_rows(values, scales), QuantRows.empty(tokens, 300, values.device)
    assert torch.equal(made.scales, scales.t())
    assert made.scales.stride() == expected.scales.stride()
    assert made.values.data_ptr() == values.data_ptr()
