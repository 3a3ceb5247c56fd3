"""Sends steps as Celery tasks with the app that the settings name. A round with a gated call goes out as a chord whose body is its observe.

The chord is built by hand from fixed ids: `self.replace` would open a new group at each delivery, and costs nearly twice as
much. What makes a round complete is the journal; the chord delivers it and shows it to operators.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

from celery import Celery, signals

from orchestration.core.errors import Misconfigured, StoreUnavailable
from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Delivery
from orchestration.core.turn import ENDED
from orchestration.queue.envelope import Envelopes
from orchestration.queue.faults import broker_translated
from orchestration.queue.names import CONTROL_QUEUE, OBSERVE, OUTBOUND, QUEUES, TASKS, arguments, group_of
from orchestration.settings import Settings
from orchestration.state.store import Store, translated, turn_key
from orchestration.telemetry import continuing

log = logging.getLogger("turnmill.queue")

#: A chord that is over has left a mark, and a header that somebody sends all the same opens it no more.
_OPEN_CHORD = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('SETNX', KEYS[1], ARGV[1])
return 1
"""


def load_app(dotted: str) -> Celery:
    """The Celery app at `module:attribute`.

    Raises:
        Misconfigured: there is none, or chords cannot work on its result backend.
    """
    module, _, attribute = dotted.partition(":")
    try:
        app = getattr(importlib.import_module(module), attribute or "app")
    except (ImportError, AttributeError) as error:
        raise Misconfigured(f"TURNMILL_CELERY_APP: no Celery app at {dotted!r} ({error})") from error
    if not isinstance(app, Celery):
        raise Misconfigured(f"TURNMILL_CELERY_APP: {dotted!r} is no Celery app")
    return app


def refuse_broken_chords(app: Celery) -> None:
    """Refuse settings of a host on which a suspended round could not be completed.

    Raises:
        Misconfigured: names the setting.
    """
    backend = str(app.conf.result_backend or "")
    if not backend.startswith(("redis://", "rediss://", "sentinel://", "redis+socket://", "socket://", "valkey://")):
        raise Misconfigured("result_backend: Redis is needed; on others a suspended chord cannot be completed")
    if app.conf.result_chord_expires is None:
        if not app.conf.result_expires:
            raise Misconfigured("result_expires: 0 or None deletes a chord's keys (celery #5237); set result_chord_expires = 0 as well")
    elif app.conf.result_chord_expires != 0:
        raise Misconfigured("result_chord_expires: must be 0, or an approval that waits for longer breaks its chord")


def _somebody_listens() -> bool:
    """Whether publishing must go through Celery's signals: for traces, or for a host's own hooks."""
    return bool(signals.before_task_publish.receivers or signals.after_task_publish.receivers)


class CeleryQueue:
    """The port `Queue` on Celery. Safe for threads; loads the app at its first use."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._lock = threading.Lock()
        self._loaded: Celery | None = None
        self._routes: dict[str, Any] = {}
        self._one_redis: bool | None = None
        self._made_envelopes: Envelopes | None = None

    @property
    def app(self) -> Celery:
        """The app that tasks are published with."""
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    app = load_app(self._settings.celery_app)
                    refuse_broken_chords(app)
                    self._loaded = app
        return self._loaded

    @property
    def _envelopes(self) -> Envelopes:
        if self._made_envelopes is None:
            self._made_envelopes = Envelopes(self.app)
        return self._made_envelopes

    def queue_name(self, kind: StepKind) -> str:
        """The broker's queue for steps of `kind`: the app's own routing, or ours where it says nothing."""
        return str(self._route(kind)["queue"].name)

    def send(self, steps: Sequence[StepId], *, headers: Sequence[int] | None = None, traceparent: str = "") -> None:
        """Send the tasks of `steps`; those of a round with a chord as its headers. What is not given is read from the journal.

        Args:
            headers: the indexes of the round's calls that are headers of a chord; empty for a round without one.
            traceparent: the trace that the steps belong to, where no span is current.

        Raises:
            StoreUnavailable: the broker does not take them; some may have gone out.
        """
        if not steps:
            return
        known = headers is not None or not any(step.kind is StepKind.TOOL for step in steps)
        contexts = {} if known else self._contexts(steps)
        given = (traceparent, list(headers or ()))
        with broker_translated(), self.app.producer_or_acquire() as producer:
            for step in steps:
                trace, chord = contexts.get((step.turn_id, step.round), given)
                with continuing(trace):
                    self._publish(producer, step, chord)

    def ring(self, steps: Sequence[StepId]) -> dict[str, tuple[str, str]]:
        """For each step outside a chord the Redis list and the message with which a script can send it itself; empty where it cannot.

        That is so unless broker and state are one Redis and nothing listens to what Celery does when it publishes.
        """
        if not self._may_ring():
            return {}
        rung = {}
        try:
            with broker_translated():
                for step in steps:
                    queue = self.queue_name(step.kind)
                    rung[str(step)] = (queue, self._envelopes.message(step, queue))
        except StoreUnavailable as error:
            # the first message of a kind needs a connection; without one the step goes out the usual way, later
            log.info("a bell cannot be rung: %s", error)
            return {}
        return rung

    def _may_ring(self) -> bool:
        if self._one_redis is None:
            app = self.app
            options = app.conf.broker_transport_options or {}
            self._one_redis = (
                self._settings.redis_url.startswith("redis://")
                and str(app.conf.broker_url) == self._settings.redis_url
                and not options.get("global_keyprefix")
                and options.get("priority_steps") == [0]
                and all(self._route(kind)["queue"].exchange.type == "direct" for kind in TASKS)
                and app.conf.task_serializer == "json"
                and not app.conf.task_compression
                and not app.conf.task_send_sent_event
            )
        return self._one_redis and not _somebody_listens()

    def send_outbound(self, tenant: str, delivery: Delivery, attempt: int) -> None:
        """Send the task of one attempt of a delivery, with ids only.

        Raises:
            StoreUnavailable: the broker does not take it.
        """
        name = OUTBOUND[delivery.way]
        routed = {} if self.app.conf.task_routes else {"queue": CONTROL_QUEUE}
        options = {"task_id": f"{delivery.message_id}.{attempt}", "serializer": "json", "ignore_result": True, **routed}
        with broker_translated():
            self.app.send_task(name, [tenant, delivery.name, attempt], **options)

    def is_empty(self, kind: StepKind) -> bool:
        """Whether no message waits in the queue for steps of `kind`; raises StoreUnavailable when the broker does not say."""
        with broker_translated(), self.app.connection_for_read() as connection:
            try:
                declared = connection.default_channel.queue_declare(queue=self.queue_name(kind), passive=True)
            except connection.channel_errors:
                return True  # on Redis an empty queue is one that is not there
            return bool(declared.message_count == 0)

    def _route(self, kind: StepKind) -> dict[str, Any]:
        name = TASKS[kind]
        found = self._routes.get(name)
        if found is None:
            app = self.app
            routed = app.amqp.router.route({}, name)
            if not (app.conf.task_routes or {}) and "queue" not in routed:
                routed = app.amqp.router.route({"queue": QUEUES[kind]}, name)
            found = self._routes[name] = {"queue": routed.get("queue") or app.amqp.default_queue} | {
                key: routed[key] for key in ("exchange", "routing_key", "priority") if key in routed
            }
        return found

    def _contexts(self, steps: Sequence[StepId]) -> dict[tuple[str, int], tuple[str, list[int]]]:
        """Of each step's turn and round: its trace, and the indexes of its chord's headers (none for a round without a chord, or over)."""
        wanted = {(step.turn_id, step.round): step for step in steps}
        with translated():
            pipe = self._store.client.pipeline(transaction=False)
            for step in wanted.values():
                pipe.hmget(turn_key(step.tenant, step.turn_id), "trace", f"h:{step.round}", "state")
            found = pipe.execute()
        return {
            place: (trace or "", json.loads(chord)["headers"] if chord and state not in ENDED else [])
            for place, (trace, chord, state) in zip(wanted, found, strict=True)
        }

    def _publish(self, producer: Any, step: StepId, headers: list[int]) -> None:
        app, route = self.app, self._route(step.kind)
        options: dict[str, Any] = {}
        if step.kind is StepKind.TOOL and step.index in headers:
            group = group_of(step)
            self._open_chord(group, len(headers))
            options = {"group_id": group, "group_index": headers.index(step.index), "chord": self._body(step)}
        args = arguments(step)
        message = app.amqp.as_task_v2(
            step.task_id,
            TASKS[step.kind],
            args,
            {},
            root_id=step.root_task_id,
            parent_id=step.parent_task_id,
            argsrepr=repr(tuple(args)),
            kwargsrepr="{}",
            ignore_result=True,
            create_sent_event=app.conf.task_send_sent_event,
            **options,
        )
        queue = route["queue"]
        if _somebody_listens() or app.conf.task_send_sent_event or queue.exchange.type != "direct":
            app.amqp.send_task_message(producer, TASKS[step.kind], message, serializer="json", **route)
            return
        # what Celery's own sender does for a direct exchange, without the signals that nobody receives: less than half the CPU
        sent_headers, properties, body, _ = message
        producer.publish(
            body,
            exchange="",
            routing_key=queue.name,
            serializer="json",
            headers=sent_headers,
            delivery_mode=2,
            declare=[queue],
            **properties,
        )

    def _open_chord(self, group: str, size: int) -> None:
        """Let the result backend know how many headers the chord has; one that is under way keeps its count, one that is over stays so."""
        backend = self.app.backend
        keys = [backend.get_key_for_group(group, part) for part in (".s", ".c")]
        backend.client.eval(_OPEN_CHORD, len(keys), *keys, size)

    def _body(self, step: StepId) -> dict[str, Any]:
        body = StepId(step.tenant, step.turn_id, step.round, StepKind.OBSERVE)
        signature = self.app.signature(
            OBSERVE,
            args=arguments(body),
            immutable=True,
            options={
                "task_id": body.task_id,
                "root_id": body.root_task_id,
                "parent_id": body.parent_task_id,
                "queue": self.queue_name(StepKind.OBSERVE),
                "argsrepr": repr(tuple(arguments(body))),
                "ignore_result": True,
            },
        )
        return dict(signature)
