"""Turnmill's own Celery app, for deployments that bring none. What matters for correctness is set on the tasks; this
is speed, names and silence."""

from __future__ import annotations

from celery import Celery
from kombu.entity import Queue

from orchestration.settings import Settings, load_settings


def make_app(settings: Settings) -> Celery:
    """The app on the given settings."""
    app = Celery(
        "turnmill",
        broker=settings.broker,
        backend=settings.redis_url,
        include=["workers.tasks"],
        amqp="orchestration.queue.broker:Amqp",
    )
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_queues=[Queue(name, routing_key=name) for name in ("plan", "tools", "control")],  # type: ignore[no-untyped-call]
        task_default_queue="plan",
        task_routes={
            "turn.plan": {"queue": "plan"},
            "turn.observe": {"queue": "plan"},
            "turn.tool": {"queue": "tools"},
            "approval.*": {"queue": "control"},
            "outbound.*": {"queue": "control"},
        },
        # the broker is a doorbell: the journal brings back what a dead worker held, so the transport keeps no books of its own
        broker_transport_options={
            "ack_emulation": False,
            "priority_steps": [0],
            "socket_timeout": 15,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "health_check_interval": 5,
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,  # a Redis that takes no writes just now: a replica before its promotion, a full disk
        broker_connection_timeout=2,
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_publish_retry_policy={"max_retries": 2, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
        result_expires=3600,
        result_chord_expires=0,  # an approval may wait for a month; the turn's end deletes its chord's keys
        result_chord_join_timeout=2.5,
        result_backend_thread_safe=True,
        redis_socket_timeout=15.0,
        redis_socket_connect_timeout=2.0,
        redis_socket_keepalive=True,
        redis_retry_on_timeout=True,
        worker_prefetch_multiplier=1,
        worker_disable_rate_limits=True,
        worker_send_task_events=False,  # Flower switches them on while it looks
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_proc_alive_timeout=30,
        resultrepr_maxsize=64,
        timezone="UTC",
    )
    return app


app = make_app(load_settings())
