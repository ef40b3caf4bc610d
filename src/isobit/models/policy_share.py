"""A rank's share of a policy that several ranks sample from together
(``isobit.models.cut``): what one GPU cannot hold, each holds a part of.

Masters are taken whole and one by one, published as a ``Policy`` publishes them, and cut: the bytes
are rows of the whole policy's, and no rank ever holds more than its share and one master.  It only
samples: there are no masters to train and no backward.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import backend_of
from isobit.kernels.operands import LinearWeight, Operand
from isobit.kernels.rope import RopeTable
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.cut import TensorCut
from isobit.models.decoder import build_decoder
from isobit.models.fp8_checkpoint import MasterValues, ScaleConversion, is_taken, master_of
from isobit.models.layers.head import PUBLISHED
from isobit.models.layers.unit import Master
from isobit.models.policy import Policy
from isobit.models.weights import Weights
from isobit.parallel.world import World
from isobit.precision.flow import build_flow
from isobit.precision.formats import DTYPES, Side
from isobit.precision.quant_tensor import QuantTensor

SIDE: Side = "rollout"
"""The side that samples."""


class PolicyShare:
    """The published weights of the rollout side, this rank's rows of them, on a device."""

    version = 1

    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig,
        masters: Iterator[tuple[str, MasterValues]],
        world: World,
        device: torch.device | str = "cpu",
    ) -> None:
        """``masters`` of the whole policy, in the order of the forward pass, on the device; the
        same on all ranks of ``world``.  Raises ConfigError for a model that cannot be cut for them.
        """
        self.config = config
        self.decoder = build_decoder(config)
        self.device = torch.device(device)
        self.backend = backend_of(self.device)
        self.flow = build_flow(precision, self.decoder.shape).one_sided(SIDE)
        self.cut = TensorCut.of(config, world)
        self.conversion = ScaleConversion()
        """Of a folder's FP8 whose scales the flow does not have."""
        frequencies = inverse_frequencies(config)
        rope = RopeTable.build(frequencies, config.max_positions, config.attention_scaling)
        self._weights = Weights(self.backend, rope.to(self.device), cut=self.cut)
        described = self.decoder.masters()
        names: list[str] = []
        for name, values in masters:
            names.append(name)
            self._take(name, described[name], values)
        if len(self.conversion):
            print(f"isobit: {self.conversion}", file=sys.stderr)
        assert names == list(described), "masters do not fit the configuration"

    def weights(self, side: Side) -> Weights:
        """What it samples with."""
        assert side == SIDE, "a share of a policy only samples"
        return self._weights

    @torch.no_grad()
    def _take(self, name: str, master: Master, values: MasterValues) -> None:
        path = name.rpartition(".")[0]
        parts = {part.split(".")[-2]: rows for part, rows in master.parts.items()}
        if master.kind == "matrix":
            site = self.flow.rollout.site(path)
            matrix = self.cut.rows(self._published(path, values), parts)
            self._weights.linears[path] = LinearWeight(site, matrix)
            return
        assert isinstance(values, torch.Tensor), "only a matrix of a linear is in FP8"
        values = values.to(self.device, DTYPES[self.flow.rollout.activations])
        if master.kind == "bias":
            bias = self.cut.rows(values, parts)
            assert isinstance(bias, torch.Tensor)
            linears = self._weights.linears
            linears[path] = replace(linears[path], bias=bias)
        else:
            self._hold(name, values)

    def _published(self, path: str, values: MasterValues) -> Operand:
        """The whole matrix of a linear, as a policy publishes it."""
        site = self.flow.rollout.site(path)
        if not isinstance(values, QuantTensor):
            return self.backend.publish(site, values.to(self.device, torch.float32))
        if is_taken(site, values):
            return values
        matrix = self.backend.publish(site, master_of(values))
        if isinstance(matrix, QuantTensor):
            self.conversion.add(path, values, matrix)
        return matrix

    def _hold(self, name: str, values: torch.Tensor) -> None:
        """The embedding and the norms whole, of lm_head this rank's rows."""
        head, plain = self.decoder.lm_head, self._weights.plain
        if name == head.master:
            published = self.backend.publish_head(values[self.cut.mine(self.cut.vocabulary)])
            # rows of a table that goes would keep all of it
            plain[PUBLISHED] = published if head.tied else published.clone()
        if name != head.master or head.tied:
            plain[name] = values


SampledPolicy = Policy | PolicyShare
"""What an engine draws from."""
