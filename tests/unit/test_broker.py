"""Connections to a Redis broker: which classes an app gets that names ours, and what is left of messages that cannot be given back."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from orchestration.queue import broker

AMQP = "orchestration.queue.broker:Amqp"


@pytest.mark.parametrize(
    ("url", "transport"),
    [
        ("redis://127.0.0.1:1/0", broker.Transport),
        ("rediss://127.0.0.1:1/0?ssl_cert_reqs=required", broker.Transport),
        ("sentinel://127.0.0.1:1/0", broker.SentinelTransport),
    ],
)
def test_an_app_that_names_ours_gets_ours_out_of_its_pools_too(url: str, transport: type[object]) -> None:
    app = Celery("host", broker=url, amqp=AMQP, set_as_current=False)
    connection = app.connection_for_read()
    assert OperationalError in connection.connection_errors and OperationalError not in connection.recoverable_connection_errors
    for one in (connection, connection.clone(), app.pool.new()):
        assert one.get_transport_cls() is transport
    assert str(connection.as_uri()).startswith(url.partition(":")[0]), "nobody sees another scheme"


def test_another_broker_is_left_alone() -> None:
    app = Celery("host", broker="memory://", amqp=AMQP, set_as_current=False)
    assert app.connection_for_read().get_transport_cls().__module__ == "kombu.transport.memory"


def test_a_worker_pauses_a_second_at_most_between_attempts_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(broker.Connection, "ensure_connection", lambda self, *args, **options: asked.update(options))
    connection = Celery("host", broker="redis://127.0.0.1:1/0", amqp=AMQP, set_as_current=False).connection_for_read()
    connection.ensure_connection(None, None, callback=None)
    assert asked["interval_max"] == 1.0
    connection.ensure_connection(interval_max=5.0)
    assert asked["interval_max"] == 5.0, "unless somebody says otherwise"


class Away:
    """A channel whose broker takes nothing."""

    do_restore = True

    def decode_body(self, body: str, encoding: str | None) -> str:
        return body

    def _restore(self, message: Any) -> None:
        raise OperationalError("away")


def test_messages_that_cannot_be_given_back_are_counted_and_not_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = broker.Messages(Away())
    for tag in ("one", "two"):
        held.append(virtual.Message(payload={"body": "secret", "properties": {"delivery_tag": tag}}, channel=Away()), tag)
    with caplog.at_level(logging.WARNING):
        held.restore_unacked_once()
    assert "2 message(s) could not be given back" in caplog.text and "secret" not in caplog.text
    assert list(tmp_path.iterdir()) == []
