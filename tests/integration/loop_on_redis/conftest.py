"""The loop's own tests once more, with the journal on a real server: its scripts must do there what they do in fakeredis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from orchestration.testing.local import LocalTurnmill
from orchestration.testing.servers import RedisServer


@pytest.fixture
def turnmill(turnmill_redis: RedisServer) -> Callable[..., LocalTurnmill]:
    """Turnmill in this process on an empty real server."""

    def start(*declared: Any, **settings: Any) -> LocalTurnmill:
        with redis.Redis.from_url(turnmill_redis.url) as client:
            client.flushdb()
        return LocalTurnmill(*declared, redis_url=turnmill_redis.url, **settings)

    return start
