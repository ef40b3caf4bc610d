"""Faults that several tests of the proof plant in the CPU's arithmetic and in the engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isobit.kernels.spec import attention, paged_attention
from isobit.rollout import executor
from isobit.rollout.runner import ForwardBatch
from isobit.rollout.scheduler import Plan


class TorchWith:
    """The torch module with one function replaced, for one module's eyes."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def exp2_in_attention(patch: pytest.MonkeyPatch) -> None:
    """Both sides compute the same formula, but torch's exp2 depends on the place of a number in its
    tensor.
    """
    patch.setattr(attention, "torch", TorchWith(exp=torch.exp2))
    patch.setattr(attention, "_LN2", 1.0)


def rollouts_attention_in_fp32(patch: pytest.MonkeyPatch) -> None:
    """Products of attention over pages are those of FP32."""
    exact = paged_attention.attend

    def attend(*arguments: Any) -> attention.AttentionOutput:
        with patch.context() as inner:
            inner.setattr(
                attention, "torch", TorchWith(bmm=lambda a, b: torch.bmm(a.float(), b.float()))
            )
            return exact(*arguments)

    patch.setattr(paged_attention, "attend", attend)


def later_chunks_one_position_off(patch: pytest.MonkeyPatch) -> None:
    """A forward that goes on with a prompt in the middle takes its tokens for those before."""
    exact = executor.build_batch

    def build_batch(plan: Plan, page_tokens: int) -> ForwardBatch:
        batch = exact(plan, page_tokens)
        shifts = [torch.full((n,), int(n > 1 and sample.cached > 0)) for sample, n in plan]
        batch.positions.sub_(torch.cat(shifts))
        return batch

    patch.setattr(executor, "build_batch", build_batch)
