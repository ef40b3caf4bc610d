"""One rank's share of a policy that several ranks sample from together
(``isobit.models.tensor_parallel``).

Masters arrive whole and one by one, are published as a ``Policy`` publishes them, and cut, so that
the bytes are rows of the whole policy's and no rank ever holds more than its share and one master.
A share only samples: it has no masters and no backward.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import backend_of
from isobit.models.adapters import Adapted
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder
from isobit.models.layers import Master, Weights
from isobit.models.master_values import MasterValues
from isobit.models.published import PublishedWeights
from isobit.models.tensor_parallel import TensorParallel
from isobit.parallel.world import World
from isobit.precision.flow import build_flow
from isobit.precision.quant_tensor import Side

SIDE: Side = "rollout"


class PolicyShare:
    """This rank's rows of the published rollout weights."""

    version = 1

    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig,
        masters: Iterator[tuple[str, MasterValues]],
        world: World,
        device: torch.device | str = "cpu",
    ) -> None:
        """``masters`` of the whole policy, on the device and in the order of the forward pass; the
        same on all ranks of ``world``. Raises ConfigError for a model that cannot be cut for them.
        """
        self.config = config
        self.decoder = build_decoder(config)
        self.device = torch.device(device)
        self.backend = backend_of(self.device)
        self.adapters: dict[str, Adapted] = {}
        """None: ``Policy.adapters`` is for a whole policy."""
        self.flow = build_flow(precision, self.decoder.shape).one_sided(SIDE)
        self.tensor_parallel = TensorParallel.of(config, world)
        published = PublishedWeights(config, self.flow, self.backend)
        self._weights = published.sides["training"] = published.sides[SIDE]
        self._weights.tensor_parallel = self.tensor_parallel
        described = self.decoder.masters()
        for name, _ in published.take_all(masters, ()):
            self._keep_share(name, described[name])
        # what connections between GPUs take is there before a cache takes what is left
        world.all_gather_stack(torch.zeros(1, device=self.device, dtype=torch.float32))

    def weights(self, side: Side) -> Weights:
        assert side == SIDE, "a share of a policy only samples"
        return self._weights

    @torch.no_grad()
    def _keep_share(self, name: str, master: Master) -> None:
        """Replace what was just published of a master by this rank's rows of it."""
        linears = self._weights.linears
        plain = self._weights.plain
        path = name.rpartition(".")[0]
        parts = {part.split(".")[-2]: rows for part, rows in master.parts.items()}
        if master.kind == "matrix":
            linears[path] = replace(
                linears[path], matrix=self.tensor_parallel.rows(linears[path].matrix, parts)
            )
        elif master.kind == "bias":
            bias = linears[path].bias
            assert bias is not None
            linears[path] = replace(linears[path], bias=self.tensor_parallel.rows(bias, parts))
        elif name == self.decoder.lm_head.master:
            mine = self.tensor_parallel.mine(self.tensor_parallel.vocabulary)
            self._weights.head = self._weights.lm_head.map(lambda tensor: tensor[mine].clone())
            if not self.decoder.lm_head.tied:
                del plain[name]
