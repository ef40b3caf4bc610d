"""Gathered tensor parallelism: each rank computes some of the *output columns* of every linear, and
the results have the bits of a single rank.

Of P ranks, each holds the embedding and norms whole, and of the rest

    qkv_proj, attention, KV cache    G / P KV heads and their query heads
    gate_up_proj                     some columns of gate and up
    o_proj, down_proj, lm_head       some columns of their outputs

Inputs of o_proj and down_proj are gathered in the linear's own format, or in BF16 before they are
quantised to INT8, since a row has one scale. Their outputs are gathered too, so that every rank has
the whole residual stream:

    a = norm(h)                 out = attend(qkv_proj(a))     this rank's heads
    x = o_proj(joined(out))     this rank's columns           x = joined(x)
    b = norm(h + x)             y = swiglu(gate_up_proj(b))   this rank's columns
    x = down_proj(joined(y))    this rank's columns           x = joined(x)

One rank computes the whole sum of an output element, so no number depends on P. For each token and
layer H D + I bytes of E4M3 with their scales and 4 C bytes of BF16 are gathered, as much as two
all-reduces in BF16 would move; with linears in INT8 or BF16 it is 2 (H D + I) and 4 C bytes.

Shares consist of whole blocks of 128 columns and may be unequal; a size with fewer blocks than
ranks is cut at multiples of 16. Heads are divided evenly.

All messages of an all_gather have the same length: narrower shares are padded to the widest. A
quantised share is one message:

    T w bytes           E4M3 values [T, w], w the columns of the widest share
    4 ceil(w/128) T     FP32 scales [ceil(w/128), T], one row per group
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from isobit.kernels.backend import Backend
from isobit.kernels.operands import LinearInput, Operand
from isobit.models.config import ModelConfig
from isobit.models.master_values import parts_of
from isobit.parallel.world import ALONE, World
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, E4M3, Int8Rows, QuantTensor, num_blocks
from isobit.util.errors import ConfigError
from isobit.util.terminal import counted

Cuts = tuple[int, ...]  # rank r has `cuts[r]` to `cuts[r + 1]`
_SMALL = 16  # a number of rows that GPU products accept, for sizes with too few blocks of 128


def joined_columns(world: World, mine: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """This rank's columns [T, c_r], contiguous -> all columns, a new contiguous [T, C]."""
    widths = _sizes(cuts)
    return _concatenated(world.all_gather_stack(_padded(mine, max(widths))), widths, 1)


def joined_groups(
    world: World, values: torch.Tensor, scales: torch.Tensor, cuts: Cuts
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's E4M3 values [T, c_r], contiguous, and FP32 scales of their 1x128 groups
    [T, ceil(c_r / 128)] of any strides -> those of all ranks: values [T, C] and scales [G, T].
    The cuts are multiples of 128, so that no group is in two shares.
    """
    tokens, widths = len(values), _sizes(cuts)
    groups, width = [num_blocks(n) for n in widths], max(widths)
    sent = _padded(values.view(torch.uint8), width)
    rows = _padded(scales, max(groups)).t().contiguous()
    stacked = world.all_gather_stack(torch.cat([sent.view(-1), rows.view(-1).view(torch.uint8)]))
    received = stacked[:, : tokens * width].view(world.size, tokens, width)
    received_rows = stacked[:, tokens * width :].view(torch.float32).view(world.size, -1, tokens)
    joined = _concatenated(received, widths, 1).view(values.dtype)
    return joined, _concatenated(received_rows, groups, 0)


def _sizes(cuts: Cuts) -> list[int]:
    return [last - first for first, last in pairwise(cuts)]


def _interleaved(shares: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of several matrices that lie behind each other in every share: those of the first matrix
    from all ranks, which have ``sizes[0]`` of them, then those of the second ..
    """
    split = [
        share.view(torch.uint8 if share.itemsize == 1 else share.dtype).split(
            [of_matrix[rank] for of_matrix in sizes]
        )
        for rank, share in enumerate(shares)
    ]
    whole = torch.cat([of_rank[place] for place in range(len(sizes)) for of_rank in split])
    return whole.view(shares[0].dtype)


def _padded(share: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - share.shape[1]
    return F.pad(share, (0, missing)) if missing else share


def _concatenated(stacked: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """[ranks, ..] -> all shares along ``dim``, each cut to its size."""
    shares = zip(stacked, sizes, strict=True)
    return torch.cat([share.narrow(dim, 0, size) for share, size in shares], dim)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The part of a decoder that this rank has, and the gathering of whole tensors."""

    world: World  # the ranks that share one decoder
    queries: Cuts = ()  # columns of attention's output, H D
    keys: Cuts = ()  # columns of K, and of V: G D
    width: Cuts = ()  # columns of gate, of up and of down_proj's input
    hidden: Cuts = ()  # columns of the outputs of o_proj and down_proj
    vocabulary: Cuts = ()  # columns of the logits
    _by_part: Mapping[str, Sequence[Cuts]] = field(init=False, repr=False, compare=False)
    """The cuts of each matrix that a checkpoint's matrix consists of."""

    def __post_init__(self) -> None:
        by_part = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys}
        by_part |= dict.fromkeys(("gate_proj", "up_proj"), self.width)
        by_part |= dict.fromkeys(("o_proj", "down_proj"), self.hidden)
        by_part = {name: (cuts,) for name, cuts in by_part.items()}
        by_part |= {"qkv_proj": (self.queries, self.keys, self.keys)}
        by_part |= {"gate_up_proj": (self.width, self.width)}
        object.__setattr__(self, "_by_part", by_part)

    @classmethod
    def of(cls, config: ModelConfig, world: World) -> "TensorParallel":
        """Raises ConfigError for a decoder that cannot be cut for the ranks of ``world``."""
        check_cut(config, world.size)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return cls(
            world,
            _even(queries, world.size),
            _even(keys, world.size),
            _in_blocks("intermediate_size", config.intermediate_size, world.size, BLOCK),
            _in_blocks("hidden_size", config.hidden_size, world.size),
            _in_blocks("vocab_size", config.num_drawn, world.size),
        )

    @property
    def size(self) -> int:
        return self.world.size

    def mine(self, cuts: Cuts) -> slice:
        return slice(cuts[self.world.rank], cuts[self.world.rank + 1])

    def share(self, config: ModelConfig) -> ModelConfig:
        """The configuration of this rank's part, for a KV cache and a memory plan."""
        if self.size == 1:
            return config
        mine = self.mine(self.width)
        own = with_heads_of_a_rank(config, self.size)
        return replace(own, intermediate_size=mine.stop - mine.start)

    def rows(self, matrix: Operand, parts: Mapping[str, int]) -> Operand:
        """This rank's rows of a published matrix or bias that fuses ``parts`` (rows by the
        checkpoint's name): new tensors with the same bytes.
        """
        if self.size == 1:
            return matrix
        mine = [self._slices(self._by_part[name]) for name in parts]

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            split = zip(tensor.split(list(parts.values())), mine, strict=True)
            return torch.cat([part[rows] for part, slices in split for rows in slices])

        if isinstance(matrix, torch.Tensor):
            return taken(matrix)
        if isinstance(matrix, Int8Rows):
            return Int8Rows(taken(matrix.values), taken(matrix.scales))
        assert isinstance(matrix, QuantTensor), "a weight is in blocks"
        split = zip(parts_of(matrix), mine, strict=True)
        return _fused([_rows_of(part, rows) for part, slices in split for rows in slices])

    def joined_rows(
        self, shares: Sequence[Sequence[torch.Tensor]], parts: Mapping[str, int]
    ) -> list[torch.Tensor]:
        """Undo ``rows``: the values, and the scales if there are any, of a matrix that fuses
        ``parts``, from those of every rank's rows; new tensors.
        """
        cuts = [cuts for name in parts for cuts in self._by_part[name]]
        sizes, kinds = [_sizes(one) for one in cuts], list(zip(*shares, strict=True))
        joined = [_interleaved(kinds[0], sizes)]
        if len(kinds) > 1:
            is_a_row = kinds[1][0].dim() == 1
            blocks = self._joined_blocks
            joined.append(_interleaved(kinds[1], sizes) if is_a_row else blocks(kinds[1], cuts))
        return joined

    def _joined_blocks(self, shares: Sequence[torch.Tensor], cuts: Sequence[Cuts]) -> torch.Tensor:
        """Rows of scales of blocks; a block that is cut is in two shares."""
        kept: list[list[torch.Tensor]] = [[] for _ in cuts]
        for rank, share in enumerate(shares):
            at = 0
            for place, of_part in enumerate(cuts):
                first, last = of_part[rank], of_part[rank + 1]
                blocks = num_blocks(last) - first // BLOCK
                kept[place].append(share[at + (first % BLOCK > 0) : at + blocks])
                at += blocks
        return torch.cat([one for of_part in kept for one in of_part])

    def _slices(self, matrices: Sequence[Cuts]) -> list[slice]:
        """This rank's rows of matrices that lie behind each other."""
        ends = accumulate((cuts[-1] for cuts in matrices), initial=0)
        own = [(self.mine(cuts), first) for cuts, first in zip(matrices, ends, strict=False)]
        return [slice(first + rows.start, first + rows.stop) for rows, first in own]

    def cuts_groups(self, site: Site, cuts: Cuts) -> bool:
        """Whether numbers that the linear ``site`` quantises together are in several shares: of a
        row in INT8, otherwise of a group of 128. Then its input is gathered before.
        """
        return self.size > 1 and (site.forward == "int8" or any(cut % BLOCK for cut in cuts))

    def input(self, backend: Backend, x: LinearInput, cuts: Cuts) -> LinearInput:
        """A linear's whole input [T, K], from this rank's columns or already whole."""
        values = x.read if isinstance(x.read, torch.Tensor) else x.read.values
        if self.size == 1 or values.shape[1] == cuts[-1]:
            return x
        if isinstance(x.read, torch.Tensor):
            return LinearInput(joined_columns(self.world, x.read, cuts))
        groups = joined_groups(self.world, values, x.read.scales, cuts)
        return LinearInput(backend.joined_rows(*groups))

    def columns(self, mine: torch.Tensor, cuts: Cuts) -> torch.Tensor:
        """This rank's columns of an output -> the whole output [T, N]."""
        return mine if self.size == 1 else joined_columns(self.world, mine, cuts)


WHOLE = TensorParallel(ALONE)


def check_ranks(rollout_tp: int, world: World) -> None:
    """Raises ConfigError if the number of processes is not ``rollout_tp``."""
    if world.size != rollout_tp:
        started = "is one process" if world.size == 1 else f"are {world.size} processes"
        raise ConfigError(
            f"cluster.rollout_tp = {rollout_tp}, but there {started}; this command's processes "
            "share one engine: give --cluster.rollout_tp as many as torchrun starts, or leave "
            "torchrun out and it starts them"
        )


def check_shared_by(processes: int, rollout_tp: int) -> None:
    """Raises ConfigError for a run whose processes do not share engines by ``rollout_tp``."""
    if processes % rollout_tp:
        started = counted(processes, "processes", "process")
        raise ConfigError(
            f"cluster.rollout_tp is {rollout_tp}, but the run has {started}, which do not share "
            f"engines by {rollout_tp}; start a multiple of {rollout_tp} (--cluster.processes N), "
            "or set cluster.rollout_tp = 1: the bytes are the same"
        )


def with_heads_of_a_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """The configuration with the heads of one of so many ranks, for the pages of a KV cache."""
    heads, kv_heads = config.num_heads // ranks, config.num_kv_heads // ranks
    return replace(config, num_heads=heads, num_kv_heads=kv_heads)


def check_cut(config: ModelConfig, ranks: int) -> None:
    """Refuse a decoder that cannot be cut for so many ranks. Raises ConfigError."""
    if ranks == 1:
        return
    if config.experts is not None:
        raise ConfigError(
            f"cluster.rollout_tp = {ranks}, but the model is a mixture of {config.experts.count} "
            "experts, which tensor parallelism does not cut: take cluster.rollout_tp = 1; in FP8 "
            "30B parameters of experts fit one GPU"
        )
    if config.delta is not None:
        raise ConfigError(
            f"cluster.rollout_tp = {ranks}, but a {config.family} model has gated delta nets, "
            "which tensor parallelism does not cut: take cluster.rollout_tp = 1"
        )
    if config.wide_qk_norm:
        raise ConfigError(
            f"cluster.rollout_tp = {ranks}, but the norms of Q and K of a {config.family} model "
            "are over all heads, which tensor parallelism shares out: take cluster.rollout_tp = 1"
        )
    heads = config.num_kv_heads
    if heads % ranks:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"cluster.rollout_tp = {ranks}, but the model's {heads} KV heads are not shared evenly "
            f"by so many ranks; take {', '.join(fitting)}"
        )
    _in_blocks("intermediate_size", config.intermediate_size, ranks, BLOCK)
    _in_blocks("hidden_size", config.hidden_size, ranks)
    _in_blocks("vocab_size", config.num_drawn, ranks)


def _even(columns: int, ranks: int) -> Cuts:
    return tuple(columns // ranks * rank for rank in range(ranks + 1))


def _in_blocks(name: str, columns: int, ranks: int, smallest: int = _SMALL) -> Cuts:
    """Cuts in whole blocks of 128, or of ``smallest`` if there are too few; longer shares first."""
    block = BLOCK if num_blocks(columns) >= ranks else smallest
    blocks = -(-columns // block)
    if blocks < ranks:
        raise ConfigError(
            f"cluster.rollout_tp = {ranks}, but the model's {name} is {columns}: {ranks} ranks "
            f"need {block} each; take fewer"
        )
    ends = accumulate(blocks // ranks + (rank < blocks % ranks) for rank in range(ranks))
    return 0, *(min(end * block, columns) for end in ends)


def _rows_of(part: QuantTensor, rows: slice) -> QuantTensor:
    """Rows of one matrix. A block that the first row is inside becomes a part of its own."""
    first_whole = min(-(-rows.start // BLOCK) * BLOCK, rows.stop)
    parts = (first_whole - rows.start, rows.stop - first_whole)
    blocks = slice(rows.start // BLOCK, num_blocks(rows.stop))
    return QuantTensor(
        part.values[rows], part.scales[blocks], "128x128", tuple(n for n in parts if n)
    )


def _fused(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Fuse matrices of the same width into new tensors."""
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(E4M3)
    scales = torch.cat([part.scales for part in parts])
    return QuantTensor(values, scales, "128x128", tuple(n for part in parts for n in part.parts))
