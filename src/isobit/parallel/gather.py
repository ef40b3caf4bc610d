"""Many tensors become complete on every rank, of which each rank has written some rows.

Every rank sends its rows of every tensor to every other.  A call of the transport costs about as
much as a megabyte on its way, so small tensors travel packed together, and large ones in groups: as
few as keep the next one ready while one is on its way.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from isobit.parallel.exchanges import Slices, Work

_SMALL = 1 << 20
"""Bytes of a tensor that is packed with others."""
_GROUP = 1 << 29
"""Bytes of the tensors of a group, or one tensor that is larger."""

Cut = tuple[torch.Tensor, Sequence[slice]]
"""A tensor, and the rows of each rank."""
Exchange = Callable[[Slices, Slices], Work]
"""Bytes to and from every rank: ``World.exchange``."""


def complete(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Sequence[int]],
    places: Sequence[int],
    rank: int,
    exchange: Exchange,
) -> None:
    """What ``World.gather`` promises, by exchanges of bytes."""
    pairs = [
        (tensor, [slice(at[place], at[place + 1]) for place in places])
        for tensor, at in zip(tensors, cuts, strict=True)
    ]
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [pair for pair in pairs if pair[0].device == device and pair[0].numel()]
        small = [pair for pair in here if pair[0].nbytes < _SMALL]
        large = [pair for pair in here if pair[0].nbytes >= _SMALL]
        works: list[Work] = []
        for group in _groups(large):
            works.append(_send_group(group, rank, exchange))
            if device.type == "cpu":  # its transport is better off with one at a time
                works.pop().wait()
        if small:
            _send_packed(small, rank, exchange)
        for work in works:
            work.wait()


def _groups(pairs: Sequence[Cut]) -> Iterator[list[Cut]]:
    group, size = list[Cut](), 0
    for pair in pairs:
        if group and size + pair[0].nbytes > _GROUP:
            yield group
            group, size = [], 0
        group.append(pair)
        size += pair[0].nbytes
    if group:
        yield group


def _send_group(group: Sequence[Cut], rank: int, exchange: Exchange) -> Work:
    size = len(group[0][1])
    send, receive = ([list[torch.Tensor]() for _ in range(size)] for _ in range(2))
    for tensor, rows in group:
        for other in range(size):
            if other != rank:
                send[other].append(_rows(tensor, rows, rank))
                receive[other].append(_rows(tensor, rows, other))
    return exchange(send, receive)


def _send_packed(pairs: Sequence[Cut], rank: int, exchange: Exchange) -> None:
    """By one message to each rank."""
    size = len(pairs[0][1])
    parts = [[_rows(tensor, rows, source) for tensor, rows in pairs] for source in range(size)]
    mine = torch.cat(parts[rank])
    packed = [
        mine if source == rank else mine.new_empty(sum(part.numel() for part in parts[source]))
        for source in range(size)
    ]
    exchange([[mine]] * size, [[one] for one in packed]).wait()
    for source, one in enumerate(packed):
        if source != rank and one.numel():
            arrived = one.split([part.numel() for part in parts[source]])
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                parts[source], list(arrived)
            )


def _rows(tensor: torch.Tensor, rows: Sequence[slice], rank: int) -> torch.Tensor:
    """A rank's rows as bytes: the same memory, in a format that every transport knows."""
    assert tensor.is_contiguous(), "rows are contiguous where they are written"
    return tensor[rows[rank]].reshape(-1).view(torch.uint8)
