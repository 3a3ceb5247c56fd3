"""From where somebody acts, as the audit stream tells it: a client's own address, believed only from proxies that the settings name."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from gateway.proxies import Proxies
from orchestration.settings import Settings


def asked(client: tuple[str, int] | None, forwarded: str | None = None) -> Request:
    headers = [(b"x-forwarded-for", forwarded.encode())] if forwarded is not None else []
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers, "client": client})


@pytest.mark.parametrize(
    ("client", "forwarded", "told"),
    [
        ("203.0.113.9", None, "rest:203.0.113.9"),
        ("203.0.113.9", "198.51.100.1", "rest:203.0.113.9"),
        ("10.0.0.1", "198.51.100.1", "rest:198.51.100.1"),
        ("10.0.0.1", "1.1.1.1, 198.51.100.1, 10.0.0.2", "rest:198.51.100.1"),
        ("10.0.0.1", "2001:db8::1", "rest:2001:db8::1"),
        ("10.0.0.1", "nonsense", "rest:10.0.0.1"),
        ("10.0.0.1", "", "rest:10.0.0.1"),
        ("10.0.0.1", None, "rest:10.0.0.1"),
    ],
)
def test_the_address_is_the_clients_where_our_proxies_say_so(client: str, forwarded: str | None, told: str) -> None:
    proxies = Proxies(Settings(trusted_proxies=("10.0.0.0/8",)))
    assert proxies.from_where("rest", asked((client, 4711), forwarded)) == told


def test_without_an_address_the_way_alone_is_told() -> None:
    assert Proxies(Settings()).from_where("channel", asked(None)) == "channel"
