"""Which function a log-probability is a value of, so that two of them can be held side by side.

Whether what was sampled and what is trained are one function is a property of the pair of engine
and trainer: the weights must be the same tensors, every site must work in the same formats, and the
same kernels must compute it.  An engine that is another program, or keeps weights of its own, says
so here, and its log-probabilities are recomputed before they are learnt from.
"""

from dataclasses import dataclass

from isobit.models.policy_share import SampledPolicy
from isobit.precision.flow import Graph, graph_differences
from isobit.precision.quant_tensor import Side


@dataclass(frozen=True, slots=True)
class LogProbFunction:
    """From tokens to log-probabilities."""

    weights: object
    """Who owns the tensors that are read; compared by identity."""
    graph: Graph
    """The format of every site."""
    back_end: str
    """Whose kernels compute it."""


def function_of(policy: SampledPolicy, side: Side) -> LogProbFunction:
    """The function that one side of a policy computes on its device."""
    return LogProbFunction(policy, policy.flow.graph(side), policy.backend.name)


def is_one_function(sampled: LogProbFunction, trained: LogProbFunction) -> bool:
    """Whether log-probabilities of the first are, bit for bit, those of the second."""
    return (
        sampled.weights is trained.weights
        and sampled.back_end == trained.back_end
        and sampled.graph.activations == trained.graph.activations
        and not graph_differences(sampled.graph, trained.graph)
    )
