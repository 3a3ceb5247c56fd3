"""The door for signed requests: proven by their scheme, made a turn by the user's function, answered at once.

A scheme is one file beside this one; `VERIFIERS` names it. The sender's delivery id is the turn's idempotency key, so a delivery that is
repeated is the same turn.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.bodies import json_answer
from gateway.parts import GatewayParts, Parts
from gateway.problems import documented, validation_errors
from gateway.shapes import Accepted
from gateway.turns import accepted, traceparent_of
from gateway.webhooks.bearer import BearerVerifier
from gateway.webhooks.contents import FORM, contents
from gateway.webhooks.delivery import Delivery, Meaning, Reply, Verifier
from gateway.webhooks.github import GitHubVerifier
from gateway.webhooks.slack import SlackVerifier
from gateway.webhooks.standard import StandardVerifier
from gateway.webhooks.stripe import StripeVerifier
from gateway.webhooks.twilio import TwilioVerifier
from orchestration.actions.submit import MAX_KEY_CHARS, Submission, Submitted, submit
from orchestration.core import webhook as schemes
from orchestration.core.errors import BadRequest, Misconfigured, NotFound, TurnmillError
from orchestration.core.ids import conversation_id_from
from orchestration.core.principal import Principal, Scope
from orchestration.core.turn import OnBusy
from orchestration.core.webhook import Webhook, WebhookRequest

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

#: The verifier of each scheme, made from its declaration and the environment with its secrets.
VERIFIERS: dict[type, Callable[[Any, Mapping[str, str]], Verifier]] = {
    schemes.StandardWebhooks: StandardVerifier,
    schemes.GitHubWebhooks: GitHubVerifier,
    schemes.SlackWebhooks: SlackVerifier,
    schemes.TwilioWebhooks: TwilioVerifier,
    schemes.StripeWebhooks: StripeVerifier,
    schemes.BearerWebhooks: BearerVerifier,
}

#: Deliveries of one process that are worked on at once. They have threads of their own: a `to_turn` that hangs holds up no other route.
AT_ONCE = 32

TWIML = b'<?xml version="1.0" encoding="UTF-8"?><Response></Response>'


@dataclass(frozen=True, slots=True)
class OpenHook:
    """A declared webhook with the verifier that guards it."""

    hook: Webhook
    verifier: Verifier


class _WebhookTurn(BaseModel):
    """What a webhook's `to_turn` gives."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    input: str | list[dict[str, Any]] = Field(min_length=1)
    conversation_id: str | None = Field(None, min_length=1)
    brief: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    callback_url: str = ""
    on_busy: Literal["queue", "reject", "interrupt", "steer"] = "queue"


def open_hooks(hooks: Mapping[str, Webhook], environ: Mapping[str, str]) -> dict[str, OpenHook]:
    """The webhooks with their verifiers; raises Misconfigured for an unknown scheme or a missing secret."""
    opened = {}
    for name, hook in hooks.items():
        make = VERIFIERS.get(type(hook.scheme))
        if make is None:
            raise Misconfigured(f"Webhook({name!r}): {type(hook.scheme).__name__} is no signature scheme of this gateway")
        try:
            opened[name] = OpenHook(hook, make(hook.scheme, environ))
        except Misconfigured as error:
            raise Misconfigured(f"Webhook({name!r}): {error}") from None
    return opened


def _limiter(request: Request) -> CapacityLimiter:
    # Made in the loop that serves, at the first delivery.
    state = request.app.state
    if not hasattr(state, "deliveries_at_once"):
        state.deliveries_at_once = CapacityLimiter(AT_ONCE)
    limiter: CapacityLimiter = state.deliveries_at_once
    return limiter


async def _raw(request: Request) -> bytes:
    return await request.body()


@router.post(
    "/{name}",
    status_code=202,
    summary="Deliver a webhook",
    response_model=Accepted,
    responses={
        200: {"description": "taken, and answered as the sender's protocol wants it", "content": {"application/json": {}, "text/xml": {}}},
        204: {"description": "verified, and means no turn"},
        **documented(409),
    },
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": {}}, FORM: {"schema": {"type": "object"}}}}},
)
async def receive(name: str, request: Request, body: Annotated[bytes, Depends(_raw)], parts: GatewayParts) -> Response:
    """Take one signed delivery; 202 says that its turn is stored, 204 that it means none."""
    opened = parts.hooks.get(name)
    if opened is None:
        raise NotFound("there is no such webhook")
    # A header sent twice counts as its last value, for the signature and for the user's function alike.
    headers = {key.lower(): value for key, value in request.headers.items()}
    delivery = Delivery(headers, body, parts.proxies.urls(request))
    query = dict(request.query_params)
    outcome = "failed"
    try:
        answer = await to_thread.run_sync(_take, parts, opened, delivery, query, limiter=_limiter(request))
        outcome = "turn" if "location" in answer.headers else "no_turn"
        return answer
    except TurnmillError as error:
        outcome = error.code
        raise
    finally:
        parts.meters.deliveries.labels(name, outcome).inc()


def _take(parts: Parts, opened: OpenHook, delivery: Delivery, query: dict[str, str]) -> Response:
    opened.verifier.prove(delivery)
    json, form = contents(delivery)
    meaning = opened.verifier.meaning(delivery, json, form)
    if meaning.answer is not None:
        return json_answer(meaning.answer)
    turn = None
    if not meaning.ignored:
        turn = _turn(opened.hook, WebhookRequest(json, delivery.body, delivery.headers, query, form))
    if turn is None:
        return _reply(meaning, None)
    return _reply(meaning, submit(parts.ports, _submission(opened.hook, turn, delivery, meaning)))


def _submission(hook: Webhook, turn: _WebhookTurn, delivery: Delivery, meaning: Meaning) -> Submission:
    key = meaning.id
    if key is not None and len(key) > MAX_KEY_CHARS:
        key = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
    return Submission(
        agent=hook.agent,
        input=turn.input,
        principal=Principal(hook.principal, hook.tenant, scopes=(str(Scope.TURNS_WRITE), str(Scope.TURNS_READ))),
        conversation_id=conversation_id_from(turn.conversation_id) if turn.conversation_id else None,
        brief=turn.brief,
        metadata=turn.metadata,
        callback_url=turn.callback_url,
        on_busy=OnBusy(turn.on_busy),
        idempotency_key=key,
        idempotency_scope=f"webhook.{hook.name}",
        # What counts as the same is what was delivered: `to_turn` may make something else of it the second time.
        idempotency_digest=delivery.digest(),
        traceparent=traceparent_of(delivery.headers.get("traceparent")),
        webhook=hook.name if hook.on_answer is not None else "",
    )


def _reply(meaning: Meaning, submitted: Submitted | None) -> Response:
    headers = {"Location": f"/v1/turns/{submitted.turn_id}"} if submitted is not None else {}
    match meaning.reply:
        case Reply.TWIML:
            return Response(TWIML, headers=headers, media_type="text/xml")
        case Reply.EMPTY:
            return Response(headers=headers)
        case Reply.OK:
            return accepted(submitted, 200) if submitted is not None else Response()
        case Reply.ACCEPTED:
            return accepted(submitted) if submitted is not None else Response(status_code=204)


def _turn(hook: Webhook, request: WebhookRequest) -> _WebhookTurn | None:
    try:
        made = hook.to_turn(request)
        return None if made is None else _WebhookTurn.model_validate(dict(made))
    except ValidationError as error:
        found = validation_errors(error.errors(include_input=False))
        where = ", ".join(".".join(str(part) for part in one["loc"]) or "all" for one in found)
        log.warning("webhook %s: to_turn gave what is no turn (%s)", hook.name, where)
        raise BadRequest(f"webhook {hook.name}: this request gives no turn (wrong: {where})") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The message of the exception may quote the request; its kind is enough.
        log.warning("webhook %s: to_turn could not read a request (%s)", hook.name, type(error).__name__)
        raise BadRequest(f"webhook {hook.name}: the request could not be read ({type(error).__name__})") from None
