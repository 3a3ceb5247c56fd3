"""One door for tokens of all kinds: API keys of the settings, API keys of the store, and JWTs. Whoever serves a transport asks here.

A caller that came in can be looked at again later, so that an open stream ends when its key is revoked or its token expires.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.core.ids import ID_PATTERN
from orchestration.core.principal import Principal, Scope
from orchestration.identity.tokens import TokenVerifier
from orchestration.settings import Settings
from orchestration.state.api_keys import find_key, has_keys, key_digest
from orchestration.state.store import Store, translated

#: A longer token is nobody's and is not looked up, in characters.
MAX_TOKEN_CHARS = 8192

#: Seconds for which it is believed that the store has keys, or none at all.
KEYS_SEEN_S = 5.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what that rests on: the hash of an API key, or a token (JWT) and the end of its life (epoch seconds). With neither, on
    trust. The token is there for agents that forward it; it is in no text and no JSON that is made of this."""

    principal: Principal
    key_digest: str = ""
    expires_at: float | None = None
    token: str = field(default="", repr=False, compare=False)

    @property
    def on_trust(self) -> bool:
        """Whether nobody has a token, and this machine is served without."""
        return not self.key_digest and self.expires_at is None

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` takes it back."""
        return {"principal": self.principal.as_json(), "key_digest": self.key_digest, "expires_at": self.expires_at}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Caller:
        return cls(Principal.from_json(data["principal"]), data["key_digest"], data["expires_at"])


class _KeyEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: str = Field(min_length=16, max_length=MAX_TOKEN_CHARS)
    sub: str = Field(min_length=1, max_length=200)
    tenant: str = Field(pattern=ID_PATTERN)
    scopes: tuple[Scope, ...] = Field(min_length=1)
    roles: tuple[str, ...] = ()


class Callers:
    """Everybody who has a token. Safe for threads.

    Raises:
        Misconfigured: the keys or the key set in the settings cannot be read.
    """

    def __init__(self, settings: Settings, store: Store, *, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._now = now
        self._configured = _configured_keys(settings.api_keys.get_secret_value())
        self._tokens = TokenVerifier(settings, now=now)
        self._keys_seen = (False, 0.0)

    @property
    def configured(self) -> bool:
        """Whether the settings name anybody: an API key, or how to check tokens."""
        return bool(self._configured or self._tokens)

    def exist(self) -> bool:
        """Whether anybody has a token, in the settings or in the store; what the store says may be some seconds old.

        Raises:
            StoreUnavailable: that must be known and cannot be.
        """
        if self.configured:
            return True
        stored, believed_until = self._keys_seen
        if time.monotonic() >= believed_until:
            with translated():
                stored = has_keys(self._store.client)
            self._keys_seen = (stored, time.monotonic() + KEYS_SEEN_S)
        return stored

    def identify(self, token: str) -> Caller:
        """Whose token this is.

        Raises:
            Unauthorized: nobody's, or it no longer holds. The token is not in the message.
            StoreUnavailable: whose it is cannot be known now.
        """
        if not 0 < len(token) <= MAX_TOKEN_CHARS:
            raise Unauthorized("the token is not known")
        digest = key_digest(token)
        principal = self._in_settings(digest)
        if principal is None:
            with translated():
                principal = find_key(self._store.client, token)
        if principal is not None:
            return Caller(principal, digest)
        identified = self._tokens.identify(token)
        if identified is None:
            raise Unauthorized("the token is not known")
        return Caller(identified.principal, expires_at=identified.expires_at, token=token)

    def still(self, caller: Caller) -> bool:
        """Whether what a caller came in with still holds. Raises StoreUnavailable when that cannot be known now."""
        if caller.expires_at is not None:
            return self._now() < caller.expires_at
        if caller.on_trust:
            return not self.exist()
        if self._in_settings(caller.key_digest) is not None:
            return True
        with translated():
            return has_keys(self._store.client, caller.key_digest)

    def _in_settings(self, digest: str) -> Principal | None:
        found = None
        for known, principal in self._configured.items():
            # All are compared, so that the time says nothing about which one was nearly right.
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def _configured_keys(text: str) -> dict[str, Principal]:
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
        hashlib.sha256(entry.key.encode("utf-8", "replace")).hexdigest(): Principal(
            entry.sub, entry.tenant, entry.roles, tuple(str(scope) for scope in entry.scopes)
        )
        for entry in entries
    }
