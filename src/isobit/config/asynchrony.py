"""The table ``async``: by how many steps sampling runs ahead of learning."""

from pydantic import Field

from isobit.config.base import Strict


class AsyncConfig(Strict):
    """A fixed lag: a run with it is as reproducible, and as resumable, as one without."""

    lag: int = Field(default=0, ge=0, le=64)
    """Steps that the weights which sample a step's batch are behind those that learn from it: batch
    t is sampled wholly by the weights after step t - 1 - lag, the first ``lag`` + 1 batches by
    those that the run begins with.  The loss's ratio is taken to the recorded log-probabilities,
    exact for the weights of then.
    """
