"""The address of Redis leads to another server from one moment to the next, as after a failover: who is connected goes there too."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import redis

from orchestration.core.errors import StoreUnavailable
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.testing.servers import RedisServer


class Address:
    """A TCP address that hands each new connection on to the server that it leads to at that moment."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    @staticmethod
    def _carry(near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError), near, far, selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(65_536)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer(appendonly="off") as first, RedisServer(appendonly="off") as second:
        yield first, second


def port_of(server: RedisServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


@pytest.mark.parametrize("stale", ["yes", "no"])
def test_who_is_connected_follows_the_address_to_the_new_primary(servers: tuple[RedisServer, RedisServer], stale: str) -> None:
    old, new = servers
    address = Address(port_of(old))
    store = Store(Settings(redis_url=address.url))
    try:
        assert store.run("leader", "duty", "p", 60_000) == 1
        store.client.set("plain", "old")
        with redis.Redis.from_url(old.url) as demoted:
            demoted.config_set("replica-serve-stale-data", stale)
            demoted.replicaof("127.0.0.1", 1)
        with pytest.raises(StoreUnavailable):
            store.run("leader", "duty", "p", 60_000)
        address.target = port_of(new)
        assert store.run("leader", "duty", "q", 60_000) == 1, "another server, on which nobody leads yet"
        assert store.client.set("plain", "new")
        with redis.Redis.from_url(new.url, decode_responses=True) as client:
            assert client.get("plain") == "new" and client.get("tm:leader:duty") == "q"
    finally:
        store.close()
        address.close()


def test_a_server_of_the_suites_own_takes_more_options() -> None:
    with RedisServer(options={"maxclients": "77"}) as server, redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.config_get("maxclients")["maxclients"] == "77"
