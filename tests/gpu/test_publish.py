"""Publishing on the GPU writes the CPU's bytes, in place."""

import pytest
import torch

from isobit.kernels.spec.quantise import quantise_blocks
from isobit.precision.formats import ScaleKind
from isobit.precision.quant_tensor import QuantTensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from isobit.kernels.hopper.publish import publish_blocks


def masters(rows: int, columns: int) -> torch.Tensor:
    """FP32 with more bits than BF16 holds; blocks of zeros, of tiny numbers, and some that are not
    finite.
    """
    x = torch.randn(rows, columns) * torch.exp(6 * torch.randn(rows, columns))
    x[:128, :128] = 0.0
    x[128:256, :128] = -torch.rand(128, 128) * 1e-30
    x[130, 130], x[300, 260], x[5, 300] = (
        torch.nan,
        torch.inf,
        3.4e38,
    )  # the last becomes infinite in BF16
    return x


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize(("rows", "columns"), [(384, 512), (512, 896)])
def test_bytes_of_the_specification(kind: ScaleKind, rows: int, columns: int) -> None:
    out = QuantTensor.empty_blocks(rows, columns, torch.device("cuda"))
    changed = torch.empty(rows // 128, columns // 128, dtype=torch.int32, device="cuda")
    places = out.values.data_ptr(), out.scales.data_ptr()
    for master in (masters(rows, columns), torch.randn(rows, columns)):
        before = out.values.view(torch.uint8).cpu()
        publish_blocks(master.cuda(), out, kind, changed)
        expected = quantise_blocks(master.bfloat16(), kind)
        assert torch.equal(out.values.view(torch.uint8).cpu(), expected.values.view(torch.uint8))
        assert torch.equal(out.scales.view(torch.int32).cpu(), expected.scales.view(torch.int32))
        differs = before != expected.values.view(torch.uint8)
        assert torch.equal(
            changed.cpu(), differs.view(rows // 128, 128, columns // 128, 128).sum((1, 3)).int()
        )
    assert places == (out.values.data_ptr(), out.scales.data_ptr())
