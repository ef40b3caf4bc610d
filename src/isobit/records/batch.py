"""A micro-batch of the trainer, and the scores that a forward gives its tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Whole sequences laid end to end without padding: T tokens of S sequences, N of them in a loss
    mask.

    Token ``i`` predicts token ``i + 1`` of the same sequence, in the row of the forward that
    computes it; ``rows`` names the N tokens whose prediction is learnt from and ``targets`` the
    tokens predicted there.  The columns are those that ``COLUMNS`` packs, with the entries of the N
    targets.  All on the host.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], from 0 in each sequence."""
    lengths: tuple[int, ...]
    """S of them, summing to T."""
    rows: torch.Tensor
    """int64 [N], ascending."""
    targets: torch.Tensor
    """int64 [N]"""
    sequence: torch.Tensor
    """int64 [N], 0..S-1, ascending: the sequence each target belongs to."""
    temperatures: torch.Tensor
    """float32 [N]"""
    recorded_log_probs: torch.Tensor
    """float32 [N], recorded as the targets were drawn."""
    old_log_probs: torch.Tensor
    """float32 [N], that the ratio of the loss is taken to: the trainer's own from before its first
    update, or the recorded ones where those are the same function's.
    """
    advantages: torch.Tensor
    """float32 [N]"""
    row_of: torch.Tensor | None = None
    """int64 [T]: the row of the forward that computes each token, where sequences share those of
    their prompt (``isobit.models.shared_prefix``); None: token i has row i.
    """
    recorded_routings: torch.Tensor | None = None
    """int64 [N], of the row that each target was drawn from; 0 where none is known (of what is
    replayed), and None where no sequence has any.
    """
    fresh: torch.Tensor | None = None
    """bool [N], whether a target was drawn from the weights of before the step's updates; None: all
    were.
    """
    reference_log_probs: torch.Tensor | None = None
    """float32 [N], by the reference model."""
    values: torch.Tensor | None = None
    """float32 [N], by the value head before the first update of the batch."""
    returns: torch.Tensor | None = None
    """float32 [N], what the value head is to learn."""
    importance: torch.Tensor | None = None
    """float32 [N], the weights of the corrections; None is 1 everywhere."""

    @property
    def num_rows(self) -> int:
        """The rows of the forward, at most T."""
        return len(self.token_ids) if self.row_of is None else int(self.row_of.max()) + 1

    @property
    def predicting_rows(self) -> torch.Tensor:
        """int64 [N]: the row that predicts each target; a shared one predicts several."""
        return self.rows if self.row_of is None else self.row_of[self.rows]


@dataclass(frozen=True, slots=True)
class RouterScores:
    """The routers of S sequences over all sparse layers, on the host
    (``isobit.kernels.routing``).
    """

    balance: torch.Tensor
    """FP32 [S]: the mean over the layers; 1 where all experts are chosen equally often."""
    z: torch.Tensor
    """FP32 [S], likewise."""
    load: torch.Tensor
    """int64 [layers, E]: choices that fell on each expert, of all sequences together."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The results of a forward for the N targets of a batch, or of one of its sequences: FP32 [N]
    where nothing else is said, on the host.
    """

    log_probs: torch.Tensor
    """Log-probabilities at the temperature that each target was drawn with; [0] for a model without
    lm_head.
    """
    entropies: torch.Tensor
    """Entropies of the distributions that the targets were drawn from, nats; [0] for a model
    without lm_head, and where only the other columns were asked for.
    """
    values: torch.Tensor | None = None
    """Values of a scalar head at the row that predicts each target; None where the model has none.
    """
    routings: torch.Tensor | None = None
    """int64 [N]: the digest of the experts at the row that predicts each target
    (``isobit.models.layers``); None for a dense model.
    """
    router: RouterScores | None = None
    """Scores of the routers of a mixture of experts, in a pass that is learnt from."""
    divergences: torch.Tensor | None = None
    """Divergences from the teacher's distribution, nats (``isobit.models.teacher``); None without a
    teacher.
    """
