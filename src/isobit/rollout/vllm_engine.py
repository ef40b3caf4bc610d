"""vLLM as the engine of a run: ``rollout.engine = "vllm"``, with ``pip install 'isobit[vllm]'``.

It runs in this process, on its own copy of the weights and with its own kernels, so it computes
another function than the trainer.  A run says so, takes old log-probabilities from the trainer, and
corrects for the difference; the metrics of the mismatch are as ever.

    weights     with each publication the policy's 8-bit bytes and scales, or BF16 numbers, go to
                vLLM's model through its weight-transfer interface, without a copy in between.
                Afterwards each of its tensors is compared with what was published
    KV cache    BF16, or E4M3 with one scale a layer for Q, K and V, which vLLM takes from its first
                forward; it takes them again after each publication (``recalibrate``)
    memory      ``release`` has vLLM sleep (its level 2): cache and weights leave the device, and
                the next step maps them again and sends the weights anew

Samples keep their books here (``isobit.rollout.sequence``), as those of the native engine do: stop
strings, episodes and half-done samples are the same.  vLLM draws its own noise, and its kernels are
not batch invariant: a run with it is not repeated to the bit.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from isobit.config.tables import MIXTURES, RunRolloutConfig
from isobit.memory.cache_size import batched_tokens, out_of_memory_named
from isobit.models.policy import Policy
from isobit.models.policy_share import LogProbFunction
from isobit.models.quantised_checkpoint import parts_of
from isobit.models.safetensors import SCALES_SUFFIX
from isobit.models.saving import quantisation_of, whole_blocks
from isobit.precision.quant_tensor import QuantTensor, dequantise
from isobit.records.text import Completion
from isobit.rollout.engine import EngineStats, Follow, Handle, Request, SampleEvent, requests_of
from isobit.rollout.native import Limits, check_limits
from isobit.rollout.sequence import Sample, SampleStream, SharedPrompt
from isobit.util.errors import ConfigError, MismatchError, NonFiniteError, RequestError, shown
from isobit.util.terminal import gib

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPPORTED = ("0.25.1",)
"""Versions of vLLM whose interfaces were read and run."""
_BACKEND = "isobit"  # the name of our weight transfer in vLLM's registry
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that weights need no copy
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SLEEP_LEVEL = 2  # weights leave the device too: they are sent again anyway


class VllmEngine:
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
        self._policy, self._tokenizer, self._seed = policy, tokenizer, seed
        self._library = _import_vllm()
        self._folder = TemporaryDirectory(prefix="isobit-vllm-")
        self._max_sequences = config.max_sequences
        self._llm = self._start(config, pages)
        cache = self._llm.llm_engine.vllm_config.cache_config
        shape = policy.config
        self._limits = Limits(
            min(shape.max_positions, self._llm.llm_engine.vllm_config.model_config.max_model_len),
            shape.num_drawn,
            cache.num_gpu_blocks,
            cache.block_size,
            tokenizer is not None,
        )
        self.stats, self._started_at = EngineStats(), perf_counter()
        self._live: dict[Handle, Sample] = {}
        """In the order of arrival."""
        self._names: dict[str, Handle] = {}
        """The live samples that vLLM has, by the names that they have there."""
        self._streams: dict[Handle, SampleStream] = {}
        self._events: list[SampleEvent] = []
        self._version: int | None = None  # of the weights that vLLM has
        self._asleep = False
        self._named = 0
        self._notes: list[str] = []
        self._scales_due = False

    @property
    def function(self) -> LogProbFunction:
        """Of vLLM's copy of the weights, and therefore the trainer's in no flow."""
        name = f"vllm {self._library.__version__}"
        return LogProbFunction(self, self._policy.flow.graph("rollout"), name)

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return len(self._live)

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
            "engine": f"vllm {self._library.__version__}",
            "kv_pages": limits.num_pages,
            "page_tokens": limits.page_tokens,
        }

    def notes(self) -> list[str]:
        """What became of the weights that were published since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what can never be served, what is live already, and filters of the distribution:
        vLLM gives the log-probability behind them alone.
        """
        check_limits(requests, self._limits, self._live)
        for request in requests:
            if request.sampling.truncates:
                raise RequestError(
                    f"prompt {request.prompt.id!r} is sampled with top_k, top_p or min_p, behind "
                    "which vLLM gives no log-probability over the whole vocabulary, as the loss "
                    "needs it; leave them out, or set rollout.engine = 'native'"
                )

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """Take on requests; a handle for each sample, in their order.

        Raises RequestError as ``check`` does, and where text is to be followed without a tokenizer;
        then none of them is taken on.
        """
        self.check(requests)
        if follow == "text" and self._tokenizer is None:
            raise RequestError("the text of samples cannot be followed without a tokenizer")
        self._begin_period()
        groups: list[list[Sample]] = []
        for request in requests:
            prompt = SharedPrompt(request, max_pages=0)
            groups.append([self._make(prompt, index) for index in range(request.samples)])
        for sample in (sample for group in groups for sample in group):
            if follow != "end":
                tokenizer = self._tokenizer if follow == "text" else None
                self._streams[sample.handle] = SampleStream(sample, tokenizer)
            self._take_on(sample)
        return [[sample.handle for sample in group] for group in groups]

    def step(self) -> list[SampleEvent]:
        """One step of vLLM: a token for each sample that it runs.

        Raises NonFiniteError where a log-probability is none, OutOfMemoryError as torch does, and
        MismatchError where vLLM's weights are not those that were published.
        """
        if self._live:
            with self._all_or_nothing():
                self._wake()
                outputs = self._llm.llm_engine.step()
                self._note_scales()
                self.stats.forwards += 1
                for output in outputs:
                    self._accept(output)
                self._events += [
                    event
                    for stream in self._streams.values()
                    if (event := stream.event()) is not None
                ]
            self.stats.seconds = perf_counter() - self._started_at
        events, self._events = self._events, []
        return events

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        """End samples where they stand, with the tokens so far."""
        asked = set(handles)
        leaving = [sample for handle, sample in self._live.items() if handle in asked]
        self._take_from_vllm(sample.handle for sample in leaving)
        for sample in leaving:
            sample.finish_reason = "aborted"
            self._end(sample)
        told = [event for event in self._events if event.handle in asked]
        self._events = [event for event in self._events if event.handle not in asked]
        return told

    def num_drawn(self, handle: Handle) -> int:
        """Tokens that a live sample has drawn."""
        return len(self._live[handle].log_probs)

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let samples go as they are."""
        asked = set(handles)
        leaving = [sample for handle, sample in self._live.items() if handle in asked]
        self._take_from_vllm(sample.handle for sample in leaving)
        half_done: dict[Handle, Completion] = {}
        for sample in leaving:
            sample.finish_reason = "aborted"
            half_done[sample.handle] = sample.completion(tokenizer=None)
            del self._live[sample.handle]
            self._streams.pop(sample.handle, None)
        self._events = [event for event in self._events if event.handle not in half_done]
        return half_done

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        """Take on half-done samples, whose tokens so far vLLM is given as a prompt.  Raises
        RequestError as the protocol says.
        """
        asked = requests_of(half_done, requests, self._live)
        self.check(list(asked.values()))
        self._begin_period()
        for handle, completion in half_done.items():
            request = asked[handle.prompt_id, handle.visit]
            sample = self._make(SharedPrompt(request, max_pages=0), handle.sample)
            sample.take_up(completion)
            self._take_on(sample)

    def take_weights(self) -> None:
        """Send what was published last, unless vLLM sleeps: then the next step does."""
        if not self._asleep:
            with self._all_or_nothing():
                self._update()

    def release(self) -> None:
        """Have vLLM sleep; live samples stay here, and are given to it again when it wakes."""
        if not self._asleep:
            self._take_from_vllm(list(self._live))
            self._llm.sleep(level=SLEEP_LEVEL)
            self._asleep, self._version = True, None

    # Samples on their way to vLLM and back.

    def _make(self, prompt: SharedPrompt, index: int) -> Sample:
        length = prompt.request.max_length(self._limits.context)
        return Sample(prompt, index, self._seed, length, 0, self._tokenizer)

    def _take_on(self, sample: Sample) -> None:
        self._live[sample.handle] = sample
        if not self._asleep:
            self._give_to_vllm(sample)

    def _give_to_vllm(self, sample: Sample) -> None:
        """Have a sample drawn on from all of its tokens; the next to last of these are the ones of
        which vLLM computes K and V, or finds them in its prefix cache.
        """
        self._named += 1
        name, sampling = str(self._named), sample.prompt.request.sampling
        params = self._library.SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sample.max_length - len(sample.tokens),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stop tokens say which ids end a completion
            logprobs=0,  # of the drawn token
            seed=sample.prompt.request.seed,
            detokenize=False,
            output_kind=self._library.sampling_params.RequestOutputKind.DELTA,
        )
        tokens = {"prompt_token_ids": list(sample.tokens)}
        self._llm.llm_engine.add_request(name, tokens, params)
        self._names[name] = sample.handle
        self.stats.prompt_tokens += len(sample.prompt.tokens)
        self.stats.recomputed_tokens += len(sample.tokens) - len(sample.prompt.tokens)

    def _take_from_vllm(self, handles: Iterable[Handle]) -> None:
        leaving = set(handles)
        names = [name for name, handle in self._names.items() if handle in leaving]
        if names:
            self._llm.llm_engine.abort_request(names)
            for name in names:
                del self._names[name]

    def _accept(self, output: Any) -> None:
        """Append what vLLM drew for one sample, up to what ends it here."""
        handle = self._names.get(output.request_id)
        if handle is None:
            return  # aborted while it was under way
        sample, (drawn,) = self._live[handle], output.outputs
        version = self._version
        assert version is not None, "vLLM has weights while it draws"
        log_probs = drawn.logprobs or ()
        for token, found in zip(drawn.token_ids, log_probs, strict=True):
            log_prob = found[token].logprob
            if not -1e30 < log_prob <= 1e-3:
                raise NonFiniteError(
                    f"vLLM gave the log-probability {log_prob} for token {token} of prompt "
                    f"{handle.prompt_id!r}: its logits are not finite"
                )
            sample.accept(token, log_prob, version)
            self.stats.generated_tokens += 1
            if sample.finish_reason is not None:
                break
        if sample.finish_reason is not None:
            if output.finished:
                del self._names[output.request_id]
            else:
                self._take_from_vllm([handle])
            self._end(sample)
        elif output.finished:
            raise MismatchError(
                f"vLLM ended a sample of prompt {handle.prompt_id!r} after "
                f"{len(sample.log_probs)} tokens for the reason "
                f"{shown(repr(drawn.finish_reason))}, which ends none here"
            )

    def _end(self, sample: Sample) -> None:
        del self._live[sample.handle]
        completion = sample.completion(self._tokenizer)
        stream = self._streams.pop(sample.handle, None)
        event = stream.event(completion) if stream is not None else None
        self._events.append(event or SampleEvent(sample.handle, completion=completion))

    def _begin_period(self) -> None:
        if not self._live:
            self.stats, self._started_at = EngineStats(), perf_counter()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After an error nobody is live."""
        try:
            with out_of_memory_named(self._policy.backend.memory):
                yield
        except BaseException:
            self._take_from_vllm(list(self._live))
            self._live, self._streams, self._events = {}, {}, []
            raise

    # Weights on their way to vLLM.

    def _wake(self) -> None:
        """Have vLLM awake with the newest weights and all live samples."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        self._update()
        there = set(self._names.values())
        for handle, sample in self._live.items():
            if handle not in there:
                self._give_to_vllm(sample)

    def _update(self) -> None:
        """Send the published weights if vLLM has others, and see that it has them."""
        version = self._policy.version
        if version == self._version:
            return
        begun = perf_counter()
        waiting = list(self._names.values())
        self._take_from_vllm(waiting)
        sent = dict(published_tensors(self._policy))
        llm = self._llm
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"weights": sent}})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        self._policy.backend.synchronize()
        seconds = perf_counter() - begun
        check_delivered(self._policy, llm.apply_model(_tensors_of)[0])
        if self._version is not None:
            self.stats.weight_changes += 1
        self._version = version
        size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
        self.stats.update_s += perf_counter() - begun
        self._notes.append(
            f"vLLM took {gib(size)} of weights in {seconds:.2f} s, and compared them in "
            f"{perf_counter() - begun - seconds:.2f} s: equal to what is published"
        )
        if self._has_scales:
            llm.apply_model(recalibrate)
            llm.collective_rpc(_recalibrate_runner)
            self._scales_due = True
        for handle in waiting:
            self._give_to_vllm(self._live[handle])

    @property
    def _has_scales(self) -> bool:
        return bool(self._llm.llm_engine.vllm_config.cache_config.calculate_kv_scales)

    def _note_scales(self) -> None:
        """Say which scales the first forward with new weights has given the cache."""
        if not self._scales_due:
            return
        self._scales_due = False
        scales = self._llm.apply_model(kv_scales)[0]
        ranges = (
            f"{name} {min(values):.3g} to {max(values):.3g}"
            for name, values in zip("QKV", zip(*scales, strict=True), strict=True)
        )
        self._notes.append(f"vLLM's scales of its {len(scales)} layers: {', '.join(ranges)}")

    # vLLM's start.

    def _start(self, config: RunRolloutConfig, pages: int) -> Any:
        """An LLM of the policy's shape, with weights that nobody has set."""
        policy = self._policy
        shape, flow, sizes = policy.config, policy.flow, policy.backend.sizes
        if shape.family in MIXTURES:
            raise ConfigError(
                f"rollout.engine = 'vllm' takes dense models, and this one is of the family "
                f"{shape.family}, with experts; set rollout.engine = 'native'"
            )
        described = {**shape.to_hf(), "vocab_size": shape.num_drawn}
        if (quantisation := quantisation_of(shape, flow)) is not None:
            described["quantization_config"] = quantisation
        with open(f"{self._folder.name}/config.json", "w", encoding="utf-8") as file:
            json.dump(described, file)
        formats = {flow.rollout.attention_format(layer) for layer in range(shape.num_layers)}
        if not formats <= {"e4m3", "bf16"}:
            raise ConfigError(
                f"rollout.engine = 'vllm' takes the flows bf16, fp8, fp8-linear and fp8-rollout, "
                f"and precision.preset is {flow.preset!r}; name one of them, or set rollout.engine "
                "= 'native'"
            )
        skipped = [layer for layer in range(shape.num_layers) if not _is_fp8(flow, layer)]
        in_fp8 = len(skipped) < shape.num_layers
        cache_bytes = pages * sizes.page_bytes(shape, flow)
        given: dict[str, Any] = {
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
            "kv_cache_dtype": "fp8" if in_fp8 else "auto",
            "calculate_kv_scales": in_fp8,
            "kv_cache_dtype_skip_layers": [str(layer) for layer in skipped] if in_fp8 else [],
            "logprobs_mode": "processed_logprobs",  # behind the temperature
            "enable_sleep_mode": True,
            "weight_transfer_config": {"backend": _BACKEND},
            "disable_log_stats": True,
            "seed": self._seed % (1 << 31),
        }
        try:
            with torch.no_grad():
                return self._library.LLM(self._folder.name, **{**given, **config.engine_options})
        except Exception as error:
            raise ConfigError(
                f"vLLM {self._library.__version__} did not start: {shown(repr(error))}; its own "
                f"lines above say more. It was given {', '.join(sorted(given))} and "
                f"rollout.engine_options = {config.engine_options}"
            ) from error


def _is_fp8(flow: Any, layer: int) -> bool:
    return flow.rollout.attention_format(layer) == "e4m3"


def published_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a policy's rollout side under the names of checkpoints, as ``isobit export
    --format fp8`` writes them: views of what is published where there is such a tensor.
    """
    weights, drawn = policy.weights("rollout"), policy.config.num_drawn
    quantised = {
        part
        for name, master in policy.decoder.masters().items()
        if master.kind == "matrix"
        and isinstance(weights.linears[name.rpartition(".")[0]].matrix, QuantTensor)
        for part in master.parts
    }
    whole = whole_blocks(policy.config, quantised)
    for name, master in policy.decoder.masters().items():
        path = name.rpartition(".")[0]
        if master.kind == "plain":
            values = weights.plain[name].bfloat16()
            is_table = name == policy.decoder.lm_head.master or name.startswith("embed")
            yield next(iter(master.parts)), values[:drawn] if is_table else values
            continue
        found = (
            weights.linears[path].bias if master.kind == "bias" else weights.linears[path].matrix
        )
        if isinstance(found, QuantTensor):
            for part, one in zip(master.parts, parts_of(found), strict=True):
                if part in whole:
                    yield part, one.values
                    yield part + SCALES_SUFFIX, one.scales
                else:
                    yield part, dequantise(one).bfloat16()
        else:
            assert isinstance(found, torch.Tensor), "a matrix in E4M3 or BF16, or a bias"
            yield from zip(master.parts, found.split(list(master.parts.values())), strict=True)


def check_delivered(policy: Policy, there: Mapping[str, torch.Tensor]) -> None:
    """Compare each tensor of vLLM's model with what is published, bit for bit.  Raises
    MismatchError that names the first one that differs.
    """
    sent = dict(published_tensors(policy))
    for name, master in policy.decoder.masters().items():
        parts = list(master.parts)
        own = parts[0]
        if len(parts) > 1:  # vLLM fuses what we fuse, under the same names
            module = parts[0].removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]
            own = f"{module}.{'.'.join(name.split('.')[-2:])}"
        if own not in there and own == "lm_head.weight":
            continue  # tied
        for suffix in ("", SCALES_SUFFIX):
            if suffix and parts[0] + suffix not in sent:
                continue
            expected = torch.cat([sent[part + suffix] for part in parts])
            found = there.get(own + suffix)
            if found is None:
                raise MismatchError(f"vLLM's model has no tensor {own + suffix}")
            found = found[: len(expected)]
            if found.shape != expected.shape or not torch.equal(_bits(found), _bits(expected)):
                raise MismatchError(
                    f"vLLM's {own + suffix} {tuple(found.shape)} {found.dtype} is not what is "
                    f"published, {tuple(expected.shape)} {expected.dtype}: the update did not "
                    "reach it"
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# What vLLM runs on its model.


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.data for name, tensor in model.named_parameters(remove_duplicate=False)}


def _attention_layers(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "calculate_kv_scales")]


def recalibrate(model: torch.nn.Module) -> None:
    """Have each layer take its scales from the next forward."""
    for layer in _attention_layers(model):
        layer.calculate_kv_scales = True


def _recalibrate_runner(worker: Any) -> None:
    """That forward is not a captured one."""
    worker.model_runner.calculate_kv_scales = True


def kv_scales(model: torch.nn.Module) -> list[tuple[float, float, float]]:
    """Of each layer the scales of Q, K and V."""
    return [
        (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float)
        for layer in _attention_layers(model)
    ]


def _import_vllm() -> Any:
    """The library, with our weight transfer in its registry."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        library = import_module("vllm")
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine = 'vllm' needs vLLM {' or '.join(SUPPORTED)}: pip install "
            f"'isobit[vllm]' ({shown(str(error))})"
        ) from None
    if library.__version__.split("+")[0] not in SUPPORTED:
        raise ConfigError(
            f"vLLM {library.__version__} is installed, and {' or '.join(SUPPORTED)} was tested: "
            "pip install 'isobit[vllm]', or set rollout.engine = 'native'"
        )
    factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    if _BACKEND not in factory._registry:
        factory.register_engine(_BACKEND, _same_process())
    return library


def _same_process() -> type:
    """A weight transfer of vLLM's that takes tensors of this process by reference."""
    base = import_module("vllm.distributed.weight_transfer.base")
    reload = import_module("vllm.model_executor.model_loader.reload")

    @dataclass
    class Nothing(base.WeightTransferInitInfo):
        pass

    @dataclass
    class Published(base.WeightTransferUpdateInfo):
        weights: Mapping[str, torch.Tensor]

    class SameProcess(base.WeightTransferEngine):
        init_info_cls, update_info_cls = Nothing, Published

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Published) -> None:
            self.model.load_weights(iter(update_info.weights.items()))

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            raise NotImplementedError("update_weights hands them over")

    return SameProcess
