"""Operations on vLLM's model: an update of its weights, their comparison with what is published,
and new scales of its cache. The one file that imports vLLM.

    in the run's process   ``isobit.rollout.vllm_engine``, by vLLM's interface for weight transfer
                           with one of our own, which hands tensors over by reference
    in a server            ``Worker``, which ``vllm serve --worker-extension-cls
                           isobit.rollout.vllm_model.Worker`` adds to vLLM's worker, so that
                           ``isobit.rollout.vllm_server`` can call it by name

vLLM's layers copy the weights to their places; then each tensor of its model is compared with what
is published (``check_delivered``).

With an E4M3 cache vLLM takes one scale a layer for each of Q, K and V from a forward, at its start
from one of made-up tokens. An update has it take them again from the next one, as FP8-RL (arXiv
2601.18150) does on the side of inference; with ``precision.kv_calibration = "never"`` the first
ones stay.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from safetensors.torch import load_file

import isobit
from isobit.config.model_shape import MIXTURES
from isobit.models.policy import Policy
from isobit.models.safetensors import SCALES_SUFFIX
from isobit.models.saving import quantisation_of
from isobit.models.weight_deltas import digest_of
from isobit.precision.quant_tensor import BLOCK, E4M3
from isobit.util.errors import ConfigError, MismatchError, NonFiniteError, shown

SUPPORTED = ("0.25.1",)
"""Versions of vLLM whose interfaces were read and run."""
BACKEND = "isobit"  # the name of our transfer in vLLM's registry
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

Tensors = Mapping[str, torch.Tensor]
Scales = list[tuple[float, float, float]]


def described_model(policy: Policy) -> dict[str, Any]:
    """The ``config.json`` of what vLLM is to compute.  Raises ConfigError for a shape or a flow
    that it does not take.
    """
    shape, flow = policy.config, policy.flow
    if shape.family in MIXTURES:
        raise ConfigError(
            f"rollout.engine = 'vllm' takes dense models, and this one is of the family "
            f"{shape.family}, with experts; set rollout.engine = 'native'"
        )
    if shape.delta is not None:
        raise ConfigError(
            f"rollout.engine = 'vllm' takes models with attention in every layer, and this one, "
            f"{shape.family}, has gated delta nets; set rollout.engine = 'native'"
        )
    others = {site.forward for site in flow.rollout.sites} - {"e4m3", "bf16"}
    if others:
        raise ConfigError(
            f"rollout.engine = 'vllm' takes the flows bf16, fp8, fp8-linear and fp8-rollout, "
            f"and precision (preset {flow.preset!r}) has {' and '.join(sorted(others)).upper()}; "
            "name one of them, or set rollout.engine = 'native'"
        )
    quantisation = quantisation_of(shape, flow)
    described = {**shape.to_hf(), "vocab_size": shape.num_drawn}
    return described if quantisation is None else described | {"quantization_config": quantisation}


def cache_arguments(policy: Policy) -> dict[str, Any]:
    """Arguments of vLLM for the cache of the policy's flow."""
    layers, attention = range(policy.config.num_layers), policy.flow.rollout.attention_format
    skipped = [str(layer) for layer in layers if attention(layer) != "e4m3"]
    in_fp8 = len(skipped) < len(layers)
    return {
        "kv_cache_dtype": "fp8" if in_fp8 else "auto",
        "calculate_kv_scales": in_fp8,
        "kv_cache_dtype_skip_layers": skipped if in_fp8 else [],
    }


def fused_names(policy: Policy) -> dict[str, list[str]]:
    """The tensors of vLLM's model, with those of a checkpoint that each consists of: it fuses what
    we fuse, under the same names.
    """
    fused: dict[str, list[str]] = {}
    for name, master in policy.decoder.masters().items():
        parts = list(master.parts)
        own = parts[0]
        if len(parts) > 1:
            module = parts[0].removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]
            own = f"{module}.{'.'.join(name.split('.')[-2:])}"
        fused[own] = parts
    return fused


def check_delivered(fused: Mapping[str, Sequence[str]], sent: Tensors, there: Tensors) -> None:
    """Compare each tensor of vLLM's model with what was sent (``fused_names``).  Bits are equal, or
    the numbers that E4M3 stands for: for DeepGEMM vLLM quantises matrices again, which halves the
    scale of a block whose largest byte is 224, and doubles its bytes.  Raises MismatchError that
    names the first tensor that differs.
    """
    for own, parts in fused.items():
        if own not in there and own == "lm_head.weight":
            continue  # tied
        stored = _Stored.of(there, [own])
        device = "cpu" if stored.values is None else stored.values.device
        wanted = _Stored.of(sent, parts, device)
        if not stored.holds(wanted):
            raise MismatchError(
                f"vLLM's {own} {stored} is not what is published, {wanted}: the update did not "
                "reach it"
            )


def check_scales(scales: Scales) -> str:
    """A line on scales that a forward has made.  Raises NonFiniteError for some that nothing can be
    divided by.
    """
    for layer, values in enumerate(scales):
        if not all(0.0 < value < math.inf for value in values):
            raise NonFiniteError(
                f"vLLM made the scales {tuple(values)} of Q, K and V in layer {layer}, which must "
                "be positive and finite: activations of its first forward with new weights are "
                "all zero or not finite there; set rollout.engine = 'native', or "
                "precision = 'fp8-linear' for a cache in BF16"
            )
    ranges = (
        f"{name} {min(values):.3g} to {max(values):.3g}"
        for name, values in zip("QKV", zip(*scales, strict=True), strict=True)
    )
    return f"new scales in {len(scales)} layers: {', '.join(ranges)}"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, and the scales of its blocks if it is in E4M3."""

    values: torch.Tensor | None
    scales: torch.Tensor | None = None

    @classmethod
    def of(
        cls, tensors: Tensors, names: Sequence[str], device: torch.device | str | None = None
    ) -> "_Stored":
        """The rows of several behind each other, on a device."""

        def joined(suffix: str) -> torch.Tensor | None:
            parts = [
                tensors[name + suffix].to(device) for name in names if name + suffix in tensors
            ]
            return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)

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


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
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


def constants_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.to("cpu", copy=True) for tensor in _unregistered(model)]


def restore(model: torch.nn.Module, constants: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(_unregistered(model), constants, strict=True):
        tensor.copy_(value)


def _attention_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "calculate_kv_scales")]


def recalibrate(model: torch.nn.Module) -> None:
    """Have each layer take its scales from the next forward."""
    for layer in _attention_layers(model):
        layer.calculate_kv_scales = True


def recalibrate_runner(worker: Any) -> None:
    """Have the next forward run without a captured graph, so that it takes the scales."""
    worker.model_runner.calculate_kv_scales = True


def read_scales(model: torch.nn.Module) -> Scales:
    return [
        (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float)
        for layer in _attention_layers(model)
    ]


def write_scales(model: torch.nn.Module, scales: Scales) -> None:
    for layer, of_layer in zip(_attention_layers(model), scales, strict=True):
        for name, value in zip("qkv", of_layer, strict=True):
            getattr(layer, f"_{name}_scale").fill_(value)
            setattr(layer, f"_{name}_scale_float", value)


class Worker:
    """Methods that a server of vLLM adds to its worker for a run.  Arguments and
    results are of JSON's types, since they go through ``/collective_rpc``.
    """

    get_model: Any  # this and the next are of vLLM's worker
    vllm_config: Any
    isobit_state: dict[str, Any]
    """The file that was loaded last, and the scales that the first forward made."""

    def isobit_describe(self) -> dict[str, Any]:
        """A description of what computes here."""
        config, model = self.vllm_config, self.get_model()
        cache, shape = config.cache_config, config.model_config
        return {
            "isobit": isobit.__version__,
            "vllm": import_module("vllm").__version__.split("+")[0],
            "world": config.parallel_config.world_size,
            "vocabulary": shape.get_vocab_size(),
            "e4m3": sorted(name for name, one in tensors_of(model).items() if one.dtype == E4M3),
            "makes_scales": bool(cache.calculate_kv_scales),
            "logprobs_mode": str(shape.logprobs_mode),
            "context": shape.max_model_len,
            "pages": cache.num_gpu_blocks,
            "page_tokens": cache.block_size,
            "running": config.scheduler_config.max_num_seqs,
            "weights": self._isobit_state.get("digest"),
        }

    def isobit_update(self, asked: str) -> dict[str, Any]:
        """Load a safetensors file and compare the model with it; nothing may be sampled meanwhile.

        ``asked`` is JSON: its path, what each tensor of the model consists of (``fused_names``),
        and whether the first scales of the cache are kept.  -> The digest of what was read, and
        what differs from it, or the problem.
        """
        order, state, digest = json.loads(asked), self._isobit_state, ""
        state["digest"] = None
        try:
            sent = load_file(order["path"])
            digest = digest_of(sent)
            model = self.get_model()
            reload = import_module("vllm.model_executor.model_loader.reload")
            reload.initialize_layerwise_reload(model)
            model.load_weights(iter(sent.items()))
            reload.finalize_layerwise_reload(model, self.vllm_config.model_config)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            check_delivered(order["fused"], sent, tensors_of(model))
        except MismatchError as error:
            return {"digest": digest, "differs": str(error)}
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        makes_scales = bool(self.vllm_config.cache_config.calculate_kv_scales)
        if makes_scales and order["keeps_scales"] and state.get("scales"):
            write_scales(model, state["scales"])
            makes_scales = False
        elif makes_scales:
            recalibrate(model)
            recalibrate_runner(self)
        state["digest"] = digest
        return {"digest": digest, "makes_scales": makes_scales}

    def isobit_scales(self) -> dict[str, Any]:
        """Scales of each layer's Q, K and V, as JSON, since they may be infinite."""
        scales = read_scales(self.get_model())
        self._isobit_state.setdefault("scales", scales)
        return {"scales": json.dumps(scales)}

    @property
    def _isobit_state(self) -> dict[str, Any]:
        return self.__dict__.setdefault("isobit_state", {})


def import_vllm() -> Any:
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
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, _same_process())
    return library


def _same_process() -> type:
    """A weight transfer of vLLM's that takes tensors of this process by reference."""
    base = import_module("vllm.distributed.weight_transfer.base")
    reload = import_module("vllm.model_executor.model_loader.reload")

    @dataclass
    class Nothing(base.WeightTransferInitInfo):
        pass

    @dataclass
    class WeightsByReference(base.WeightTransferUpdateInfo):
        weights: Mapping[str, torch.Tensor]

    class SameProcess(base.WeightTransferEngine):
        init_info_cls, update_info_cls = Nothing, WeightsByReference

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: WeightsByReference) -> None:
            self.model.load_weights(iter(update_info.weights.items()))

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            raise NotImplementedError("update_weights hands them over")

    return SameProcess
