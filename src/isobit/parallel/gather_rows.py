"""``complete`` sends each rank's rows of tensors to all others (``isobit.parallel.ownership``).

A call of the transport costs about as much as sending a megabyte, so small tensors are packed
together and large ones sent in groups.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from isobit.parallel.exchanges import Slices, Work

_SMALL = 1 << 20  # bytes below which tensors are packed together
_GROUP = 1 << 29  # bytes of the tensors sent together, but for one that is larger
Cut = tuple[torch.Tensor, Sequence[slice]]  # a tensor, and the rows of each rank
Exchange = Callable[[Slices, Slices], Work]  # ``World.exchange``, of bytes


def complete(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Sequence[int]],
    places: Sequence[int],
    rank: int,
    exchange: Exchange,
) -> None:
    """``World.all_gather_rows`` by exchanges of bytes."""
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
    """A rank's rows as bytes, which every transport knows; the same memory."""
    assert tensor.is_contiguous(), "rows are contiguous where they are written"
    return tensor[rows[rank]].reshape(-1).view(torch.uint8)
