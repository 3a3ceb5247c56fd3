"""The door for signed requests: verified by their scheme, made a turn by the user's function, answered at once.

A scheme is one file beside this one with a verifier; `VERIFIERS` names it. The sender's delivery id is the turn's idempotency key, so a
delivery that is repeated is the same turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.bodies import strict_json
from gateway.parts import GatewayParts
from gateway.problems import validation_errors
from gateway.turns import accepted
from gateway.webhooks.standard import StandardVerifier
from orchestration.actions.submit import Submission, submit
from orchestration.core.agent import StandardWebhooks, Webhook, WebhookRequest
from orchestration.core.errors import BadRequest, Misconfigured, NotFound
from orchestration.core.ids import conversation_id_from
from orchestration.core.principal import Principal, Scope

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


class Verifier(Protocol):
    """One signature scheme with its secrets."""

    def verify(self, headers: Mapping[str, str], body: bytes) -> str:
        """The delivery's id; raises BadSignature."""
        ...


#: The verifier of each scheme, made from its declaration and the environment with its secrets.
VERIFIERS: dict[type, Callable[[Any, Mapping[str, str]], Verifier]] = {StandardWebhooks: StandardVerifier}


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


def open_hooks(hooks: Mapping[str, Webhook], environ: Mapping[str, str]) -> dict[str, OpenHook]:
    """The webhooks with their verifiers; raises Misconfigured for an unknown scheme or a missing secret."""
    opened = {}
    for name, hook in hooks.items():
        make = VERIFIERS.get(type(hook.scheme))
        if make is None:
            raise Misconfigured(f"Webhook({name!r}): {type(hook.scheme).__name__} is no signature scheme of this gateway")
        opened[name] = OpenHook(hook, make(hook.scheme, environ))
    return opened


async def _raw(request: Request) -> bytes:
    return await request.body()


@router.post("/{name}", status_code=202, summary="Deliver a webhook", responses={204: {"description": "verified, and means no turn"}})
def receive(name: str, request: Request, body: Annotated[bytes, Depends(_raw)], parts: GatewayParts) -> Response:
    """Take one signed delivery; 202 says that its turn is stored, 204 that it means none."""
    opened = parts.hooks.get(name)
    if opened is None:
        raise NotFound("there is no such webhook")
    hook = opened.hook
    # A header sent twice counts as its last value, for the signature and for the user's function alike.
    headers = {key.lower(): value for key, value in request.headers.items()}
    delivery = opened.verifier.verify(headers, body)
    turn = _turn(hook, WebhookRequest(strict_json(body) if body else None, body, headers, dict(request.query_params)))
    if turn is None:
        return Response(status_code=204)
    submission = Submission(
        agent=hook.agent,
        input=turn.input,
        principal=Principal(hook.principal, hook.tenant, scopes=(str(Scope.TURNS_WRITE), str(Scope.TURNS_READ))),
        conversation_id=conversation_id_from(turn.conversation_id) if turn.conversation_id else None,
        brief=turn.brief,
        metadata=turn.metadata,
        callback_url=turn.callback_url,
        idempotency_key=delivery,
        idempotency_scope=f"webhook.{name}",
    )
    return accepted(submit(parts.ports, submission))


def _turn(hook: Webhook, request: WebhookRequest) -> _WebhookTurn | None:
    try:
        made = hook.to_turn(request)
        return None if made is None else _WebhookTurn.model_validate(made)
    except ValidationError as error:
        found = validation_errors(error.errors(include_input=False))
        where = ", ".join(".".join(str(part) for part in one["loc"]) or "all" for one in found)
        log.warning("webhook %s: to_turn gave what is no turn (%s)", hook.name, where)
        raise BadRequest(f"webhook {hook.name}: this request gives no turn (wrong: {where})") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The message of the exception may quote the request; its kind is enough.
        log.warning("webhook %s: to_turn could not read a request (%s)", hook.name, type(error).__name__)
        raise BadRequest(f"webhook {hook.name}: the request could not be read ({type(error).__name__})") from None
