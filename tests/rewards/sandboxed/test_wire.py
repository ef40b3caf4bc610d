"""Values on the wire: what comes back is of builtin types exactly, and nonsense is refused."""

import json
import math
import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.rewards.sandboxed.wire import DEEPEST, MOST_BYTES, Channel, WireError, decode, encode

Point = namedtuple("Point", "x y")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.complex_numbers(allow_nan=False),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(SCALARS),
        st.frozensets(SCALARS),
        st.dictionaries(SCALARS, inner),
    ),
)


def refuse(value: Any) -> list[Any]:
    raise WireError(type(value).__name__)


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, refuse))), lambda number: ("object", number))


def typed(value: Any) -> Any:
    """The value with the type of every part, sets in an order."""
    name = type(value).__name__
    if isinstance(value, dict):
        return name, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return name, [typed(item) for item in value]
    if isinstance(value, set | frozenset):
        return name, sorted(repr(typed(item)) for item in value)
    return name, repr(value)


@given(VALUES)
def test_a_value_comes_back_equal_and_of_its_types(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert typed(back) == typed(value)


def test_values_that_json_lacks() -> None:
    assert math.isnan(there_and_back(float("nan")))
    assert there_and_back([math.inf, -0.0, "\ud800"]) == [math.inf, 0.0, "\ud800"]
    assert math.copysign(1, there_and_back(-0.0)) == -1
    assert there_and_back(10**6000) == 10**6000
    assert there_and_back(bytearray(b"a")) == bytearray(b"a")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Point(1, 2), (1, 2)),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (Counter("aa"), {"a": 2}),
        (
            type("Liar", (int,), {"__eq__": lambda self, other: True, "__hash__": int.__hash__})(3),
            3,
        ),
        (
            type("Word", (str,), {"__eq__": lambda self, other: True, "__hash__": str.__hash__})(
                "a"
            ),
            "a",
        ),
        (
            type(
                "Pile",
                (list,),
                {
                    "__eq__": lambda self, other: True,
                },
            )([4]),
            [4],
        ),
    ],
)
def test_a_subclass_comes_back_as_the_builtin_type(value: Any, plain: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(plain)
    assert back == plain
    assert back != "else"


def test_other_objects_are_kept_by_the_sender() -> None:
    assert encode([object()], lambda value: ["r", 7]) == ["l", ["r", 7]]
    assert decode(["l", ["r", 7]], lambda number: ("object", number)) == [("object", 7)]


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        1.5,
        ["?"],
        ["i", "zz"],
        ["i", 5],
        ["f", "one"],
        ["d", 5],
        ["d", ["k"]],
        ["s", ["l"]],
        ["r", "1"],
        ["r", True],
        ["r"],
        ["D", "x"],
        ["F", "0x1", "0x0"],
        ["b", "0"],
        [["l"]],
    ],
)
def test_what_is_no_value_is_refused(message: Any) -> None:
    with pytest.raises(WireError):
        decode(message, lambda number: number)


def test_depth_is_bounded_both_ways() -> None:
    value: Any = 1
    message: Any = 1
    for _ in range(DEEPEST + 1):
        value, message = [value], ["l", message]
    with pytest.raises(WireError, match="levels deep"):
        encode(value, refuse)
    with pytest.raises(WireError, match="levels deep"):
        decode(message, lambda number: number)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WireError, match="levels deep"):
        encode(endless, refuse)


def channel_fed(data: bytes) -> Channel:
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return Channel(reading, -1)


def test_messages_follow_each_other() -> None:
    reading, writing = os.pipe()
    channel = Channel(reading, writing)
    for message in (["call", 1], "x" * 1000, None):
        channel.send(message)
        assert channel.receive() == message
    os.close(writing)
    with pytest.raises(EOFError):
        channel.receive()
    os.close(reading)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff" + b"x", WireError),
        (b"\x00\x00\x00\x02{]", WireError),
        (b"\x00\x00\x00\x01\xff", WireError),
        (b"\x00\x00\x10\x00" + b"[" * 4096, WireError),
        (b"\x00\x00\x00\x05[1", EOFError),
        (b"\x00", EOFError),
    ],
)
def test_bytes_that_are_no_message(data: bytes, error: type[Exception]) -> None:
    channel = channel_fed(data)
    with pytest.raises(error):
        channel.receive()
    os.close(channel.incoming)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(WireError, match="the most are"):
        Channel(-1, -1).send("x" * MOST_BYTES)
