"""Publishing on the GPU writes the CPU's bytes, in place."""

from itertools import pairwise

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.parallel.ownership import Ownership
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format, QuantTensor, ScaleKind
from tests.gpu.kernels import publish, publish_blocks, republish


def masters(rows: int, columns: int) -> torch.Tensor:
    """FP32 with more bits than BF16 holds; blocks of zeros, of tiny numbers, and some that are not
    finite.
    """
    x = torch.randn(rows, columns) * torch.exp(6 * torch.randn(rows, columns))
    x[:128, :128] = 0.0
    x[128:256, :128] = -torch.rand(128, 128) * 1e-30
    # The last becomes infinite in BF16.
    x[130, 130] = torch.nan
    x[300, 260] = torch.inf
    x[5, 300] = 3.4e38
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


@pytest.mark.parametrize("parts", [(576, 192, 192), (256, 128, 72), (1024,)])
@pytest.mark.parametrize("forward", ["e4m3", "bf16"])
def test_pieces_of_rows_are_published_as_the_whole(forward: Format, parts: tuple[int, ...]) -> None:
    site = Site("w", "linear", forward, dgrad=forward, wgrad=forward, parts=parts)
    master = masters(sum(parts), 576).cuda()
    whole = LinearWeight(site, publish(site, master))
    weight = LinearWeight(site, publish(site, torch.zeros_like(master)))
    expected = republish(LinearWeight(site, publish(site, torch.zeros_like(master))), master)
    cuts = Ownership.of({"w": master.shape}, {"w": parts}, 4).cuts["w"]
    changed = sum(
        int(republish(weight.rows(first, last), master[first:last]))
        for first, last in pairwise(cuts)
    )
    assert changed == int(expected) > 0
    assert int(republish(weight.rows(0, 0), master[:0])) == 0  # who owns none
    for piece, made in zip(numbers(weight), numbers(whole), strict=True):
        assert torch.equal(piece, made)


def numbers(weight: LinearWeight) -> list[torch.Tensor]:
    """As integers: NaNs compare, too."""
    if isinstance(weight.matrix, QuantTensor):
        scales = weight.matrix.scales.view(torch.int32)
        return [weight.matrix.values.view(torch.uint8), scales]
    assert isinstance(weight.matrix, torch.Tensor)
    return [weight.matrix.view(torch.int16)]
