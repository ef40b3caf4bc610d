"""A model that only scores: a reference model or a reward model.

Its weights are what the training side of a policy reads, in that side's formats and nothing else: a
byte a linear weight in FP8, no masters, and no second form where the sides of the flow differ.  On
its weights the scorer computes the policy's own forward, so that equal bytes give equal bits.

    take             the policy's published bytes, in place            (a reference that moves on)
    is_equal_to      whether they are the policy's bytes: then its log-probabilities are the
                     policy's own, and need not be computed
    offload          on a device with memory of its own: they lie in one page-locked buffer of main
                     memory, and on the device only within ``on_device``.  They are never written
                     there, so the way back is to drop them

A reward model: a frozen decoder in the flow with one score a sequence.

    score = w . hidden[last]      w [C] and hidden states in BF16 (FP32 in the ``fp32`` flow), the
                                  sum in FP32

``last`` is the last token of the sequence that is no padding, as transformers has it: trailing
tokens ``pad_token_id`` do not count, also where the tokenizer pads with the token that ends a
sequence.  The decoder is causal, so what follows ``last`` changes nothing and is not computed.

The forward is the training side's over packed sequences, where each row's sums have an order of
their own: a score is the same bits whatever else is scored with it, in whatever order and packing.
"""

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from isobit.config.tables import PrecisionConfig
from isobit.data.tokenizer import check_vocabulary, load_tokenizer
from isobit.kernels.backend import Backend
from isobit.kernels.operands import LinearWeight, Operand, RopeTable
from isobit.models.config import ModelConfig
from isobit.models.decoder import PUBLISHED, Decoder, build_decoder, decoder_shape
from isobit.models.folder import read_config, read_masters, read_reward_config
from isobit.models.fp8_checkpoint import MasterValues
from isobit.models.layers import Weights
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.quant_tensor import QuantTensor, Side
from isobit.records.batch import PackedBatch, first_fit_decreasing
from isobit.util.errors import CheckpointError, ModelError

SIDE: Side = "training"
"""The side that scores."""


def without_value_head(config: ModelConfig) -> ModelConfig:
    """Of a policy's model what scores tokens; the values of states are the policy's own."""
    return replace(config, value_head=False)


class FrozenPolicy:
    """The published weights of one side, on a device; nothing trains them."""

    def __init__(
        self, config: ModelConfig, flow: PrecisionFlow, backend: Backend, weights: Weights
    ) -> None:
        """``weights`` becomes its own; ``flow`` has their formats on both sides."""
        self.config, self.flow, self.backend = config, flow, backend
        self.decoder: Decoder = build_decoder(config)
        self._weights = weights
        self._held = _held(weights, self.decoder)
        self._places: list[torch.Tensor] | None = None
        """In main memory, of an offloaded one."""
        self._visits = False
        """Whether an offloaded one is on the device."""
        self._compared: tuple[weakref.ref[Policy], int, bool] | None = None
        """With which policy, at which of its versions, and whether the bytes were equal."""
        self._digest: str | None = None

    @classmethod
    def publish(
        cls,
        config: ModelConfig,
        precision: PrecisionConfig,
        masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]],
        device: torch.device | str = "cpu",
    ) -> "FrozenPolicy":
        """Publish masters, one by one and as a ``Policy`` does; none of them is kept."""
        flow = build_flow(precision, decoder_shape(config)).one_sided(SIDE)
        made = Policy(config, flow, masters, device, trainable=False)
        return cls(config, flow, made.backend, made.weights(SIDE))

    @classmethod
    def load(
        cls, folder: Path, precision: PrecisionConfig, device: torch.device | str = "cpu"
    ) -> "FrozenPolicy":
        """From a Hugging Face folder, of which one master at a time is in memory.  Raises
        ModelError as ``load_policy`` does.
        """
        config = read_config(folder)
        return cls.publish(config, precision, read_masters(folder, config, device), device)

    @classmethod
    def of(cls, policy: Policy) -> "FrozenPolicy":
        """What a policy's training side reads now, but for a value head, as tensors of its own."""
        config = without_value_head(policy.config)
        weights = _copy(policy.weights(SIDE), build_decoder(config))
        made = cls(config, policy.flow.one_sided(SIDE), policy.backend, weights)
        made._remember(policy, True)
        return made

    def weights(self, side: Side) -> Weights:
        """What it scores with."""
        assert side == SIDE, "a frozen model only scores"
        return self._weights

    @property
    def num_bytes(self) -> int:
        """Of all that it holds, the rotary table included."""
        return sum(tensor.nbytes for tensor in self._held)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name what a checkpoint needs to hold: ``LINEAR.weight`` as it is published, in FP8
        with ``LINEAR.weight.scales``, and all other masters' publications by their names.  Another
        form of lm_head and the rotary table are functions of the rest.
        """
        return _named(self._weights, self.decoder)

    def digest(self) -> str:
        """The SHA-256 of ``tensors``, names, formats and shapes included; computed once."""
        if self._digest is None:
            sha256 = hashlib.sha256()
            for name, tensor in self.tensors().items():
                sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                sha256.update(_bytes(tensor.cpu()).numpy().data)
            self._digest = sha256.hexdigest()
        return self._digest

    @torch.no_grad()
    def take(self, policy: Policy) -> None:
        """Copy the published bytes of a policy of the same configuration and flow, in place;
        outside of ``on_device``.  A value head is not looked at, here and in ``is_equal_to``.
        """
        assert self._fits(policy), "only the weights of the same model can be taken"
        assert not self._visits, "what is on the device for a while would stay as it was"
        theirs = _held(policy.weights(SIDE), self.decoder)
        for mine, tensor in zip(self._lasting(), theirs, strict=True):
            _bytes(mine).copy_(_bytes(tensor), non_blocking=True)
        self.backend.synchronize()
        self._digest = None
        self._remember(policy, True)

    @torch.no_grad()
    def is_equal_to(self, policy: Policy) -> bool:
        """Whether its log-probabilities are those of the policy's training side bit for bit, since
        all published bytes are the same.  They are compared once a version of the policy.
        """
        if self._compared is not None:
            known, version, equal = self._compared
            if known() is policy and version == policy.version:
                return equal
        equal = self._fits(policy) and _same_bytes(
            self.tensors(), _named(policy.weights(SIDE), self.decoder)
        )
        self._remember(policy, equal)
        return equal

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take ``tensors`` of another frozen model of the same configuration and flow, one by one.
        Raises CheckpointError for a name, format or shape that is not its own.
        """
        mine = dict(zip(map(id, self._held), self._lasting(), strict=True))
        own = self.tensors()
        for name in sorted(own.keys() | tensors.keys()):
            if name not in own or name not in tensors:
                where = "the model" if name in own else "the checkpoint"
                raise CheckpointError(f"{name} is only in {where}: it is of another model")
        for name, tensor in own.items():
            found = tensors[name]
            if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{name} is {found.dtype} of {tuple(found.shape)}, and the model has "
                    f"{tensor.dtype} of {tuple(tensor.shape)}: it is of another model or flow"
                )
            _bytes(mine[id(tensor)]).copy_(_bytes(found))
        self._derive_head(mine)
        self._digest = self._compared = None

    def _derive_head(self, lasting: Mapping[int, torch.Tensor]) -> None:
        """Make lm_head's other form again, where its back end has one."""
        if self.decoder.head is None:
            return
        plain = self._weights.plain
        table, head = plain[self.decoder.head.master], plain[PUBLISHED]
        if head is not table:
            lasting[id(head)].copy_(self.backend.publish_head(lasting[id(table)]))

    @torch.no_grad()
    def offload(self) -> None:
        """From now on its weights are on the device only within ``on_device``.  Where the device
        has no memory of its own, as a CPU, nothing changes.
        """
        memory = self.backend.memory
        if memory is None or self._places is not None:
            return
        held = self._held
        buffer = memory.host_buffer(sum(tensor.nbytes for tensor in held))
        widest_first = sorted(held, key=lambda tensor: -tensor.element_size())  # so that all align
        parts = buffer.split([tensor.nbytes for tensor in widest_first])
        by_tensor = {
            id(tensor): part.view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(widest_first, parts, strict=True)
        }
        self._places = [by_tensor[id(tensor)] for tensor in held]
        for place, tensor in zip(self._places, held, strict=True):
            place.copy_(tensor, non_blocking=True)
        self.backend.synchronize()
        self._point_to(self._places)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A block in which it can score."""
        if self._places is None or self._visits:
            yield
            return
        device = self.backend.device
        self._point_to(
            [
                torch.empty_like(place, device=device).copy_(place, non_blocking=True)
                for place in self._places
            ]
        )
        self._visits = True
        try:
            yield
        finally:
            self._visits = False
            self._point_to(self._places)

    def _point_to(self, values: list[torch.Tensor]) -> None:
        """Give the tensors that the weights hold the storage of others."""
        for tensor, value in zip(self._held, values, strict=True):
            tensor.data = value

    def _lasting(self) -> list[torch.Tensor]:
        """What keeps the weights, in the order of ``_held``: main memory, or the device."""
        return self._held if self._places is None else self._places

    def _fits(self, policy: Policy) -> bool:
        return self.config == without_value_head(
            policy.config
        ) and self.flow.training == policy.flow.graph(SIDE)

    def _remember(self, policy: Policy, equal: bool) -> None:
        self._compared = weakref.ref(policy), policy.version, equal


def _named(weights: Weights, decoder: Decoder) -> dict[str, torch.Tensor]:
    """What is published from the masters of ``decoder``, once, by name."""
    named: dict[str, torch.Tensor] = {}
    for path, linear in weights.linears.items():
        if isinstance(linear.matrix, torch.Tensor):
            named[f"{path}.weight"] = linear.matrix
        else:
            named[f"{path}.weight"] = linear.matrix.values
            named[f"{path}.weight.scales"] = linear.matrix.scales
        if linear.bias is not None:
            named[f"{path}.bias"] = linear.bias
    masters = decoder.masters()
    return named | {name: x for name, x in weights.plain.items() if name in masters}


def _held(weights: Weights, decoder: Decoder) -> list[torch.Tensor]:
    """Every tensor that the decoder reads, once, in a fixed order."""
    tensors = [*_named(weights, decoder).values(), weights.rope.cos, weights.rope.sin]
    head = weights.plain.get(PUBLISHED)
    if head is not None and not any(head is tensor for tensor in tensors):
        tensors.append(head)
    return tensors


def _copy(weights: Weights, decoder: Decoder) -> Weights:
    """What a decoder reads, with tensors of its own; what is one tensor stays one."""
    copies = {id(tensor): tensor.clone() for tensor in _held(weights, decoder)}

    def copied(matrix: Operand) -> Operand:
        if isinstance(matrix, torch.Tensor):
            return copies[id(matrix)]
        assert isinstance(matrix, QuantTensor), "a weight is in blocks"
        values, scales = copies[id(matrix.values)], copies[id(matrix.scales)]
        return replace(matrix, values=values, scales=scales)

    linears = {
        path: LinearWeight(
            one.site, copied(one.matrix), None if one.bias is None else copies[id(one.bias)]
        )
        for path, one in weights.linears.items()
    }
    plain = {name: copies[id(x)] for name, x in weights.plain.items() if id(x) in copies}
    rope = RopeTable(copies[id(weights.rope.cos)], copies[id(weights.rope.sin)])
    return Weights(weights.backend, rope, weights.graph, linears, plain)


def _same_bytes(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Whether two models hold the same; the largest tensors, which change most easily, first."""
    for name in sorted(theirs, key=lambda name: -theirs[name].nbytes):
        other = theirs[name]
        if not torch.equal(_bytes(mine[name].to(other.device)), _bytes(other)):
            return False
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes] of the same storage."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


class RewardModel:
    """Scores token sequences."""

    def __init__(self, policy: FrozenPolicy, tokenizer: PreTrainedTokenizerBase) -> None:
        """``policy`` is the decoder with its score head; where it is offloaded, scores are asked
        for within its ``on_device``.
        """
        assert policy.decoder.value is not None, "a reward model has a score head"
        self.policy, self.tokenizer, self._scorer = policy, tokenizer, Scorer(policy)

    @property
    def context(self) -> int:
        """Tokens that a sequence can hold."""
        return self.policy.config.max_positions

    def score(self, sequences: Sequence[Sequence[int]], tokens_per_batch: int) -> list[float]:
        """The score of each sequence, in batches of at most so many tokens (or of one sequence).

        A score may be NaN or infinite where the model's output is.  Raises ModelError for a token
        that the model does not know.
        """
        config = self.policy.config
        self._check_vocabulary(max((max(ids) for ids in sequences), default=0))
        trimmed = [without_padding(ids, config.pad_token_id) for ids in sequences]
        scores = [0.0] * len(trimmed)
        for members in first_fit_decreasing([len(ids) for ids in trimmed], tokens_per_batch):
            batch = last_tokens_batch([trimmed[index] for index in members])
            for index, score in zip(members, self._forward(batch), strict=True):
                scores[index] = score
        return scores

    def _forward(self, batch: PackedBatch) -> list[float]:
        values = self._scorer.score(batch).values
        assert values is not None, "a reward model has a score head"
        return values.tolist()

    def _check_vocabulary(self, largest: int) -> None:
        if largest >= self.policy.config.vocab_size:
            raise ModelError(
                f"the reward model's tokenizer gives the token {largest}, but the model knows 0 to "
                f"{self.policy.config.vocab_size - 1}: the tokenizer belongs to another model"
            )


def load_reward_model(
    folder: Path, precision: PrecisionConfig, device: torch.device | str = "cpu"
) -> RewardModel:
    """Read a ``...ForSequenceClassification`` folder and publish its weights in the given flow.

    Raises ModelError for a folder that cannot be used, ConfigError for precision options that the
    model does not have.
    """
    config = read_reward_config(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    masters = read_masters(folder, config, device)
    return RewardModel(FrozenPolicy.publish(config, precision, masters, device), tokenizer)


def without_padding(token_ids: Sequence[int], pad_token_id: int | None) -> Sequence[int]:
    """The sequence up to its last token that is no padding; its first token where all are."""
    count = len(token_ids)
    while count > 1 and token_ids[count - 1] == pad_token_id:
        count -= 1
    return token_ids[:count]


def last_tokens_batch(sequences: Sequence[Sequence[int]]) -> PackedBatch:
    """A micro-batch of which the last token of each of the S sequences is read: N = S, and there is
    nothing that its row predicts.
    """
    lengths = torch.tensor([len(ids) for ids in sequences])
    last, nothing = lengths.cumsum(0) - 1, torch.zeros(len(sequences))
    token_ids = torch.tensor([token for ids in sequences for token in ids])
    return PackedBatch(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        lengths=tuple(lengths.tolist()),
        rows=last,
        targets=token_ids[last],
        sequence=torch.arange(len(sequences)),
        temperatures=torch.ones(len(sequences)),
        recorded_log_probs=nothing,
        old_log_probs=nothing,
        advantages=nothing,
    )
