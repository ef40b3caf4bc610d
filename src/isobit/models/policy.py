"""The policy: FP32 masters that the optimiser moves, and what both sides of the flow read,
published from them.

A publication rounds every master to BF16 once and quantises it once, in place: the engine and the
trainer hold the same tensors, so new weights need no copy and no message.  Where rollout and
training have the same formats at a site, its weight exists once.

The masters are those of the units (``isobit.models.layers``), by name: ``embed_tokens.weight``,
``layers.N.{input_norm, post_attention_norm, q_norm, k_norm}.weight``, ``layers.N.{qkv_proj, o_proj,
gate_up_proj, down_proj}.weight`` (q, k, v and gate, up are fused along their outputs),
``layers.N.qkv_proj.bias``, ``norm.weight``, ``lm_head.weight`` where it is not tied, and
``value_head.weight`` or ``score.weight``.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import backend_of
from isobit.kernels.operands import LinearWeight
from isobit.kernels.rope import RopeTable
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.decoder import build_decoder
from isobit.models.fp8_checkpoint import MasterValues, ScaleConversion, is_taken, master_of
from isobit.models.layers.head import PUBLISHED
from isobit.models.pieces import is_equal_in_pieces
from isobit.models.published_change import PublishedChange
from isobit.models.weights import Weights
from isobit.precision.flow import PrecisionFlow, Site, build_flow
from isobit.precision.formats import DTYPES, Side
from isobit.precision.quant_tensor import QuantTensor


class Policy:
    """A decoder's configuration, flow, masters and published weights, on one device.

    A policy that is not ``trainable`` keeps no masters: it holds what a rollout reads and nothing
    else.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig | PrecisionFlow,
        masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]],
        device: torch.device | str = "cpu",
        trainable: bool = True,
    ) -> None:
        """``masters`` in the order of the forward pass.  Those of a mapping are copied; pairs are
        taken one by one, so they need not fit the memory together, and are handed over: what is in
        FP32 on the device becomes the master itself, and a matrix that a folder has in FP8 is read
        as it is where the flow has the form of its scales (``isobit.models.fp8_checkpoint``).
        """
        self.config = config
        self.decoder = build_decoder(config)
        self.device = torch.device(device)
        self.backend = backend_of(self.device)
        self.flow = (
            precision
            if isinstance(precision, PrecisionFlow)
            else build_flow(precision, self.decoder.shape)
        )
        self.masters: dict[str, torch.nn.Parameter] = {}
        self.change = PublishedChange()
        """What the last publication changed."""
        self.conversion = ScaleConversion()
        """Of a folder's FP8 whose scales the flow does not have."""
        self._reads_folder = False
        """Whether matrices are a folder's FP8 as it is."""
        frequencies = inverse_frequencies(config)
        rope = RopeTable.build(frequencies, config.max_positions, config.attention_scaling)
        rope = rope.to(self.device)
        self._sides: dict[Side, Weights] = {
            "rollout": Weights(self.backend, rope),
            "training": Weights(self.backend, rope),
        }
        self._described = self.decoder.masters()
        pairs = masters.items() if isinstance(masters, Mapping) else masters
        names: list[str] = []
        for name, values in pairs:
            names.append(name)
            if isinstance(values, QuantTensor):
                self._take_quantised(name, values, trainable)
                continue
            copied = values.to(self.device, torch.float32, copy=isinstance(masters, Mapping))
            master = torch.nn.Parameter(copied)
            self._publish(name, master)
            if trainable:
                self.masters[name] = master
        if len(self.conversion):
            print(f"isobit: {self.conversion}", file=sys.stderr)
        assert names == list(self._described), "masters do not fit the configuration"
        self.version = 1

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The masters, in the order of the forward pass."""
        return iter(self.masters.values())

    def weights(self, side: Side) -> Weights:
        """What a side reads."""
        return self._sides[side]

    def gradient(self, name: str) -> torch.Tensor:
        """A master's FP32 gradient, to be added to; zeros where it has none yet."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def publish(self) -> None:
        """Quantise each weight once, in place, from the BF16 rounding of its master; ``version``
        counts the publications.
        """
        self.change = PublishedChange()
        self._reads_folder = False
        for name, master in self.masters.items():
            self._publish(name, master)
        self.version += 1

    @torch.no_grad()
    def restore(self, masters: Mapping[str, torch.Tensor], version: int) -> None:
        """Take the values of other masters of the same names and shapes, publish them, and count on
        from ``version``.

        Until its first publication a policy that was made from a folder's FP8 reads those bytes,
        and publishing the numbers that they stand for could give others: then nothing is published
        where the masters are these numbers.
        """
        is_as_read = self._reads_folder and all(
            is_equal_in_pieces(master, masters[name]) for name, master in self.masters.items()
        )
        if not is_as_read:
            for name, master in self.masters.items():
                master.copy_(masters[name])
            self.publish()
        self.version = version

    @torch.no_grad()
    def _publish(self, name: str, master: torch.Tensor) -> None:
        path, kind = name.rpartition(".")[0], self._described[name].kind
        if kind == "matrix":
            self._publish_matrix(path, master)
        elif kind == "bias":
            self._publish_bias(path, master)
        else:
            self._publish_plain(name, master)

    @torch.no_grad()
    def _take_quantised(self, name: str, given: QuantTensor, trainable: bool) -> None:
        """A folder's FP8: as it is on each side whose flow has its form, and published from the
        numbers that it stands for on any other.
        """
        path = name.rpartition(".")[0]
        sites: dict[Side, Site] = {side: self.flow.graph(side).site(path) for side in self._sides}
        taken = {site: is_taken(site, given) for site in sites.values()}
        master = None
        if trainable or not all(taken.values()):
            master = torch.nn.Parameter(master_of(given))
        made = {site: LinearWeight(site, given) for site in sites.values() if taken[site]}
        self._reads_folder |= bool(made)
        for side, site in sites.items():
            if site not in made:
                assert master is not None
                matrix = self.backend.publish(site, master)
                made[site] = LinearWeight(site, matrix)
                if isinstance(matrix, QuantTensor):
                    self.conversion.add(path, given, matrix)
            self._sides[side].linears[path] = made[site]
        if trainable and master is not None:
            self.masters[name] = master

    def _publish_matrix(self, path: str, master: torch.Tensor) -> None:
        made: dict[Site, LinearWeight] = {}
        for side in ("rollout", "training"):
            site = self.flow.graph(side).site(path)
            linears = self._sides[side].linears
            if site not in made:
                if path in linears:
                    self.change.add(self.backend.republish(linears[path], master), master.numel())
                    made[site] = linears[path]
                else:
                    made[site] = LinearWeight(site, self.backend.publish(site, master))
            linears[path] = made[site]

    def _publish_bias(self, path: str, master: torch.Tensor) -> None:
        bias: torch.Tensor | None = None
        made: dict[int, LinearWeight] = {}
        for side in ("rollout", "training"):
            linears = self._sides[side].linears
            held = linears[path]
            if held.bias is not None:
                held.bias.copy_(master)
                continue
            if bias is None:  # both sides read one
                bias = master.detach().to(DTYPES[self.flow.training.activations], copy=True)
            linears[path] = made.setdefault(id(held.matrix), replace(held, bias=bias))

    def _publish_plain(self, name: str, master: torch.Tensor) -> None:
        dtype = DTYPES[self.flow.training.activations]
        self._hold(name, master, dtype)
        head = self.decoder.head
        if head is not None and name == head.master:
            table = self._sides["training"].plain[name]
            published = self.backend.publish_head(table)
            if published is table:
                for weights in self._sides.values():
                    weights.plain[PUBLISHED] = table
            else:
                self._hold(PUBLISHED, published, dtype)

    def _hold(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Both sides read one tensor, which later publications overwrite."""
        held = self._sides["rollout"].plain.get(name)
        if held is None:
            held = tensor.detach().to(dtype, copy=True)
        else:
            held.copy_(tensor)
        for weights in self._sides.values():
            weights.plain[name] = held


def random_policy(
    config: ModelConfig,
    precision: PrecisionConfig,
    seed: int,
    device: torch.device | str = "cpu",
    trainable: bool = True,
) -> Policy:
    """Masters drawn on the device as transformers draws them: matrices from N(0, 0.02), norms 1,
    biases 0; and what no checkpoint has, 0.
    """
    return Policy(config, precision, random_masters(config, seed, device), device, trainable)


def random_masters(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of one master after the other, as ``random_policy`` has them."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, master in build_decoder(config).masters().items():
        shape = master.shape
        if not master.parts:
            yield name, torch.zeros(shape, device=device)
        elif len(shape) == 2:
            yield name, torch.randn(shape, generator=generator, device=device).mul_(0.02)
        else:
            yield name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
