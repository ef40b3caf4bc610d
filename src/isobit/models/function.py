"""What function a log-probability is a value of, so that two of them can be compared.

Sampling and training compute one function only if engine and trainer read the same weight tensors,
use the same formats at every site and run the same kernels. An engine that runs elsewhere or keeps
its own weights reports another function here, and its log-probabilities are recomputed before
training on them.
"""

from dataclasses import dataclass

from isobit.models.policy_share import SampledPolicy
from isobit.precision.flow import Graph, graph_differences
from isobit.precision.quant_tensor import Side


@dataclass(frozen=True, slots=True)
class LogProbFunction:
    """A function from tokens to log-probabilities."""

    weights: object
    """The owner of the tensors that are read; compared by identity."""
    graph: Graph
    """The format of every site."""
    back_end: str
    """The name of the kernels' back end."""


def function_of(policy: SampledPolicy, side: Side) -> LogProbFunction:
    """What one side of a policy computes on its device."""
    return LogProbFunction(policy, policy.flow.graph(side), policy.backend.name)


def is_one_function(sampled: LogProbFunction, trained: LogProbFunction) -> bool:
    """Whether log-probabilities of both are bit for bit the same."""
    return (
        sampled.weights is trained.weights
        and sampled.back_end == trained.back_end
        and sampled.graph.activations == trained.graph.activations
        and not graph_differences(sampled.graph, trained.graph)
    )
