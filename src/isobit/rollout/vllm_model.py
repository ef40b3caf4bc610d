"""vLLM in this process: its start, its weights and its memory.  The one file that imports it.

An update goes through vLLM's weight-transfer interface (``start_weight_update``,
``update_weights``, ``finish_weight_update``) with a transfer of our own, which hands tensors of
this process over by reference; vLLM's layers copy them to their places.  What vLLM has then is
compared with what is published, tensor by tensor (``check_delivered``).

With an E4M3 cache vLLM takes one scale a layer for each of Q, K and V from a forward, at its start
from one of made-up tokens.  ``update`` has it take them again from the next one, as FP8-RL (arXiv
2601.18150) does on the side of inference; with ``precision.kv_calibration = "never"`` the first
ones stay, also through its sleep, which would make them 1.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from isobit.config.tables import MIXTURES, RunRolloutConfig
from isobit.memory.cache_size import batched_tokens
from isobit.models.policy import Policy
from isobit.models.safetensors import SCALES_SUFFIX
from isobit.models.saving import published_tensors, quantisation_of
from isobit.precision.quant_tensor import BLOCK
from isobit.util.errors import ConfigError, MismatchError, NonFiniteError, shown
from isobit.util.terminal import gib

SUPPORTED = ("0.25.1",)
"""Versions of vLLM whose interfaces were read and run."""
_BACKEND = "isobit"  # the name of our transfer in vLLM's registry
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_LEVEL = 2  # of sleep: weights leave the device too, since they are sent again anyway


Scales = list[tuple[float, float, float]]


class Vllm:
    """An LLM of a policy's shape, with the policy's weights once ``update`` has been called.

    Raises ConfigError where vLLM is missing, is of another version, does not compute the policy's
    shape or flow, or does not start.
    """

    def __init__(self, policy: Policy, config: RunRolloutConfig, seed: int, pages: int) -> None:
        """``pages`` of the native engine's cache say how many bytes vLLM's has."""
        self._policy, self._library = policy, _import_vllm()
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
        (self._constants,) = self._llm.apply_model(_constants_of)
        self._llm.sleep(level=_LEVEL)
        self.asleep, self.version = True, None

    def wake(self) -> None:
        """Have the memory back; what was in it is lost, but for buffers and constants."""
        self._llm.wake_up()
        self._llm.apply_model(partial(_restore, constants=self._constants))
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
        check_delivered(self._policy, sent, llm.apply_model(_tensors_of)[0])
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
            self._llm.apply_model(partial(_write_scales, scales=self._scales))
            return
        self._llm.apply_model(_recalibrate)
        self._llm.collective_rpc(_recalibrate_runner)
        self._scales_due = True

    def describe_scales(self) -> list[str]:
        """A line on the scales that the first forward with new weights has made, once.

        Raises NonFiniteError for scales that nothing can be divided by.
        """
        if not self._scales_due:
            return []
        self._scales_due = False
        self._scales = scales = self._llm.apply_model(_read_scales)[0]
        for layer, values in enumerate(scales):
            if not all(0.0 < value < math.inf for value in values):
                raise NonFiniteError(
                    f"vLLM made the scales {values} of Q, K and V in layer {layer}, which must be "
                    "positive and finite: activations of its first forward with new weights are "
                    "all zero or not finite there; set rollout.engine = 'native', or "
                    "precision = 'fp8-linear' for a cache in BF16"
                )
        ranges = (
            f"{name} {min(values):.3g} to {max(values):.3g}"
            for name, values in zip("QKV", zip(*scales, strict=True), strict=True)
        )
        return [f"{self.name} has new scales in {len(scales)} layers: {', '.join(ranges)}"]

    @property
    def _has_scales(self) -> bool:
        return bool(self.engine.vllm_config.cache_config.calculate_kv_scales)

    def _start(self, config: RunRolloutConfig, seed: int, pages: int) -> Any:
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
        if not {site.forward for site in flow.rollout.sites} <= {"e4m3", "bf16"}:
            raise ConfigError(
                f"rollout.engine = 'vllm' takes the flows bf16, fp8, fp8-linear and fp8-rollout, "
                f"and precision.preset is {flow.preset!r}; name one of them, or set rollout.engine "
                "= 'native'"
            )
        skipped = [layer for layer in range(shape.num_layers) if not _is_fp8(flow, layer)]
        in_fp8 = len(skipped) < shape.num_layers
        if in_fp8:  # its other runner captures forwards that are to make scales
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
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
            "seed": seed % (1 << 31),
        }
        if policy.backend.memory is not None:
            # a run has set it by a function (allocate_in_pages); vLLM keeps its memory out of such
            # segments, so that it can sleep, where the variable says so
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
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


def check_delivered(
    policy: Policy, sent: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]
) -> None:
    """Compare each tensor of vLLM's model with what was sent of the policy.  Bits are equal, or the
    numbers that E4M3 stands for: for DeepGEMM vLLM quantises matrices again, which halves the scale
    of a block whose largest byte is 224, and doubles its bytes.  Raises MismatchError that names
    the first tensor that differs.
    """
    for name, master in policy.decoder.masters().items():
        parts = list(master.parts)
        own = parts[0]
        if len(parts) > 1:  # vLLM fuses what we fuse, under the same names
            module = parts[0].removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]
            own = f"{module}.{'.'.join(name.split('.')[-2:])}"
        if own not in there and own == "lm_head.weight":
            continue  # tied
        wanted, found = _Stored.of(sent, parts), _Stored.of(there, [own])
        if not found.holds(wanted):
            raise MismatchError(
                f"vLLM's {own} {found} is not what is published, {wanted}: the update did not "
                "reach it"
            )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, and the scales of its blocks if it is in E4M3."""

    values: torch.Tensor | None
    scales: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> "_Stored":
        """The rows of several behind each other."""

        def joined(suffix: str) -> torch.Tensor | None:
            found = [tensors[name + suffix] for name in names if name + suffix in tensors]
            return torch.cat(found) if len(found) > 1 else next(iter(found), None)

        return cls(joined(""), joined(SCALES_SUFFIX))

    def __str__(self) -> str:
        if self.values is None:
            return "(none)"
        return f"{tuple(self.values.shape)} {self.values.dtype}"

    def holds(self, other: "_Stored") -> bool:
        """Whether the first rows are those of another."""
        if self.values is None or other.values is None:
            return False
        mine = self.values[: len(other.values)]
        if mine.shape != other.values.shape or mine.dtype != other.values.dtype:
            return False
        are_equal = torch.equal(_bits(mine), _bits(other.values))
        if self.scales is None or other.scales is None:
            return self.scales is other.scales and are_equal
        if self.scales.shape != other.scales.shape:
            return False
        if are_equal and torch.equal(self.scales, other.scales):
            return True
        return all(  # a band at a time, which waits for the device: only where bits differ
            torch.equal(one, two)
            for one, two in zip(self._numbers(), other._numbers(), strict=True)
        )

    def _numbers(self) -> Iterator[torch.Tensor]:
        """A band of blocks after the other, FP32 [128, K]."""
        assert self.values is not None
        assert self.scales is not None
        for values, scales in zip(self.values.split(BLOCK), self.scales, strict=True):
            yield values.float() * scales.float().repeat_interleave(BLOCK)[: values.shape[1]]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# What vLLM runs on its model.


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.data for name, tensor in model.named_parameters(remove_duplicate=False)}


def _unregistered(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that modules and their parts hold as plain attributes, such as the ranges that scales
    of Q, K and V are divided by.  vLLM's sleep drops them with the weights and keeps buffers alone.
    """
    holders = [
        holder
        for module in model.modules()
        for holder in (module, getattr(module, "impl", None), getattr(module, "quant_method", None))
        if hasattr(holder, "__dict__")
    ]
    found = {
        id(value): value
        for holder in holders
        for name, value in vars(holder).items()
        if isinstance(value, torch.Tensor) and name != "kv_cache"
    }
    return list(found.values())


def _constants_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.to("cpu", copy=True) for tensor in _unregistered(model)]


def _restore(model: torch.nn.Module, constants: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(_unregistered(model), constants, strict=True):
        tensor.copy_(value)


def _attention_layers(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "calculate_kv_scales")]


def _recalibrate(model: torch.nn.Module) -> None:
    """Have each layer take its scales from the next forward."""
    for layer in _attention_layers(model):
        layer.calculate_kv_scales = True


def _recalibrate_runner(worker: Any) -> None:
    """That forward is not a captured one."""
    worker.model_runner.calculate_kv_scales = True


def _read_scales(model: torch.nn.Module) -> Scales:
    return [
        (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float)
        for layer in _attention_layers(model)
    ]


def _write_scales(model: torch.nn.Module, scales: Scales) -> None:
    for layer, of_layer in zip(_attention_layers(model), scales, strict=True):
        for name, value in zip("qkv", of_layer, strict=True):
            getattr(layer, f"_{name}_scale").fill_(value)
            setattr(layer, f"_{name}_scale_float", value)


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
