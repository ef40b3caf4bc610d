"""Models that only score: reference models and reward models.

A frozen model holds the weights that the training side of a policy reads, in that side's formats,
and nothing else: one byte per linear weight in FP8, and no masters. The scorer computes the
policy's own forward on it, so equal bytes give equal bits, whatever else is in the batch.
"""

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from isobit.config.precision import PrecisionConfig
from isobit.data.tokenizer import check_vocabulary, load_tokenizer
from isobit.kernels.backend import Backend
from isobit.kernels.operands import LinearWeight, Operand
from isobit.models.config import ModelConfig
from isobit.models.decoder import LM_HEAD, Decoder, build_decoder, decoder_shape
from isobit.models.folder import read_config, read_masters, read_reward_config
from isobit.models.layers import Weights
from isobit.models.master_values import MasterValues
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.precision.flow import Graph, PrecisionFlow, build_flow
from isobit.precision.quant_tensor import QuantisedWeight, Side
from isobit.records.batch import PackedBatch
from isobit.records.packing import first_fit_decreasing
from isobit.util.errors import CheckpointError, ModelError

SIDE: Side = "training"  # the side that scores


def frozen_config(config: ModelConfig) -> ModelConfig:
    """The configuration without a value head and adapters."""
    return replace(config, value_head=False, lora=None)


def places_in(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A place for each of some tensors in uint8 [their bytes together], of its format and shape."""
    widest_first = sorted(tensors, key=lambda tensor: -tensor.element_size())  # so that all align
    parts = buffer.split([tensor.nbytes for tensor in widest_first])
    by_tensor = {
        id(tensor): part.view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(widest_first, parts, strict=True)
    }
    return [by_tensor[id(tensor)] for tensor in tensors]


class FrozenPolicy:
    """The published weights of the training side, on a device.

    With ``offload``, on a device with memory of its own, they are kept in one page-locked buffer of
    main memory and copied to the device for each ``on_device`` block. The device's copy is never
    written, so it is simply dropped.
    """

    def __init__(
        self, config: ModelConfig, flow: PrecisionFlow, backend: Backend, weights: Weights
    ) -> None:
        """Takes over ``weights``; ``flow`` has their formats on both sides."""
        self.config = config
        self.flow = flow
        self.backend = backend
        self.decoder: Decoder = build_decoder(config)
        self._weights = weights
        self._held = list(_held(weights, self.decoder))
        self._places: list[torch.Tensor] | None = None  # the tensors in main memory, if offloaded
        self._visits = False  # whether offloaded weights are on the device
        self._compared: tuple[weakref.ref[Policy], int, bool] | None = None
        """With which policy and version it was compared, and whether the bytes were equal."""
        self._digest: str | None = None

    @classmethod
    def publish(
        cls,
        config: ModelConfig,
        precision: PrecisionConfig,
        masters: Mapping[str, torch.Tensor] | Iterator[tuple[str, MasterValues]],
        device: torch.device | str = "cpu",
    ) -> "FrozenPolicy":
        """Publish masters one by one, as a ``Policy`` does, keeping none of them."""
        flow = build_flow(precision, decoder_shape(config)).frozen(SIDE)
        published = Policy(config, flow, masters, device, trainable=False)
        return cls(config, flow, published.backend, published.weights(SIDE))

    @classmethod
    def load(
        cls, folder: Path, precision: PrecisionConfig, device: torch.device | str = "cpu"
    ) -> "FrozenPolicy":
        """Load a folder, with one master at a time in memory. Raises ModelError as ``load_policy``
        does.
        """
        config = read_config(folder)
        return cls.publish(config, precision, read_masters(folder, config, device), device)

    @classmethod
    def of(cls, policy: Policy) -> "FrozenPolicy":
        """A copy of what a policy's training side reads now, except for a value head. With LoRA it
        is the base, which nothing changes: its tensors are the policy's own, and not copied.
        """
        config, decoder = frozen_config(policy.config), build_decoder(frozen_config(policy.config))
        if policy.config.lora is not None:
            flow = policy.flow.frozen(SIDE).without_adapters()
            weights = _without_adapters(policy.weights(SIDE), flow.training)
            return cls(config, flow, policy.backend, weights)
        flow = policy.flow.frozen(SIDE)
        weights = _copy(policy.weights(SIDE), decoder, flow.training)
        frozen = cls(config, flow, policy.backend, weights)
        frozen._remember(policy, flow.training == policy.flow.training)
        return frozen

    def weights(self, side: Side) -> Weights:
        assert side == SIDE, "a frozen model only scores"
        return self._weights

    @property
    def num_bytes(self) -> int:
        """Including the rotary table."""
        return sum(tensor.nbytes for tensor in self._held)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint must hold, by name: ``LINEAR.weight`` as published, in FP8
        with ``LINEAR.weight.scales``, and all other masters' published tensors by their names.
        lm_head's other form and the rotary table are functions of the rest.
        """
        return dict(_named(self._weights, self.decoder))

    def digest(self) -> str:
        """The SHA-256 of ``tensors``, including names, formats and shapes; computed once."""
        if self._digest is None:
            sha256 = hashlib.sha256()
            for name, tensor in self.tensors().items():
                sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                sha256.update(_bytes(tensor.cpu()).numpy().data)
            self._digest = sha256.hexdigest()
        return self._digest

    @torch.no_grad()
    def take(self, policy: Policy) -> None:
        """Copy the published bytes of a policy of the same configuration and flow, in place and
        outside of ``on_device``. A value head is ignored, here and in ``is_equal_to``.
        """
        assert self._fits(policy), "only the weights of the same model can be taken"
        assert not self._visits, "what is on the device for a while would stay as it was"
        theirs = _held(policy.weights(SIDE), self.decoder)
        for mine, tensor in zip(self._lasting(), theirs, strict=True):
            _bytes(mine).copy_(_bytes(tensor), non_blocking=True)
        self.backend.synchronize()
        self._digest = None
        self._remember(policy, self.flow.training == policy.flow.training)

    @torch.no_grad()
    def is_equal_to(self, policy: Policy) -> bool:
        """Whether all published bytes are those of the policy's training side, so that its
        log-probabilities are the same bits and need not be computed. They are compared once per
        version of the policy. With scales of Q, K and V a tensor, which only the policy has, it is
        another function.
        """
        if self._compared is not None:
            known, version, equal = self._compared
            if known() is policy and version == policy.version:
                return equal
        equal = (
            policy.config.lora is None
            and self._fits(policy)
            and self.flow.training == policy.flow.training
            and _same_bytes(self.tensors(), _named(policy.weights(SIDE), self.decoder))
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
            stored = tensors[name]
            if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{name} is {stored.dtype} of {tuple(stored.shape)}, and the model has "
                    f"{tensor.dtype} of {tuple(tensor.shape)}: it is of another model or flow"
                )
            _bytes(mine[id(tensor)]).copy_(_bytes(stored))
        if self.decoder.head is not None:
            site, head = self._weights.graph.site(LM_HEAD), self._weights.lm_head
            table = self._weights.plain[self.decoder.head.master]
            held = head.map(lambda tensor: mine[id(tensor)])
            self.backend.publish_head(site, mine[id(table)], held)
        self._digest = self._compared = None

    @torch.no_grad()
    def offload(self) -> None:
        """Keep the weights in main memory and have them on the device only within ``on_device``. On
        a device without memory of its own, such as a CPU, this does nothing.
        """
        memory = self.backend.memory
        if memory is None or self._places is not None:
            return
        held = self._held
        buffer = memory.host_buffer(sum(tensor.nbytes for tensor in held))
        self._places = places_in(buffer, held)
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
        """Give the tensors in the weights the storage of others."""
        for tensor, value in zip(self._held, values, strict=True):
            tensor.data = value

    def _lasting(self) -> list[torch.Tensor]:
        """The tensors that keep the weights, in the order of ``_held``: main memory if offloaded,
        or the device.
        """
        return self._held if self._places is None else self._places

    def _fits(self, policy: Policy) -> bool:
        return (
            self.config == frozen_config(policy.config)
            and self.flow.training == policy.flow.frozen(SIDE).training
        )

    def _remember(self, policy: Policy, equal: bool) -> None:
        self._compared = weakref.ref(policy), policy.version, equal


def _named(weights: Weights, decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors published from the masters of ``decoder``, each once, by name. A matrix that
    ranks share is gathered when its turn comes.
    """
    for path, linear in weights.linears.items():
        if isinstance(linear.matrix, torch.Tensor):
            yield f"{path}.weight", linear.matrix
        else:
            yield f"{path}.weight", linear.matrix.values
            yield f"{path}.weight.scales", linear.matrix.scales
        if linear.bias is not None:
            yield f"{path}.bias", linear.bias
    yield from _plain(weights, decoder).items()


def _plain(weights: Weights, decoder: Decoder) -> dict[str, torch.Tensor]:
    masters = decoder.masters()
    return {name: x for name, x in weights.plain.items() if name in masters}


def _held(weights: Weights, decoder: Decoder) -> Iterator[torch.Tensor]:
    """Every tensor that the decoder reads, once, in a fixed order."""
    yield from (tensor for _, tensor in _named(weights, decoder))
    yield from weights.rope.tensors()
    others = [*_plain(weights, decoder).values(), *weights.rope.tensors()]
    for derived in () if weights.head is None else weights.head.tensors:
        if not any(derived is tensor for tensor in others):
            others.append(derived)
            yield derived


def _without_adapters(weights: Weights, graph: Graph) -> Weights:
    """The same tensors, but for adapters, for ``graph``."""
    own = {site.name for site in graph.sites}
    linears = {path: linear for path, linear in weights.linears.items() if path in own}
    return Weights(weights.backend, weights.rope, graph, linears, weights.plain, weights.head)


def _copy(weights: Weights, decoder: Decoder, graph: Graph) -> Weights:
    """A copy of all tensors that a decoder reads, for ``graph``; shared tensors stay shared."""
    linears = {
        path: LinearWeight(
            one.site, _copied(one.matrix), None if one.bias is None else one.bias.clone()
        )
        for path, one in weights.linears.items()
    }
    others = replace(weights, linears={})
    copies = {id(tensor): tensor.clone() for tensor in _held(others, decoder)}
    plain = {name: copies[id(x)] for name, x in weights.plain.items() if id(x) in copies}
    rope = weights.rope.map(lambda tensor: copies[id(tensor)])
    head = None if weights.head is None else weights.head.map(lambda tensor: copies[id(tensor)])
    return Weights(weights.backend, rope, graph, linears, plain, head)


def _copied(matrix: Operand) -> Operand:
    if isinstance(matrix, torch.Tensor):
        return matrix.clone()
    assert isinstance(matrix, QuantisedWeight), "a weight is a matrix or in 8 bits"
    return replace(matrix, values=matrix.values.clone(), scales=matrix.scales.clone())


def _same_bytes(
    mine: Mapping[str, torch.Tensor], theirs: Iterable[tuple[str, torch.Tensor]]
) -> bool:
    return all(
        torch.equal(_bytes(mine[name].to(other.device)), _bytes(other)) for name, other in theirs
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes] of the same storage."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


class RewardModel:
    """Scores token sequences with a frozen decoder and its score head.

        score = w . hidden[last]   w [C] and hidden states in BF16 (FP32 in the ``fp32`` flow), the
                                   sum in FP32

    ``last`` is the sequence's last token before trailing padding (``pad_token_id``), as in
    transformers, even if the tokenizer pads with its end token. The decoder is causal, so padding
    changes nothing and is not computed.
    """

    def __init__(self, policy: FrozenPolicy, tokenizer: PreTrainedTokenizerBase) -> None:
        """``policy`` has a score head; if it is offloaded, score within its ``on_device``."""
        assert policy.decoder.value is not None, "a reward model has a score head"
        self.policy = policy
        self.tokenizer = tokenizer
        self._scorer = Scorer(policy)

    @property
    def context(self) -> int:
        """Tokens that a sequence can hold."""
        return self.policy.config.max_positions

    def score(self, sequences: Sequence[Sequence[int]], tokens_per_batch: int) -> list[float]:
        """The score of each sequence, in batches of at most so many tokens (or of one sequence). A
        score may be NaN or infinite if the model's output is. Raises ModelError for a token that
        the model does not know.
        """
        config, largest = self.policy.config, max((max(ids) for ids in sequences), default=0)
        if largest >= config.vocab_size:
            raise ModelError(
                f"the reward model's tokenizer gives the token {largest}, but the model knows 0 to "
                f"{config.vocab_size - 1}: the tokenizer belongs to another model"
            )
        trimmed = [without_padding(ids, config.pad_token_id) for ids in sequences]
        scores = [0.0] * len(trimmed)
        for members in first_fit_decreasing([len(ids) for ids in trimmed], tokens_per_batch):
            values = self._scorer.score(last_tokens_batch([trimmed[index] for index in members]))
            assert values.values is not None, "a reward model has a score head"
            for index, score in zip(members, values.values.tolist(), strict=True):
                scores[index] = score
        return scores


def load_reward_model(
    folder: Path, precision: PrecisionConfig, device: torch.device | str = "cpu"
) -> RewardModel:
    """Read a ``...ForSequenceClassification`` folder and publish its weights in the given flow.
    Raises ModelError for a folder that cannot be used, ConfigError for precision options that do
    not fit the model.
    """
    config = read_reward_config(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    masters = read_masters(folder, config, device)
    return RewardModel(FrozenPolicy.publish(config, precision, masters, device), tokenizer)


def without_padding(token_ids: Sequence[int], pad_token_id: int | None) -> Sequence[int]:
    """The sequence up to its last token that is not padding; its first token if all are."""
    count = len(token_ids)
    while count > 1 and token_ids[count - 1] == pad_token_id:
        count -= 1
    return token_ids[:count]


def last_tokens_batch(sequences: Sequence[Sequence[int]]) -> PackedBatch:
    """A micro-batch that scores the last token of each of the S sequences: N = S, no targets."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    last, nothing = lengths.cumsum(0) - 1, torch.zeros(len(sequences), dtype=torch.float32)
    token_ids = torch.tensor([token for ids in sequences for token in ids])
    return PackedBatch(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        lengths=tuple(lengths.tolist()),
        rows=last,
        targets=token_ids[last],
        sequence=torch.arange(len(sequences)),
        temperatures=torch.ones(len(sequences), dtype=torch.float32),
        recorded_log_probs=nothing,
        old_log_probs=nothing,
        advantages=nothing,
    )
