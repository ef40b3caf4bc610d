"""What a step works on: groups of completions of exactly so many tokens, for prompts of random
tokens.
"""

import argparse
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Case:
    """``prompts`` of ``prompt_tokens`` tokens, ``samples`` completions of ``new_tokens`` tokens for
    each.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def sequences(self) -> int:
        """Completions of a step."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt_tokens + self.new_tokens

    def random_prompts(self, vocab_size: int) -> list[list[int]]:
        """The same token ids for every engine."""
        random = Random(0)  # noqa: S311 (no secret)
        return [
            random.choices(range(vocab_size), k=self.prompt_tokens) for _ in range(self.prompts)
        ]


CASES = {"2k": Case(32, 8, 256, 2048), "8k": Case(8, 8, 256, 8192)}
WARM_UP_TOKENS = 16
"""New tokens of the rollout before the timed one."""


def case_names(text: str) -> list[str]:
    """A list with commas, for argparse."""
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the cases are {', '.join(CASES)}")
    return names
