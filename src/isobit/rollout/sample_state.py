"""A half-done sample as it moves between engines: what was drawn of it, and no K or V.

The engine that takes it computes K and V again, as after a preemption, and draws on at the next
position: the sample's noise is keyed by its name and its place, so the tokens are those that the
first engine would have drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, FinishReason
from isobit.rollout.request import Handle, Request


@dataclass(frozen=True, slots=True)
class SampleState:
    """Sample number ``sample`` of a request, with an entry of each column for each token drawn."""

    request: Request
    sample: int
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    """FP32 values."""
    weights_versions: Sequence[int] = ()
    truncated_log_probs: Sequence[float] = ()
    """Empty where no filter is on."""
    routings: Sequence[int] = ()
    """Empty for a model without experts."""

    @classmethod
    def of(cls, request: Request, sample: int, completion: Completion) -> Self:
        """The state whose ``completion`` this is."""
        return cls(
            request,
            sample,
            completion.token_ids,
            completion.log_probs,
            completion.weights_versions,
            completion.truncated_log_probs or (),
            completion.routings or (),
        )

    @property
    def handle(self) -> Handle:
        """The sample's name."""
        return Handle(self.request.prompt.id, self.request.visit, self.sample)

    def completion(self, text: str, finish_reason: FinishReason) -> Completion:
        """The record of the sample, which has ended here."""
        sampling = self.request.sampling
        sequence = TokenSequence.of_answer(
            self.request.prompt.token_ids,
            self.token_ids,
            self.log_probs,
            self.weights_versions,
            sampling.log_prob_temperature,
            self.truncated_log_probs if sampling.truncates else None,
            self.routings or None,
        )
        return Completion(sequence, text, finish_reason)
