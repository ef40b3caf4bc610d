"""All tests here but those of the memory need Triton, which compiles or interprets kernels."""

import importlib.util
from pathlib import Path

if importlib.util.find_spec("triton") is None:
    here = Path(__file__).parent
    collect_ignore = [path.name for path in here.glob("test_*.py") if path.stem != "test_memory"]
