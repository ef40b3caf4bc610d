"""transformers in BF16 with SDPA: the outside baseline.

Sequences of one length in a batch without padding; cuDNN's attention first, PyTorch's flash where
it refuses; log-probabilities in chunks of rows, each computed again in the backward; with ``full``
recomputation its own gradient checkpointing.

The optimiser is the one that our trainer has: AdamW over FP32 masters with BF16 moments, rounded
stochastically.  transformers trains BF16 weights with BF16 gradients, which add up in ``.grad``
over the micro-batches of a step.  So the step clips those gradients, gives each to its master in
FP32, one after the other (masters 30.5, moments 30.5, weights and gradients 15.3 GiB each for 8B; a
second set of gradients in FP32 would take the activations' room), and copies the masters to the
weights.  The step is to its advantage: its gradients take half the bytes of our FP32 ones, and are
rounded at each micro-batch, for which nothing is charged.
"""

from contextlib import AbstractContextManager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.passes.cases import Case
from benchmarks.passes.phases import Phases
from benchmarks.passes.timing import Pass, Step
from isobit.config.tables import Recompute, TrainingConfig
from isobit.kernels.backend import backend_of
from isobit.models.config import ModelConfig
from isobit.training.optimiser import build_optimiser

CHUNK = 1024
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class PeerModel:
    """A model of transformers with random weights."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = config.to_hf()
        described = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(
                described, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        self.model.train()

    def recompute(self, kind: Recompute) -> None:
        """What its backward computes again from now on: none or full."""
        if kind == "full":
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        else:
            self.model.gradient_checkpointing_disable()

    def log_probs(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """int64 [S, L] -> log-probabilities of the tokens behind position ``first``, FP32 [S * (L -
        1 - first)].
        """
        targets = ids[:, first + 1 :].reshape(-1)
        hidden = (
            self.model.model(input_ids=ids, use_cache=False)
            .last_hidden_state[:, first:-1]
            .reshape(targets.numel(), -1)
        )
        head = self.model.lm_head.weight
        parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat(
            [checkpoint(_log_probs, h, head, t, use_reentrant=False) for h, t in parts]
        )  # pyright: ignore[reportArgumentType]


class PeerOptimiser:
    """What the top of this file says, over the parameters of a model."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig) -> None:
        self._parameters = list(model.parameters())
        self._masters = [
            torch.nn.Parameter(parameter.detach().float()) for parameter in self._parameters
        ]
        self._optimisers = [
            build_optimiser({"master": master}, config, backend_of(master.device), seed=number)
            for number, master in enumerate(self._masters)
        ]
        self._max_norm = config.max_grad_norm

    @torch.no_grad()
    def step(self, phases: Phases) -> None:
        """Clip, move the masters, publish, and drop the gradients."""
        with phases("optimiser"):
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
            for parameter, master, optimiser in zip(
                self._parameters, self._masters, self._optimisers, strict=True
            ):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
                optimiser.step()
                master.grad = None
        with phases("publish"):
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)


def fastest_attention() -> AbstractContextManager[object]:
    """cuDNN's attention before the others, for a forward and its backward."""
    return sdpa_kernel(_ATTENTION, set_priority=True)


def make_pass(case: Case, device: str = "cuda") -> Pass:
    """Random weights on the card, and the pass over them."""
    peer = PeerModel(case.config, device)
    peer.recompute(case.recompute)
    ids, weights = case.token_ids().to(device), case.weights().to(device).view(-1)

    def one() -> None:
        with fastest_attention():
            (peer.log_probs(ids) * weights).sum().backward()

    return one


def make_step(case: Case, microbatches: int, device: str = "cuda") -> Step:
    """A model, its optimiser, and a step over so many micro-batches: the mean of -log p of all
    tokens.
    """
    peer = PeerModel(case.config, device)
    peer.recompute(case.recompute)
    optimiser = PeerOptimiser(peer.model, TrainingConfig(moments="bf16"))
    ids, phases = case.token_ids().to(device), Phases(on_gpu=device != "cpu")

    def one(count: int) -> dict[str, float]:
        phases.start()
        with fastest_attention():
            for _ in range(count):
                with phases("forward"):
                    loss = -peer.log_probs(ids).mean() / microbatches
                with phases("backward"):
                    loss.backward()
        optimiser.step(phases)
        return phases.stop()

    return one


def _log_probs(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, head).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
