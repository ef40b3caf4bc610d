"""SHA-256 of prompts, by which other data is noticed."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from isobit.records.text import Prompt


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Of all prompts in their order: ids, tokens, and the columns that a reward may read."""
    digest = sha256()
    for prompt in prompts:
        content = [prompt.id, prompt.token_ids, dict(prompt.row)]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def learnt_sha256(prompts: Sequence[Prompt], learnt: Sequence[Any]) -> str:
    """The same with what is to be learnt behind each."""
    return sha256(json.dumps([prompts_sha256(prompts), learnt]).encode()).hexdigest()
