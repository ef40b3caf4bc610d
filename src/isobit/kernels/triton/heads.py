"""Which heads the kernels of attention take, and the pages and parts of their K and V; needs no
Triton.
"""

PAGE_TOKENS = 128
PART_TOKENS = 2048
"""Keys of a part (``isobit.kernels.triton.attention``)."""
MOST_APART = 4096
"""Parts of all sequences of a decode step, up to which each has programs of its own."""
HEAD_SIZES = (64, 96, 128, 256)
MOST_QUERY_HEADS = 16  # of one KV head


def heads_problem(heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why attention does not take so many query and KV heads of that size, or None."""
    repeat, rest = divmod(heads, kv_heads)
    if head_dim in HEAD_SIZES and not rest and repeat <= MOST_QUERY_HEADS:
        return None
    *but_last, last = map(str, HEAD_SIZES)
    return (
        f"the model has {heads} query heads of {head_dim} over {kv_heads} KV heads, and attention "
        f"on the GPU takes head sizes {', '.join(but_last)} and {last} and 1 to {MOST_QUERY_HEADS} "
        "query heads a KV head; the CPU takes every even head size up to 256"
    )
