"""The policy: FP32 masters that the optimiser moves, and what both sides of the flow read,
published from them.

A publication rounds every master to BF16 once and quantises it once, in place: the engine and the
trainer hold the same tensors, so new weights need no copy and no message.  Of several processes
each owns some rows of every master (``isobit.parallel.ownership``) and publishes these; published
weights are whole on all.

The masters are those of the units (``isobit.models.layers``), by name: ``embed_tokens.weight``,
``layers.N.{input_norm, post_attention_norm, q_norm, k_norm}.weight``, ``layers.N.{qkv_proj, o_proj,
gate_up_proj, down_proj}.weight`` (q, k, v and gate, up are fused along their outputs),
``layers.N.qkv_proj.bias``, ``norm.weight``, ``lm_head.weight`` where it is not tied, and
``value_head.weight`` or ``score.weight``.
"""

from collections.abc import Iterator, Mapping

import torch

from isobit.config.precision import PrecisionConfig, named_precision
from isobit.errors import MismatchError
from isobit.kernels.backend import backend_of
from isobit.models.config import ModelConfig
from isobit.models.decoder import build_decoder, master_shapes
from isobit.models.fp8_checkpoint import MasterValues, ScaleConversion
from isobit.models.pieces import is_equal_in_pieces
from isobit.models.published import Published
from isobit.models.published_change import PublishedChange
from isobit.models.weights import Weights
from isobit.parallel.agreement import agreed
from isobit.parallel.gradient_sum import (
    ExchangedSum,
    GradientSum,
    Targets,
    fold_of,
    gradients_of,
)
from isobit.parallel.slots import ONE_SLOT, Slots, SlotSum
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.formats import Side


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
        world: World = ALONE,
        slots: Slots = ONE_SLOT,
    ) -> None:
        """``masters``, whole, in the order of the forward pass.  Those of a mapping are copied;
        pairs are taken one by one, so they need not fit the memory together, and are handed over:
        what is in FP32 on the device becomes the master itself, and a matrix that a folder has in
        FP8 is read as it is where the flow has the form of its scales
        (``isobit.models.fp8_checkpoint``).  Every rank of ``world`` is given the same.  ``slots``
        are those of an update.
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
        """What the last publication changed."""
        self.shapes = master_shapes(config)
        """Of the whole masters."""
        self.ownership = self.decoder.ownership(world.size, slots.hosts)
        self._published = Published(config, self.flow, self.backend)
        self._take(masters, trainable)
        self.gradient = self._gradient_sum()
        """Where a backward adds up the gradients of the masters."""
        self.version = 1

    @property
    def conversion(self) -> ScaleConversion:
        """Of a folder's FP8 whose scales the flow does not have."""
        return self._published.conversion

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The masters, as far as this rank owns them, in the order of the forward pass."""
        return iter(self.masters.values())

    def weights(self, side: Side) -> Weights:
        """What a side reads."""
        return self._published.sides[side]

    def rows(self, name: str) -> slice:
        """Of a master, those that this rank owns."""
        return self.ownership.rows(name, self.world.rank)

    def whole_master(self, name: str) -> torch.Tensor:
        """A whole FP32 master, on the policy's device; asked for by all ranks together."""
        own = self.masters[name].detach()
        if self.world.size == 1:
            return own
        whole = own.new_empty(self.shapes[name])
        whole[self.rows(name)] = own
        self.world.gather([whole], [self.ownership.cuts[name]], self.ownership.places)
        return whole

    def publish(self) -> None:
        """Quantise each weight once, in place, from the BF16 rounding of its master; ``version``
        counts the publications.  All ranks together.

        Raises MismatchError, on all, where one has other bytes afterwards.
        """
        self.change = PublishedChange(self.world)
        self._published.reads_folder = False
        for name, master in self.masters.items():
            rows = self.rows(name)
            if rows.start < rows.stop:
                self._published.republish(name, master, rows.start, rows.stop, self.change)
        self._published.gather(self.world, self.ownership.cuts, self.ownership.places)
        self.version += 1
        if self.world.size > 1:
            self.compare(self.world)

    @torch.no_grad()
    def restore(self, masters: Mapping[str, torch.Tensor], version: int) -> None:
        """Take the values of other masters, of the rows that this rank owns, publish them, and
        count on from ``version``.

        Until its first publication a policy that was made from a folder's FP8 reads those bytes,
        and publishing the numbers that they stand for could give others: then nothing is published
        where the masters are these numbers.
        """
        is_as_read = self._published.reads_folder and all(
            is_equal_in_pieces(master, masters[name]) for name, master in self.masters.items()
        )
        if not all(self.world.messages(is_as_read)):
            for name, master in self.masters.items():
                master.copy_(masters[name])
            self.publish()
        self.version = version

    def checksum(self) -> int:
        """Of all bytes that both sides read, scales too (``isobit.models.checksum``): the same on
        every rank, whatever it owns.
        """
        return self._published.checksum()

    def pass_on(self, world: World, owners: int) -> None:
        """Bring the published weights, and their version, from the first ``owners`` ranks of a
        world, who share the masters, to the others, who have none; all its ranks together.

        Raises MismatchError, on all, where one has other bytes afterwards.
        """
        owned = self.decoder.ownership(owners).cuts
        without = world.size - owners
        cuts = {name: (*at, *(at[-1:] * without)) for name, at in owned.items()}
        self._published.gather(world, cuts)
        self.version, _ = self.compare(world)

    def compare(self, world: World) -> tuple[int, int]:
        """Find all published bytes alike on all ranks of a world; -> the version of the first one,
        and their checksum.  Raises MismatchError, on all, where one has others.
        """
        found = world.messages([self.version, self.checksum()])
        first, expected = found[0]
        for rank, (_, checksum) in enumerate(found):
            if checksum != expected:
                raise agreed(
                    MismatchError(
                        f"the published weights of rank {world.numbers[rank]} are not those of "
                        f"rank {world.numbers[0]} (version {first}; checksums "
                        f"{checksum:016x} and {expected:016x}): the connection "
                        "between them, or a memory, is faulty; take that host out and go on with "
                        "--resume"
                    )
                )
        return first, expected

    def _take(
        self, masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]], keep: bool
    ) -> None:
        """Publish whole masters, and keep the rows that this rank owns."""
        for name, master in self._published.take_all(masters, keep):
            if keep and master is not None:
                own = master if self.world.size == 1 else master[self.rows(name)].clone()
                self.masters[name] = torch.nn.Parameter(own)

    def _gradient_sum(self) -> GradientSum | ExchangedSum | SlotSum:
        decoder, gradients = self.decoder, gradients_of(self.masters)
        targets = Targets(
            self.shapes,
            decoder.backward_groups(),
            decoder.added_in_parts,
            self.device,
            self.backend.add_in_order,
        )
        if not self.masters:
            return GradientSum(targets, gradients)
        if self.slots.count > 1:
            return SlotSum(self.slots, targets, gradients, self.ownership, self.world)
        return fold_of(targets, gradients, self.ownership, self.world)


def random_policy(
    config: ModelConfig,
    precision: PrecisionConfig | str,
    seed: int,
    device: torch.device | str = "cpu",
    trainable: bool = True,
    world: World = ALONE,
    slots: Slots = ONE_SLOT,
) -> Policy:
    """Masters drawn on the device as transformers draws them: matrices from N(0, 0.02), norms 1,
    biases 0; and what no checkpoint has, 0.
    """
    masters = random_masters(config, seed, device)
    return Policy(config, named_precision(precision), masters, device, trainable, world, slots)


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
