"""The gated delta rule on a GPU: one function however tokens come, as near to FP64 as the
specification, with gradients that repeat.
"""

import pytest
import torch

from isobit.kernels.operands import DeltaShape
from isobit.kernels.triton.delta_rule_rollout import PagedDeltaRule
from isobit.kernels.triton.memory import CapturedGraph
from tests.kernels.triton import delta_rule_checks as checks
from tests.kernels.triton.delta_rule_checks import OTHER, SHAPE

LARGE = DeltaShape(key_heads=4, value_heads=8, key_dim=128, value_dim=128, width=4)
"""Heads of the sizes of Qwen3.5's."""
of_shapes = pytest.mark.parametrize("shape", [SHAPE, OTHER, LARGE], ids=["small", "odd", "large"])


@pytest.fixture(autouse=True)
def on_the_card() -> None:
    checks.use(torch.device("cuda", torch.cuda.current_device()))


@of_shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_in_parts_are_those_of_a_packed_batch(shape: DeltaShape, dtype: torch.dtype) -> None:
    checks.check_parts(shape, [63, 64, 65, 128, 129, 1, 300], 100, dtype)


@of_shapes
@pytest.mark.parametrize("start", [1, 63, 64, 65, 127])
def test_decoding_over_the_ends_of_chunks(shape: DeltaShape, start: int) -> None:
    checks.check_decoding(shape, start, 131)


def test_parts_that_end_anywhere_are_the_specifications() -> None:
    checks.check_ends()


@of_shapes
def test_forms_are_in_no_bit(shape: DeltaShape) -> None:
    checks.check_forms(shape)


@of_shapes
def test_vectors_of_a_program_are_in_no_bit(shape: DeltaShape) -> None:
    checks.check_vectors(shape)


@of_shapes
def test_gradients_of_several_blocks(shape: DeltaShape) -> None:
    checks.check_blocks(shape, [130, 200, 64, 3])


@of_shapes
def test_pieces_are_in_no_bit(shape: DeltaShape) -> None:
    checks.check_pieces(shape)


@of_shapes
def test_forms_of_a_row_are_in_no_bit(shape: DeltaShape) -> None:
    checks.check_row_forms(shape)


@pytest.mark.parametrize(
    ("at", "accepted"), [(1, 1), (60, 2), (62, 0), (62, 1), (62, 2), (62, 3), (64, 0), (64, 2)]
)
def test_rejected_guesses(at: int, accepted: int) -> None:
    checks.check_rejected(at, accepted)


def test_the_first_row_of_a_carry_is_written_again() -> None:
    checks.check_begun_again()


@pytest.mark.parametrize(("at", "stop"), [(0, 40), (60, 70), (64, 65), (3, 140)])
def test_carries_are_the_specifications(at: int, stop: int) -> None:
    checks.check_carries(at, stop)


@of_shapes
@pytest.mark.parametrize(("near", "written"), [(70, 0), (126, 1)])
def test_positions_far_from_the_start(shape: DeltaShape, near: int, written: int) -> None:
    checks.check_far(shape, near, written)


@of_shapes
def test_rows_of_guesses_are_a_part(shape: DeltaShape) -> None:
    checks.check_rows_of_guesses(shape)
    checks.check_rows_of_guesses(shape, (3, 66, 1, 20), (64, 127, 0, 50))


@of_shapes
def test_output_is_as_near_to_fp64_as_the_specifications(shape: DeltaShape) -> None:
    checks.check_output(shape, [200, 64, 65, 3, 129])


@of_shapes
def test_gradients_are_as_near_to_fp64_as_the_specifications_and_repeat(shape: DeltaShape) -> None:
    checks.check_backward(shape, [130, 200, 64, 3, 65])


@pytest.mark.parametrize(("size", "heads", "tokens"), [(24, 3, 40), (128, 32, 300)])
def test_gates(size: int, heads: int, tokens: int) -> None:
    checks.check_gates(size, heads, tokens)


@pytest.mark.parametrize(("columns", "tokens"), [(24, 9), (640, 300), (2048, 70)])
def test_sums_with_a_shared_expert(columns: int, tokens: int) -> None:
    checks.check_shared(columns, tokens)


def test_a_captured_step_reads_positions_and_carries_where_they_are() -> None:
    """Launched again after both have changed, over the end of a chunk, beside rows of padding."""
    learnt, tokens = checks.weights(LARGE), 70
    given = checks.inputs(LARGE, tokens, torch.bfloat16)
    expected = checks.packed(given, learnt, [tokens])
    device = torch.device("cuda", torch.cuda.current_device())
    carries = checks.empty_carries(LARGE, 3, torch.bfloat16, device)
    position = torch.zeros(2, dtype=torch.int64, device=device)
    places = torch.full((2, 2), 2, dtype=torch.int32, device=device)
    row = given.map(lambda one: one[:1].repeat(2, 1).to(device))
    weights = checks.sent(learnt)

    def step() -> tuple[torch.Tensor, ...]:
        return (PagedDeltaRule.decoding(position, *places).forward(carries, row, weights),)

    graph = CapturedGraph(step, None)
    for t in range(tokens):
        position[0] = t
        read, written = (t - 1) // 64 if t else -1, t // 64
        places[:, 0] = torch.tensor([read, written], dtype=torch.int32)
        for mine, one in ((row.x, given.x), (row.a, given.a), (row.b, given.b)):
            mine[0] = one[t]
        assert torch.equal(graph.replay()[0][0].cpu(), expected[t])
