"""The largest numbers that a recipe or a command line may hold.

All of these are more than any run has: a number beyond is a mistake, which would otherwise show as
a plan without end, a crash of a library, or a machine without memory.  Those of a model's shape are
in ``isobit.config.shape``.
"""

MAX_COUNT = 1_000_000_000
"""Of tokens, rows and pages."""
MAX_STEPS = 10_000_000
MAX_BATCH = 1_000_000
"""Prompts, or completions, of a step."""
MAX_PROCESSES = 4096
MAX_THREADS = 1024
MAX_WAIT_S = 1e6
MAX_FACTOR = 1e6
"""Of coefficients, in either direction."""
MAX_SEED = (1 << 63) - 1
"""What the generators of torch and numpy both take, and TOML can hold."""
