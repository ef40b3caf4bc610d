"""SHA-256 of what a policy is: the bytes that it has published, and its masters."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from isobit.models.policy import Policy

_THREADS = 8


def published_digest(policy: Policy) -> str:
    """Of all tensors that the training side reads, in the order of their names."""
    weights = policy.weights("training")
    tensors = dict(weights.plain)
    for name, linear in weights.linears.items():
        if isinstance(linear.matrix, torch.Tensor):
            tensors[name] = linear.matrix
        else:
            tensors[f"{name}.values"] = linear.matrix.values
            tensors[f"{name}.scales"] = linear.matrix.scales
    return _joined(tensors[name] for name in sorted(tensors))


def master_digest(policy: Policy) -> str:
    """Of all FP32 masters, whole, in the order of the forward; all ranks together."""
    return _joined(policy.whole_master(name) for name in policy.masters)


def _joined(tensors: Iterable[torch.Tensor]) -> str:
    """Of the digests of tensors, which are copied to the host one by one and hashed side by
    side.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [pool.submit(_digest, tensor.detach().cpu()) for tensor in tensors]
        return hashlib.sha256(b"".join(part.result() for part in parts)).hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).digest()
