"""Learning curves: the parts of ``benchmarks.learning``."""
