"""The engine's model on a Hopper GPU: decode steps replayed from CUDA graphs, prompts run as they
come, nothing waited for.

A decode step is one captured graph for a number of sequences: newest tokens in, K and V written,
next tokens drawn, all of it on rows of ``DeviceState``.  Weights are read where the policy
publishes them and pages where the cache holds them, so neither new weights nor new pages need
another capture.  Batches are padded up to a captured size; sizes are captured when they first
occur, and so are longer contexts, whose attention runs in more parts.  Where a sample has a filter
(top-k, top-p, min-p), the graph ends with the logits.

Drawn tokens travel to the host behind the step that made them; ``PendingTokens`` waits for them.
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from isobit.errors import ConfigError
from isobit.kernels.hopper.attention import PART
from isobit.kernels.hopper.gemm import describe_back_ends, why_not_deep_gemm
from isobit.kernels.hopper.kv_cache import HopperKvCache
from isobit.kernels.hopper.paged_attention import DecodeAttention, PagedAttention
from isobit.kernels.hopper.sampling import sample_tokens
from isobit.kernels.hopper.transfer import to_device
from isobit.models import hopper_decoder
from isobit.models.head import head_logits
from isobit.models.policy import Policy
from isobit.rollout.native.batch import build_batch
from isobit.rollout.native.device_state import DeviceState
from isobit.rollout.native.gpu_sampling import DrawnOnGpu, draw, truncates
from isobit.rollout.native.ready import Ready, distinct_rows
from isobit.rollout.native.scheduler import Plan
from isobit.rollout.native.sequence import Sample

_SLOW_CAPTURE = 1.0
"""Seconds from which a first capture is worth a line: kernels were compiled."""
_compiled: set[tuple[object, ...]] = set()
"""What this process has captured before, whose kernels it has: a runner that is made again captures
again, but compiles nothing.
"""


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A decode step of a fixed size: ``logits`` where the draw is left to the host, else tokens and
    log-probabilities.
    """

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


class PendingTokens:
    """What a step draws, on its way to the host."""

    def __init__(self, drawn: Sequence[DrawnOnGpu]) -> None:
        self._samples = [sample for part in drawn for sample in part.samples]
        self._arrived = torch.cuda.Event()
        self._arrived.record()
        if not self._samples:
            return
        self._tokens = _to_host(torch.cat([part.tokens for part in drawn]))
        self._log_probs = _to_host(torch.cat([part.log_probs for part in drawn]))
        truncated = [part.log_probs if part.truncated is None else part.truncated for part in drawn]
        self._truncated = (
            _to_host(torch.cat(truncated))
            if any(part.truncated is not None for part in drawn)
            else None
        )
        self._arrived.record()

    def wait(self) -> list[tuple[Sample, int, float, float | None]]:
        """Sample, token, log-probability and that under the truncated distribution where it has
        one, in the order of the draws.
        """
        # also where nothing was drawn, so that the host is never more than a step ahead
        self._arrived.synchronize()
        if not self._samples:
            return []
        truncated: list[float | None] = [None] * len(self._samples)
        if self._truncated is not None:
            values = self._truncated.tolist()
            truncated = [
                v if s.prompt.request.sampling.truncates else None
                for s, v in zip(self._samples, values, strict=True)
            ]
        return list(
            zip(
                self._samples,
                self._tokens.tolist(),
                self._log_probs.tolist(),
                truncated,
                strict=True,
            )
        )


class GraphRunner:
    """A ``PipelineRunner``: the rollout side of a policy on a GPU."""

    def __init__(self, policy: Policy, num_pages: int, max_sequences: int) -> None:
        problem = policy.config.hopper_problem(policy.flow.preset)
        if problem is not None:
            raise ConfigError(f"{problem}; use device 'cpu'")
        _name_fallbacks()
        self._policy = policy
        self._cache = HopperKvCache(
            policy.config, policy.flow, num_pages + 1, policy.device
        )  # the last page is for padding
        self.page_tokens = self._cache.page_tokens
        max_pages = -(-policy.config.max_positions // self.page_tokens)
        self._state = DeviceState(
            max_sequences, max_pages, self.page_tokens, num_pages, policy.device
        )
        self._sizes = graph_sizes(max_sequences)
        self._rows = torch.full((self._sizes[-1],), self._state.padding, device=policy.device)
        self._graphs: dict[tuple[int, int, bool], _CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._drawn: list[DrawnOnGpu] = []

    @property
    def version(self) -> int:
        """The policy's count of publications."""
        return self._policy.version

    @torch.no_grad()
    def decode(self, samples: Sequence[Sample]) -> None:
        """Feed each sample's newest token, which the GPU knows, and draw the next one."""
        slots = self._state.slots(samples)
        size = next(size for size in self._sizes if size >= len(slots))
        longest = max([sample.length for sample in samples])
        filtered = truncates(samples)
        step = self._captured(size, _parts(longest), filtered)
        self._rows[:size].copy_(
            torch.tensor(slots + [self._state.padding] * (size - len(slots))).pin_memory(),
            non_blocking=True,
        )
        step.graph.replay()
        n = len(slots)
        if filtered:
            (logits,) = step.outputs
            drawn = draw(logits[:n], range(n), samples)
            self._state.append(self._rows[:n], drawn.tokens)
            self._drawn.append(drawn)
        else:
            tokens, log_probs = (
                output[:n].clone() for output in step.outputs
            )  # the next replay overwrites them
            self._drawn.append(DrawnOnGpu(samples, tokens, log_probs))

    @torch.no_grad()
    def prefill(self, plan: Plan) -> Tensor:
        """Put tokens that the host knows through the model; -> final hidden state of each chunk's
        last token, [len(plan), hidden].
        """
        batch = build_batch(plan, self.page_tokens)
        token_ids, positions = (
            to_device(x, self._policy.device) for x in (batch.token_ids, batch.positions)
        )
        attention = PagedAttention(self._cache, batch.paged, positions)
        hidden = hopper_decoder.hidden_states(
            self._policy, "rollout", token_ids, positions, attention
        )
        last = torch.tensor(batch.paged.counts).cumsum(0) - 1
        return hidden.index_select(0, to_device(last, hidden.device))

    @torch.no_grad()
    def draw(self, ready: Ready) -> None:
        """Draw the next token of each sample from its hidden state; the sample can be decoded from
        then on.
        """
        samples = [sample for sample, _ in ready]
        hidden, rows = distinct_rows(ready)
        drawn = draw(head_logits(self._policy, "rollout", hidden), rows, samples)
        self._state.admit(samples, drawn.tokens)
        self._drawn.append(drawn)

    def end_step(self) -> PendingTokens:
        """Everything drawn since the last call."""
        drawn, self._drawn = self._drawn, []
        return PendingTokens(drawn)

    def forget(self, samples: Sequence[Sample]) -> None:
        """These samples have left."""
        self._state.forget(samples)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages of all layers."""
        self._cache.copy_pages(sources, targets)

    def clear(self) -> None:
        """Forget all samples and everything in the cache, non-finite numbers included."""
        self._drawn = []
        self._state.clear()
        self._cache.clear()

    def _captured(self, size: int, parts: int, filtered: bool) -> _CapturedStep:
        key = (size, parts, filtered)
        if key not in self._graphs:
            started = perf_counter()
            self._graphs[key] = self._capture(size, parts * PART, filtered)
            seconds = perf_counter() - started
            kernels = (self._policy.config, self._policy.flow, *key)
            if seconds > _SLOW_CAPTURE and kernels not in _compiled:
                print(
                    f"isobit: kernels for {size} decoding sequences were compiled or loaded in "
                    f"{seconds:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
            _compiled.add(kernels)
        return self._graphs[key]

    def _capture(self, size: int, max_length: int, filtered: bool) -> _CapturedStep:
        """Run the step once on padding alone, which compiles and loads its kernels, then capture
        it.

        ``torch.cuda.graph`` would also collect garbage and give all cached memory back, and the
        next prompts would wait for gigabytes of it to be allocated again.
        """
        rows = self._rows[:size]
        rows.fill_(self._state.padding)
        self._step(rows, max_length, filtered)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()  # a collection could free GPU memory in the middle of the capture
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool)
                outputs = self._step(rows, max_length, filtered)
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return _CapturedStep(graph, outputs)

    def _step(self, rows: Tensor, max_length: int, filtered: bool) -> tuple[Tensor, ...]:
        token_ids, batch = self._state.batch(rows, max_length)
        attention = DecodeAttention(self._cache, batch)
        hidden = hopper_decoder.hidden_states(
            self._policy, "rollout", token_ids, batch.positions, attention
        )
        logits = head_logits(self._policy, "rollout", hidden)
        if filtered:
            return (logits,)
        index = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
        state = self._state
        drawn = sample_tokens(
            logits, index, state.temperatures[rows], state.keys[rows], batch.positions + 1
        )
        state.append(rows, drawn[0])
        return drawn


@cache
def _name_fallbacks() -> None:
    """Once a process: which libraries stand in for DeepGEMM, and why."""
    if why_not_deep_gemm() is not None:
        for operation, library in describe_back_ends().items():
            print(f"isobit: {operation}: {library}", file=sys.stderr)


def graph_sizes(max_sequences: int) -> list[int]:
    """The batch sizes that are captured: powers of two up to 32, then multiples of 64.

    Padding costs next to nothing: a decode step waits for weights and for K and V, and a padded row
    has one key.  Every size costs a capture, and seconds of compilation on a machine that has not
    seen it.
    """
    sizes = [1, 2, 4, 8, 16, 32, *range(64, max_sequences, 64)]
    return [size for size in sizes if size < max_sequences] + [max_sequences]


def _parts(longest: int) -> int:
    """Parts of the KV range that the attention of a step is launched with: 1, 2, 4, ..."""
    return 1 << (-(-longest // PART) - 1).bit_length()


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
