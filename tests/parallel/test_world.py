"""What travels between processes arrives with its bytes."""

import errno
import math
import os
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.parallel import gather_rows, processes
from isobit.parallel.world import World, decode, encode, run_on_all
from isobit.util.errors import ConfigError, PeerError
from tests.worlds import in_world


def exchanged(world: World, send: list[list[torch.Tensor]], numbers: int) -> list[torch.Tensor]:
    """What came from each rank, so many numbers; zeros from this one."""
    series = world.exchanges(max(one.numel() for (one,) in send), torch.device("cpu"))
    comes = [[] if rank == world.rank else [numbers] for rank in range(world.size)]
    found = series.start(send, comes).wait()
    return [one[0].clone() if one else torch.zeros(numbers) for one in found]


def travel(world: World, _: Any) -> dict[str, Any]:
    """Every kind of transport once, with parts of different sizes, some empty."""
    values = world.all_gather({"rank": world.rank, "x": torch.full((world.rank,), 0.1)})
    cuts = [0, 3, 3, 5][: world.size + 1]
    table = torch.full((cuts[-1], 2), float(world.rank), dtype=torch.bfloat16)
    world.all_gather_rows([table], [cuts])
    stacked = world.all_gather_stack(torch.tensor([[world.rank, 1.5]], dtype=torch.bfloat16))
    tables, many = _tables(world.rank)
    gather_rows._GROUP = 3 << 20  # bytes: the tables of a megabyte and more are two groups
    world.all_gather_rows(tables, many)
    series = world.exchanges(world.rank + 4, torch.device("cpu"))
    sums = torch.zeros(3)
    for number in range(3):
        send = [[torch.full((3,), 100.0 * number + world.rank)] * (to % 2) for to in range(3)]
        arrival = series.start(send, [[3] * (world.rank % 2)] * 3)
        for slices in arrival.wait():
            for one in slices:
                sums = sums * 7 + one
    send = [[torch.full((to + 1,), 10.0 * world.rank + to)] for to in range(world.size)]
    receive = exchanged(world, send, world.rank + 1)
    counted = world.board.add("tickets", 1)
    world.barrier("all have counted")
    world.board.post(f"note {world.rank}", b"\x00\xff")
    world.barrier("all have posted")
    notes = [world.board.read(f"note {rank}") for rank in range(world.size)]

    def fail_on_one() -> int:
        if world.rank == world.size - 1:
            raise ValueError("full disk")
        return world.rank

    try:
        run_on_all(world, fail_on_one)
        raised = "nothing"
    except (PeerError, ValueError) as error:
        raised = f"{type(error).__name__}: {error}"
    return {
        "values": values,
        "table": table,
        "stacked": stacked,
        "tables are whole": all(
            torch.equal(one.view(torch.uint8), whole)
            for one, whole in zip(tables, _tables(None)[0], strict=True)
        ),
        "sums": sums,
        "received": receive,
        "counted": counted,
        "notes": [note is not None and note.hex() for note in notes],
        "absent": world.board.read("nobody's"),
        "raised": raised,
    }


def _tables(rank: int | None) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Tensors of several formats and sizes, with the rows of a rank or of all, and their cuts."""
    generator = torch.Generator().manual_seed(0)
    tables, cuts = [], []
    for rows, width, dtype, cut in (
        (700, 900, torch.bfloat16, [0, 128, 512, 700]),
        (3, 5, torch.float32, [0, 1, 1, 3]),
        (1100, 1024, torch.float8_e4m3fn, [0, 0, 1100, 1100]),
        (0, 5, torch.float32, [0, 0, 0, 0]),
        (64, 1, torch.bfloat16, [0, 0, 0, 64]),
        (1024, 1500, torch.uint8, [0, 384, 640, 1024]),
    ):
        whole = torch.randint(256, (rows, width * dtype.itemsize), generator=generator)
        table = whole.to(torch.uint8).view(dtype)
        if rank is not None:
            mine = table[cut[rank] : cut[rank + 1]].clone()
            table.zero_()[cut[rank] : cut[rank + 1]] = mine
        tables.append(table.view(torch.uint8) if rank is None else table)
        cuts.append(cut)
    return tables, cuts


def test_three_processes():
    found = in_world(3, "tests.parallel.test_world:travel")
    for rank, one in enumerate(found):
        assert [value["rank"] for value in one["values"]] == [0, 1, 2]
        assert torch.equal(one["values"][2]["x"], torch.full((2,), 0.1))
        expected = torch.tensor([0.0] * 3 + [2.0] * 2).bfloat16()[:, None].expand(5, 2)
        assert torch.equal(one["table"], expected)
        assert one["stacked"].tolist() == [[[0, 1.5]], [[1, 1.5]], [[2, 1.5]]]
        for source in {0, 1, 2} - {rank}:
            arrived = torch.full((rank + 1,), 10.0 * source + rank)
            assert torch.equal(one["received"][source], arrived)
        assert one["tables are whole"]
        order = [100 * number + source for number in range(3) for source in (0, 2)]
        total = torch.zeros(3)
        for value in order if rank == 1 else []:
            total = total * 7 + value
        assert torch.equal(one["sums"], total)
        assert one["notes"] == ["00ff"] * 3
        assert one["absent"] is None
    assert sorted(one["counted"] for one in found) == [1, 2, 3]
    assert [one["raised"] for one in found] == [
        "PeerError: rank 2 failed: ValueError: full disk",
        "PeerError: rank 2 failed: ValueError: full disk",
        "ValueError: full disk",
    ]


def test_messages_keep_their_bits():
    numbers = [0.1, 1e-310, math.pi, -0.0, math.inf, math.nan]
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": [torch.tensor([1, 2**62])]}
    numbers_back, tensors_back, rest = decode(encode([numbers, tensors, {"none": None, "é": 1}]))
    assert torch.equal(
        torch.tensor(numbers_back, dtype=torch.float64).view(torch.int64),
        torch.tensor(numbers, dtype=torch.float64).view(torch.int64),
    )
    assert torch.equal(tensors_back["a"], tensors["a"])
    assert torch.equal(tensors_back["b"][0], tensors["b"][0])
    assert rest == {"none": None, "é": 1}


def test_a_message_is_no_code():
    with pytest.raises(TypeError):
        encode(object())


def in_parts(world: World, _: Any) -> dict[str, Any]:
    """A world of one rank and one of two."""
    mine = world.split([0, 1, 3])
    table = torch.full((4,), float(world.rank))
    mine.all_gather_rows([table], [[0, 4] if mine.size == 1 else [0, 1, 4]])
    mine.board.add("here", 1)
    send = [[torch.full((2,), float(world.rank))] for _ in range(mine.size)]
    receive = exchanged(mine, send, 2)
    world.barrier("all have counted")
    strided = world.split_groups([[0, 2], [1]])
    inner = mine.split_groups([[rank] for rank in range(mine.size)])
    return {
        "strided": [strided.rank, strided.numbers, strided.all_gather(world.rank)],
        "inner": [mine.numbers, inner.numbers, inner.size], "place": [mine.rank, mine.size],
        "messages": mine.all_gather(world.rank), "table": table,
        "received": [float(one.sum()) for one in receive], "all": world.all_gather(world.rank),
        "here": mine.board.add("here", 0),
    }  # fmt: skip


def test_ranks_fall_into_worlds_of_their_own() -> None:
    alone, *pair = in_world(3, "tests.parallel.test_world:in_parts")
    assert alone["place"] == [0, 1]
    assert alone["messages"] == [0]
    assert torch.equal(alone["table"], torch.zeros(4))
    assert [one["place"] for one in pair] == [[0, 2], [1, 2]]
    assert [one["messages"] for one in pair] == [[1, 2]] * 2
    assert all(torch.equal(one["table"], torch.tensor([1.0, 2, 2, 2])) for one in pair)
    assert [one["received"] for one in pair] == [[0.0, 4.0], [2.0, 0.0]]
    assert [one["all"] for one in (alone, *pair)] == [[0, 1, 2]] * 3
    assert [one["here"] for one in (alone, *pair)] == [1, 2, 2]
    assert [one["strided"] for one in (alone, *pair)] == [
        [0, [0, 2], [0, 2]],
        [0, [1], [1]],
        [1, [0, 2], [0, 2]],
    ]
    assert alone["inner"] == [[0], [0], 1]
    assert [one["inner"] for one in pair] == [[[1, 2], [1], 1], [[1, 2], [2], 1]]


def fail_to_share(world: World, _: Any) -> dict[str, str]:
    """What each rank says where one of them cannot have memory that all can read."""
    said: dict[str, str] = {}

    def attempt(case: str, changes: dict[str, Any], device: str = "cpu") -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(name, value)
            try:
                found = world.shared(1000, torch.device(device))
                said[case] = f"{len(found)} of {found[0].numel()}"
            except (ConfigError, torch.OutOfMemoryError) as error:
                said[case] = f"{type(error).__name__}: {error}"

    def fail(error: Exception, failing: int, otherwise: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if world.rank == failing:
                raise error
            return otherwise(*arguments, **named)

        return call

    full = fail(OSError(errno.ENOSPC, "No space left on device"), 1, os.posix_fallocate)
    attempt("full", {"os.posix_fallocate": full})
    unread = fail(RuntimeError("unable to mmap"), 0, torch.from_file)
    attempt("unread", {"torch.from_file": unread})
    folders, folder = list[Any](), processes.TemporaryDirectory

    def noted(prefix: str, dir: Path | None) -> Any:
        folders.append(dir)
        return folder(prefix=prefix)

    module = "isobit.parallel.processes"
    for free in ([1500, 1500], [3000, 1500], [2001, 2001]):
        seen = SimpleNamespace(free=free[world.rank])
        usage = {f"{module}.disk_usage": lambda _, seen=seen: seen}
        attempt("room", {f"{module}.TemporaryDirectory": noted, **usage})
    said["folders"] = str([one is not None for one in folders])
    gpu = "torch.distributed._symmetric_memory"
    empty = fail(torch.OutOfMemoryError("no 1000 bytes"), 1, lambda *_, **__: torch.zeros(250))
    waits = fail(RuntimeError("it waits for ever"), 0, None)
    cuda = {f"{gpu}.empty": empty, f"{gpu}.rendezvous": waits}
    attempt("memory", {**cuda, "torch.cuda.synchronize": lambda _: None}, "cuda")
    return said


def test_where_one_rank_has_no_memory_for_all_to_read_all_are_told() -> None:
    first, second = in_world(2, f"{__name__}:fail_to_share")
    for case, reason in (("full", "No space left on device"), ("unread", "unable to mmap")):
        assert first[case] == second[case]
        assert first[case].startswith("ConfigError: 2 processes that share an engine need")
        assert reason in first[case] and "cluster.rollout_tp = 1" in first[case]
    assert first["room"] == second["room"] == "2 of 1000"
    assert first["folders"] == second["folders"] == "[False, False, True]", "room for both"
    assert second["memory"] == "OutOfMemoryError: no 1000 bytes"
    assert first["memory"].startswith("OutOfMemoryError: rank 1: ")


@pytest.mark.parametrize(("waits_s", "lines"), [(0.0, 1), (60.0, 0)])
def test_others_that_do_not_come_are_named_while_they_are_waited_for(
    waits_s: float,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Torch waits half an hour without a word."""
    words = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a.host", "MASTER_PORT": "29500"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "WAITED_S", waits_s)

    def find(_: str) -> Any:
        sleep(0.1)
        raise processes.dist.DistStoreError("1/2 clients joined")

    monkeypatch.setattr(processes, "rendezvous", find)
    with pytest.raises(ConfigError, match="have not found each other"), processes.joined():
        pass
    said = "isobit: waiting for all 2 processes of the run at a.host:29500, here as rank 0\n"
    assert capsys.readouterr().err == said * lines


def join_again(world: World, _: Any) -> str:
    """What a script gets whose first run has ended with an error: its world was not left."""
    with pytest.raises(ConfigError) as raised, processes.joined():
        pass
    return str(raised.value)


def test_a_second_run_behind_an_error_is_refused_with_what_to_do() -> None:
    for said in in_world(2, "tests.parallel.test_world:join_again", timeout=60):
        assert "ended with an error" in said and "start the script again on all ranks" in said
