"""The parts in which lm_head takes its rows, in numbers: what a plan of the memory needs to know on
a machine without Triton, too.
"""

FORWARD_LOGITS = 1 << 28
BACKWARD_BYTES = 2 << 30
BYTES_A_LOGIT = 6
"""In the backward: the logit in FP32, and its gradient in BF16."""
_TILE = 128


def forward_rows(vocab_size: int) -> int:
    """Rows of a part of the forward, about a gigabyte of FP32 logits: whole tiles of the GEMM."""
    return _rows(FORWARD_LOGITS, vocab_size)


def backward_rows(vocab_size: int) -> int:
    """Rows of a part of the backward, about 2 GiB."""
    return _rows(BACKWARD_BYTES // BYTES_A_LOGIT, vocab_size)


def _rows(logits: int, vocab_size: int) -> int:
    return max(1, logits // vocab_size // _TILE) * _TILE
