"""Measurements on a real pretrained checkpoint (``benchmarks.real_checkpoint``)."""
