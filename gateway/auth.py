"""Who comes in: the caller behind a token or a ticket, or the development principal where nobody has a token and only loopback is served.

Whose a token is, `orchestration/identity/` says. What a principal may do is checked here per route (scopes) and in the actions (roles).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection

from gateway.loopback import is_loopback, not_local
from gateway.parts import GatewayParts, Parts
from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.core.principal import DEVELOPER, Principal, Scope
from orchestration.core.safe_json import dumps
from orchestration.identity.callers import Caller, Callers
from orchestration.identity.sealing import TokenSeal
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.state.tickets import MAX_CHARS, Tickets

log = logging.getLogger(__name__)


class Door:
    """Lets requests in: by a token where anybody has one, else only from this machine.

    Args:
        served_on: addresses that the server was told to listen on, as far as they can be known.

    Raises:
        Misconfigured: nobody has a token, and an address is not loopback; or the keys in the settings cannot be read.
        StoreUnavailable: whether keys are stored must be known and cannot be.
    """

    def __init__(self, settings: Settings, store: Store, *, served_on: Sequence[str] = ()) -> None:
        self._callers = Callers(settings, store)
        self._tickets = Tickets(store)
        self._seal = TokenSeal(settings)
        outside = [host for host in (settings.host, *served_on) if not is_loopback(host)]
        if outside and not self._callers.exist():
            remedy = "make a key (turnmill keys create), or set TURNMILL_API_KEYS, TURNMILL_JWT_SECRET or TURNMILL_JWT_JWKS"
            raise Misconfigured(f"without API keys the gateway serves loopback only, not {outside[0]!r}; {remedy}")
        if not outside and not self._callers.configured:
            log.warning("no API key in the settings: unless keys are stored, whoever reaches this machine's loopback is %r", DEVELOPER.sub)

    def caller(self, connection: HTTPConnection, ticket: str | None = None) -> Caller:
        """Who sent this request; a `ticket` counts where there is no Authorization header, and is used up by it.

        Raises:
            Unauthorized: a token or ticket is nobody's, one is needed and missing, or without keys the request comes from elsewhere.
            StoreUnavailable: that cannot be known now.
        """
        header = connection.headers.get("authorization")
        if header is not None:
            scheme, _, token = header.partition(" ")
            if scheme.lower() != "bearer" or not token.strip():
                raise Unauthorized("the Authorization header is no bearer token")
            return self._callers.identify(token.strip())
        if ticket is not None:
            return self._redeemed(ticket)
        if self._callers.exist():
            raise Unauthorized("this needs a token: Authorization: Bearer …")
        stranger = not_local(connection)
        if stranger:
            raise Unauthorized(f"without API keys only this machine is served, and {stranger}")
        return Caller(DEVELOPER)

    def issue_ticket(self, caller: Caller) -> tuple[str, str]:
        """A ticket for a browser of this caller's, and until when it is good. Raises StoreUnavailable."""
        # The token goes along, so that it can be forwarded for who comes in by the ticket.
        sealed = self._seal.seal(caller.token, caller.principal) if caller.token and self._seal else ""
        return self._tickets.issue(dumps(caller.as_json() | {"token": sealed}))

    def still(self, caller: Caller) -> bool:
        """Whether what a caller came in with still holds. Raises StoreUnavailable when that cannot be known now."""
        return self._callers.still(caller)

    def _redeemed(self, ticket: str) -> Caller:
        known = self._tickets.redeem(ticket)
        if known is None:
            raise Unauthorized("the ticket is unknown, used or older than a minute; POST /v1/tickets gives another")
        kept = json.loads(known)
        caller = Caller.from_json(kept)
        if kept.get("token"):
            caller = replace(caller, token=self._seal.open(kept["token"], caller.principal))
        if not self._callers.still(caller):
            raise Unauthorized("whoever got this ticket has lost access since")
        return caller


_bearer = HTTPBearer(auto_error=False, description="an API key or a JWT")


def admitted(parts: Parts, connection: HTTPConnection, *scopes: Scope, ticket: str | None = None) -> Caller:
    """The caller of a request, who has all of `scopes` and has not asked too much.

    Raises:
        Unauthorized, Forbidden, RateLimited, StoreUnavailable
    """
    caller = parts.door.caller(connection, ticket)
    parts.brake.take(caller, connection.scope)
    for scope in scopes:
        caller.principal.require(scope)
    return caller


# Not async, any of them: looking up a stored key asks Redis, which must not hold up the event loop.


def _calling(*scopes: Scope) -> Callable[..., Caller]:
    def caller(request: Request, parts: GatewayParts, _documented: Annotated[object, Depends(_bearer)]) -> Caller:
        return admitted(parts, request, *scopes)

    return caller


def _calling_by_ticket(scope: Scope) -> Callable[..., Caller]:
    def caller(
        request: Request,
        parts: GatewayParts,
        _documented: Annotated[object, Depends(_bearer)],
        ticket: Annotated[str | None, Query(max_length=MAX_CHARS, description="in place of a token: POST /v1/tickets")] = None,
    ) -> Caller:
        return admitted(parts, request, scope, ticket=ticket)

    return caller


def _asking(scope: Scope) -> Callable[..., Principal]:
    def principal(request: Request, parts: GatewayParts, _documented: Annotated[object, Depends(_bearer)]) -> Principal:
        return admitted(parts, request, scope).principal

    return principal


#: A route's parameter: whoever asks, whatever they may do.
AnyCaller = Annotated[Caller, Depends(_calling())]
#: A route's parameter: whoever asks, who may submit turns and read them.
Converses = Annotated[Caller, Depends(_calling(Scope.TURNS_WRITE, Scope.TURNS_READ))]
#: A route's parameter: whoever asks, who may read turns and may show a ticket instead of a token.
WatchesTurns = Annotated[Caller, Depends(_calling_by_ticket(Scope.TURNS_READ))]
#: A route's parameter: whoever asks, who may submit turns.
SubmitsTurns = Annotated[Caller, Depends(_calling(Scope.TURNS_WRITE))]
#: A route's parameter: the principal, who must have the scope in the name.
WritesTurns = Annotated[Principal, Depends(_asking(Scope.TURNS_WRITE))]
ReadsTurns = Annotated[Principal, Depends(_asking(Scope.TURNS_READ))]
ReadsApprovals = Annotated[Principal, Depends(_asking(Scope.APPROVALS_READ))]
DecidesApprovals = Annotated[Principal, Depends(_asking(Scope.APPROVALS_DECIDE))]
Administers = Annotated[Principal, Depends(_asking(Scope.ADMIN))]
