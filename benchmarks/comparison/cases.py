"""What is asked of an engine: requests of random tokens that all come at once and all end at the
same length.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Case:
    """``requests`` prompts of ``prompt_tokens`` tokens, and exactly ``new_tokens`` generated for
    each.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted_tokens(self) -> int:
        """The tokens of "tokens per second": generated ones, or those of the prompts where only one
        is generated for each.
        """
        return self.requests * (self.prompt_tokens if self.new_tokens == 1 else self.new_tokens)


CASES = {
    "prefill": Case(128, 2048, 1),
    "short": Case(256, 512, 1024),
    "long": Case(256, 512, 3584),
    "context": Case(16, 30720, 2048),
}
MODES = ("bf16", "fp8-linear", "fp8")
"""BF16; FP8 linears; FP8 linears, KV cache and attention."""
MAX_SEQUENCES = 256
WARM_UP_TOKENS = 16
"""New tokens of the run of the same prompts that goes before the timed one: prompts come in over
eight forwards of 16,384 tokens, so that all of them are decoded together at the end, as in the
timed run, and every batch size on the way has been captured.
"""


def random_prompts(case: Case, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """The same token ids for every engine."""
    random = Random(seed)  # noqa: S311 (no secret)
    return [random.choices(range(vocab_size), k=case.prompt_tokens) for _ in range(case.requests)]
