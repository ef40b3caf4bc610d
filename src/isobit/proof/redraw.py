"""A few samples drawn again by the trainer's process, where servers elsewhere have drawn them.

A token depends on the tokens before it, the weights, the settings and the key of its sample's
noise.  A server that takes the noise of another sample records the right log-probability of every
token, so that no comparison of log-probabilities shows it; but the run is then not the one that its
seed names.  In an exact flow the logits of a whole sample come out of one packed forward, so that
all of its tokens can be drawn again at once, without a KV cache:

    logits of the sample's tokens + its key, their positions  -->  the same tokens

It takes a forward for each of ``REDRAWN`` samples, with at most ``MOST_TOKENS`` tokens behind its
prompt, once for each version of the weights.
"""

from collections.abc import Sequence

import numpy as np
import torch

from isobit.kernels.operands import Draws
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.proof.scenarios import up_to
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, SamplingParams
from isobit.rollout.requests import Request

REDRAWN, MOST_TOKENS = 4, 64
"""Samples of a rollout, evenly spaced, and the first so many of the tokens of each."""


def redraw_some(
    policy: Policy, requests: Sequence[Request], made: Sequence[Sequence[Completion]], seed: int
) -> str | None:
    """Draw a few of the samples that were made for requests of a run with the seed again, by the
    weights that are published now.  -> A sentence on the first that has other tokens, or None.
    """
    samples_drawn = [
        (request, index, drawn)
        for request, completions in zip(requests, made, strict=True)
        for index, one in enumerate(completions)
        if (drawn := _drawn_first(one.sequence, policy.version)) is not None
    ]
    count = min(REDRAWN, len(samples_drawn))
    for request, index, sample in (
        samples_drawn[number * len(samples_drawn) // count] for number in range(count)
    ):
        key = request.noise_key(seed, index)
        tokens = redrawn(policy, sample, request.sampling, key)
        given = sample.of_response(sample.token_ids)
        differing = np.flatnonzero(tokens != given)
        if differing.size:
            first = int(differing[0])
            return (
                f"{differing.size} of {given.size} tokens of sample {index} of prompt "
                f"{request.prompt.id!r} (visit {request.visit}) are not what its noise draws: "
                f"token {first} is {int(given[first])}, and drawn again {int(tokens[first])}"
            )
    return None


@torch.no_grad()
def redrawn(
    policy: Policy, sample: TokenSequence, sampling: SamplingParams, key: int
) -> np.ndarray:
    """The tokens in the loss mask of a sample, each drawn again behind those before it, int32."""
    batch, backend = lay_end_to_end([sample]), policy.backend
    hidden, _ = Scorer(policy).hidden_states(batch, policy.decoder.routes(), side="rollout")
    logits = policy.decoder.lm_head.logits(policy.weights("rollout"), hidden)
    count = batch.rows.numel()
    filters = None
    if sampling.truncates:
        filters = (
            torch.full((count,), sampling.top_k),
            torch.full((count,), sampling.top_p, dtype=torch.float64),
            torch.full((count,), sampling.min_p, dtype=torch.float64),
        )
    draws = Draws(
        rows=torch.arange(count, dtype=torch.int32),
        temperatures=torch.full((count,), sampling.temperature, dtype=torch.float32),
        keys=torch.full((count,), key),
        positions=batch.rows + 1,
        filters=filters,
    )
    drawn = backend.draw(logits, draws.map(backend.to_device))
    return drawn.tokens.cpu().numpy().astype(np.int32)


def _drawn_first(sequence: TokenSequence, version: int) -> TokenSequence | None:
    """A sample with its first tokens that the weights of a version drew; None without any."""
    mask = sequence.loss_mask & (sequence.weights_versions == version)
    return up_to(sequence, mask & (mask.cumsum() <= MOST_TOKENS)) if mask.any() else None
