"""Who is asking: API keys of the settings and of the store, and the development principal where no key exists and only loopback is served.

What a principal may do is checked here per route (scopes) and in the actions (roles). A key is compared by its hash, and no log has it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.parts import GatewayParts
from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.core.ids import ID_PATTERN
from orchestration.core.principal import DEVELOPER, Principal, Scope
from orchestration.settings import Settings
from orchestration.state.api_keys import find_key, list_keys
from orchestration.state.store import Store, translated

log = logging.getLogger(__name__)

#: A longer bearer token is nobody's and is not looked up.
MAX_TOKEN_CHARS = 8192

#: Seconds for which it is believed that the store has keys, or none at all.
KEYS_SEEN_S = 5.0

#: Tells whose token this is; None when it is not one that this verifier knows. May raise Unauthorized for one that no longer holds.
Verifier = Callable[[str], Principal | None]


class _KeyEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: str = Field(min_length=16, max_length=MAX_TOKEN_CHARS)
    sub: str = Field(min_length=1, max_length=200)
    tenant: str = Field(pattern=ID_PATTERN)
    scopes: tuple[Scope, ...] = Field(min_length=1)
    roles: tuple[str, ...] = ()


class Door:
    """Lets requests in: by a key where there are keys, else only from this machine.

    Args:
        served_on: addresses that the server was told to listen on, as far as they can be known.

    Raises:
        Misconfigured: no key is configured or stored, and an address is not loopback; or the keys in the settings cannot be read.
        StoreUnavailable: whether keys are stored must be known and cannot be.
    """

    def __init__(self, settings: Settings, store: Store, *, served_on: Sequence[str] = ()) -> None:
        configured = _configured_keys(settings.api_keys.get_secret_value())
        self._store = store
        self._has_configured_keys = bool(configured)
        self._keys_seen = (False, 0.0)
        # A verifier of signed tokens (JWT) is one more entry here; its setting then counts as "keys exist" in `_keys_exist`.
        self._verifiers: tuple[Verifier, ...] = (_in(configured), self._stored)
        outside = [host for host in (settings.host, *served_on) if not is_loopback(host)]
        if outside and not self._keys_exist():
            remedy = "make a key (turnmill keys create) or set TURNMILL_API_KEYS"
            raise Misconfigured(f"without API keys the gateway serves loopback only, not {outside[0]!r}; {remedy}")
        if not outside and not self._has_configured_keys:
            log.warning("no API key in the settings: unless keys are stored, whoever reaches this machine's loopback is %r", DEVELOPER.sub)

    def principal(self, request: Request) -> Principal:
        """Who sent this request.

        Raises:
            Unauthorized: a token that is nobody's, none where one is needed, or a request from elsewhere to a gateway without keys.
        """
        header = request.headers.get("authorization")
        if header is None:
            return self._without_token(request)
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN_CHARS:
            raise Unauthorized("the Authorization header is no bearer token")
        for verify in self._verifiers:
            found = verify(token)
            if found is not None:
                return found
        raise Unauthorized("the token is not known")

    def _without_token(self, request: Request) -> Principal:
        if self._keys_exist():
            raise Unauthorized("this needs an API key: Authorization: Bearer …")
        stranger = _not_local(request)
        if stranger:
            raise Unauthorized(f"without API keys only this machine is served, and {stranger}")
        return DEVELOPER

    def _keys_exist(self) -> bool:
        if self._has_configured_keys:
            return True
        stored, believed_until = self._keys_seen
        if time.monotonic() >= believed_until:
            with translated():
                stored = bool(list_keys(self._store.client))
            self._keys_seen = (stored, time.monotonic() + KEYS_SEEN_S)
        return stored

    def _stored(self, token: str) -> Principal | None:
        with translated():
            return find_key(self._store.client, token)


def _configured_keys(text: str) -> dict[bytes, Principal]:
    if not text.strip():
        return {}
    try:
        entries = TypeAdapter(list[_KeyEntry]).validate_python(json.loads(text))
    except json.JSONDecodeError:
        raise Misconfigured("TURNMILL_API_KEYS: a JSON list was expected") from None
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)
        where = "; ".join(f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in found)
        raise Misconfigured(f"TURNMILL_API_KEYS: {where}") from None
    return {
        hashlib.sha256(entry.key.encode("utf-8", "replace")).digest(): Principal(
            entry.sub, entry.tenant, entry.roles, tuple(str(scope) for scope in entry.scopes)
        )
        for entry in entries
    }


def _in(configured: Mapping[bytes, Principal]) -> Verifier:
    def verify(token: str) -> Principal | None:
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found = None
        for known, principal in configured.items():
            # All are compared, so that the time says nothing about which one was nearly right.
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    return verify


def is_loopback(host: str) -> bool:
    """Whether this address or host name is this machine's own."""
    name = host.strip().strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def served_hosts(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The addresses that this process's server was told to listen on, as far as its command line and environment say."""
    found = [environ["UVICORN_HOST"]] if environ.get("UVICORN_HOST") else []
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--host":
            found.append(value if equals else "".join(argv[place + 1 : place + 2]))
        elif name in ("-b", "--bind") and "gunicorn" in argv[0]:
            address = value if equals else "".join(argv[place + 1 : place + 2])
            found.append(address.rpartition(":")[0] or address)
    return [host for host in found if host]


def _not_local(request: Request) -> str:
    """Why this request may not come from this machine; empty when it does."""
    client, server = request.scope.get("client"), request.scope.get("server")
    if not client or not is_loopback(client[0]):
        return "this request comes from elsewhere"
    if server and server[1] is not None and not is_loopback(server[0]):
        return "this request came in on another address"
    # A web page may make a browser on this machine send requests here: under a name of its own (DNS rebinding) or from its own origin.
    if not is_loopback(_host_of(request.headers.get("host", ""))):
        return "its Host is not loopback"
    if "origin" in request.headers and not is_loopback(_host_of(request.headers["origin"])):
        return "its Origin is not loopback"
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")):
        return "this request came through a proxy"
    return ""


def _host_of(address: str) -> str:
    """The host in a Host or Origin header; empty when it is none."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return (parts.hostname or "") if parts.port is None or parts.port >= 0 else ""
    except ValueError:
        return ""


_bearer = HTTPBearer(auto_error=False, description="an API key")


def _asking(scope: Scope) -> Callable[..., Principal]:
    # Not async: looking up a stored key asks Redis, which must not hold up the event loop.
    def principal(request: Request, parts: GatewayParts, _documented: Annotated[object, Depends(_bearer)]) -> Principal:
        found = parts.door.principal(request)
        found.require(scope)
        return found

    return principal


#: A route's parameter: the principal, who must have the scope in the name.
WritesTurns = Annotated[Principal, Depends(_asking(Scope.TURNS_WRITE))]
ReadsTurns = Annotated[Principal, Depends(_asking(Scope.TURNS_READ))]
ReadsApprovals = Annotated[Principal, Depends(_asking(Scope.APPROVALS_READ))]
DecidesApprovals = Annotated[Principal, Depends(_asking(Scope.APPROVALS_DECIDE))]
