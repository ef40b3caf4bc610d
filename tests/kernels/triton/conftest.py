"""All tests here need Triton, which compiles or interprets kernels."""

import importlib.util
from pathlib import Path

if importlib.util.find_spec("triton") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]
