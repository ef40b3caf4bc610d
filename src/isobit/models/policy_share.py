"""One rank's share of a policy that several ranks sample from together
(``isobit.models.tensor_parallel``).

A share only samples: it has no masters and no backward. Its bytes are rows of the whole policy's.
For a ``PolicyShare`` masters arrive whole and one by one, are published as a ``Policy`` publishes
them, and cut, so that no rank ever holds more than its share and one master. A ``PublishedShare``
reads the slices of a policy that also trains (``isobit.models.slices``).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.backend import backend_of
from isobit.models.adapters import Adapted
from isobit.models.config import ModelConfig
from isobit.models.decoder import Head, build_decoder
from isobit.models.layers import Master, Weights
from isobit.models.master_values import MasterValues
from isobit.models.policy import Policy
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
            _keep_share(self._weights, name, described[name], self.decoder.lm_head)
        _connect(world, self.device)

    def weights(self, side: Side) -> Weights:
        assert side == SIDE, "a share of a policy only samples"
        return self._weights


class PublishedShare:
    """This rank's rows of what a policy has published, for an engine that ranks share."""

    def __init__(self, whole: Policy) -> None:
        """``whole`` has slices, and the same of it is published on all ranks."""
        self.whole = whole
        self.config, self.decoder, self.flow = whole.config, whole.decoder, whole.flow
        self.device, self.backend = whole.device, whole.backend
        self.adapters: dict[str, Adapted] = {}
        self.version = 0
        """Of the policy when lm_head was cut; 0 while it is not."""
        self._weights = replace(
            whole.weights(SIDE), tensor_parallel=whole.slices.split, linears={}, plain={}, head=None
        )
        _connect(whole.slices.split.world, self.device)

    @property
    def is_current(self) -> bool:
        """Whether all is there, as it was published last."""
        return self.version == self.whole.version

    def weights(self, side: Side) -> Weights:
        assert side == SIDE, "a share of a policy only samples"
        return self._weights

    @torch.no_grad()
    def cut(self) -> None:
        """Read the slices, and copies of the rows of biases and of lm_head."""
        own, whole, head = self._weights, self.whole.weights(SIDE), self.decoder.lm_head
        own.linears, own.plain = self.whole.slices.own(SIDE), dict(whole.plain)
        _take_head(own, whole, head)
        self.version = self.whole.version

    def drop(self) -> None:
        """Give the memory of the copies back."""
        self._weights.linears, self._weights.plain, self._weights.head = {}, {}, None
        self.version = 0


@torch.no_grad()
def _keep_share(weights: Weights, name: str, master: Master, head: Head) -> None:
    """Replace what was just published of a master by this rank's rows of it."""
    linears, split, path = weights.linears, weights.tensor_parallel, name.rpartition(".")[0]
    if master.kind == "matrix":
        matrix = split.rows(linears[path].matrix, master.modules)
        linears[path] = replace(linears[path], matrix=matrix)
    elif master.kind == "bias":
        bias = linears[path].bias
        assert bias is not None
        linears[path] = replace(linears[path], bias=split.rows(bias, master.modules))
    elif name == head.master:
        _take_head(weights, weights, head)


def _take_head(own: Weights, whole: Weights, head: Head) -> None:
    """Let ``own`` have copies of this rank's rows of the lm_head of ``whole``, perhaps itself."""
    mine = own.tensor_parallel.mine(own.tensor_parallel.vocabulary)
    own.head = whole.lm_head.map(lambda tensor: tensor[mine].clone())
    if not head.tied:
        del own.plain[head.master]


def _connect(world: World, device: torch.device) -> None:
    """What connections between GPUs take is there before a cache takes what is left."""
    world.all_gather_stack(torch.zeros(1, device=device, dtype=torch.float32))
