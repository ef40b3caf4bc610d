"""The GPU's training pass over tensors without storage: what it would hold, counted, on a machine
without a GPU.

On torch's meta device every tensor has a shape and a size and no numbers.  The kernels' launches do
nothing, so that the wrappers around them, with all that they allocate, run as they are.
"""

import importlib
import pkgutil
import sys
import weakref
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isobit.config.precision import PrecisionConfig
from isobit.config.training import Recompute
from isobit.models import policy as policy_module
from isobit.models import scorer
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass
from isobit.models.shared_prefix import SharedRows
from isobit.records.batch import PackedBatch
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from tests.models.policies import whole_batch

META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made under it and not gone yet, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes and not _holds(storage, (args, kwargs)):
                    self._sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _holds(storage: torch.UntypedStorage, given: Any) -> bool:
    """Whether one of the tensors that an operation was given is of that storage."""
    return any(
        leaf.untyped_storage()._cdata == storage._cdata
        for leaf in tree_leaves(given)
        if isinstance(leaf, torch.Tensor)
    )


class _NoKernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


class _NoGemm:
    fp8_gemm_nt = bf16_gemm_nt = staticmethod(lambda *arguments, **options: None)
    m_grouped_fp8_gemm_nt_contiguous = m_grouped_bf16_gemm_nt_contiguous = fp8_gemm_nt
    m_grouped_fp8_gemm_nt_contiguous = m_grouped_bf16_gemm_nt_contiguous = fp8_gemm_nt
    fp8_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked = fp8_gemm_nt


def without_launches(
    monkeypatch: pytest.MonkeyPatch, back_end: Literal["hopper", "triton"] = "hopper"
) -> None:
    """Policies on the meta device compute with a back end of GPUs, whose kernels and libraries
    compute nothing; what only a real GPU has is left out.
    """
    pytest.importorskip("triton", reason="the modules that launch the kernels need Triton")
    from isobit.kernels import hopper, triton
    from isobit.kernels.hopper import gemm, grouped_gemm, wgrad
    from isobit.kernels.hopper.backend import HopperBackend
    from isobit.kernels.triton import attend, delta_rule_training
    from isobit.kernels.triton.backend import TritonBackend

    packages = [
        (one.__name__, found.name)
        for one in (hopper, triton)
        for found in pkgutil.iter_modules(one.__path__)
    ]
    for package, found in packages:
        module = importlib.import_module(f"{package}.{found}")
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _NoKernel())
    monkeypatch.setitem(sys.modules, "deep_gemm", _NoGemm)
    monkeypatch.setattr(gemm, "gemm_back_end", lambda scales: "deep_gemm")
    monkeypatch.setattr(gemm, "deep_gemm_or_triton", lambda: "deep_gemm")
    for module in (grouped_gemm, wgrad):
        monkeypatch.setattr(module, "deep_gemm_or_triton", lambda: "deep_gemm")
    for module in (attend, delta_rule_training):
        monkeypatch.setattr(module, "to_device", lambda tensor, device: tensor.to(device))
    monkeypatch.setattr(TritonBackend, "to_device", lambda self, tensor: tensor.to(self.device))
    made = HopperBackend if back_end == "hopper" else TritonBackend
    monkeypatch.setattr(policy_module, "backend_of", made)
    # which looks at the numbers
    monkeypatch.setattr(scorer, "_on_host", lambda found, routes, rows: found)
    monkeypatch.setattr(torch, "addmm", lambda grad, a, b, alpha=1, out_dtype=None, out=None: grad)
    monkeypatch.setattr(torch, "mm", _product)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if out is not None:
        return out
    shape = a.shape[0], b.shape[1]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def meta_policy(shape: ModelConfig, precision: PrecisionConfig) -> Policy:
    """With all that a policy on a GPU holds; call ``without_launches`` first."""
    masters = (
        (name, torch.empty(master.shape, device=META))
        for name, master in build_decoder(shape).masters().items()
    )
    return Policy(shape, precision, masters, META)


def meta_batch(lengths: tuple[int, ...]) -> PackedBatch:
    """Every token is a target."""
    return whole_batch(torch.empty(sum(lengths), dtype=torch.int64, device=META), lengths)


def shared_batch(prompt: int, answers: tuple[int, ...]) -> PackedBatch:
    """Answers to one prompt, whose rows they share; on the host."""
    given = [7] * prompt
    sequences = [TokenSequence.of_answer(given, [5] * length) for length in answers]
    return lay_end_to_end(sequences, shared_prefix=True)


def micro_batch_bytes(
    policy: Policy,
    lengths: tuple[int, ...],
    recompute: Recompute,
    batch: PackedBatch | None = None,
) -> dict[Literal["forward", "saved", "peak"], int]:
    """What forward and backward take beside weights, gradients and the batch itself: at most in the
    layers' forward, saved when the loss is there, and at most.  Every token is a target, or those
    of ``batch``.
    """
    for master in policy.parameters():
        master.grad = torch.empty_like(master)
    batch = batch or meta_batch(lengths)
    ids, positions = batch.token_ids.to(META), batch.positions.to(META)
    shared = None if batch.row_of is None else SharedRows.of(batch, lambda x: x.to(META))
    numbers = torch.empty(len(batch.rows), device=META)
    with LiveBytes() as layers:
        PackedPass(policy, ids, positions, lengths, recompute, shared=shared).forward()
    with LiveBytes() as live:
        scored = ScoredPass(policy, batch, recompute)
        scored.forward()
        saved = live.now
        decoder = policy.decoder
        scored.backward(
            None if decoder.head is None else numbers,
            d_values=None if decoder.value is None else numbers,
        )
    return {"forward": layers.peak, "saved": saved, "peak": live.peak}
