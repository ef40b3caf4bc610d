"""What observed rows stand for."""

import torch

from isobit.kernels.spec.quantise import quantise_rows
from isobit.proof.bisect.difference import dequantise


def test_rows_whose_last_group_is_short() -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    rows = quantise_rows(x)
    torch.testing.assert_close(dequantise(rows.values, rows.scales), x, rtol=1 / 16, atol=1e-2)
