"""Frames for whoever watches: one subscribed Redis connection per process, and beside it the stored stream for what came before.

A watcher's subscription is confirmed before its backlog is read, and the two are merged by number, so nothing falls between them. A
published frame is only the quick way: after a break of the connection, and now and then in silence, the stream is read again from the last
number. Who may watch what, and when a watch ends, is for `actions/follow.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from orchestration.core.errors import StoreUnavailable
from orchestration.state.store import conversation_key, translated
from orchestration.state.watcher import Bounds, Buffer, Frame, Watcher, stored_frame

log = logging.getLogger(__name__)

#: A channel that nobody publishes on: it keeps the connection in subscribed mode while nobody watches.
_PULSE = "tm:hub"

#: Seconds of silence after which the connection is asked for a sign of life, and again until it counts as dead.
_PING_S = 5.0

#: Seconds that a command may take.
_ANSWER_S = 10.0

#: The largest number that a stream entry can have.
MAX_SEQ = 2**63 - 1


@dataclass(eq=False, slots=True)
class _Channel:
    name: str
    stream: str
    watchers: set[Watcher] = field(default_factory=set)
    confirmed: asyncio.Event = field(default_factory=asyncio.Event)


class FrameHub:
    """All watchers of one gateway process on one subscribed connection.

    Args:
        redis_url: where the frames are.
        queue_frames, queue_bytes: published frames (characters of them) that wait for one watcher before it is cut off.
    """

    def __init__(self, redis_url: str, *, queue_frames: int = 1000, queue_bytes: int = 4_194_304) -> None:
        self._buffer = Buffer(queue_frames, queue_bytes)
        self._url = redis_url
        self._channels: dict[str, _Channel] = {}
        self._awaited: Counter[str] = Counter()
        self._orders: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
        self._stopping = False
        self._reader: Redis | None = None
        self._listener: Redis | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen. Redis may be away; the connection is tried again until it is there."""
        options: dict[str, Any] = {
            "decode_responses": True,
            "encoding_errors": "replace",
            "protocol": 2,
            "socket_connect_timeout": 2,
            # With a time limit of its own redis-py sends through `asyncio.wait_for`, which can swallow a cancellation (Python < 3.12).
            "socket_timeout": None,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
        }
        pool = BlockingConnectionPool.from_url(self._url, max_connections=32, timeout=_ANSWER_S, **options)
        self._reader = Redis(connection_pool=pool)
        self._listener = Redis.from_url(self._url, **options)
        self._task = asyncio.create_task(self._listen(), name="frame hub")

    async def close(self) -> None:
        """End all watches and close the connections."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for client in (self._listener, self._reader):
            if client is not None:
                await client.aclose(close_connection_pool=True)

    def stop(self) -> None:
        """End all watches, also those that are still to come; their clients come back to another process."""
        self._stopping = True
        for channel in self._channels.values():
            for watcher in channel.watchers:
                watcher.end()

    @property
    def stopping(self) -> bool:
        """Whether all watches were ended for good."""
        return self._stopping

    @property
    def watching(self) -> int:
        """How many watch at the moment."""
        return sum(not watcher.over for channel in self._channels.values() for watcher in channel.watchers)

    @property
    def channels(self) -> int:
        """How many conversations are listened to at the moment."""
        return len(self._channels)

    @asynccontextmanager
    async def watch(self, tenant: str, conversation_id: str, *, after: int, exact: bool = False) -> AsyncIterator[Watcher]:
        """Watch one conversation for the block: every frame with a number above `after`.

        Args:
            after: 0 for all that are kept.
            exact: the frame numbered `after + 1` certainly existed; if it is gone, a gap frame says so.
        """
        key = conversation_key(tenant, conversation_id)
        name = f"{key}:live"
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel(name, f"{key}:frames")
            self._order(True, name)
        watcher = Watcher(self, channel.stream, channel.confirmed, min(after, MAX_SEQ), exact=exact, buffer=self._buffer)
        channel.watchers.add(watcher)
        if self._stopping:
            watcher.end()
        try:
            yield watcher
        finally:
            watcher.end()
            channel.watchers.discard(watcher)
            if not channel.watchers and self._channels.get(name) is channel:
                del self._channels[name]
                self._order(False, name)

    async def bounds(self, tenant: str, conversation_id: str) -> Bounds:
        """What is kept of a conversation's frames. Raises StoreUnavailable."""
        return await self.bounds_of(f"{conversation_key(tenant, conversation_id)}:frames")

    async def bounds_of(self, stream: str) -> Bounds:
        """The same by the stream's key."""
        async with _answering():
            client = self._client()
            given = int(await client.hget(stream.removesuffix(":frames"), "seq") or 0)
            try:
                info = await client.xinfo_stream(stream)
            except redis.ResponseError as error:
                if "no such key" not in str(error):
                    raise
                return Bounds(0, given, trimmed=False)
        first = info.get("first-entry")
        return Bounds(
            first=_number(first[0]) if first else 0,
            last=max(given, _number(info["last-generated-id"])),
            trimmed=int(info.get("entries-added", 0)) > int(info["length"]),
        )

    async def entries(self, stream: str, first: int, count: int) -> list[Frame]:
        """At most `count` stored frames from number `first` on. Raises StoreUnavailable."""
        async with _answering():
            found: Any = await self._client().xrange(stream, min=f"{first}-0", count=count)
        return [stored_frame(_number(entry), fields["t"], fields["f"]) for entry, fields in found]

    def _client(self) -> Redis:
        if self._reader is None:
            raise StoreUnavailable("the frame hub has not been started")
        return self._reader

    def _order(self, subscribe: bool, name: str) -> None:
        # A subscription may be given up and wanted again before its first confirmation came: only the last one counts.
        if subscribe:
            self._awaited[name] += 1
        self._orders.put_nowait((subscribe, name))

    async def _listen(self) -> None:
        assert self._listener is not None
        pause_s = 0.05
        told = False
        while True:
            pubsub = self._listener.pubsub()
            try:
                await pubsub.subscribe(_PULSE)
                self._begin_anew()
                pause_s, told = 0.05, False
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._place_orders(pubsub))
                    group.create_task(self._hear(pubsub))
            except* Exception as broken:
                log.log(logging.DEBUG if told else logging.WARNING, "frames: no connection to the store (%s)", _kinds(broken))
                told = True
            finally:
                self._lose_connection()
                await _discard(pubsub)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)

    def _begin_anew(self) -> None:
        self._awaited.clear()
        self._orders = asyncio.Queue()
        for name in self._channels:
            self._order(True, name)

    def _lose_connection(self) -> None:
        for channel in self._channels.values():
            channel.confirmed.clear()
            for watcher in channel.watchers:
                watcher.fall_behind()

    async def _place_orders(self, pubsub: PubSub) -> None:
        # Only this task sends, in order, and no client's departure can cancel it half way through a command.
        while True:
            subscribe, name = await self._orders.get()
            await (pubsub.subscribe(name) if subscribe else pubsub.unsubscribe(name))

    async def _hear(self, pubsub: PubSub) -> None:
        asked = False
        while True:
            message = await pubsub.get_message(timeout=_PING_S)
            if message is not None:
                asked = False
                self._dispatch(message)
            elif asked:
                raise redis.ConnectionError("no answer to a ping")
            else:
                asked = True
                await pubsub.ping()

    def _dispatch(self, message: dict[str, Any]) -> None:
        channel = self._channels.get(message["channel"] or "")
        if channel is None:
            if message["type"] == "subscribe" and message["channel"] in self._awaited:
                self._confirm(message["channel"])
            return
        if message["type"] == "subscribe":
            if self._confirm(channel.name):
                channel.confirmed.set()
        elif message["type"] == "message":
            try:
                seq, turn_id, body = message["data"].split(" ", 2)
                ready = stored_frame(int(seq), turn_id, body)
            except ValueError:
                log.warning("frames: a published text was no frame; reading the stream instead")
                for watcher in channel.watchers:
                    watcher.fall_behind()
                return
            for watcher in channel.watchers:
                watcher.push(ready)

    def _confirm(self, name: str) -> bool:
        """Count one confirmation; whether it was the last one awaited."""
        self._awaited[name] -= 1
        if self._awaited[name] <= 0:
            del self._awaited[name]
            return True
        return False


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """Faults of the store, and no answer in time, as StoreUnavailable."""
    try:
        with translated():
            async with asyncio.timeout(_ANSWER_S):
                yield
    except TimeoutError:
        raise StoreUnavailable("the store does not answer") from None


def _number(entry_id: str) -> int:
    return int(entry_id.split("-", 1)[0])


def _kinds(broken: BaseExceptionGroup[BaseException]) -> str:
    return ", ".join(_kinds(one) if isinstance(one, BaseExceptionGroup) else type(one).__name__ for one in broken.exceptions)


async def _discard(pubsub: PubSub) -> None:
    try:
        await pubsub.aclose()  # type: ignore[no-untyped-call]
    except (redis.RedisError, OSError):
        log.debug("frames: the broken connection did not close cleanly")
