"""A stand-in for vLLM's interfaces of one process, as version 0.25.1 has them, around a model of
transformers in FP32: samples, log-probabilities and weights are real, and nothing is batched.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isobit.models.quantised_checkpoint import Fp8Format

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def _place(name: str) -> int:
    """Of a part of a fused matrix: vLLM puts each to its place in whatever order they come."""
    own = name.split(".")[-2]
    return list(FUSED).index(own) if own in FUSED else -1


class Attention(torch.nn.Module):
    """What has the scales of a layer's cache."""

    calculate_kv_scales = False
    _q_scale_float, _k_scale_float, _v_scale_float = 1.0, 1.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self._q_scale, self._k_scale, self._v_scale = torch.ones(3)
        self.range = torch.tensor(2.0)  # a plain attribute, which no state_dict has

    def make_scales(self, by: torch.Tensor) -> None:
        """As the first forward with new weights does, here by one of these."""
        if self.calculate_kv_scales:
            self.calculate_kv_scales = False
            for name in ("_q_scale", "_k_scale", "_v_scale"):
                scale = float(by.abs().max() / self.range)
                getattr(self, name).fill_(scale)
                setattr(self, f"{name}_float", scale)


class Model(torch.nn.Module):
    """Tensors under vLLM's names, and the model that computes with them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        found = getattr(config, "quantization_config", None)
        if found is not None:
            delattr(config, "quantization_config")
        self.kept = None if found is None else Fp8Format(tuple(found["modules_to_not_convert"]))
        self.held = [AutoModelForCausalLM.from_config(config, dtype=torch.float32)]
        self.attentions = [Attention() for _ in range(config.num_hidden_layers)]
        self.layers = torch.nn.ModuleList(self.attentions)
        self.tensors: dict[str, torch.Tensor] = {}
        self.loaded: dict[str, torch.Tensor] = {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.tensors.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights)

    def finish(self) -> None:
        """Take all tensors, dequantised, into the model, which must have a place for each."""
        fused: dict[str, list[torch.Tensor]] = {}
        numbers: dict[str, torch.Tensor] = {}
        for name, tensor in sorted(self.loaded.items(), key=lambda one: _place(one[0])):
            module, _, leaf = name.rpartition(".")
            above, _, own = module.rpartition(".")
            fused.setdefault(f"{above}.{FUSED.get(own, own)}.{leaf}".lstrip("."), []).append(tensor)
            if leaf == "weight_scale_inv":
                continue
            scales = self.loaded.get(f"{module}.weight_scale_inv")
            assert (scales is None) == (tensor.dtype != torch.float8_e4m3fn), name
            assert (
                self.kept is None
                or (scales is None) == self.kept.keeps(module)
                or (tensor.ndim == 1 or own == "embed_tokens")
            ), name
            numbers[name] = tensor.float()
            if scales is not None:
                grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
                numbers[name] *= grid
        self.tensors = {name: torch.cat(parts) for name, parts in fused.items()}
        missing = self.held[0].load_state_dict(numbers, strict=False)
        assert not missing.unexpected_keys, missing
        assert set(missing.missing_keys) <= {"lm_head.weight"}, missing


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    seed: int | None
    detokenize: bool
    output_kind: str
    drawn: list[int] = field(default_factory=list)


class LlmEngine:
    """Draws one token for each request in a step."""

    def __init__(self, model: Model, config: Any, seed: int, most: int) -> None:
        self.model, self.vllm_config = model, config
        self.waiting: dict[str, tuple[list[int], SamplingParams]] = {}
        self.random, self.most = torch.Generator().manual_seed(seed), most

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert name not in self.waiting
        assert params.max_tokens > 0
        self.waiting[name] = list(prompt["prompt_token_ids"]), params

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.waiting[name]

    @torch.no_grad()
    def step(self) -> list[Any]:
        outputs: list[Any] = []
        for place, layer in enumerate(self.model.attentions):
            attention = self.model.held[0].model.layers[place].self_attn
            layer.make_scales(attention.k_proj.weight)
        for name, (tokens, params) in list(self.waiting.items())[: self.most]:
            logits = self.model.held[0](torch.tensor([tokens])).logits[0, -1]
            log_probs = (logits / (params.temperature or 1.0)).log_softmax(-1)
            if params.temperature == 0:
                token = int(log_probs.argmax())
            else:
                token = int(torch.multinomial(log_probs.exp(), 1, generator=self.random))
            tokens.append(token)
            params.drawn.append(token)
            reason = "stop" if token in params.stop_token_ids else None
            if reason is None and len(params.drawn) == params.max_tokens:
                reason = "length"
            if reason is not None:
                del self.waiting[name]
            found = {token: SimpleNamespace(logprob=float(log_probs[token]))}
            one = SimpleNamespace(token_ids=[token], logprobs=[found], finish_reason=reason)
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[one], finished=reason is not None)
            )
        return outputs


class Llm:
    """``vllm.LLM``."""

    made: ClassVar[list["Llm"]] = []

    def __init__(self, folder: str, **given: Any) -> None:
        self.given, self.asleep, self.updates = given, False, 0
        self.model = Model(folder)
        assert (Path(folder) / "config.json").is_file()
        cache = SimpleNamespace(
            num_gpu_blocks=64, block_size=16, calculate_kv_scales=given["calculate_kv_scales"]
        )
        config = SimpleNamespace(
            cache_config=cache,
            model_config=SimpleNamespace(max_model_len=given["max_model_len"]),
        )
        most = given["max_num_seqs"]
        self.llm_engine = LlmEngine(self.model, config, given["seed"], most)
        self.transfer = Factory._registry[given["weight_transfer_config"]["backend"]](
            None, None, None, self.model
        )
        self.runner = SimpleNamespace(calculate_kv_scales=False)
        Llm.made.append(self)

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.transfer.init_transfer_engine(self.transfer.init_info_cls(**request["init_info"]))

    def start_weight_update(self) -> None:
        assert not self.asleep and not self.llm_engine.waiting
        self.transfer.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        info = self.transfer.update_info_cls(**request["update_info"])
        self.transfer.receive_weights(info)

    def finish_weight_update(self) -> None:
        self.transfer.finish_weight_update()
        self.updates += 1

    def reset_prefix_cache(self) -> None: ...

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def collective_rpc(self, function: Any) -> list[Any]:
        return [function(SimpleNamespace(model_runner=self.runner))]

    def sleep(self, level: int) -> None:
        assert level == 2 and not self.llm_engine.waiting
        self.asleep, self.model.tensors = True, {}
        for tensor in self.model.held[0].state_dict().values():
            tensor.fill_(torch.nan)
        for layer in self.model.attentions:
            layer._k_scale.fill_(1)
            layer._v_scale.fill_(1)
            layer.range.fill_(0)

    def wake_up(self) -> None:
        assert self.asleep
        self.asleep = False


class Transfer:
    """``WeightTransferEngine``."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Model) -> None:
        self.model, self.model_config = model, None


class Factory:
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: Any) -> None:
        assert name not in cls._registry
        cls._registry[name] = engine


def lose_one(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """From now on layers of the model get its first down_proj as it is, whatever is sent."""
    load = Model.load_weights
    held = model.loaded["model.layers.0.mlp.down_proj.weight"].clone()

    def load_but_one(self: Model, weights: Any) -> None:
        load(self, ((name, held if "down_proj" in name else one) for name, one in weights))

    monkeypatch.setattr(Model, "load_weights", load_but_one)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.25.1") -> None:
    """Have ``import vllm`` find this."""
    Llm.made, Factory._registry = [], {}
    info = type("Info", (), {})
    modules = {
        "vllm": {
            "__version__": version,
            "LLM": Llm,
            "SamplingParams": SamplingParams,
            "sampling_params": SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta")),
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Transfer,
            "WeightTransferInitInfo": info,
            "WeightTransferUpdateInfo": info,
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, _: model.finish(),
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
