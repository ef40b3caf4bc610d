"""The embedding: rows of the published table; the gradient goes to the FP32 master.

The backward is ``embedding_dense_backward``, which adds a token's rows in their order.  The
backward of ``table[ids]`` would be an accumulating ``index_put``, the one CPU operation whose sums
vary from run to run.
"""

import torch


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """int64 [T], table [V, C] -> [T, C] in the table's dtype."""
    return table.index_select(0, token_ids)


def embedding_backward(d_hidden: torch.Tensor, token_ids: torch.Tensor, grad: torch.Tensor) -> None:
    """d_hidden [T, C], int64 [T]: grad, FP32 [V, C], += the sum of each token's rows."""
    rows = d_hidden.float()
    grad.add_(torch.ops.aten.embedding_dense_backward(rows, token_ids, grad.shape[0], -1, False))
