"""Isobit: reinforcement learning of language models in FP8 where the sampled policy and the trained policy are one function.

Importing this package imports no torch.  It must come before the first ``import torch`` of a process to take effect on the
OpenMP setting below: idle OpenMP workers spin for so long by default that, with another busy process on the machine, every
parallel operation waits milliseconds for a worker that is not running.  A short spin keeps the workers warm between two
operations without that cost.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
