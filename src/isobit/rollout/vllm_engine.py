"""vLLM as the engine of a run: ``rollout.engine = "vllm"``, with ``pip install 'isobit[vllm]'``.

It runs in this process, on its own copy of the weights and with its own kernels, so it computes
another function than the trainer.  A run says so, takes old log-probabilities from the trainer, and
corrects for the difference; the metrics of the mismatch are as ever.

    weights     with each publication the policy's 8-bit bytes and scales, or BF16 numbers, go to
                vLLM's model through its weight-transfer interface, without a copy in between.
                Afterwards each of its tensors is compared with what was published
    KV cache    BF16, or E4M3 with one scale a layer for Q, K and V, which vLLM takes from its first
                forward; it takes them again after each publication
    memory      ``release`` has vLLM sleep (its level 2): cache and weights leave the device, and
                the next step maps them again and sends the weights anew

Samples keep their books here (``isobit.rollout.sequence``), as those of the native engine do: stop
strings, episodes and half-done samples are the same.  vLLM draws its own noise, and its kernels are
not batch invariant: a run with it is not repeated to the bit.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from isobit.config.rollout import RunRolloutConfig
from isobit.memory.cache_size import batched_tokens, out_of_memory_named
from isobit.models.function import LogProbFunction
from isobit.models.policy import Policy
from isobit.models.saving import published_tensors
from isobit.rollout.remote_samples import RemoteSamples
from isobit.rollout.requests import EngineLimits, Handle, Request
from isobit.rollout.sequence import Sample
from isobit.rollout.vllm_model import (
    BACKEND,
    Scales,
    cache_arguments,
    check_delivered,
    check_scales,
    constants_of,
    described_model,
    fused_names,
    import_vllm,
    read_scales,
    recalibrate,
    recalibrate_runner,
    restore,
    tensors_of,
    write_scales,
)
from isobit.util.errors import ConfigError, MismatchError, RequestError, shown
from isobit.util.terminal import gib

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEVEL = 2  # of sleep: weights leave the device too, since they are sent again anyway


class VllmEngine(RemoteSamples):
    """Draws samples with vLLM from the current weights of a policy (``RolloutEngine``).

    Args:
        policy: its published rollout side is what vLLM is given.
        config: sizes; ``engine_options`` are further arguments of ``vllm.LLM``.
        tokenizer: for text and stop strings; None leaves texts empty.
        seed: of vLLM's noise.
        pages: of the native engine's cache; vLLM's has as many bytes.

    Raises ConfigError where vLLM is missing, is of another version, or does not start.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunRolloutConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        seed: int,
        pages: int,
    ) -> None:
        self._policy, self._max_sequences = policy, config.max_sequences
        self._vllm = Vllm(policy, config, seed, pages)
        context, blocks, block_tokens = self._vllm.sizes
        drawn = policy.config.num_drawn
        limits = EngineLimits(context, drawn, blocks, block_tokens, tokenizer is not None)
        super().__init__(limits, seed, tokenizer)
        self._names: dict[str, Handle] = {}
        """The live samples that vLLM has, by the names that they have there."""
        self._named = 0

    @property
    def function(self) -> LogProbFunction:
        """The function of vLLM's copy of the weights, which is the trainer's in no flow."""
        return LogProbFunction(self, self._policy.flow.graph("rollout"), self._vllm.name)

    @property
    def num_running(self) -> int:
        """Samples that vLLM has, of which some may wait there."""
        return len(self._names)

    @property
    def has_room(self) -> bool:
        """Whether fewer samples are live than run at once."""
        return len(self._live) < self._max_sequences

    def figures(self) -> dict[str, Any]:
        """The version, and the sizes of its cache."""
        limits = self._limits
        return {
            "engine": self._vllm.name,
            "kv_pages": limits.num_pages,
            "page_tokens": limits.page_tokens,
        }

    def take_weights(self) -> None:
        """Send what was published last, unless vLLM sleeps: then the next step does."""
        if not self._vllm.asleep:
            with self._all_or_nothing():
                self._update()

    def release(self) -> None:
        """Have vLLM sleep; live samples stay here, and are given to it again when it wakes."""
        if not self._vllm.asleep:
            self._let_go(self._live.values())
            self._vllm.sleep()

    # Samples on their way to vLLM and back.

    def _check(self, requests: Sequence[Request], live: Iterable[Handle] = ()) -> None:
        """Also filters of the distribution."""
        super()._check(requests, live)
        check_whole_distribution(requests)

    def _take_on(self, sample: Sample) -> None:
        super()._take_on(sample)
        if not self._vllm.asleep:
            self._give_to_vllm(sample)

    def _draw(self) -> None:
        """One step of vLLM: a token for each sample that it runs.

        Raises OutOfMemoryError as torch does, and MismatchError where vLLM's weights are not those
        that were published.
        """
        self._wake()
        outputs = self._vllm.engine.step()
        self._notes += self._vllm.describe_scales()
        self.stats.forwards += 1
        for output in outputs:
            self._accept(output)

    def _give_to_vllm(self, sample: Sample) -> None:
        """Have a sample drawn on from all of its tokens; the next to last of these are the ones of
        which vLLM computes K and V, or finds them in its prefix cache.
        """
        self._named += 1
        name, sampling = str(self._named), sample.prompt.request.sampling
        self._vllm.add(
            name,
            sample.tokens,
            temperature=sampling.temperature,
            max_tokens=sample.max_length - len(sample.tokens),
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sample.prompt.request.seed,
        )
        self._names[name] = sample.handle
        self.stats.prompt_tokens += len(sample.prompt.tokens)
        self.stats.recomputed_tokens += len(sample.tokens) - len(sample.prompt.tokens)

    def _let_go(self, samples: Iterable[Sample]) -> None:
        leaving = {sample.handle for sample in samples}
        names = [name for name, handle in self._names.items() if handle in leaving]
        if names:
            self._vllm.engine.abort_request(names)
            for name in names:
                del self._names[name]

    def _accept(self, output: Any) -> None:
        """Append what vLLM drew for one sample, up to what ends it here."""
        handle = self._names.get(output.request_id)
        if handle is None:
            return  # aborted while it was under way
        sample, (drawn,) = self._live[handle], output.outputs
        version = self._vllm.version
        assert version is not None, "vLLM has weights while it draws"
        log_probs = drawn.logprobs or ()
        for token, found in zip(drawn.token_ids, log_probs, strict=True):
            self._append(sample, token, found[token].logprob, version, "vLLM")
            if sample.finish_reason is not None:
                break
        if sample.finish_reason is not None:
            if output.finished:
                del self._names[output.request_id]
            self._end(sample)
        elif output.finished:
            raise MismatchError(
                f"vLLM ended a sample of prompt {handle.prompt_id!r} after "
                f"{len(sample.log_probs)} tokens for the reason "
                f"{shown(repr(drawn.finish_reason))}, which ends none here"
            )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        with super()._all_or_nothing(), out_of_memory_named(self._policy.backend.memory):
            yield

    def _wake(self) -> None:
        """Have vLLM awake with the newest weights and all live samples."""
        if self._vllm.asleep:
            self._vllm.wake()
        self._update()
        there = set(self._names.values())
        for handle, sample in self._live.items():
            if handle not in there:
                self._give_to_vllm(sample)

    def _update(self) -> None:
        """Have vLLM take what was published since, with no sample there meanwhile."""
        if self._vllm.version == self._policy.version:
            return
        begun, is_first = perf_counter(), self._vllm.version is None
        waiting = [self._live[handle] for handle in self._names.values()]
        self._let_go(waiting)
        self._notes.append(self._vllm.update())
        self._count_update(perf_counter() - begun, is_first)
        for sample in waiting:
            self._give_to_vllm(sample)


class Vllm:
    """An LLM of a policy's shape, with the policy's weights once ``update`` has been called.

    Raises ConfigError where vLLM is missing, is of another version, does not compute the policy's
    shape or flow, or does not start.
    """

    def __init__(self, policy: Policy, config: RunRolloutConfig, seed: int, pages: int) -> None:
        """``pages`` of the native engine's cache say how many bytes vLLM's has."""
        if policy.backend.name == "triton":
            raise ConfigError(
                "rollout.engine is 'vllm', and back_end 'triton' has all kernels of its process "
                "compiled for sm_80, vLLM's too; name servers of vLLM in rollout.servers"
            )
        self._policy, self._library = policy, import_vllm()
        self._folder = TemporaryDirectory(prefix="isobit-vllm-")
        self._llm = self._start(config, seed, pages)
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self.version: int | None = None
        """Of the weights that it has."""
        self.asleep = False
        self._constants: list[torch.Tensor] = []
        """While it sleeps: what vLLM does not keep by itself, in the host's memory."""
        self._scales: Scales | None = None
        """Of each layer those of Q, K and V, once a forward has made them."""
        self._scales_due = False

    @property
    def name(self) -> str:
        return f"vllm {self._library.__version__}"

    @property
    def engine(self) -> Any:
        """Its ``LLMEngine``."""
        return self._llm.llm_engine

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens of the longest sequence, blocks of the cache, and tokens of a block."""
        config = self.engine.vllm_config
        cache = config.cache_config
        return config.model_config.max_model_len, cache.num_gpu_blocks, cache.block_size

    def add(self, name: str, token_ids: Sequence[int], **sampling: Any) -> None:
        """Have a sequence continued, with the log-probability of each drawn token."""
        params = self._library.SamplingParams(
            **sampling,
            ignore_eos=True,  # stop_token_ids says which ids end it
            logprobs=0,
            detokenize=False,
            output_kind=self._library.sampling_params.RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)

    def sleep(self) -> None:
        """Give the device the memory of weights and cache."""
        (self._constants,) = self._llm.apply_model(constants_of)
        self._llm.sleep(level=_LEVEL)
        self.asleep, self.version = True, None

    def wake(self) -> None:
        """Have the memory back; what was in it is lost, but for buffers and constants."""
        self._llm.wake_up()
        self._llm.apply_model(partial(restore, constants=self._constants))
        self.asleep = False

    def update(self) -> str:
        """Take the published weights.  -> A line on it.  No sequence may be there.

        Raises MismatchError where it has not taken them.
        """
        begun, llm = perf_counter(), self._llm
        sent = dict(published_tensors(self._policy))
        llm.start_weight_update()
        llm.update_weights({"update_info": {"weights": sent}})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        self._policy.backend.synchronize()
        sending, begun = perf_counter() - begun, perf_counter()
        check_delivered(fused_names(self._policy), sent, llm.apply_model(tensors_of)[0])
        self.version = self._policy.version
        if self._has_scales:
            self._have_scales()
        size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
        return (
            f"{self.name} took {gib(size)} of weights in {sending:.3f} s; compared in "
            f"{perf_counter() - begun:.3f} s, they are equal to what is published"
        )

    def _have_scales(self) -> None:
        """Have the next forward make scales for the new weights, or keep the first ones."""
        if self._scales is not None and self._policy.flow.kv_calibration == "never":
            self._llm.apply_model(partial(write_scales, scales=self._scales))
            return
        self._llm.apply_model(recalibrate)
        self._llm.collective_rpc(recalibrate_runner)
        self._scales_due = True

    def describe_scales(self) -> list[str]:
        """A line on the scales that the first forward with new weights has made, once.

        Raises NonFiniteError for scales that nothing can be divided by.
        """
        if not self._scales_due:
            return []
        self._scales_due = False
        self._scales = scales = self._llm.apply_model(read_scales)[0]
        return [f"{self.name} has {check_scales(scales)}"]

    @property
    def _has_scales(self) -> bool:
        return bool(self.engine.vllm_config.cache_config.calculate_kv_scales)

    def _start(self, config: RunRolloutConfig, seed: int, pages: int) -> Any:
        policy = self._policy
        shape, flow, sizes = policy.config, policy.flow, policy.backend.sizes
        with open(f"{self._folder.name}/config.json", "w", encoding="utf-8") as file:
            json.dump(described_model(policy), file)
        cache = cache_arguments(policy)
        if cache["calculate_kv_scales"]:  # its other runner captures forwards that make scales
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        cache_bytes = pages * sizes.page_bytes(shape, flow)
        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": min(shape.max_positions, pages * sizes.page_tokens),
            "max_num_seqs": config.max_sequences,
            "max_num_batched_tokens": max(
                batched_tokens(config, sizes), min(shape.max_positions, 2048)
            ),
            "kv_cache_memory_bytes": cache_bytes,
            "gpu_memory_utilization": 0.01,  # only compared with what is free
            **cache,
            "logprobs_mode": "processed_logprobs",  # behind the temperature
            "enable_sleep_mode": True,
            "weight_transfer_config": {"backend": BACKEND},
            "disable_log_stats": True,
            "seed": seed % (1 << 31),
        }
        if policy.backend.memory is not None:
            # a run has set it by a function (allocate_in_pages); vLLM keeps its memory out of such
            # segments, so that it can sleep, where the variable says so
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        try:
            with torch.no_grad():
                return self._library.LLM(
                    self._folder.name, **{**arguments, **config.engine_options}
                )
        except Exception as error:
            raise ConfigError(
                f"vLLM {self._library.__version__} did not start: {shown(repr(error))}; its own "
                f"lines above say more. It was given {', '.join(sorted(arguments))} and "
                f"rollout.engine_options = {config.engine_options}"
            ) from error


def check_whole_distribution(requests: Sequence[Request]) -> None:
    """Refuse filters of the distribution: vLLM gives the log-probability behind them alone."""
    for request in requests:
        if request.sampling.truncates:
            raise RequestError(
                f"prompt {request.prompt.id!r} is sampled with top_k, top_p or min_p, behind "
                "which vLLM gives no log-probability over the whole vocabulary, as the loss "
                "needs it; leave them out, or set rollout.engine = 'native'"
            )
