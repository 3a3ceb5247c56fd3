"""Deliver: one attempt to tell the outside one thing, begun and ended in Redis. A message that comes twice tells nothing twice; an attempt
whose worker dies is made again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestration.core.approval import as_api
from orchestration.core.errors import NotFound, TurnmillError
from orchestration.core.outbound import Delivery, Way
from orchestration.outbound.address import check_url
from orchestration.outbound.events import callback_body, ended_checkpoint, webhook_answer
from orchestration.outbound.functions import call
from orchestration.outbound.post import post
from orchestration.outbound.signing import secrets_of, signed_headers
from orchestration.outbound.told import Told
from orchestration.state.outbound import Attempt
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.outbound")

#: Attempts that one process makes at a time: its other slots are for decisions and recovery, which must not wait for slow receivers.
AT_ONCE = 4

#: When an attempt for which there was no room is made again, in milliseconds.
ROOM_MS = 1_000

_room = threading.Semaphore(AT_ONCE)


def deliver(ports: Ports, tenant: str, name: str, number: int) -> str:
    """Make attempt `number` of a delivery, if it is to be made; returns what came of it, for the log.

    Raises:
        StoreUnavailable: Redis is away; the delivery stays due.
    """
    delivery = Delivery.parse(name)
    attempt = ports.outbound.begin(tenant, delivery, number, ports.lease.process)
    if attempt is None:
        return "not_due"
    if not _room.acquire(blocking=False):
        ports.outbound.put_off(attempt, ROOM_MS)
        return "put_off"
    try:
        told = _tell(ports, attempt)
    finally:
        _room.release()
    if not told.code:
        ports.outbound.delivered(attempt)
        return "done"
    again = ports.outbound.failed(attempt, told.code, for_good=told.for_good, asked_for_s=told.asked_for_s)
    log.warning("%s, attempt %d: %s; %s", delivery.message_id, number, told.code, "tried again later" if again else "given up")
    return "again" if again else "given_up"


def _tell(ports: Ports, attempt: Attempt) -> Told:
    try:
        return _WAYS[attempt.delivery.way](ports, attempt)
    except NotFound:
        return Told("not_found", for_good=True)
    except TurnmillError as error:
        return Told(error.code, for_good=error.code in ("validation_error", "misconfigured"))


def _by_callback(ports: Ports, attempt: Attempt) -> Told:
    url, body = callback_body(ports, attempt.tenant, attempt.delivery)
    networks = ports.settings.callback_networks
    place = check_url(url, networks)
    secrets = secrets_of(attempt.tenant, ports.settings, ports.secrets)
    headers = signed_headers(secrets, attempt.delivery.message_id, body, now_s=int(time.time()))
    return post(place, {"content-type": "application/json", "user-agent": "turnmill", **headers}, body, networks)


def _by_hook(ports: Ports, attempt: Attempt) -> Told:
    hook = ports.project.on_approval_request
    if hook is None:
        return Told("no_hook", for_good=True)
    return call(hook, as_api(ports.approvals.get(attempt.tenant, attempt.delivery.subject)))


def _by_answer(ports: Ports, attempt: Attempt) -> Told:
    view = ports.conversations.turn(attempt.tenant, attempt.delivery.subject)
    webhook = ports.project.webhooks.get(view.request.webhook)
    if webhook is None or webhook.on_answer is None:
        return Told("no_hook", for_good=True)
    return call(webhook.on_answer, webhook_answer(view, attempt.delivery))


def _by_round(ports: Ports, attempt: Attempt) -> Told:
    view = ports.conversations.turn(attempt.tenant, attempt.delivery.subject)
    agent = ports.project.agents.get(view.raw.get("ended_by", ""))
    if agent is None or agent.on_round is None:
        return Told("no_hook", for_good=True)
    return call(agent.on_round, ended_checkpoint(ports, view, agent))


_WAYS: dict[Way, Callable[[Ports, Attempt], Told]] = {
    Way.CALLBACK: _by_callback,
    Way.HOOK: _by_hook,
    Way.ANSWER: _by_answer,
    Way.ROUND: _by_round,
}
