"""The policy: FP32 masters that the optimiser updates, and the published weights that both sides
read.

A publication rounds every master to BF16 once and quantises it once, in place. Engine and trainer
hold the same tensors, so new weights need no copy and no message; a site's weight exists once if
rollout and training have the same formats there. Of several processes each owns and publishes some
rows of every master (``isobit.parallel.ownership``); published weights are whole on all, but for
matrices of which ranks that share an engine hold a part each (``isobit.models.slices``).

The masters, by name: ``embed_tokens.weight``, ``layers.N.{input_norm, post_attention_norm, q_norm,
k_norm}.weight``, ``layers.N.{qkv_proj, o_proj, gate_up_proj, down_proj}.weight`` (q, k, v and gate,
up are fused along their outputs), ``layers.N.qkv_proj.bias``, ``norm.weight``, ``lm_head.weight``
if it is not tied, and ``value_head.weight`` or ``score.weight``. Norms behind blocks are
``layers.N.{attention_output_norm, mlp_output_norm}.weight``.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from isobit.config.precision import PrecisionConfig, named_precision
from isobit.kernels.backend import backend_of
from isobit.models.adapter_delivery import JoinedAdapters, check_delivered
from isobit.models.adapters import Adapted, drawn_adapters
from isobit.models.checkpoint import is_equal_in_pieces
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, master_shapes
from isobit.models.layers import Master, Weights
from isobit.models.master_values import MasterValues, ScaleConversion
from isobit.models.published import PublishedChange, PublishedWeights
from isobit.models.slices import Slices
from isobit.models.tensor_parallel import TensorParallel
from isobit.parallel.gradient_sum import (
    ONE_SLOT,
    ExchangedSum,
    GradientSum,
    Slots,
    SlotSum,
    Targets,
    fold_of,
)
from isobit.parallel.world import ALONE, World, raised_on_all
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.kv_scales import KvScales
from isobit.precision.quant_tensor import Side
from isobit.util.errors import MismatchError


class Policy:
    """A decoder's configuration, flow, masters and published weights, on one device. A policy that
    is not ``trainable`` keeps no masters, only what a rollout reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig | PrecisionFlow,
        masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]],
        device: torch.device | str = "cpu",
        trainable: bool = True,
        world: World = ALONE,
        slots: Slots = ONE_SLOT,
        sharing: World = ALONE,
    ) -> None:
        """``masters``, whole, in the order of the forward, the same on every rank of ``world``.
        Those of a mapping are copied. Pairs are taken over one by one, so they need not fit the
        memory together: FP32 values on the device become the master itself, and a folder's FP8
        matrix is used unchanged if the flow has the form of its scales
        (``isobit.models.master_values``). ``slots`` are those of an update. Of the ranks
        ``sharing`` an engine each publishes its rows of the matrices (``isobit.models.slices``).
        """
        self.config = config
        self.decoder = build_decoder(config)
        self.device = torch.device(device)
        self.backend = backend_of(self.device)
        self.world, self.slots = world, slots
        self.flow = (
            precision
            if isinstance(precision, PrecisionFlow)
            else build_flow(precision, self.decoder.shape)
        )
        self.masters: dict[str, torch.nn.Parameter] = {}
        """The rows that this rank owns, perhaps none."""
        self.change = PublishedChange(self.world)
        self.shapes = master_shapes(config)
        """Of the masters that learn."""
        self.ownership = self.decoder.ownership(world.size, slots.hosts)
        self._published = PublishedWeights(config, self.flow, self.backend)
        if sharing.size > 1:
            self._published.slice(TensorParallel.of(config, sharing))
        kept = self.shapes if trainable else {}
        for name, master in self._published.take_all(masters, kept):
            if name in kept and master is not None:
                own = master if world.size == 1 else master[self.rows(name)].clone()
                self.masters[name] = torch.nn.Parameter(own)
        self.joined = None if config.lora is None else JoinedAdapters.of(self)
        self.gradient = self._gradient_sum()
        """Sums the masters' gradients during a backward."""
        self.adapters: dict[str, Adapted] = {}
        """That it also samples with, by name (``isobit.models.adapters.add_adapter``)."""
        self.version = 1
        self._base: str | None = None

    @property
    def conversion(self) -> ScaleConversion:
        return self._published.conversion

    @property
    def slices(self) -> Slices:
        """The rows of its matrices that this rank has, of those that ranks share."""
        assert self._published.slices is not None, "the matrices are whole"
        return self._published.slices

    @property
    def kv_scales(self) -> KvScales | None:
        """Scales of Q, K and V a tensor, which belong to the published weights; None without."""
        return self._published.kv_scales

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's rows of the masters, in the order of the forward."""
        return iter(self.masters.values())

    def weights(self, side: Side) -> Weights:
        return self._published.sides[side]

    def rows(self, name: str) -> slice:
        """The rows of a master that this rank owns."""
        return self.ownership.rows(name, self.world.rank)

    def whole_master(self, name: str) -> torch.Tensor:
        """A whole FP32 master, on the policy's device. All ranks call it."""
        own = self.masters[name].detach()
        if self.world.size == 1:
            return own
        whole = own.new_empty(self.shapes[name])
        whole[self.rows(name)] = own
        self.world.all_gather_rows([whole], [self.ownership.cuts[name]], self.ownership.places)
        return whole

    def publish(self) -> None:
        """Quantise each weight once, in place, from the BF16 rounding of its master; ``version``
        counts the publications. All ranks call it. Raises MismatchError, on all, if published bytes
        differ afterwards, or with LoRA are not those of the adapters that were trained.
        """
        self.change = PublishedChange(self.world)
        self._published.reads_folder = False
        if (joined := self.joined) is not None:
            numbers = sum(self.masters[name].numel() for name in joined.places)
            self.change.add(joined.publish(), numbers)
        for names in self._published.layers():
            self._publish([name for name in names if name in self.masters])
        if self._published.slices is not None:
            self._published.slices.meet()
        if self.config.lora is not None:
            check_delivered(self)
        if (scales := self.kv_scales) is not None:
            if scales.calibration == "trainer":
                scales.take_update(self.world.all_gather(scales.learnt.tolist()))
            scales.is_due |= scales.calibration == "engine"
        self.version += 1
        if self.world.size > 1:
            self.compare(self.world)

    def _publish(self, names: Sequence[str]) -> None:
        """Publish the rows that this rank owns of some masters, and take those of others."""
        for name in names:
            rows = self.rows(name)
            if rows.start < rows.stop and (self.joined is None or name not in self.joined.places):
                master = self.masters[name]
                self._published.republish(name, master, rows.start, rows.stop, self.change)
        cuts = {name: self.ownership.cuts[name] for name in names}
        self._published.gather(self.world, cuts, self.ownership.places)

    @torch.no_grad()
    def republish(
        self, masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]]
    ) -> None:
        """Publish other whole masters in place, one by one, and keep none: for a policy that is not
        trainable and alone in its world. A mapping holds a policy's masters of this flow; pairs are
        a folder's, in the order of the forward, in FP32.
        """
        assert self._published.slices is None, "ranks that share rows publish them together"
        self.change, self._published.reads_folder = PublishedChange(self.world), False
        if isinstance(masters, Mapping):
            pairs: Iterator[tuple[str, MasterValues]] = (
                (name, masters[name]) for name in self.shapes
            )
        else:
            pairs = self._published.folded(masters, lambda channels: None)
        for name, values in pairs:
            assert isinstance(values, torch.Tensor)
            master = values.to(self.device, torch.float32)
            self._published.republish(name, master, 0, self.shapes[name][0], self.change)
        self._published.gather(self.world, dict.fromkeys(self.shapes, ()))
        self.version += 1

    @torch.no_grad()
    def restore(self, masters: Mapping[str, torch.Tensor], version: int) -> None:
        """Take other masters' values of the rows that this rank owns, publish them, and count on
        from ``version``.

        Until its first publication a policy made from a folder's FP8 reads those bytes, and
        publishing the numbers that they stand for could give others, so nothing is published if the
        masters are exactly these numbers.
        """
        is_as_read = self._published.reads_folder and all(
            is_equal_in_pieces(master, masters[name]) for name, master in self.masters.items()
        )
        if not all(self.world.all_gather(is_as_read)):
            for name, master in self.masters.items():
                master.copy_(masters[name])
            self.publish()
        self.version = version

    def checksum(self, values: bool = True) -> int:
        """The checksum of all bytes that both sides read, including scales
        (``isobit.models.safetensors``): the same on every rank, whatever it owns. Without
        ``values`` those of a value head are left out.
        """
        kept = () if values else [name for name in self.shapes if name.startswith("value_head.")]
        return self._published.checksum(kept)

    def base(self) -> dict[str, str] | None:
        """The checksum of the base's published bytes, which never change with LoRA, and the back
        end, since others publish other bytes; None without LoRA.
        """
        if self.config.lora is None:
            return None
        if self._base is None:
            self._base = f"{self._published.checksum(self.shapes):016x}"
        return {"back_end": self.backend.name, "checksum": self._base}

    def pass_on(self, world: World, owners: int) -> None:
        """Send the published weights and their version from the first ``owners`` ranks of a world,
        which share the masters, to the others, which have none. All its ranks call it. Raises
        MismatchError, on all, if published bytes differ afterwards.
        """
        owned = self.decoder.ownership(owners).cuts
        without = world.size - owners
        cuts = {name: (*at, *(at[-1:] * without)) for name, at in owned.items()}
        self._published.gather(world, cuts)
        if self.kv_scales is not None:
            self.kv_scales.restore(world.all_gather(self.kv_scales.state())[0])
        self.version, _ = self.compare(world)

    def passed_rows(self) -> list[torch.Tensor]:
        """Views of the published rows that this rank sends where it passes weights on."""
        rank = self.world.rank
        return [
            tensor[at[rank] : at[rank + 1]]
            for tensor, at in self._published.tensors(self.decoder.ownership(self.world.size).cuts)
        ]

    def complete_rows(self) -> None:
        """Take those rows of all other ranks of the policy's world, which all call it."""
        self._published.gather(self.world, self.decoder.ownership(self.world.size).cuts)

    def compare(self, world: World) -> tuple[int, int]:
        """Check that all ranks of a world have the same published bytes; -> the version of the
        first one, and the checksum. Raises MismatchError, on all, if they differ.
        """
        states = world.all_gather([self.version, self.checksum()])
        first, expected = states[0]
        for rank, (_, checksum) in enumerate(states):
            if checksum != expected:
                raise raised_on_all(
                    MismatchError(
                        f"the published weights of rank {world.numbers[rank]} are not those of "
                        f"rank {world.numbers[0]} (version {first}; checksums "
                        f"{checksum:016x} and {expected:016x}): the connection "
                        "between them, or a memory, is faulty; take that host out and go on with "
                        "--resume"
                    )
                )
        return first, expected

    def _gradient_sum(self) -> GradientSum | ExchangedSum | SlotSum:
        # The closure holds the masters, not the policy: a cycle would keep a model's memory.
        decoder, masters = self.decoder, self.masters

        def gradient(name: str) -> torch.Tensor:
            master = masters[name]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            return master.grad

        targets = Targets(
            self.shapes,
            decoder.backward_groups(),
            decoder.added_in_parts,
            self.device,
            self.backend.add_in_order,
        )
        if not self.masters:
            return GradientSum(targets, gradient)
        if self.slots.count > 1:
            return SlotSum(self.slots, targets, gradient, self.ownership, self.world)
        return fold_of(targets, gradient, self.ownership, self.world)


def random_policy(
    config: ModelConfig,
    precision: PrecisionConfig | str,
    seed: int,
    device: torch.device | str = "cpu",
    trainable: bool = True,
    world: World = ALONE,
    slots: Slots = ONE_SLOT,
    sharing: World = ALONE,
) -> Policy:
    """Matrices N(0, 0.02), as transformers draws them; norms and sinks 1, biases and values 0.
    Adapters as PEFT does.
    """
    masters = drawn_adapters(random_masters(config, seed, device), config, seed)
    named = named_precision(precision)
    return Policy(config, named, masters, device, trainable, world, slots, sharing)


def random_masters(
    config: ModelConfig, seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of one master after the other, as in ``random_policy``."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, master in build_decoder(config).masters().items():
        yield name, _drawn(name, master, generator)


def _drawn(name: str, master: Master, generator: torch.Generator) -> torch.Tensor:
    """The values with which a master begins; those of a gated delta rule as transformers does."""
    values = torch.zeros(master.shape, device=generator.device, dtype=torch.float32)
    if not master.parts:
        return values
    if len(master.shape) == 2:
        return values.normal_(generator=generator).mul_(0.02)
    if name.endswith(".convolution"):
        most = master.shape[-1] ** -0.5
        return values.uniform_(-most, most, generator=generator)
    if name.endswith(".a_log"):
        return values.uniform_(0.01, 16, generator=generator).log_()
    if name.endswith(".dt_bias"):
        return values.fill_(1.0)
    return values if name.endswith("bias") else values.fill_(1.0 - master.offset)
