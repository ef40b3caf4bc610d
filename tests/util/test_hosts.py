"""Which requests mean a server by one of its names."""

import pytest

from isobit.util.hosts import LOCAL_NAMES, HostCheck

GOOD = ("127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST.", "[::1]", "[::1]:8000")
BAD = (
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80", "",
    "[::1].evil.example", "evil.example#localhost", "localhost@evil.example", "127.0.0.2", "[", ":",
)  # fmt: skip


def wrong(check: HostCheck, *headers: tuple[str, str]) -> str | None:
    return check.wrong_header([(name.encode(), value.encode()) for name, value in headers])


@pytest.mark.parametrize("host", GOOD)
def test_names_of_this_machine_are_let_in(host: str) -> None:
    check = HostCheck(LOCAL_NAMES)
    assert wrong(check, ("host", host)) is None
    assert wrong(check, ("host", host), ("origin", f"http://{host}")) is None


@pytest.mark.parametrize("host", BAD)
def test_other_names_are_not(host: str) -> None:
    check = HostCheck(LOCAL_NAMES)
    assert wrong(check, ("host", host)) == "Host"
    assert wrong(check, ("host", "localhost"), ("origin", f"http://{host}")) == "Origin"


def test_headers_that_are_missing_or_there_twice() -> None:
    check = HostCheck(LOCAL_NAMES)
    assert wrong(check) == "Host"
    assert wrong(check, ("host", "localhost"), ("host", "localhost")) == "Host"
    for origins in (["null"], ["http://localhost", "http://evil.example"], ["localhost"]):
        given = [("origin", origin) for origin in origins]
        assert wrong(check, ("host", "localhost"), *given) == "Origin"


def test_a_port_that_is_said_is_wanted() -> None:
    check = HostCheck(("localhost",), 8000)
    assert wrong(check, ("host", "localhost:8000")) is None
    assert wrong(check, ("host", "localhost")) == wrong(check, ("host", "localhost:80")) == "Host"


def test_without_names_a_page_may_ask_the_server_that_it_came_from() -> None:
    check = HostCheck(None)
    assert wrong(check, ("host", "any.example:80")) is None
    assert wrong(check, ("host", "a.example"), ("origin", "http://a.example:3000")) is None
    assert wrong(check, ("host", "a.example"), ("origin", "http://evil.example")) == "Origin"
