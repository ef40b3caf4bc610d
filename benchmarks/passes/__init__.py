"""The parts of ``benchmarks.training``."""
