"""Mischief with what Celery keeps in Redis: connections cut, messages lost or delivered again, chords forgotten. Journals must bear it."""

from __future__ import annotations

import random
from typing import Any, cast

import redis

#: The lists that stand for queues.
QUEUES = ("plan", "tools", "control")

#: Messages that are kept to be delivered again, much later.
KEPT = 200


class Broker:
    """The broker of the deployment, from the side of somebody who wishes it ill. Every method says what it did."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self._redis = redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=1)
        self._chance = chance
        self._kept: list[tuple[str, bytes]] = []

    def mischief(self) -> str:
        """Do one thing; nothing, when Redis does not answer."""
        try:
            return self._chance.choice((self._cut, self._lose, self._double, self._forget_chords))()
        except redis.RedisError as error:
            return f"no mischief: {type(error).__name__}"

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _cut(self) -> str:
        cut = [self._redis.execute_command("CLIENT", "KILL", "TYPE", kind) for kind in ("normal", "pubsub")]  # type: ignore[no-untyped-call]
        return f"cut {sum(cut)} connections to redis"

    def _lose(self) -> str:
        lost = 0
        for queue in QUEUES:
            lost += len(self._waiting(queue))
            self._redis.delete(queue)
        return f"lost {lost} messages"

    def _double(self) -> str:
        waiting = [(queue, message) for queue in QUEUES for message in self._waiting(queue)]
        late = self._chance.sample(self._kept, min(len(self._kept), 20))
        for queue, message in (*waiting, *late):
            self._redis.lpush(queue, message)
        self._kept = [*self._kept, *waiting][-KEPT:]
        return f"delivered {len(waiting)} messages twice, and {len(late)} from long ago again"

    def _forget_chords(self) -> str:
        keys = list(self._redis.scan_iter("celery-taskset-meta-*", count=1000))
        if keys:
            self._redis.delete(*keys)
        return f"forgot {len(keys)} keys of chords"

    def _waiting(self, queue: str) -> list[bytes]:
        return cast(list[Any], self._redis.lrange(queue, 0, -1))
