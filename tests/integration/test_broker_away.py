"""A broker whose connections break while threads publish: each send goes out or says that the broker does not answer, nothing else."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import redis

from orchestration.core.errors import StoreUnavailable
from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Delivery, OutboundEvent, Way
from orchestration.queue.faults import broker_translated
from orchestration.queue.sender import CeleryQueue
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.testing.servers import redis_server
from workers import app as workers_app

#: Threads that publish, and how often each does.
THREADS, TIMES = 8, 20


def test_what_kombu_finds_in_a_closed_channel_is_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server() as server:
        app = workers_app.make_app(Settings(redis_url=server.url))
        with app.producer_or_acquire() as producer:
            channel = producer.channel
            channel.close()
            with pytest.raises(StoreUnavailable, match="closed"), broker_translated():
                channel._connparams()
        app.close()


def test_a_mistake_of_our_own_is_no_broker_that_is_away() -> None:
    nothing: object = None
    with pytest.raises(AttributeError), broker_translated():
        nothing.connection  # type: ignore[attr-defined]  # noqa: B018


def test_connections_that_are_cut_while_threads_publish_raise_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server() as server:
        app = workers_app.make_app(Settings(redis_url=server.url))
        monkeypatch.setattr(workers_app, "app", app)
        settings = Settings(redis_url=server.url, celery_app="workers.app:app")
        queue = CeleryQueue(settings, Store(settings))
        ended: Counter[str] = Counter()
        working = threading.Event()

        def publish(thread: int) -> None:
            for number in range(TIMES):
                try:
                    queue.send_outbound("dev", Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, f"tn_{thread}_{number}"), 1)
                    queue.send([StepId("dev", f"tn_{thread}_{number}", 1, StepKind.PLAN)], headers=())
                    queue.is_empty(StepKind.PLAN)
                    ended["sent"] += 1
                except StoreUnavailable:
                    ended["unavailable"] += 1
                except BaseException as error:
                    ended[repr(error)] += 1
                working.set()

        threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(THREADS)]
        for one in threads:
            one.start()
        assert working.wait(60)
        cutter = redis.Redis.from_url(server.url)
        while any(one.is_alive() for one in threads):
            cutter.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]
            threads[0].join(0.03)
            threads[-1].join(0.03)
        cutter.close()
        app.close()
    assert sum(ended.values()) == THREADS * TIMES
    assert ended.keys() <= {"sent", "unavailable"}, ended
