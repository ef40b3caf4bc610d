"""Does exact FP8 learn like BF16, on a real checkpoint: what ``benchmarks.proof`` is made of."""
