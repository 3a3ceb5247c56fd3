"""Tokens that somebody else gives out (JWT): signature, time, issuer and audience are checked here, and the claims become a principal.

The settings say which algorithms count: HS256 with a secret, RS256 and ES256 with a key set. What a token says about its own checking
(`alg` beyond these, `jku`, `jwk`, `x5c`) decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from orchestration.core.errors import Unauthorized
from orchestration.core.ids import is_id
from orchestration.core.principal import ALL_SCOPES, ANY_ROLE, Principal
from orchestration.identity.key_set import KeySet
from orchestration.settings import Settings

log = logging.getLogger(__name__)

#: By how much an issuer's clock may be ahead of ours, in seconds.
AHEAD_S = 10

#: Bytes of the shortest secret that is no risk (RFC 7518, section 3.2).
SAFE_SECRET_BYTES = 32

#: Roles and scopes of one token that are read.
MAX_NAMES = 100


@dataclass(frozen=True, slots=True)
class Identified:
    """Whose token it is, and until when it holds (epoch seconds)."""

    principal: Principal
    expires_at: float


class TokenVerifier:
    """Checks tokens by the settings.

    Raises:
        Misconfigured: the key set of the settings cannot be used.
    """

    def __init__(self, settings: Settings, *, keys: KeySet | None = None, now: Callable[[], float] = time.time) -> None:
        secrets = [secret.encode() for secret in settings.jwt_secret.get_secret_value().split()]
        # Zero bytes up to a block change no HMAC, and spare a warning of the library for each token; ours is said once.
        self._secrets = [secret.ljust(SAFE_SECRET_BYTES, b"\0") for secret in secrets]
        self._keys = keys or (KeySet(settings.jwt_jwks) if settings.jwt_jwks else None)
        self._issuer = settings.jwt_issuer or None
        self._audience = settings.jwt_audience or None
        self._now = now
        if self:
            self._warn(min(map(len, secrets), default=SAFE_SECRET_BYTES))

    def __bool__(self) -> bool:
        return bool(self._secrets or self._keys)

    def identify(self, token: str) -> Identified | None:
        """Whose token this is; None when it is no JWT at all, or none is taken here.

        Raises:
            Unauthorized: it is one, and does not hold. The token is not in the message.
        """
        if not self or token.count(".") != 2:
            return None
        try:
            claims = self._claims(token)
            return _identified(claims, self._now())
        except jwt.PyJWTError as error:
            raise Unauthorized(f"the token does not hold ({type(error).__name__})") from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise Unauthorized(f"the token cannot be read ({type(error).__name__})") from None

    def _claims(self, token: str) -> Mapping[str, Any]:
        header = jwt.get_unverified_header(token)
        algorithm, key_id = str(header.get("alg")), header.get("kid")
        if "crit" in header:
            raise Unauthorized("the token demands extensions that are not known here")
        candidates: list[Any] = []
        if algorithm == "HS256":
            candidates = list(self._secrets)
        elif algorithm in ("RS256", "ES256") and self._keys is not None:
            candidates = [key.public for key in self._keys.keys(key_id if isinstance(key_id, str) else None, algorithm)]
        if not candidates:
            raise Unauthorized("the token is signed with a key or an algorithm that is not taken here")
        for key in candidates:
            try:
                return self._decoded(token, key, algorithm)
            except jwt.InvalidSignatureError:
                continue
        raise Unauthorized("the token's signature does not fit")

    def _decoded(self, token: str, key: Any, algorithm: str) -> Mapping[str, Any]:
        required = ["exp", "sub", "tenant"] + (["iss"] if self._issuer else []) + (["aud"] if self._audience else [])
        return jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            issuer=self._issuer,
            audience=self._audience,
            # Time is compared below with one clock, which a test can turn.
            options={"require": required, "verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )

    def _warn(self, shortest: int) -> None:
        if shortest < SAFE_SECRET_BYTES:
            log.warning("TURNMILL_JWT_SECRET has a secret of less than %d bytes, which can be guessed", SAFE_SECRET_BYTES)
        if not self._audience:
            log.warning("TURNMILL_JWT_AUDIENCE is not set: tokens that the same issuer made for others may be taken here")
        if not self._issuer:
            log.warning("TURNMILL_JWT_ISSUER is not set: whoever has a key of the set may issue tokens")


def _identified(claims: Mapping[str, Any], now_s: float) -> Identified:
    expires_at = _seconds(claims["exp"], "exp")
    if now_s >= expires_at:
        raise Unauthorized("the token has expired")
    if "nbf" in claims and _seconds(claims["nbf"], "nbf") > now_s + AHEAD_S:
        raise Unauthorized("the token does not hold yet")
    sub, tenant = claims["sub"], claims["tenant"]
    if not isinstance(sub, str) or not 1 <= len(sub) <= 200 or not sub.isprintable() or not isinstance(tenant, str) or not is_id(tenant):
        raise Unauthorized("the token's sub is 1 to 200 printable characters, its tenant an id")
    roles = tuple(role for role in _names(claims.get("roles", [])) if role != ANY_ROLE)  # that one stands for all, and is ours to give
    named = claims.get("scope", claims.get("scopes", []))
    scopes = tuple(scope for scope in _names(named.split() if isinstance(named, str) else named) if scope in ALL_SCOPES)
    return Identified(Principal(sub, tenant, roles, scopes), expires_at)


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise Unauthorized(f"the token's {name} is no time")
    return float(value)


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name.isprintable() for name in value[:MAX_NAMES]):
        raise Unauthorized("the token's roles and scopes are lists of printable text")
    return list(dict.fromkeys(value[:MAX_NAMES]))
