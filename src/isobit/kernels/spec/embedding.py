"""The embedding: rows of the published table; the gradient goes to the FP32 master.

The backward is ``embedding_dense_backward``, which adds a token's rows in their order.  The
backward of ``table[ids]`` would be an accumulating ``index_put``, the one CPU operation whose sums
vary from run to run.
"""

from typing import Any

import torch


def embedding(
    token_ids: torch.Tensor, table: torch.Tensor, master: torch.Tensor | None
) -> torch.Tensor:
    """int64 [T], table [V, hidden] -> [T, hidden] in the table's dtype."""
    if not torch.is_grad_enabled():
        return table.index_select(0, token_ids)
    return _Embedding.apply(master, token_ids, table)  # pyright: ignore[reportReturnType]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, master: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_ids)
        ctx.num_rows = table.shape[0]
        return table.index_select(0, token_ids)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (token_ids,) = ctx.saved_tensors
        return (
            torch.ops.aten.embedding_dense_backward(
                gradients[0].float(), token_ids, ctx.num_rows, -1, False
            ),
            None,
            None,
        )
