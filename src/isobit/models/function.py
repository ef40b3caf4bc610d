"""Comparison of the function that an engine samples from with the function that is trained.

The answer is read off formats and tensors; ``isobit verify`` and every exact step show it in bits.
"""

from dataclasses import dataclass

from isobit.models.policy import Policy
from isobit.models.policy_share import PolicyShare, PublishedShare
from isobit.precision.flow import Graph, is_same_forward
from isobit.precision.quant_tensor import Side

SampledPolicy = Policy | PolicyShare | PublishedShare
"""A policy that an engine samples from."""


@dataclass(frozen=True, slots=True)
class LogProbFunction:
    """The function that log-probabilities are values of, so that two can be compared.

    Sampling and training compute one function only if engine and trainer read the same weight
    tensors, use the same formats at every site and run the same kernels. An engine that runs
    elsewhere or keeps its own weights reports another function, and its log-probabilities are
    recomputed before training on them.
    """

    weights: object
    """The owner of the tensors that are read; compared by identity."""
    graph: Graph
    """The format of every site."""
    back_end: str
    """The name of the kernels' back end."""


def function_of(policy: SampledPolicy, side: Side) -> LogProbFunction:
    """The function that one side of a policy computes on its device."""
    owner = policy.whole if isinstance(policy, PublishedShare) else policy
    return LogProbFunction(owner, policy.flow.graph(side), policy.backend.name)


def is_one_function(sampled: LogProbFunction, trained: LogProbFunction) -> bool:
    """Whether log-probabilities of both are bit for bit the same."""
    return (
        sampled.weights is trained.weights
        and sampled.back_end == trained.back_end
        and is_same_forward(sampled.graph, trained.graph)
    )
