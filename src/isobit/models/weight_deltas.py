"""New weights as their changes from the ones before, for servers that sample for a run.

An update is safetensors files, of 256 MiB each unless one tensor has more.  Of each tensor that
changed they hold

    NAME            all of it, in BF16 (FP32 in the flow ``fp32``), or

    NAME.counts     U8 [ceil(n / 128)], of n numbers: how many of each block of 128 changed
    NAME.places     U8 [changed]: which of their blocks these are, ascending
    NAME.values     BF16 [changed]: what they are now

A learning rate of 1e-6 moves at most four of a hundred BF16 numbers to a neighbour, here and there:
almost every page of 4 KiB has one of them, so that single numbers are sent.  One costs 3 bytes, and
1/128 byte whether it changed or not.

``digest_of`` names all tensors together, so that a server that applies an update can check what it
holds.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch.nn.functional import pad

from isobit.models.policy import Policy
from isobit.models.safetensors import DTYPES, FilePlan, bytes_of, read_header
from isobit.util.errors import ModelError, shown

BLOCK = 128
"""Numbers, of which a byte can count how many changed."""
CHUNK, COPIES = 1 << 22, 4
"""Numbers that are compared at once, whole blocks; and threads that copy from a GPU."""
MOST = 256 << 20
"""Bytes of a file, unless one tensor has more."""
_SUFFIXES = ("counts", "places", "values")
_WORD = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_FORMAT_OF = {dtype: name for name, dtype in DTYPES.items()}

Tensors = Mapping[str, torch.Tensor]


def digest_of(tensors: Tensors) -> str:
    """SHA-256 in hexadecimal over a line for each tensor, by name: ``NAME FORMAT (SHAPE) SHA256``,
    of which the last is that of its bytes.
    """

    def line(name: str) -> bytes:
        values = tensors[name]
        own = sha256(bytes_of(values)).hexdigest()
        return f"{name} {_FORMAT_OF[values.dtype]} {tuple(values.shape)} {own}\n".encode()

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing releases Python's lock
        return sha256(b"".join(threads.map(line, sorted(tensors)))).hexdigest()


def rounded_masters(
    policy: Policy, before: Tensors | None = None
) -> Iterator[tuple[str, torch.Tensor, dict[str, torch.Tensor]]]:
    """The numbers that a publication quantises, by name, on the host: masters in BF16, or in FP32
    in the flow ``fp32``, without a value head, which only trains.  With each its change from
    ``before`` (``rounded``).  All ranks of the policy's world take them together.
    """
    dtype = torch.float32 if policy.flow.preset == "fp32" else torch.bfloat16
    for name in policy.masters:
        if not name.startswith("value_head."):
            old = None if before is None else before[name]
            yield name, *rounded(policy.whole_master(name), dtype, old)


def rounded(
    master: torch.Tensor, dtype: torch.dtype, before: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A master in a format, on the host, and what it differs in from what it was ``before``:
    nothing where that is not given or all bits are the same; ``counts``, ``places`` and ``values``;
    or, where these would be longer, all under "".

    They are compared on the master's device, ``CHUNK`` numbers at a time, so that it takes few
    bytes there; on a GPU several threads copy meanwhile.
    """
    copy = torch.empty(master.shape, dtype=dtype)
    places = [copy.view(-1).split(CHUNK), master.detach().reshape(-1).split(CHUNK)]
    olds = [None] * len(places[0]) if before is None else before.view(-1).split(CHUNK)

    def work(place: torch.Tensor, values: torch.Tensor, old: torch.Tensor | None) -> Changed | None:
        on_device = values.to(dtype)
        place.copy_(on_device)
        return None if old is None else _compared(old, on_device)

    if master.is_cuda:
        with ThreadPoolExecutor(COPIES) as threads:
            changes = list(threads.map(work, *places, olds))
    else:  # whose operations have threads of their own
        changes = list(map(work, *places, olds))
    return copy, _joined([change for change in changes if change is not None], copy)


Changed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # counts, places and values of a chunk


def _compared(old: torch.Tensor, new: torch.Tensor) -> Changed:
    before, after = (one.to(new.device).view(_WORD[one.dtype]) for one in (old, new))
    differs = before != after
    at = differs.nonzero().squeeze(1)
    blocks = pad(differs.view(torch.uint8), (0, -len(differs) % BLOCK)).view(-1, BLOCK)
    counts = blocks.sum(1, dtype=torch.uint8)
    return counts.cpu(), (at % BLOCK).to(torch.uint8).cpu(), new[at].cpu()


def _joined(chunks: Sequence[Changed], new: torch.Tensor) -> dict[str, torch.Tensor]:
    """The change that leads to ``new``, of the changes of its chunks."""
    changed = sum(len(places) for _, places, _ in chunks)
    if not changed:
        return {}
    if -(-new.numel() // BLOCK) + changed * (1 + new.element_size()) >= new.nbytes:
        return {"": new}
    parts = map(torch.cat, zip(*chunks, strict=True))
    return dict(zip(_SUFFIXES, parts, strict=True))


def apply_change(held: torch.Tensor, change: Tensors, name: str) -> None:
    """Write ``counts``, ``places`` and ``values`` into a tensor.  Raises ModelError, naming it,
    where they do not fit it or one another.
    """
    if set(change) != set(_SUFFIXES):
        raise ModelError(f"{shown(name)}: of counts, places and values one is missing")
    counts, places, values = (change[suffix] for suffix in _SUFFIXES)
    flat = held.view(-1)
    formats = (counts.dtype, places.dtype, values.dtype)
    if formats != (torch.uint8, torch.uint8, held.dtype):
        raise ModelError(f"{shown(name)}: a change has the formats {formats}")
    blocks = torch.arange(-(-len(flat) // BLOCK))
    if counts.shape != blocks.shape or not int(counts.sum()) == len(places) == len(values):
        raise ModelError(
            f"{shown(name)}: a change has {len(counts)} blocks, {len(places)} places and "
            f"{len(values)} values, and the tensor {len(blocks)} blocks"
        )
    at = blocks.repeat_interleave(counts.long()) * BLOCK + places
    ascends = bool((at.diff() > 0).all()) and (not len(places) or int(places.max()) < BLOCK)
    if not ascends or (len(at) and int(at[-1]) >= len(flat)):
        raise ModelError(f"{shown(name)}: the places of a change do not ascend within its blocks")
    flat[at] = values


def files_of(tensors: Tensors) -> Iterator[list[memoryview]]:
    """Tensors as safetensors files, each in pieces that follow one another.  A change, whose parts
    have one name before the dot, stays together.
    """
    held: dict[str, torch.Tensor] = {}
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, values in tensors.items():
        groups.setdefault(_owner(name), {})[name] = values
    for group in groups.values():
        if held and sum(one.nbytes for one in (*held.values(), *group.values())) > MOST:
            yield _file(held)
            held = {}
        held |= group
    yield _file(held)


def read_file(body: bytearray) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file's bytes, copied.  Raises ModelError."""
    with memoryview(body) as data:
        stored = read_header(data, Path("the body"))
    tensors: dict[str, torch.Tensor] = {}
    for name, one in stored.items():
        if one.format not in DTYPES:
            raise ModelError(f"{shown(name)} is {one.format}, in which no weights are sent")
        # an offset of the file need not be a multiple of the numbers' size
        part, dtype = body[one.begin : one.end], DTYPES[one.format]
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(one.shape)
    return tensors


def parted_names(tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """The parts that an update holds of each tensor: all of it under "", or its change."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, values in tensors.items():
        owner = _owner(name)
        parts.setdefault(owner, {})[name[len(owner) + 1 :]] = values
    return parts


def _owner(name: str) -> str:
    owner, _, suffix = name.rpartition(".")
    return owner if suffix in _SUFFIXES else name


def _file(tensors: Tensors) -> list[memoryview]:
    plan = FilePlan.of(tensors)
    return [memoryview(plan.header), *(bytes_of(tensors[name]) for name in plan.begins)]


@dataclass(frozen=True, slots=True)
class SentWeights:
    """One version of a policy's weights, as it is sent to servers; immutable."""

    version: int
    tensors: Tensors
    """All tensors, on the host."""
    digest: str
    published: int
    """``Policy.checksum`` of the bytes published from them, without a value head."""
    base: str | None
    """The digest of the version before, to which ``change`` leads from there; None without one."""
    change: Tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of(cls, policy: Policy, before: "SentWeights | None" = None) -> "SentWeights":
        """The weights that the policy has published last.  All ranks of its world call it."""
        tensors, change = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        held = None if before is None else before.tensors
        for name, tensors[name], changed in rounded_masters(policy, held):
            for suffix, part in changed.items():
                change[f"{name}.{suffix}" if suffix else name] = part
        base = None if before is None else before.digest
        published = policy.checksum(values=False)
        return cls(policy.version, tensors, digest_of(tensors), published, base, change)

    def files(self, base: str | None) -> Iterator[Sequence[memoryview]]:
        """The files that lead here from the weights with the digest ``base``."""
        return files_of(self.change if base is not None and base == self.base else self.tensors)
