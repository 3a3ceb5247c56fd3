"""The token that each query carries: made for one key and one minute by who asks, checked by who serves."""

from __future__ import annotations

from dataclasses import dataclass

import jwt

from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.identity.tokens import TokenVerifier
from orchestration.settings import Settings

#: How long a token holds, in seconds.
TOKEN_S = 60

#: By how much the clocks of two machines may differ, in seconds.
LEEWAY_S = 10

_ALGORITHM = "HS256"
_REQUIRED = ["exp", "aud", "sub", "tenant"]


@dataclass(frozen=True, slots=True)
class Asker:
    """For whom a query asks. Without an authorizer nothing is known: all empty."""

    sub: str = ""
    tenant: str = ""
    roles: tuple[str, ...] = ()


def sign(asker: Asker, key: str, *, secret: str, now_s: float) -> str:
    """A token for one query of `key`."""
    issued = int(now_s)
    claims = {"sub": asker.sub, "tenant": asker.tenant, "roles": list(asker.roles), "aud": key, "iat": issued, "exp": issued + TOKEN_S}
    return jwt.encode(claims, _key(secret), algorithm=_ALGORITHM)


def callers_of(settings: Settings) -> TokenVerifier | None:
    """What knows the tokens of callers, where the settings say that our tool hosts take them.

    Raises:
        Misconfigured: they do, and say nothing of how to check one.
    """
    if not settings.mesh_caller_tokens:
        return None
    verifier = TokenVerifier(settings)
    if not verifier:
        raise Misconfigured("TURNMILL_MESH_CALLER_TOKENS needs TURNMILL_JWT_SECRET or TURNMILL_JWT_JWKS to check callers' tokens with")
    return verifier


def verify(token: str, key: str, *, secret: str, callers: TokenVerifier | None = None) -> Asker:
    """Who asks `key` with `token`: one that `sign` made for this key, or one that a caller of the gateway came in with, where `callers`
    knows those.

    Raises:
        Unauthorized: no token, one of somebody else's, one for another key, or one that is too old. The token is not in the message.
    """
    try:
        claims = jwt.decode(token, _key(secret), algorithms=[_ALGORITHM], audience=key, leeway=LEEWAY_S, options={"require": _REQUIRED})
    except jwt.PyJWTError as error:
        found = callers.identify(token) if callers is not None else None
        if found is not None:
            return Asker(found.principal.sub, found.principal.tenant, found.principal.roles)
        raise Unauthorized(f"not authorized for {key!r} ({type(error).__name__})") from None
    sub, tenant, roles = claims["sub"], claims["tenant"], claims.get("roles", [])
    if not isinstance(sub, str) or not isinstance(tenant, str) or not isinstance(roles, list):
        raise Unauthorized(f"not authorized for {key!r} (claims of the wrong type)")
    return Asker(sub, tenant, tuple(str(role) for role in roles))


def _key(secret: str) -> bytes:
    """The secret as HMAC takes it anyway: zero bytes up to a block change no signature, and spare development a warning for each query."""
    return secret.encode().ljust(32, b"\0")
