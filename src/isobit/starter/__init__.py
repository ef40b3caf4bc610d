"""The starter model: a Qwen3-shaped policy of about a million parameters that adds four one-digit
numbers. It makes every command runnable on a laptop, without a download, in minutes. ``README.md``
is its model card.
"""

from importlib.resources import files
from pathlib import Path


def starter_folder() -> Path:
    """The folder of the model, its tokenizer, ``train.jsonl`` and ``held_out.jsonl``."""
    return Path(str(files(__name__)))
