"""What both sides of the flow read, published from masters: in place, so that whoever holds a
tensor sees the new weights.

    publish      a whole master, or a folder's FP8 as it is: makes the tensors
    republish    some of a master's rows, into theirs
    gather       the rows that other ranks have republished

Where rollout and training have the same formats at a site, its weight exists once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import LinearWeight
from isobit.kernels.rope import RopeTable
from isobit.models.checksum import checksum_of
from isobit.models.config import ModelConfig, inverse_frequencies
from isobit.models.decoder import build_decoder
from isobit.models.fp8_checkpoint import MasterValues, ScaleConversion, is_taken, master_of
from isobit.models.layers.head import PUBLISHED
from isobit.models.published_change import PublishedChange
from isobit.models.weights import Weights
from isobit.parallel.world import World
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.formats import DTYPES, Side
from isobit.precision.quant_tensor import QuantTensor, block_sizes
from isobit.terminal import say

SIDES: tuple[Side, Side] = ("rollout", "training")


class Published:
    """The weights of a decoder in a flow, on one device."""

    def __init__(self, config: ModelConfig, flow: PrecisionFlow, backend: Backend) -> None:
        frequencies = inverse_frequencies(config)
        rope = RopeTable.build(frequencies, config.max_positions, config.attention_scaling)
        rope, decoder = rope.to(backend.device), build_decoder(config)
        self.sides: dict[Side, Weights] = {
            side: Weights(backend, rope, flow.graph(side)) for side in SIDES
        }
        self.conversion = ScaleConversion()
        """Of a folder's FP8 whose scales the flow does not have."""
        self.reads_folder = False
        """Whether matrices are a folder's FP8 as it is."""
        self._decoder, self._flow, self._backend = decoder, flow, backend
        self._described = decoder.masters()

    def take_all(
        self,
        masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]],
        keep: bool,
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Publish whole masters, in the order of the forward pass; -> each by name as FP32 numbers
        on the device, once it is published, or None of a folder's FP8 that stays as it is and is
        not to ``keep``.  Those of a mapping are copied, pairs are handed over.
        """
        pairs = masters.items() if isinstance(masters, Mapping) else masters
        names: list[str] = []
        for name, values in pairs:
            names.append(name)
            if isinstance(values, QuantTensor):
                master = self.take(name, values, keep)
            else:
                copy, device = isinstance(masters, Mapping), self._backend.device
                master = values.to(device, torch.float32, copy=copy)
                self.publish(name, master.detach())
            yield name, master
        if len(self.conversion):
            say(f"isobit: {self.conversion}")
        assert names == list(self._described), "masters do not fit the configuration"

    @torch.no_grad()
    def publish(self, name: str, master: torch.Tensor) -> None:
        """Make what is read of a whole FP32 master."""
        path, kind = name.rpartition(".")[0], self._described[name].kind
        if kind == "matrix":
            made = {
                site: LinearWeight(site, self._backend.publish(site, master))
                for site in self._sites(path).values()
            }
            for side, site in self._sites(path).items():
                self.sides[side].linears[path] = made[site]
        elif kind == "bias":
            self._publish_bias(path, master)
        else:
            self._publish_plain(name, master)

    @torch.no_grad()
    def take(self, name: str, given: QuantTensor, keep_master: bool) -> torch.Tensor | None:
        """A folder's FP8: as it is on each side whose flow has its form, and published from the
        numbers that it stands for on any other; -> these numbers, where ``keep_master``.
        """
        path = name.rpartition(".")[0]
        sites = self._sites(path)
        taken = {site: is_taken(site, given) for site in sites.values()}
        master = master_of(given) if keep_master or not all(taken.values()) else None
        made = {site: LinearWeight(site, given) for site in sites.values() if taken[site]}
        self.reads_folder |= bool(made)
        for side, site in sites.items():
            if site not in made:
                assert master is not None
                matrix = self._backend.publish(site, master)
                made[site] = LinearWeight(site, matrix)
                if isinstance(matrix, QuantTensor):
                    self.conversion.add(path, given, matrix)
            self.sides[side].linears[path] = made[site]
        return master if keep_master else None

    @torch.no_grad()
    def republish(
        self, name: str, rows: torch.Tensor, first: int, last: int, change: PublishedChange
    ) -> None:
        """Overwrite what is read of a master's rows ``first`` to ``last``; in a matrix these begin
        and end with blocks.  ``change`` counts.
        """
        path, kind = name.rpartition(".")[0], self._described[name].kind
        if kind == "matrix":
            for held in self._of(path):
                part = held.rows(first, last)
                change.add(self._backend.republish(part, rows), rows.numel())
        elif kind == "bias":
            for bias in _distinct([held.bias for held in self._of(path)]):
                bias[first:last].copy_(rows)
        else:
            self.sides["rollout"].plain[name][first:last].copy_(rows)

    @torch.no_grad()
    def gather(
        self,
        world: World,
        cuts: Mapping[str, Sequence[int]],
        places: Sequence[int] | None = None,
    ) -> None:
        """Take the rows of each master that other ranks have republished (``World.gather``), and
        derive what is a function of several ranks' rows.
        """
        pairs = list(self._tensors(cuts))
        world.gather([tensor for tensor, _ in pairs], [at for _, at in pairs], places)
        self._derive_head()

    def checksum(self) -> int:
        """Of all bytes that are read of masters (``isobit.models.checksum``), by their places."""
        tensors = self._tensors(dict.fromkeys(self._described, (0,)))
        return checksum_of({str(place): tensor for place, (tensor, _) in enumerate(tensors)})

    def _tensors(
        self, cuts: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
        """What is read of masters, each tensor once, and where its rows are cut."""
        for name, at in cuts.items():
            path, kind = name.rpartition(".")[0], self._described[name].kind
            if kind == "matrix":
                for held in self._of(path):
                    if isinstance(held.matrix, QuantTensor):
                        yield held.matrix.values, at
                        yield held.matrix.scales, _blocks_at(held.matrix, at)
                    else:
                        assert isinstance(held.matrix, torch.Tensor)
                        yield held.matrix, at
            elif kind == "bias":
                for bias in _distinct([held.bias for held in self._of(path)]):
                    yield bias, at
            else:
                yield self.sides["rollout"].plain[name], at

    def _sites(self, path: str) -> dict[Side, Site]:
        return {side: self._flow.graph(side).site(path) for side in SIDES}

    def _of(self, path: str) -> list[LinearWeight]:
        """What the sides read of a linear: one weight or two."""
        rollout, training = (self.sides[side].linears[path] for side in SIDES)
        return [rollout] if rollout.matrix is training.matrix else [rollout, training]

    def _publish_bias(self, path: str, master: torch.Tensor) -> None:
        """Both sides read one."""
        bias = master.to(DTYPES[self._flow.training.activations], copy=True)
        made: dict[int, LinearWeight] = {}
        for weights in self.sides.values():
            held = weights.linears[path]
            weights.linears[path] = made.setdefault(id(held.matrix), replace(held, bias=bias))

    def _publish_plain(self, name: str, master: torch.Tensor) -> None:
        """Both sides read one."""
        held = master.to(DTYPES[self._flow.training.activations], copy=True)
        for weights in self.sides.values():
            weights.plain[name] = held
        if self._decoder.head is not None and name == self._decoder.head.master:
            self._derive_head()

    def _derive_head(self) -> None:
        """What lm_head multiplies with, from its table."""
        if self._decoder.head is None:
            return
        plain = self.sides["training"].plain
        made = self._backend.publish_head(plain[self._decoder.head.master])
        if made is plain.get(PUBLISHED):
            return
        held = plain.get(PUBLISHED)
        if held is not None:  # whoever holds it sees the new one
            made = held.copy_(made)
        for weights in self.sides.values():
            weights.plain[PUBLISHED] = made


def _blocks_at(matrix: QuantTensor, rows: Sequence[int]) -> list[int]:
    """How many blocks stand above each of these rows, at each of which one begins or all end."""
    sizes = block_sizes(matrix.parts or (matrix.values.shape[0],))
    above = dict(zip(accumulate(sizes, initial=0), range(len(sizes) + 1), strict=True))
    return [above[row] for row in rows]


def _distinct(biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    found = {id(bias): bias for bias in biases if bias is not None}
    return list(found.values())
