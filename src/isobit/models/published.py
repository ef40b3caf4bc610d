"""The weights that both sides of a flow read, published from masters, and how much a publication
changes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import (
    HeadWeight,
    LinearWeight,
    RopeTable,
)
from isobit.models.config import ModelConfig, inverse_frequencies, rotary_scales
from isobit.models.decoder import LM_HEAD, build_decoder
from isobit.models.layers import Weights
from isobit.models.master_values import MasterValues, ScaleConversion, is_taken, master_of
from isobit.models.outliers import about_folded, fold_norms, norm_offset
from isobit.models.rope import LongRopeScaling
from isobit.models.safetensors import Slice, added_up, checksum
from isobit.models.slices import Slices
from isobit.models.tensor_parallel import TensorParallel
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.kv_scales import KvScales
from isobit.precision.quant_tensor import DTYPES, QuantisedWeight, QuantTensor, Side
from isobit.util.terminal import say


class PublishedChange:
    """Counts how many of the quantised weights a publication changes.

        share = changed numbers / numbers     over the matrices of all linears: E4M3 or INT8 bytes
                                              without scales, or BF16 numbers if a matrix stays BF16

    An update that moves masters by much less than their format's spacing changes few of them.
    Counts stay on the device until ``share`` is read.
    """

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._changed: list[torch.Tensor] = []
        self._numbers = 0

    def add(self, changed: torch.Tensor, numbers: int) -> None:
        """Count one matrix of so many numbers; ``changed`` is an int64 scalar on its device."""
        self._changed.append(changed)
        self._numbers += numbers

    @property
    def share(self) -> float:
        """The changed share, from 0 to 1, over the rows of all ranks, which all call it."""
        changed = int(torch.stack(self._changed).sum()) if self._changed else 0
        counts = self._world.all_gather((changed, self._numbers))
        numbers = sum(count[1] for count in counts)
        return sum(count[0] for count in counts) / numbers if numbers else 0.0


SIDES: tuple[Side, Side] = ("rollout", "training")


class PublishedWeights:
    """The weights of a decoder in a flow, on one device, published from masters."""

    def __init__(self, config: ModelConfig, flow: PrecisionFlow, backend: Backend) -> None:
        frequencies = inverse_frequencies(config)
        rope = RopeTable.build(frequencies, config.max_positions, rotary_scales(config))
        if config.no_rope_layers:
            rope = rope.with_unturned()
        elif config.other_rope_layers:
            theta = config.window_rope_theta or config.rope_theta
            own = replace(config, rope_scaling=None, rope_theta=theta)
            scales = rotary_scales(own)
            other = RopeTable.build(inverse_frequencies(own), config.max_positions, scales)
            rope = replace(rope, other=other)
        rope, decoder = rope.to(backend.device), build_decoder(config)
        self.sides: dict[Side, Weights] = {
            side: Weights(backend, rope, flow.graph(side)) for side in SIDES
        }
        self.conversion = ScaleConversion()
        """The error of a folder's FP8 with scales that the flow does not have."""
        self.reads_folder = False  # whether matrices are a folder's FP8, unchanged
        self.kv_scales = KvScales.of(flow, backend.device)
        for weights in self.sides.values():
            weights.kv_scales = self.kv_scales
        if self.kv_scales is not None:
            self.sides["rollout"].kv_maxima = self.kv_scales.sampled
        self._decoder, self._config = decoder, config
        self._flow = flow
        self._backend = backend
        self._described = decoder.masters()
        self.slices: Slices | None = None

    def slice(self, split: TensorParallel) -> None:
        """Keep, of all matrices that are published from now on, this rank's rows (``Slices``)."""
        self.slices = Slices(split, self._described, self.sides)

    def layers(self) -> list[list[str]]:
        """The names of the masters that are published together: those of a layer, where matrices
        are whole one layer at a time, or all.
        """
        if self.slices is None:
            return [list(self._described)]
        by_layer: dict[str, list[str]] = {}
        for name in self._described:
            layer = name.split(".")[1] if name.startswith("layers.") else ""
            by_layer.setdefault(layer, []).append(name)
        return list(by_layer.values())

    def take_all(
        self,
        masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]],
        keep: Collection[str],
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Publish whole masters, in the order of the forward; -> each by name, after it was
        published, as FP32 numbers on the device, or None for a folder's FP8 that is used unchanged
        and not one of those to ``keep``. Masters of a mapping are copied, pairs are taken over.
        """
        pairs = masters.items() if isinstance(masters, Mapping) else masters
        names: list[str] = []
        folded: list[int] = []
        for name, values in self.folded(pairs, folded.append):
            names.append(name)
            if isinstance(values, QuantisedWeight):
                master = self.take(name, values, name in keep)
            else:
                copy, device = isinstance(masters, Mapping), self._backend.device
                master = values.to(device, torch.float32, copy=copy)
                self.publish(name, master.detach())
            if self.slices is not None and self._described[name].kind == "matrix":
                self.slices.keep(name.rpartition(".")[0])
            yield name, master
        scaling = self._config.rope_scaling
        if isinstance(scaling, LongRopeScaling) and (
            line := scaling.about(self._config.max_positions)
        ):
            say(line)
        if len(self.conversion):
            say(f"isobit: {self.conversion}")
        if folded:
            say(about_folded(folded))
        assert names == list(self._described), "masters do not fit the configuration"
        if self.slices is not None:
            self.slices.share()

    def folded(
        self, masters: Iterable[tuple[str, MasterValues]], note: Callable[[int], None]
    ) -> Iterator[tuple[str, MasterValues]]:
        """A folder's masters, in the order of the forward, as the flow has them."""
        return fold_norms(masters, self._is_int8, note, norm_offset(self._config))

    @torch.no_grad()
    def publish(self, name: str, master: torch.Tensor) -> None:
        path, kind = name.rpartition(".")[0], self._described[name].kind
        if kind == "matrix":
            published = {
                site: LinearWeight(site, self._backend.publish(site, master))
                for site in self._sites(path).values()
            }
            for side, site in self._sites(path).items():
                self.sides[side].linears[path] = published[site]
            return
        held = self._rounded(name, master)  # for both sides
        if kind == "bias":
            with_bias: dict[int, LinearWeight] = {}
            for weights in self.sides.values():
                linear = weights.linears[path]
                made_once = with_bias.setdefault(id(linear.matrix), replace(linear, bias=held))
                weights.linears[path] = made_once
            return
        for weights in self.sides.values():
            weights.plain[name] = held
        if self._decoder.head is not None and name == self._decoder.head.master:
            self._derive_head()

    @torch.no_grad()
    def take(self, name: str, stored: QuantisedWeight, keep_master: bool) -> torch.Tensor | None:
        """Use a folder's FP8 or INT8 unchanged on each side whose flow has its form, and publish
        its numbers on the other; -> these numbers, if ``keep_master``. Raises ModelError for INT8
        whose numbers are needed.
        """
        path = name.rpartition(".")[0]
        sites = self._sites(path)
        taken = {site: is_taken(site, stored) for site in sites.values()}
        master = master_of(stored) if keep_master or not all(taken.values()) else None
        published = {site: LinearWeight(site, stored) for site in sites.values() if taken[site]}
        self.reads_folder |= bool(published)
        for side, site in sites.items():
            if site not in published:
                assert master is not None
                matrix = self._backend.publish(site, master)
                published[site] = LinearWeight(site, matrix)
                if isinstance(stored, QuantTensor) and isinstance(matrix, QuantTensor):
                    self.conversion.add(path, stored, matrix)
            self.sides[side].linears[path] = published[site]
        return master if keep_master else None

    @torch.no_grad()
    def republish(
        self, name: str, rows: torch.Tensor, first: int, last: int, change: PublishedChange
    ) -> None:
        """Overwrite what is published of rows ``first`` to ``last``, of a matrix whole blocks."""
        path, kind = name.rpartition(".")[0], self._described[name].kind
        if kind == "matrix":
            for held in self._of(path):
                part = held.rows(first, last)
                change.add(self._backend.republish(part, rows), rows.numel())
        elif kind == "bias":
            for bias in _distinct([held.bias for held in self._of(path)]):
                bias[first:last].copy_(rows)
        else:
            self.sides["rollout"].plain[name][first:last].copy_(self._rounded(name, rows))

    def _rounded(self, name: str, master: torch.Tensor) -> torch.Tensor:
        """A copy of what is no matrix, as both sides read it."""
        held = master.to(DTYPES[self._flow.training.activations], copy=True)
        offset = self._described[name].offset
        return held.float().add_(offset) if offset else held

    @torch.no_grad()
    def gather(
        self, world: World, cuts: Mapping[str, Sequence[int]], places: Sequence[int] | None = None
    ) -> None:
        """Take the rows of each master that other ranks have republished
        (``World.all_gather_rows``), and derive what depends on several ranks' rows.
        """
        if world.size > 1:
            pairs = list(self.tensors(cuts))
            world.all_gather_rows([tensor for tensor, _ in pairs], [at for _, at in pairs], places)
        if self.slices is not None:
            self.slices.store({name.rpartition(".")[0] for name in cuts})
        head = self._decoder.head
        if head is not None and head.master in cuts and not self._decoder.has_adapters:
            self._derive_head()  # with adapters it stays

    def checksum(self, without: Collection[str] = ()) -> int:
        """The checksum of all published bytes (``isobit.models.safetensors``), by their places, but
        for those of some masters.
        """
        names = [name for name in self._described if name not in without]
        tensors = enumerate(self.tensors(dict.fromkeys(names, (0,))))
        rows = ((str(place), Slice.whole(tensor)) for place, (tensor, _) in tensors)
        if self.slices is None:
            return checksum(rows)
        found = added_up(checksum([one]) for one in rows)  # one layer at a time
        self.slices.forget()
        return found

    def tensors(
        self, cuts: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
        """Each published tensor once, and where its rows are cut."""
        for name, at in cuts.items():
            path, kind = name.rpartition(".")[0], self._described[name].kind
            if kind == "matrix":
                for held in self._of(path):
                    if isinstance(held.matrix, QuantisedWeight):
                        yield held.matrix.values, at
                        yield held.matrix.scales, held.matrix.scales_above(at)
                    else:
                        assert isinstance(held.matrix, torch.Tensor)
                        yield held.matrix, at
            elif kind == "bias":
                for bias in _distinct([held.bias for held in self._of(path)]):
                    yield bias, at
            else:
                yield self.sides["rollout"].plain[name], at

    def _is_int8(self, path: str) -> bool:
        """Whether either side reads the linear ``path`` in INT8."""
        described = self._described.get(f"{path}.weight")
        if described is None or described.kind != "matrix":
            return False
        return any(site.forward == "int8" for site in self._sites(path).values())

    def _sites(self, path: str) -> dict[Side, Site]:
        return {side: self._flow.graph(side).site(path) for side in SIDES}

    def _of(self, path: str) -> list[LinearWeight]:
        """A linear's published weights: one, or two if the sides differ."""
        rollout, training = (self.sides[side].linears[path] for side in SIDES)
        return [rollout] if rollout.matrix is training.matrix else [rollout, training]

    def _derive_head(self) -> None:
        """Compute lm_head's operands from its table, in place for all who hold them."""
        if self._decoder.head is None:
            return
        table = self.sides["training"].plain[self._decoder.head.master]
        heads: dict[Site, HeadWeight] = {}
        for weights in self.sides.values():
            site = weights.graph.site(LM_HEAD)
            if site not in heads:
                heads[site] = self._backend.publish_head(site, table, weights.head)
            weights.head = heads[site]


def _distinct(biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    by_identity = {id(bias): bias for bias in biases if bias is not None}
    return list(by_identity.values())
