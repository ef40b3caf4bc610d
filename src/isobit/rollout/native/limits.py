"""The refusal of what this engine, with its model and its cache, could never deliver.

Everything that can be known to fail is refused before it is taken on, with the numbers: every
sequence of an accepted request can run to its full length alone in the cache, which is why the
scheduler never gets stuck.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from isobit.errors import RequestError
from isobit.memory.cache_size import pages_for
from isobit.rollout.request import Handle, Request, check_requests


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the cache can take: positions, vocabulary entries, pages and their tokens;
    and whether text can be decoded.
    """

    context: int
    vocab_size: int
    num_pages: int
    page_tokens: int
    has_tokenizer: bool

    @property
    def max_pages(self) -> int:
        """The most pages that one sequence can hold."""
        return min(pages_for(self.context, self.page_tokens), self.num_pages)


def check_limits(
    requests: Sequence[Request], limits: Limits, live: Collection[Handle] = ()
) -> None:
    """Refuse the batch if ``check_requests`` does, or if any request of it can never be served.

    Raises:
        RequestError: naming the prompt, what it asks for and what there is.
    """
    check_requests(requests, live)
    for request in requests:
        _check_prompt(request, limits)
        if request.sampling.stop_strings and not limits.has_tokenizer:
            raise RequestError(
                f"prompt {request.prompt.id!r} asks for stop strings, which need a tokenizer; this "
                "engine has none"
            )


def _check_prompt(request: Request, limits: Limits) -> None:
    prompt = request.prompt
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise RequestError(f"prompt {prompt.id!r} has no tokens: there is nothing to continue")
    if num_tokens >= limits.context:
        raise RequestError(
            f"prompt {prompt.id!r} has {num_tokens} tokens; the model's context holds "
            f"{limits.context}, and a new token must fit: "
            "shorten or drop the prompt"
        )
    if not (min(prompt.token_ids) >= 0 and max(prompt.token_ids) < limits.vocab_size):
        raise RequestError(
            f"prompt {prompt.id!r} holds token ids from {min(prompt.token_ids)} to "
            f"{max(prompt.token_ids)}; the model knows 0 to "
            f"{limits.vocab_size - 1}: the tokenizer belongs to another model"
        )
    max_length = request.max_length(limits.context)
    # the last token of all is sampled, but never read back
    needed = pages_for(max_length - 1, limits.page_tokens)
    if needed > limits.num_pages:
        raise RequestError(
            f"prompt {prompt.id!r} can grow to {max_length} tokens ({num_tokens} of the prompt, at "
            f"most {request.sampling.max_new_tokens} "
            f"new, context {limits.context}): {needed} pages of {limits.page_tokens} tokens, and "
            f"the KV cache has {limits.num_pages}; "
            "raise rollout.kv_pages or rollout.kv_memory_gib, or lower rollout.max_new_tokens"
        )
