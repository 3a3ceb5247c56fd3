"""Our app's connections to a Redis broker: kombu's own, with what kombu leaves open where Redis restarts, stalls or is left by somebody.

Named by the `amqp` option of a Celery app; a host's app may name it too (`Celery(amqp="orchestration.queue.broker:Amqp")`). On a
broker that is no Redis nothing of this applies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from celery.app.amqp import AMQP
from kombu.connection import Connection
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES, _transport_cache, redis, virtual
from kombu.utils.json import dumps

log = logging.getLogger("turnmill.queue")

#: Longest pause between two attempts to connect, in seconds. Kombu's own 30 s would leave a worker without a broker for that long
#: after Redis has come back.
MAX_PAUSE_S = 1.0

#: How long an answer to a remote-control command (`celery inspect`, Flower, a worker that starts) is kept for who asked, in
#: milliseconds. Without a time of its own each answer to somebody who has left by then stays for ever.
ANSWER_KEPT_MS = 60_000

_ANSWERS = ".reply.celery.pidbox"


class Messages(virtual.QoS):
    """The messages that a worker holds without having done them, where the transport keeps no books of its own."""

    def restore_unacked(self) -> list[Any]:
        """Give them back to the broker. What it does not take is no loss: the journal brings those steps back.

        Kombu would write them to a file in the temporary directory instead, which nobody reads or removes.
        """
        left = super().restore_unacked()  # type: ignore[no-untyped-call]
        if left:
            log.warning("%d message(s) could not be given back to the broker; the journal brings their steps back", len(left))
        return []


class _Bounded:
    """What both kinds of channel have in common."""

    ack_emulation: bool
    QoS: type[virtual.QoS]
    conn_or_acquire: Callable[[], Any]
    _q_for_pri: Callable[[str, int], str]
    _get_message_priority: Callable[..., int]
    _fanout_queues: dict[str, tuple[str, str]]
    typeof: Callable[[str], Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.ack_emulation:
            self.QoS = Messages

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        if not queue.endswith(_ANSWERS) or options.get("_publish_batch") is not None:
            super()._put(queue, message, **options)  # type: ignore[misc]
            return
        key = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
        with self.conn_or_acquire() as client, client.pipeline() as pipe:
            pipe.lpush(key, dumps(message))  # type: ignore[no-untyped-call]
            pipe.pexpire(key, ANSWER_KEPT_MS)
            pipe.execute()

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        if self.typeof(exchange).type != "fanout":
            super()._queue_bind(exchange, routing_key, pattern, queue)  # type: ignore[misc]
        else:
            # what is published to all is heard, not looked up: a table of who may hear it would keep each killed worker for ever
            self._fanout_queues[queue] = (exchange, routing_key.replace("#", "*"))

    def _refresh_bindings(self, queues: list[str]) -> None:
        super()._refresh_bindings([queue for queue in queues if queue not in self._fanout_queues])  # type: ignore[misc]


class Channel(_Bounded, redis.Channel):  # type: ignore[misc]
    """A channel on one Redis server."""


class SentinelChannel(_Bounded, redis.SentinelChannel):  # type: ignore[misc]
    """A channel on the primary that Sentinels name."""


class Transport(redis.Transport):
    """The transport on one Redis server."""

    Channel = Channel


class SentinelTransport(redis.SentinelTransport):
    """The transport on the primary that Sentinels name."""

    Channel = SentinelChannel


#: Ours by the schemes of URLs, in place of kombu's.
_OURS = {"redis": Transport, "rediss": Transport, "sentinel": SentinelTransport}


def _install() -> None:
    """Have these schemes mean ours, in this process: connections out of a pool are of kombu's own class and go by the scheme alone."""
    for scheme, ours in _OURS.items():
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{ours.__name__}"
        _transport_cache.pop(scheme, None)


class BrokerConnection(Connection):
    """A connection whose every fault makes a worker connect anew, soon and for as long as it takes."""

    @cached_property
    def connection_errors(self) -> Any:
        """What a worker's consumer connects anew for. Kombu says some faults of Redis in its own words, those of a server that still
        loads its data among them, and counts those words as no fault of the connection: the worker would end."""
        return (*self.get_transport_cls().connection_errors, OperationalError)  # type: ignore[no-untyped-call]

    @cached_property
    def recoverable_connection_errors(self) -> Any:
        """What kombu itself tries again for, as often as it is told: not what it has given up already."""
        transport = self.get_transport_cls()  # type: ignore[no-untyped-call]
        return transport.connection_errors + transport.channel_errors

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, again and again if need be; returns the connection."""
        pauses = {"interval_start": 0.2, "interval_step": 0.2, "interval_max": MAX_PAUSE_S}
        return super().ensure_connection(*args, **(pauses | options))  # type: ignore[no-untyped-call]


class Amqp(AMQP):  # type: ignore[misc]
    """Celery's `app.amqp` with these connections."""

    Connection = BrokerConnection
    BrokerConnection = BrokerConnection

    def __init__(self, *args: Any, **options: Any) -> None:
        _install()
        super().__init__(*args, **options)
